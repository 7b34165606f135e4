"""Files that survive a kill or a full disk at any byte.

Guarantees:

- ``write_atomic`` replaces a whole file: readers see the old or the new content, even after a kill or on a full disk.
- ``replace_folder`` makes a folder appear complete or not at all.
- ``remove_partial`` removes what killed processes left, and nothing of a live one, whatever machine it is on.
- ``append_line`` adds a whole line: a partial line left by a kill is cut before the next, and no reader ever gets it.
- A full disk raises ``DiskFull``, which names the path.
- ``bound_log`` bounds a file that other processes hold open for appending, however fast they write.
- What is damaged, and a folder that was removed, is an error that names the path.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import yaml

from recipe.atropos.errors import AtroposError, ConfigurationError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTIAL = ".partial"  # suffix of files that are being written; their names begin with "."
_NO_ROOM = 1 << 16  # bytes
# Colors and the like; titles and links; control characters but tab, newline and return.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class RunDirError(AtroposError, RuntimeError):
    """Error for an unusable run folder: another process holds it, or its content is not what this recipe writes."""


class FolderRemoved(AtroposError, OSError):
    """Error for a folder that was removed or moved while it is in use; the message names its path."""

    def __init__(self, path: str | Path):
        super().__init__(
            f"{path} is gone: it was removed or moved while in use; move it back, or give another --run-dir"
        )


class DiskFull(AtroposError, OSError):
    """Error for a file for which there is no space; the message names its path."""

    def __init__(self, path: str | Path):
        super().__init__(f"no space left on device: {path}; make room there, the same command then resumes the run")
        self.path = path


@contextlib.contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Raise DiskFull, naming ``path``, if the block meets a full disk, an exhausted quota or a size limit, and
    FolderRemoved if there is no folder of it.
    """
    try:
        yield
    except FileNotFoundError as error:
        if Path(path).parent.exists():
            raise
        raise FolderRemoved(Path(path).parent) from error
    except OSError as error:
        if error.errno in FULL and not isinstance(error, DiskFull):
            raise DiskFull(path) from error
        raise


@contextlib.contextmanager
def usable(what: str, instead: str) -> Iterator[None]:
    """Raise ConfigurationError, which says ``what`` cannot be used and to give ``instead``, if the block cannot read or
    write there; DiskFull passes.
    """
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        raise ConfigurationError(f"{what}: {error.strerror or error}; give {instead}") from error


def disk_is_full(path: str | Path) -> bool:
    """Return whether the disk of a folder is full."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _NO_ROOM


def open_lock(path: Path) -> int:
    """Open a file for ``flock``, created if needed. Other users cannot: whoever can read it could take the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # one of an earlier version
    return descriptor


def write_atomic(path: str | Path, data: bytes) -> None:
    """Replace the file by ``data``, or leave it as it is.

    Raises:
        DiskFull: nothing is changed, and no partial file is left.
    """
    with disk_errors(path), _partial(Path(path)) as partial:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only now
        os.replace(partial, path)


def sync(path: str | Path) -> None:
    """Write to the disk what the kernel still holds of a file, or of the names in a folder; a power loss keeps it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no folders
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replace_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path``, which replaces it at the end of the block; an error changes nothing.

    Raises:
        DiskFull: no partial folder is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*{PARTIAL}"):
        remove_partial(left)
    with disk_errors(path), _partial(path) as partial:
        former = path.with_name(f".{path.name}.former{partial.name.removeprefix(f'.{path.name}')}")
        partial.mkdir()
        try:
            yield partial
            if path.exists():
                path.rename(former)
            partial.rename(path)
        finally:
            if former.exists() and not path.exists():
                former.rename(path)
            discard(former)


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yield a name for what is to replace ``path``, and remove what still has it when the block ends. Until then a file
    beside it is locked: processes in other containers and on other machines see the lock, unlike a pid.
    """
    number = secrets.randbits(64)
    partial = path.with_name(f".{path.name}.{number}{PARTIAL}")
    with path.with_name(f".lock.{number}{PARTIAL}").open("xb") as lock:
        try:
            with contextlib.suppress(OSError):  # no file can be locked there, so nothing is removed either
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield partial
        finally:
            discard(partial)
            discard(Path(lock.name))


def discard(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be removed."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_partial(partial: Path) -> None:
    """Remove a partial file or folder, unless its writer lives, which holds its lock.

    A folder that ``replace_folder`` moved aside, before it was killed without replacing it, is moved back.
    """
    writer = partial.name.split(".")[-2]
    if not writer.isdigit():
        return
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(partial.with_name(f".lock.{writer}{PARTIAL}").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        place, former, _ = partial.name.removeprefix(".").rpartition(f".former.{writer}{PARTIAL}")
        if former and partial.is_dir() and not partial.with_name(place).exists():
            partial.rename(partial.with_name(place))
        discard(partial)
        discard(Path(lock.name))


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON with ``write_atomic``."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    write_atomic(path, orjson.dumps(value, option=options))


def cache_root() -> Path:
    """Return ``$ATROPOS_CACHE``, else ``~/.cache/verl-atropos``: what is made once for all runs."""
    return Path(os.environ.get("ATROPOS_CACHE") or Path.home() / ".cache" / "verl-atropos")


def read_json(path: str | Path, default: Any = None, kind: type = dict) -> Any:
    """Return what ``write_json`` wrote, of type ``kind``, or ``default`` if there is no file.

    Raises:
        RunDirError: the file is something else, so something else wrote it.
    """
    try:
        return _of_kind(orjson.loads(Path(path).read_bytes()), kind)
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise RunDirError(f"{path} is damaged ({error}): restore it, or remove it if the run can do without") from error


def _of_kind(value: Any, kind: type) -> Any:
    """Return a value; raise ValueError if it is not of type ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"it holds a {type(value).__name__}, not a {kind.__name__}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, unresolved; faster than OmegaConf's own reader, which takes a second.

    Raises:
        RunDirError: the file is something else.
        FileNotFoundError: there is no file.
    """
    try:
        return _of_kind(yaml.load(Path(path).read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)), dict)
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise RunDirError(
            f"{path} is damaged ({problem}): restore it, or remove it, and the command that resumes the run writes it"
        ) from error


def append_line(path: str | Path, value: Any) -> None:
    """Append ``value`` as a line of JSON in a single write; first cut a partial line that a kill left at the end.

    Only one process at a time may append to a file.

    Raises:
        DiskFull: the file is as it was.
    """
    line = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    with disk_errors(path), open(path, "a+b", buffering=0) as file:
        end = _end_of_last_line(file)
        if end != file.seek(0, os.SEEK_END):
            file.truncate(end)
        try:
            if file.write(line) != len(line):  # no room for the rest
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def _end_of_last_line(file: BinaryIO, block: int = 1 << 16) -> int:
    """Return the size of the file without an unterminated last line."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def bound_log(path: Path, limit: int) -> None:
    """Move what a log holds to ``PATH.1`` if that is more than ``limit`` bytes: with it, the newest part is kept.

    Its writers must hold it open for appending: they go on at its beginning. A reader that follows it finds it smaller
    than before, and begins again; so does ``tail -F``. A line that is written in the moment between the end of the
    copying and the truncation is lost. At most 2 ``limit`` bytes are copied: of a process that writes faster, the last
    ``limit`` bytes that were there at the beginning, and as many after them. Where there is no room for the copy, the
    log stays as it is.
    """
    with contextlib.suppress(OSError):
        if (size := path.stat().st_size) <= limit:
            return
        with (
            _partial(path) as partial,
            open(path, "r+b", buffering=0) as log,
            open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", 0) as copy,
        ):
            if size > 2 * limit:
                log.seek(size - limit)
            room = 2 * limit - _copy(log, copy, 2 * limit)
            os.replace(partial, path.with_name(f"{path.name}.1"))
            _copy(log, copy, room)
            log.truncate(0)


def _copy(source: BinaryIO, target: BinaryIO, most: int) -> int:
    """Copy at most ``most`` bytes; return how many there were."""
    copied = 0
    while part := source.read(min(1 << 20, most - copied)):
        target.write(part)
        copied += len(part)
    return copied


def printable(text: str) -> str:
    """Return text for a terminal: without colors and control characters, which could rewrite what it shows; what
    returns to the beginning of a line, as a progress bar does, begins a new one."""
    return _CONTROL.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def rewrite_lines(path: str | Path, lines: list[dict[str, Any]]) -> None:
    """Write JSON objects, one per line, with ``write_atomic``."""
    write_atomic(path, b"".join(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for line in lines))


class LineReader:
    """Reader that follows a growing file of JSON objects, one per line, from its beginning; whole lines only. A file
    that was replaced is read from its beginning again.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._offset = self._number = self._inode = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that were added since those that were yielded; to be read to its end before the next call.

        Raises:
            RunDirError: a whole line is not a JSON object, which nothing here writes; names it.
        """
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._offset, self._number, self._inode = 0, 0, inode
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._number += 1
                try:
                    yield _of_kind(orjson.loads(line), dict)
                except ValueError as error:
                    raise RunDirError(f"{self._path}, line {self._number} is damaged ({error}): remove it") from error


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return all whole lines of a file of JSON objects; [] if there is no file."""
    return list(LineReader(path).new_lines())
