"""A run's batches, as its Trajectory API stored them, to train on them again without any server.

Replaying a run's batches with its configuration reproduces its weights: bit for bit on a CPU, but GPU kernels add in
varying order unless ``actor.fsdp_config.full_determinism`` is set.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.atropos.trajectory_api import records
from recipe.atropos.trajectory_api.client import NumberedBatch


class RecordedSource(contextlib.AbstractContextManager["RecordedSource"]):
    """Drop-in replacement for ``DataSource`` that returns the batches of a store that follow number ``after``."""

    def __init__(self, directory: str | Path, after: int):
        self.directory = Path(directory)
        self.after = after

    def __exit__(self, *_: object) -> None:
        pass

    def next_batch(self, meanwhile: Callable[[], object] | None = None) -> NumberedBatch:
        """Return the next batch; raise TrajectoryStoreError if it is not in the store."""
        groups = records.read(self.directory, self.after + 1)
        self.after += 1
        return NumberedBatch(self.after, groups)

    def metrics(self) -> dict[str, float]:
        return {}

    def commit(self, number: int) -> None:
        """Tell nobody: there is no Trajectory API."""

    weights_pushed = batch_is_empty = commit


class NoServers:
    """Drop-in replacement for ``WeightSyncManager`` in a replay, which has no servers."""

    version: int | None = None

    def update_weights(self, global_steps: int, meanwhile: object = None) -> dict[str, Any]:
        self.version = global_steps
        return {}

    def ensure_current(self, global_steps: int, meanwhile: Callable[[], object]) -> dict[str, Any]:
        return {}

    def onload_servers(self) -> None:
        """Do nothing: there are none."""

    offload_servers = onload_servers
