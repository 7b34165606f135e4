"""A run's temporary files and shared memory: named by the run, private to its user, gone with it.

Guarantees:

- the folder ``TMPDIR/atropos-XXXXXXXX`` (mode 0700) and the shared memory ``/dev/shm/atropos-XXXXXXXX-*`` are removed
  at the end of the run, or, where that was killed, by the next run that starts;
- nothing of a living run, of another user or of another program is removed: the run's owner holds a lock on the folder,
  and on an entry of its own in ``/dev/shm``, as long as it lives. A lock is seen from other containers too, where a
  process number is not, but on a shared file system not from other machines: each removes the folders of its own runs.
"""

import atexit
import contextlib
import fcntl
import functools
import itertools
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.private_process import SCRATCH

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "atropos-"
_NAME = rf"({_PREFIX}[a-z0-9_]{{8}})"
_FOLDER = re.compile(_NAME)
_SEGMENT = re.compile(rf"{_NAME}(?:-\d+-\d+)?|sem\.{_NAME}-mp-\w+|sglang_loads_{_NAME}_\w+\.shm")
_MARK = ".scratch"  # a file in each folder of ours, with the boot of the machine that made it
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TRIES = 20
_LONGEST_BASE = 22  # bytes; the path of a Unix socket has 107, of which Ray takes 68 below the run's folder
_segments = itertools.count()


class Scratch:
    """``folder`` of a run; ``locks`` are its owner's."""

    def __init__(self, folder: Path, locks: list[int]):
        self.folder, self._locks, self._owner = folder, locks, os.getpid()

    @classmethod
    def create(cls) -> "Scratch":
        """A new one, owned by this process, after those of dead runs are removed.

        Raises:
            AtroposError: the file system of the temporary folder has no locks.
        """
        remove_dead()
        for _ in range(_TRIES):
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
            (folder / _MARK).write_text(_machine())
            locks = [_lock(folder)]
            if _SHARED_MEMORY.is_dir():
                mark = _SHARED_MEMORY / folder.name
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL, 0o600))
                locks.append(_lock(mark))
            if None not in locks:
                return cls(folder, locks)
            for lock in locks:  # another process, which starts too, took an entry for a dead run's
                if lock is not None:
                    os.close(lock)
            _remove(folder.parent, folder.name)
            _remove(_SHARED_MEMORY, folder.name)
        raise AtroposError(
            f"TMPDIR={_base()}: a folder there cannot be locked (flock); give one on a local disk of this machine"
        )

    def variables(self) -> dict[str, str]:
        """The environment of the run's processes. What torch compiles is for later runs too, and stays."""
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{_base()}/torchinductor_{os.getuid()}")
        return {"TMPDIR": str(self.folder), SCRATCH: str(self.folder), "TORCHINDUCTOR_CACHE_DIR": compiled}

    def shared_memory(self) -> Path:
        """A new path for shared memory of this run."""
        return _SHARED_MEMORY / f"{self.folder.name}-{os.getpid()}-{next(_segments)}"

    def remove(self) -> None:
        """Of the owner, once the run's processes have ended."""
        if self._locks and self._owner == os.getpid():
            for base in (self.folder.parent, _SHARED_MEMORY):
                _remove(base, self.folder.name)
            while self._locks:
                os.close(self._locks.pop())


@functools.cache
def current() -> Scratch:
    """That of the run; where no launcher made one, one of this process, which goes with it."""
    folder = Path(os.environ.get(SCRATCH, ""))
    if folder.is_absolute() and folder.is_dir():
        return Scratch(folder, [])
    own = Scratch.create()
    atexit.register(own.remove)
    return own


def remove_dead() -> None:
    """Remove what runs of this user left behind whose owner is gone."""
    for base in (_base(), _SHARED_MEMORY):
        for name in {name for name, _ in _found(base)}:
            lock = _lock(base / name)
            if lock is not None or not (base / name).exists():
                _remove(base, name)
            if lock is not None:
                os.close(lock)


def _found(base: Path) -> Iterator[tuple[str, Path]]:
    """(run, path) of what is this user's, and any run's of this machine."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            match = (_SEGMENT if base == _SHARED_MEMORY else _FOLDER).fullmatch(entry.name)
            if match is None or entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            if base == _SHARED_MEMORY or _made_here(Path(entry, _MARK)):
                yield next(filter(None, match.groups())), Path(entry)


def _made_here(mark: Path) -> bool:
    try:
        return mark.read_text() == _machine()
    except OSError:
        return False


def _machine() -> str:
    """The boot of this machine, which its containers share; its name, where the system does not tell."""
    try:
        return _BOOT.read_text()
    except OSError:
        return socket.gethostname()


def _remove(base: Path, name: str) -> None:
    """The entry that is locked comes last: without it the others are a dead run's."""
    for path in sorted((path for run, path in _found(base) if run == name), key=lambda path: path.name == name):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of ``path``; None where another process has it, or has removed the path."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _base() -> Path:
    """The system's temporary folder; of a process of a run, the one that the run's folder lies in."""
    base = Path(tempfile.gettempdir())
    if (base / _MARK).is_file():
        base = base.parent
    return base if len(str(base)) <= _LONGEST_BASE else Path("/tmp")
