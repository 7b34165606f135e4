"""Train again on the batches of a run, without any server: ``verl-atropos replay runs/NAME [key=value ...]``

It uses the run's configuration, writes to ``runs/NAME-replay``, and reports whether the final weights are the same. On
a CPU they are; on GPUs, set ``actor_rollout_ref.actor.fsdp_config.full_determinism=true`` for both. The run must have
kept its batches (``api.retention=all``, the default).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.atropos.checkpoint.store import checkpoints_of, last_batch, step_of
from recipe.atropos.config.compose import (
    compose_values,
    differences,
    given_keys,
    given_values,
    leaves,
    load_recorded,
    resolved,
    shipped,
    with_values,
)
from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import find_run
from recipe.atropos.trajectory_api import records
from recipe.atropos.utils.files import read_yaml
from recipe.atropos.utils.gpus import decide_device


def replay(run: Path, overrides: Sequence[str]) -> bool:
    """Train on the batches of ``run``; return True if the weights of the last step equal the run's.

    Raises:
        ConfigurationError, FileNotFoundError, TrajectoryStoreError: there is nothing to replay.
    """
    from recipe.atropos.main import run as train

    replayed = run.with_name(f"{run.name}-replay")
    settings = {
        "run.name": replayed.name,
        "run.dir": str(replayed),
        "trainer.default_local_dir": str(RunDir(replayed).checkpoints),
        "trainer.rollout_data_dir": str(RunDir(replayed).rollouts),
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "trainer.atropos.replay": str(RunDir(run).trajectories),
        "inference.urls": [],
        "inference.gateway": None,
        "evaluation.evaluated_file": None,
    }
    recorded, own = load_recorded(RunDir(run).config), checkpoints_of(RunDir(run))
    if (begun := recorded.trainer.resume_from_path) and Path(begun).expanduser().resolve().parent != own.directory:
        raise ConfigurationError(f"{run} went on from {begun}, of another run, whose batches are not here: replay that")
    config = resolved(with_values(recorded, settings | _changes(RunDir(run), overrides)))
    decide_device(config)
    check_config(config)
    if RunDir(config.run.dir).given.exists():  # which no replay writes
        raise ConfigurationError(f"run.dir={config.run.dir}: it holds a run that is no replay; give another folder")
    step, kept = config.trainer.total_training_steps, records.numbers(RunDir(run).trajectories)
    ready = [step_of(folder) for folder in own.whole() if kept.issuperset(range(1, last_batch(folder) + 1))]
    if step not in ready:
        raise ConfigurationError(
            f"trainer.total_training_steps={step}: {run} lacks the checkpoint of that step, or batches before it; "
            f"steps with both: {', '.join(map(str, sorted(ready))) or 'none'}"
        )
    train(config)
    made = checkpoints_of(RunDir(config.run.dir))
    differing = differing_tensors(*(each.directory / f"global_step_{step}" / "actor" for each in (own, made)))
    if differing:
        print(f"weights after step {step} differ in {len(differing)} tensors, first {differing[0]}")
    else:
        print(f"weights after step {step}: the same, bit for bit")
    return not differing


def _changes(run: RunDir, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values that ``overrides`` change, also of the keys that follow theirs; checked as those of a run."""
    if not overrides:
        return {}
    own = load_recorded(run.config)
    if run.given.exists():  # of an earlier version none, whose followers stay as recorded
        own = with_values(shipped(None), dict(leaves(read_yaml(run.given))) | {MODEL_KEY: "any"})
    changed = compose_values(given_values(overrides), base=own)
    return differences(resolved(changed), resolved(own), given_keys(overrides))


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors that are not equal in two checkpoints of the actor, over all ranks.

    Raises:
        FileNotFoundError: a checkpoint has no model, or the numbers of ranks differ.
        CheckpointDamaged, ShardsError: a file is not as it was saved, or holds code.
    """
    # imported here: torch takes seconds
    import torch

    from recipe.atropos.checkpoint.shards import load_verified

    names = []
    files, others = ({path.name for path in folder.glob("model_world_size_*.pt")} for folder in (one, other))
    if not files or files != others:
        raise FileNotFoundError(f"{one} and {other} hold no checkpoints of one and the same number of ranks")
    for name in sorted(files):
        states = [load_verified(folder.parent, f"{folder.name}/{name}") for folder in (one, other)]
        for key in sorted(states[0].keys() | states[1].keys()):
            pair = [getattr(state.get(key), "_local_tensor", state.get(key)) for state in states]
            if any(tensor is None for tensor in pair) or not torch.equal(*pair):
                names.append(key)
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below runs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")


def main(given: argparse.Namespace) -> int:
    return 0 if replay(find_run(given.run).path, given.overrides) else 1
