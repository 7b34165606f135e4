"""The folder of a run: the paths of its files, and its lock. ``utils/files.py`` writes the files.

Guarantees:

- ``RunDir.lock`` admits one run at a time; it is released when all processes that inherit it have exited or died.
- A folder records its format; a folder of another format is refused.
"""

import contextlib
import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.files import (
    PARTIAL,
    RunDirError,
    disk_errors,
    open_lock,
    read_json,
    remove_partial,
    usable,
    write_json,
)
from recipe.atropos.utils.process import process_lives, start_time

FORMAT = 1
"""Incremented whenever a folder of an older recipe could not be resumed, or would be misread."""

LOCK_VARIABLE = "ATROPOS_RUN_LOCK"
"""Environment variable with the lock's file descriptor, which a launcher passes to the processes it starts."""

ELSEWHERE = "sessions"
"""In place of a replica's number: the sessions of an environment's programs that no process of the run starts."""

LAUNCHER = "launcher"
"""Name of the launcher in ``services.json`` and, if it was detached, of its log."""

_LOCK_SECONDS = 30.0  # for the processes of a killed launcher to exit
_LOCK_POLL_SECONDS = 0.1


class RunDir:
    """A run's folder; all paths in it are defined here and nowhere else."""

    def __init__(self, path: str | Path):
        self.path = path = Path(path).resolve()
        self.identity = path / "run.json"  # the folder's path and format, the model that it trains, and versions
        self.config = path / "config.yaml"
        self.given = path / "given.yaml"  # what the run was given, from which the rest of config.yaml follows
        self.services = path / "services.json"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.alarms = path / "alarms.jsonl"  # one line for each alarm that is raised or cleared
        self.summary = path / "summary.json"
        self.reward_picture = path / "reward.png"
        self.report = path / "report.html"
        self.logs = path / "logs"
        self.rollouts = path / "rollouts"
        self.sessions = path / "sessions.sqlite"  # what programs sampled
        self.trajectories = path / "trajectories"  # the Trajectory API's store
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.model = path / "model"  # the trained model in Hugging Face format
        self.adapter = path / "adapter"  # or a LoRA adapter alone, in PEFT's
        self.start = path / "start"  # the weights of another run that this run starts from
        self.environments = path / "environments"
        self.evaluation = path / "evaluation"
        self.evaluated = self.evaluation / "evaluated"  # the newest evaluated version
        self.tensorboard = path / "tensorboard"
        self.wandb_run = path / "wandb_run"  # the number of the run's W&B run
        self.servers_offloaded = path / "servers_offloaded"  # present while servers on the trainer's GPUs are offloaded
        self.waiting = path / "waiting"  # present while the trainer waits for a batch or an evaluation
        self.holder_file = path / "lock"  # which process has locked the folder
        self.lock_file = path / ".lock"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def evaluation_of(self, version: int, environment: str) -> Path:
        return self.evaluation / str(version) / environment

    def environment_report(self, name: str, replica: int | str = 0) -> Path:
        return self.environments / (f"{name}.{replica}.jsonl" if replica else f"{name}.jsonl")

    def remove_partial(self) -> None:
        """Remove partial files that killed processes left."""
        for partial in list(self.path.rglob(f".*{PARTIAL}")):
            remove_partial(partial)

    def is_other(self, folder: str) -> bool:
        """Return whether ``folder``, which a run recorded as its own, is another run's, and still there."""
        other = RunDir(folder).identity
        return bool(folder) and other.exists() and not (self.identity.exists() and other.samefile(self.identity))

    # ---------------------------------------------------------------- format

    def check_format(self) -> None:
        """Raise ConfigurationError if the folder has the format of another version of the recipe."""
        begun = any(path.exists() for path in (self.config, self.metrics, self.summary, self.checkpoints))
        found = read_json(self.identity, {"format": 0 if begun else FORMAT}).get("format")
        if found != FORMAT:
            age = "a newer" if isinstance(found, int) and found > FORMAT else "an older"
            raise ConfigurationError(
                f"run.dir={self.path} holds a run of format {found}, and this recipe reads format {FORMAT}: resume it "
                f"with {age} version of the recipe, or give another folder (--run-dir)"
            )

    def mark_format(self) -> None:
        """Record the format in a folder in which no run has begun. Raises as in ``check_format``."""
        self.check_format()
        if not self.identity.exists():
            write_json(self.identity, {"format": FORMAT})

    # ---------------------------------------------------------------- lock

    @contextlib.contextmanager
    def lock(self, say: Callable[[str], object] = print) -> Iterator[int]:
        """Lock the folder, creating it if needed; yield the lock's file descriptor.

        A process that was started with that descriptor, and its number in LOCK_VARIABLE, shares the lock, which is
        released when the last such process exits. If a killed launcher left processes behind, wait for them, and
        report that with ``say``.

        Raises:
            RunDirError: a running process holds the lock; the message names it.
            ConfigurationError: the folder cannot be created, written or locked.
        """
        if (inherited := self.inherited_lock()) is not None:
            yield inherited
            return
        with usable(f"run.dir={self.path}", "a folder that can be written (--run-dir)"), disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()  # the lock's file may be there already
            if not self.lock_file.exists() and (holder := self.holder()) is not None and holder.lives():
                raise RunDirError(f"run.dir={self.path} is in use by {holder}, of an earlier version: end it first")
            descriptor = open_lock(self.lock_file)
        try:
            self._acquire(descriptor, say)
            yield descriptor
        finally:
            os.close(descriptor)

    def holder(self) -> "Holder | None":
        """Return the process that locked the folder last, which may have ended; None if there is none, or if the folder
        is a copy of the one that it locked.
        """
        try:
            found = Holder.parse(self.holder_file.read_bytes())
            return None if found and found.is_here and found.inode != self._locked().st_ino else found
        except FileNotFoundError:
            return None

    def inherited_lock(self) -> int | None:
        """Return the lock's descriptor if a launcher that holds the folder started this process, else None."""
        descriptor = int(os.environ.get(LOCK_VARIABLE, -1))
        with contextlib.suppress(OSError):
            return descriptor if self.is_locked_by(descriptor) else None
        return None

    def is_locked_by(self, descriptor: int) -> bool:
        """Return whether a lock's descriptor is this folder's, which was neither removed nor moved since.

        Raises:
            OSError: no file is open there, or the disk does not answer.
        """
        lock = os.fstat(descriptor)
        try:
            return os.path.samestat(lock, self._locked())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _locked(self) -> os.stat_result:
        """Return the status of the file that is locked, which is ``holder_file`` in a run of an earlier version."""
        return (self.lock_file if self.lock_file.exists() else self.holder_file).stat()

    def _acquire(self, descriptor: int, say: Callable[[str], object]) -> None:
        deadline, logged = time.monotonic() + _LOCK_SECONDS, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = self.holder()
                lives = holder is not None and holder.lives()
                if lives or time.monotonic() > deadline:
                    whose = "" if lives else "what was started by "
                    raise RunDirError(
                        f"run.dir={self.path} is in use by {whose}{holder or 'an unidentified process'}: "
                        "wait for its end, end it, or give another folder (--run-dir)"
                    ) from None
                if holder is not None and not logged:
                    say(f"waiting for what was started by {holder}, which is gone")
                    logged = True
            except OSError as error:  # Lustre, unless it is mounted with the option flock
                raise ConfigurationError(
                    f"run.dir={self.path}: a file there cannot be locked (flock: {error.strerror}); give a folder on "
                    "another file system (--run-dir), or mount this one with locks"
                ) from error
            time.sleep(_LOCK_POLL_SECONDS)
        with disk_errors(self.holder_file):
            self.holder_file.write_bytes(orjson.dumps(Holder.this_process(os.fstat(descriptor).st_ino)))


@dataclass(frozen=True)
class Holder:
    """A process that holds the lock of a file, without its arguments, which may contain secrets; see ``process_lives``.

    ``inode``: the file's, which a copy of it does not have.
    """

    pid: int
    host: str
    command: str
    started: float
    booted: float
    inode: int

    @classmethod
    def this_process(cls, inode: int) -> "Holder":
        command = Path(sys.argv[0]).stem or "python"
        return cls(os.getpid(), socket.gethostname(), command, start_time(os.getpid()), psutil.boot_time(), inode)

    @classmethod
    def parse(cls, content: bytes) -> "Holder | None":
        """Return the holder that a lock file names; None while it is being written."""
        try:
            return cls(**orjson.loads(content))
        except (orjson.JSONDecodeError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()

    def lives(self) -> bool:
        """Return whether the process is running; on another machine, it is assumed to be."""
        return not self.is_here or process_lives(self.pid, self.started, self.booted)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} ({self.command} on {self.host}, started {since})"
