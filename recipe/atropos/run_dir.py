"""The folder of a run: where its files are, how they are written, and who holds it.

Guarantees:

- ``write_atomic`` replaces a file whole: a reader sees the old or the new content, also after a kill or a full disk.
- ``replace_folder`` lets a folder appear whole or not at all.
- ``append_line`` adds a line whole: what a kill left of one is cut before the next, and no reader ever gets it.
- ``RunDir.lock`` lets one run at a time into the folder; it ends with the processes that inherit it, however they end.
- A folder says which format it has; one of another format is refused.
- A full disk is a ``DiskFull`` that names the path.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from recipe.atropos.errors import AtroposError, ConfigurationError

FORMAT = 1
"""Raised whenever a folder of an older recipe could not be resumed, or would be read wrongly."""

LOCK_VARIABLE = "ATROPOS_RUN_LOCK"
"""Environment variable with the descriptor of the lock that a launcher hands to what it starts."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PARTIAL = ".partial"  # ends the names of files that are being written; their names begin with "."
_NO_ROOM = 1 << 16  # bytes
_LOCK_SECONDS = 30.0  # for the processes of a launcher that was killed to end
_LOCK_POLL_SECONDS = 0.1


class DiskFull(AtroposError, OSError):
    """There is no space for a file; the message names its path."""

    def __init__(self, path: str | Path):
        super().__init__(f"no space left on device: {path}; make room there, the same command then resumes the run")
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:  # it is made of the path, not of its message
        return type(self), (self.path,), self.__dict__


class RunDirError(AtroposError, RuntimeError):
    """A run folder that cannot be used: another process holds it, or its content is not what this recipe writes."""


@contextlib.contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Raises DiskFull, naming ``path``, where the block meets a full disk, an exhausted quota or a size limit."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, DiskFull):
            raise DiskFull(path) from error
        raise


def disk_is_full(path: str | Path) -> bool:
    """Whether there is no room for anything on the disk of a folder."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _NO_ROOM


def write_atomic(path: str | Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the file by ``data``, or leave it as it is; with ``mode`` from its first byte on.

    Raises:
        DiskFull: nothing is changed, and nothing half-written is left.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    try:
        with disk_errors(path):
            partial.unlink(missing_ok=True)  # of an earlier process with this number, perhaps with another mode
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # some file systems tell only now that there is no space
            os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replace_folder(path: str | Path) -> Iterator[Path]:
    """Yields an empty folder beside ``path``, which takes its place at the end of the block, or changes nothing.

    Raises:
        DiskFull: nothing half-written is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*{_PARTIAL}"):
        _remove_partial(left, own=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    former = path.with_name(f".{path.name}.former.{os.getpid()}{_PARTIAL}")
    try:
        with disk_errors(path):
            partial.mkdir()
            yield partial
            if path.exists():
                path.rename(former)
            partial.rename(path)
    finally:
        if former.exists() and not path.exists():
            former.rename(path)
        for folder in (partial, former):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_partial(partial: Path, own: bool = False) -> None:
    """Unless the process lives that writes it; ``own``: this one does not, an earlier one had its number.

    A folder that was moved away by ``replace_folder``, which was killed before the new one took its place, returns.
    """
    writer = partial.name.split(".")[-2]
    if not writer.isdigit() or (psutil.pid_exists(int(writer)) and not (own and int(writer) == os.getpid())):
        return
    place, former, _ = partial.name.removeprefix(".").rpartition(f".former.{writer}{_PARTIAL}")
    if former and partial.is_dir() and not partial.with_name(place).exists():
        partial.rename(partial.with_name(place))
    elif partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any, mode: int = 0o644) -> None:
    """``write_atomic`` of JSON, indented."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    write_atomic(path, orjson.dumps(value, option=options), mode)


def read_json(path: str | Path, default: Any = None) -> Any:
    """What ``write_json`` wrote, ``default`` where there is no file.

    Raises:
        RunDirError: somebody else wrote it: it is no JSON.
    """
    try:
        return orjson.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return default
    except orjson.JSONDecodeError as error:
        raise RunDirError(f"{path} is no JSON ({error}): restore it, or remove it if the run can do without") from error


def append_line(path: str | Path, value: Any) -> None:
    """Add ``value`` as a line of JSON in a single write; half a line that a kill left at the end is cut before.

    One process at a time appends to a file.

    Raises:
        DiskFull: the file is as it was.
    """
    line = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    with disk_errors(path), open(path, "a+b", buffering=0) as file:
        end = _end_of_last_line(file)
        if end != file.seek(0, os.SEEK_END):
            file.truncate(end)
        try:
            written = file.write(line)
            if written != len(line):  # the next byte has no room
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def _end_of_last_line(file: Any, block: int = 1 << 16) -> int:
    """The size of the file without a last line that has no end."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def rewrite_lines(path: str | Path, lines: list[dict[str, Any]]) -> None:
    """``write_atomic`` of a file of JSON objects, one a line."""
    write_atomic(path, b"".join(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for line in lines))


class LineReader:
    """Follows a file of JSON objects, one a line, that is being written, from its beginning; whole lines only."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._offset = self._number = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines that were added since the last call.

        Raises:
            RunDirError: a whole line is no JSON, which nothing here writes; names it.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        found = []
        for line in whole.split(b"\n") if newline else []:
            self._number += 1
            try:
                found.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise RunDirError(f"{self._path}, line {self._number} is no JSON ({error}): remove it") from error
        return found


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a file of JSON objects; none where there is no file."""
    return LineReader(path).new_lines()


class RunDir:
    """A run's folder; every path in it is spelled here and nowhere else."""

    def __init__(self, path: str | Path):
        self.path = path = Path(path).resolve()
        self.identity = path / "run.json"  # the folder's format, and the model that it trains
        self.config = path / "config.yaml"
        self.services = path / "services.json"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.summary = path / "summary.json"
        self.reward_picture = path / "reward.png"
        self.logs = path / "logs"
        self.rollouts = path / "rollouts"
        self.batches = path / "batches"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.model = path / "model"  # the trained model in Hugging Face format
        self.adapter = path / "adapter"  # or a LoRA adapter alone, in PEFT's
        self.start = path / "start"  # the weights of another run that this one begins with
        self.environments = path / "environments"
        self.evaluation = path / "evaluation"
        self.evaluated = self.evaluation / "evaluated"  # the newest version that was evaluated
        self.tensorboard = path / "tensorboard"
        self.servers_offloaded = path / "servers_offloaded"  # while the trainer has the memory of servers on its GPUs
        self.lock_file = path / "lock"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def evaluation_of(self, version: int, environment: str) -> Path:
        return self.evaluation / str(version) / environment

    def reward_bridge(self, environment: str) -> Path:
        return self.environments / f"{environment}.reward_bridge.yaml"

    def environment_report(self, name: str) -> Path:
        return self.environments / f"{name}.jsonl"

    def remove_partial(self) -> None:
        """Remove what processes that were killed left of files that they were writing."""
        for partial in list(self.path.rglob(f".*{_PARTIAL}")):
            _remove_partial(partial)

    # ---------------------------------------------------------------- format

    def check_format(self) -> None:
        """Raises ConfigurationError: another version of the recipe made this folder."""
        begun = any(path.exists() for path in (self.config, self.metrics, self.summary, self.checkpoints))
        found = read_json(self.identity, {"format": 0 if begun else FORMAT}).get("format")
        if found != FORMAT:
            age = "a newer" if isinstance(found, int) and found > FORMAT else "an older"
            raise ConfigurationError(
                f"run.dir={self.path} holds a run of format {found}, and this recipe reads format {FORMAT}: resume it "
                f"with {age} version of the recipe, or give another folder (--run-dir)"
            )

    def mark_format(self) -> None:
        """A folder in which nothing has begun is one of this format. Raises as ``check_format``."""
        self.check_format()
        if not self.identity.exists():
            write_json(self.identity, {"format": FORMAT})

    # ---------------------------------------------------------------- lock

    @contextlib.contextmanager
    def lock(self, say: Callable[[str], object] = print) -> Iterator[int]:
        """Hold the folder, which is made if it is not there; yields the lock's descriptor.

        A process that was started with that descriptor, and its number in LOCK_VARIABLE, is let in and holds the
        folder too: the lock is free when the last of them has ended. Those that a killed launcher left are waited for,
        which ``say`` is told.

        Raises:
            RunDirError: a living process holds it; names it.
            ConfigurationError: it cannot be made or written.
        """
        if (inherited := self._inherited()) is not None:
            yield inherited
            return
        try:
            with disk_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        except DiskFull:
            raise
        except OSError as error:
            raise ConfigurationError(
                f"run.dir={self.path}: {error.strerror}; give a folder that can be written (--run-dir)"
            ) from error
        try:
            self._acquire(descriptor, say)
            yield descriptor
        finally:
            os.close(descriptor)

    def inherits_lock(self) -> bool:
        """Whether a launcher that holds the folder started this process."""
        return self._inherited() is not None

    def _inherited(self) -> int | None:
        try:
            descriptor = int(os.environ[LOCK_VARIABLE])
            same = os.path.samestat(os.fstat(descriptor), self.lock_file.stat())
        except (KeyError, ValueError, OSError):
            return None
        return descriptor if same else None

    def _acquire(self, descriptor: int, say: Callable[[str], object]) -> None:
        deadline, told = time.monotonic() + _LOCK_SECONDS, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = _Holder.read(descriptor)
                lives = holder is not None and holder.lives()
                if lives or time.monotonic() > deadline:
                    whose = "" if lives else "what was started by "
                    raise RunDirError(
                        f"run.dir={self.path} is in use by {whose}{holder or 'a process that did not say its number'}: "
                        "wait for its end, end it, or give another folder (--run-dir)"
                    ) from None
                if holder is not None and not told:
                    say(f"waiting for what was started by {holder}, which is gone")
                    told = True
            time.sleep(_LOCK_POLL_SECONDS)
        with disk_errors(self.lock_file):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, orjson.dumps(_Holder.this_process()), 0)


@dataclass(frozen=True)
class _Holder:
    """A process that holds a lock. Not its arguments, in which there may be secrets."""

    pid: int
    host: str
    command: str
    started: float

    @classmethod
    def this_process(cls) -> "_Holder":
        command = Path(sys.argv[0]).stem or "python"
        return cls(os.getpid(), socket.gethostname(), command, psutil.Process().create_time())

    @classmethod
    def read(cls, descriptor: int) -> "_Holder | None":
        """None while it is being written."""
        try:
            return cls(**orjson.loads(os.pread(descriptor, 4096, 0)))
        except (orjson.JSONDecodeError, TypeError):
            return None

    def lives(self) -> bool:
        """Of a process on another machine nobody knows: it does."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 2  # the clock may have been set since
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} ({self.command} on {self.host}, started {since})"
