"""The checkpoints of a run: which are complete, which is the newest, how many are kept.

Guarantees:

- a checkpoint is complete once ``complete.json``, written last, lists its files, their sizes and digests; a run resumes
  only from the most recently completed one, or the one that it went back to since (``trainer.resume_from_path``),
  whatever verl's tracker says;
- it is on the disk, synced, before it counts as complete and before an older one is removed for it: a power loss leaves
  one or the other;
- what a checkpoint holds is compared with its digests before it is used (``verify``);
- partial checkpoints left by a kill or a full disk are removed at the next start; other folders are never touched;
- ``keep`` applies to all complete checkpoints in the folder, including those of earlier processes; the one with the
  best held-out score is kept in addition;
- a checkpoint records which model it was trained from.
"""

import contextlib
import fnmatch
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from omegaconf import DictConfig

from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.run.evaluations import heldout_scores
from recipe.atropos.run.folder import RunDir, RunDirError
from recipe.atropos.utils.files import DiskFull, disk_errors, disk_is_full, read_json, sync, write_atomic, write_json
from recipe.atropos.utils.secret import read_config_yaml

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file name for a LoRA adapter's configuration; not imported, because PEFT takes seconds to import."""

COMPLETE, _INCOMPLETE = "complete.json", "incomplete"
_TRACKER = "latest_checkpointed_iteration.txt"  # for verl's own tools


class CheckpointDamaged(AtroposError, RuntimeError):
    """A file of a checkpoint is not as it was saved; the message has its path, and what to do."""


class Checkpoints:
    """The folders ``global_step_N`` of ``directory``."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory).resolve()
        self.owner = self.directory / ".run_dir"  # the path of the run whose checkpoints these are

    def run_dir(self) -> str:
        """Return the path of the run whose checkpoints these are; "" if none is recorded."""
        try:
            return self.owner.read_text()
        except FileNotFoundError:
            return ""

    def whole(self) -> list[Path]:
        """Return the complete checkpoints, in the order in which they were completed."""
        found = {folder: self._sequence(folder) for folder in self.folders()}
        return sorted((folder for folder, number in found.items() if number is not None), key=found.__getitem__)

    def newest(self) -> Path | None:
        """Return the most recently completed checkpoint; log which folders are not complete."""
        whole = self.whole()
        for folder in self.folders():
            if folder not in whole:
                why = f"it has no {COMPLETE}, which this recipe writes last"
                if (folder / COMPLETE).exists():
                    why = (
                        "files are missing or have other sizes than when they were saved, or that file is damaged "
                        "(trainer.resume_mode=resume_path resumes from it)"
                    )
                logger.warning("%s is passed over: %s", folder, why)
        return whole[-1] if whole else None

    def best(self, scores: Mapping[int, float]) -> Path | None:
        """Return the complete checkpoint with the highest of ``scores`` (by step), the newest on ties, or None."""
        scored = [folder for folder in self.whole() if step_of(folder) in scores]
        return max(reversed(scored), key=lambda folder: scores[step_of(folder)], default=None)

    def to_resume(self, trainer: DictConfig) -> Path | None:
        """Return the checkpoint that ``trainer.resume_mode`` resumes from, or None.

        Raises:
            ConfigurationError: ``trainer.resume_from_path`` is not a checkpoint, or one of verl's own trainer, whose
                ``data.pt`` is a data loader's.
        """
        if trainer.resume_mode != "resume_path":
            return self.newest() if trainer.resume_mode == "auto" else None
        folder = Path(trainer.resume_from_path).expanduser().resolve()
        if not re.fullmatch(r"global_step_\d+", folder.name) or not (folder / COMPLETE).exists():
            raise ConfigurationError(
                f"trainer.resume_from_path={trainer.resume_from_path}: no checkpoint of a run; give a folder "
                f"global_step_N with {COMPLETE} in it. To begin with the weights of verl's own trainer, give what "
                "python -m verl.model_merger makes of them as actor_rollout_ref.model.path"
            )
        return folder

    def continues(self, trainer: DictConfig) -> bool:
        """Return whether a run with this configuration continues the folder's own, or begins in an empty folder.

        It does not if it starts from scratch (``resume_mode=disable``) or from another run's checkpoint.
        """
        resumed = self.to_resume(trainer)
        return trainer.resume_mode == "auto" or (resumed is not None and resumed.parent == self.directory)

    def go_on_from(self, folder: Path) -> None:
        """Count ``folder``, if it is one of these, as the newest: a run that goes back to it leaves those after it."""
        if folder in self.whole()[:-1]:
            write_json(folder / COMPLETE, read_json(folder / COMPLETE) | {"sequence": self._next_sequence()})

    def remove_incomplete(self) -> None:
        """Remove checkpoints that an earlier process began to save and did not complete."""
        for folder in self.folders():
            if (folder / _INCOMPLETE).exists() and not (folder / COMPLETE).exists():
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def saving(
        self,
        step: int,
        keep: int | None,
        model: dict[str, Any] | None = None,
        scores: Mapping[int, float] | None = None,
        batch: int = 0,
        digests: Mapping[str, str] | None = None,
    ) -> Iterator[Path]:
        """Yield the folder to write into. ``keep`` complete checkpoints stay (None: all); at least one existing one
        stays until the new one is complete.

        ``model``: ``resumption.model_identity`` of the trained model. ``scores``: held-out scores by step. ``batch``:
        number of the last batch in the weights. ``digests``: those of ``digests_of`` that the block has computed.

        Raises:
            DiskFull: nothing is left of the new checkpoint.
        """
        folder = self.directory / f"global_step_{step}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that went on from an earlier one; before others are chosen
        self._prune(max(1, keep - 1) if keep else None, scores or {})  # make room first, as verl does
        try:
            with disk_errors(folder):
                folder.mkdir(parents=True)
                (folder / _INCOMPLETE).touch()
                yield folder
                written = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _INCOMPLETE)
                files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in written}
                made = {name: (digests or {}).get(name) or _digest(folder / name) for name in files}
                for path in (*folder.rglob("*"), folder, self.directory):
                    sync(path)
                complete = {"step": step, "sequence": self._next_sequence(), "model": model, "batch": batch}
                write_json(folder / COMPLETE, complete | {"files": files, "digests": made})
                (folder / _INCOMPLETE).unlink()
                sync(folder)
        except BaseException as error:
            # torch's writer, in another process, does not report why it failed.
            full = "No space left on device" in str(error) or disk_is_full(self.directory)
            shutil.rmtree(folder, ignore_errors=True)
            if full and not isinstance(error, DiskFull):
                raise DiskFull(folder) from error
            raise
        write_atomic(self.directory / _TRACKER, str(step).encode())
        self._prune(keep, scores or {})

    def oldest_batch(self) -> int:
        """Return the number of the last batch that every complete checkpoint contains."""
        return min(map(last_batch, self.whole()), default=0)

    def _prune(self, keep: int | None, scores: Mapping[int, float]) -> None:
        best = self.best(scores)
        for folder in self.whole()[: -keep or None] if keep else []:
            if folder == best:
                continue
            os.replace(folder / COMPLETE, folder / _INCOMPLETE)  # after a kill midway, the next start removes it
            shutil.rmtree(folder, ignore_errors=True)

    def folders(self) -> list[Path]:
        found = [path for path in self.directory.glob("global_step_*") if re.fullmatch(r"global_step_\d+", path.name)]
        return sorted(found, key=step_of)

    def _next_sequence(self) -> int:
        return 1 + max((self._sequence(folder) or 0 for folder in self.folders()), default=0)

    def _sequence(self, folder: Path) -> int | None:
        """Return its position in the order of completion, or None if it is not complete."""
        try:
            saved = read_json(folder / COMPLETE)
            whole = saved and all((folder / name).stat().st_size == size for name, size in saved["files"].items())
            return saved["sequence"] if whole else None
        except (OSError, KeyError, AttributeError, RunDirError):  # also broken by hand
            return None


def checkpoints_of(run: RunDir) -> Checkpoints:
    """Return the checkpoints of a run, even if its folder was moved, and another run now has its former path."""
    own = Checkpoints(run.checkpoints)
    if own.folders() or not run.config.exists():
        return own
    recorded = Checkpoints(read_config_yaml(run.config).trainer.default_local_dir)
    return own if recorded.folders() and run.is_other(recorded.run_dir()) else recorded


def choose_checkpoint(run: RunDir, step: int | None = None, best: bool = False) -> Path:
    """Return a run's newest complete checkpoint, logging which folders are not complete; the one of ``step``, or the
    one with the best held-out score.

    Raises:
        ConfigurationError: there is none; the message says which there are.
    """
    checkpoints = checkpoints_of(run)
    whole = {step_of(folder): folder for folder in checkpoints.whole()}
    if not whole:
        raise ConfigurationError(
            f"{checkpoints.directory} holds no whole checkpoint: give the folder of a run that has saved one "
            "(trainer.save_freq)"
        )
    if best:
        if (found := checkpoints.best(heldout_scores(run.path))) is None:
            raise ConfigurationError(
                f"--best: no checkpoint of {run.path} was evaluated, which has those of steps {sorted(whole)}; let "
                "evaluation.every and trainer.save_freq come at the same steps"
            )
        return found
    found = checkpoints.newest() if step is None else whole.get(step)
    if found is None:
        raise ConfigurationError(f"step {step}: {run.path} has whole checkpoints of steps {sorted(whole)}")
    return found


def model_of(folder: Path) -> dict[str, Any] | None:
    """Return the identity of the model that the checkpoint was trained from; None if it is not recorded."""
    try:
        return read_json(folder / COMPLETE, {}).get("model")
    except RunDirError:  # truncated; resumed from only if trainer.resume_from_path names it
        return None


def last_batch(folder: Path) -> int:
    """Return the number of the last batch in a complete checkpoint's weights; 0 if it is not recorded."""
    return read_json(folder / COMPLETE).get("batch", 0)


def digests_of(folder: Path, pattern: str) -> dict[str, str]:
    """Sync each file of a checkpoint that matches ``pattern``; return their digests by name relative to ``folder``.

    They find damage, not intent: xxh3, the fastest of what was measured, over mapped files, which are not empty.
    """
    files = list(folder.glob(pattern))
    for path in files:
        sync(path)
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_64(np.memmap(path, mode="r")).hexdigest() for path in files
    }


def verify(folder: Path, *patterns: str) -> None:
    """Compare the files of a checkpoint that match one of ``patterns`` with their digests.

    A checkpoint of an earlier version of the recipe has none, and one that is not complete has no file with them.

    Raises:
        CheckpointDamaged: a file is missing, or not as it was saved.
        RunDirError: ``complete.json`` is damaged.
    """
    saved = read_json(folder / COMPLETE, {}).get("digests", {})
    for name in sorted(name for name in saved if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)):
        path = folder / name
        if not path.is_file() or _digest(path) != saved[name]:
            older = [other for other in Checkpoints(folder.parent).whole() if step_of(other) < step_of(folder)]
            instead = f"is that of {older[-1]}" if older else "is none before it"
            raise CheckpointDamaged(
                f"{path} is not as it was saved (its digest differs from {COMPLETE}'s): restore it, or move "
                f"{folder.name} away; the checkpoint to go on from then {instead}"
            )


def _digest(path: Path) -> str:  # reads: of a mapped file, an unreadable block would end the process without a word
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def step_of(folder: Path) -> int:
    """Return the step of a folder; raise ValueError if its name is not ``global_step_N``."""
    return int(folder.name.removeprefix("global_step_"))
