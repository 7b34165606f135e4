"""Record a run's training batches on disk, step by step, to replay the training without any server.

Each batch is a file, ``STEP.json``, with the groups as the Trajectory API served them. Replaying a run's files with
its configuration reproduces its weights: bit for bit on a CPU, but GPU kernels add in varying order unless
``actor.fsdp_config.full_determinism`` is set.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from recipe.atropos.data_source import Batch, DataSourceError
from recipe.atropos.trajectory_api.trajectory_client import NumberedBatch
from recipe.atropos.utils.files import write_atomic


def batch_path(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"{step:06d}.json"


def recorded_steps(directory: str | Path) -> list[int]:
    """Return the recorded steps, in order."""
    return sorted(int(path.stem) for path in Path(directory).glob("*.json") if path.stem.isdigit())


def write_batch(directory: str | Path, step: int, batch: Batch) -> None:
    """Record a step's groups; readers see either the complete file or none.

    Raises:
        DiskFull: nothing is written.
    """
    path = batch_path(directory, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, orjson.dumps(batch, option=orjson.OPT_SERIALIZE_NUMPY))


def read_batch(directory: str | Path, step: int) -> Batch:
    """Return the groups of a step.

    Raises:
        DataSourceError: the step is not recorded; the message says which steps are.
    """
    path = batch_path(directory, step)
    if not path.is_file():
        steps = recorded_steps(directory)
        there = f"it holds steps {steps[0]} to {steps[-1]}" if steps else "it holds none"
        raise DataSourceError(f"no batch of step {step} in {directory}: {there}")
    return orjson.loads(path.read_bytes())


class RecordedSource:
    """Drop-in replacement for ``DataSource`` that returns the recorded batches from ``first_step`` on."""

    def __init__(self, directory: str | Path, first_step: int):
        self.directory = Path(directory)
        self.step = first_step

    def __enter__(self) -> "RecordedSource":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __len__(self) -> int:
        return sum(step >= self.step for step in recorded_steps(self.directory))

    def next_batch(self, meanwhile: Callable[[], object] | None = None) -> NumberedBatch:
        """Return the next recorded batch, numbered by its step; raise DataSourceError if there is none."""
        batch = NumberedBatch(self.step, read_batch(self.directory, self.step))
        self.step += 1
        return batch

    def metrics(self) -> dict[str, float]:
        return {"atropos/batches_ahead": len(self)}

    def weights_pushed(self, through: int) -> None:
        pass

    def commit(self, through: int) -> None:
        pass


class NoServers:
    """Drop-in replacement for ``WeightSyncManager`` in a replay, which has no servers."""

    version: int | None = None

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        self.version = global_steps
        return {}

    def ensure_current(self, global_steps: int) -> dict[str, Any]:
        return {}

    def onload_servers(self) -> None:
        pass

    def offload_servers(self) -> None:
        pass
