"""A run's temporary files and shared memory: named after the run, private to its user, removed with it.

Guarantees:

- the folder ``TMPDIR/atropos-XXXXXXXX`` (mode 0700) and the shared memory ``/dev/shm/atropos-XXXXXXXX-*`` are removed
  at the end of the run, or, if it was killed, by the next run that starts; a killed process's, by the one that replaces
  it;
- nothing of a live run, of another user or of another program is removed: the run's owner holds a lock on the folder,
  and on its own entry in ``/dev/shm``, as long as it lives. Other containers see the lock, unlike a pid; other machines
  on a shared file system do not, so each machine removes only the folders of its own runs.
"""

import atexit
import contextlib
import fcntl
import functools
import itertools
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.files import discard
from recipe.atropos.utils.private_process import SCRATCH

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "atropos-"
_NAME = rf"({_PREFIX}[a-z0-9_]{{8}})"
_FOLDER = re.compile(_NAME)
_SEGMENT = re.compile(rf"{_NAME}(?:-(?P<pid>\d+)-\d+)?|sem\.{_NAME}-mp-\w+|sglang_loads_{_NAME}_\w+\.shm")
_MARK = ".scratch"  # file in each run's folder, with the boot id of the machine that made it
_TRIES = 20
_LONGEST_BASE = 22  # bytes; the path of a Unix socket may have 107, of which Ray uses 68 below the run's folder
_segments = itertools.count()


class Scratch:
    """Temporary ``folder`` of a run, and the ``locks`` of its owner; None in other processes."""

    def __init__(self, folder: Path, locks: list[int] | None = None):
        self.folder, self._locks, self._owner = folder, locks, os.getpid()

    @classmethod
    def create(cls) -> "Scratch":
        """Remove those of dead runs, then create one that is owned by this process.

        Raises:
            AtroposError: the file system of the temporary folder does not support locks.
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
            own = cls(folder, [lock for lock in locks if lock is not None])
            if None not in locks:
                return own
            own.remove()  # another starting process took an entry for a dead run's
        raise AtroposError(
            f"TMPDIR={_base()}: a folder there cannot be locked (flock); give one on a local disk of this machine"
        )

    def variables(self) -> dict[str, str]:
        """Return the environment of the run's processes. torch's compile cache is kept for later runs, unless another
        user could write to it: torch runs what it holds.
        """
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if not compiled or compiled.startswith(f"{tempfile.gettempdir()}/torchinductor_"):  # as torch itself sets it
            own = _base() / f"torchinductor_{os.getuid()}"
            with contextlib.suppress(OSError):
                own.mkdir(mode=0o700)
            compiled = str(own if _is_private(own) else self.folder / "torchinductor")
        return {"TMPDIR": str(self.folder), SCRATCH: str(self.folder), "TORCHINDUCTOR_CACHE_DIR": compiled}

    def shared_memory(self) -> Path:
        """Return a new path for shared memory of this run; a process's first call removes what killed ones left."""
        number = next(_segments)
        if number == 0:
            for path in list(_SHARED_MEMORY.glob(f"{self.folder.name}-*")):
                segment = _SEGMENT.fullmatch(path.name)
                if segment and not psutil.pid_exists(int(segment["pid"])):
                    path.unlink(missing_ok=True)
        return _SHARED_MEMORY / f"{self.folder.name}-{os.getpid()}-{number}"

    def remove(self) -> None:
        """Remove all of it, in the owner only; the run's processes must have ended."""
        if self._locks is not None and self._owner == os.getpid():
            for base in (self.folder.parent, _SHARED_MEMORY):
                _remove(base, self.folder.name)
            while self._locks:
                os.close(self._locks.pop())


@functools.cache
def current() -> Scratch:
    """Return the run's scratch; if no launcher made one, one that is removed when this process exits."""
    folder = Path(os.environ.get(SCRATCH, ""))
    if folder.is_absolute() and folder.is_dir():
        return Scratch(folder)
    own = Scratch.create()
    atexit.register(own.remove)
    return own


def remove_dead() -> None:
    """Remove what dead runs of this user left behind."""
    for base in (_base(), _SHARED_MEMORY):
        for name in {name for name, _ in _found(base)}:
            lock = _lock(base / name)
            if lock is not None or not (base / name).exists():
                _remove(base, name)
            if lock is not None:
                os.close(lock)


def _found(base: Path) -> Iterator[tuple[str, Path]]:
    """Yield (run, path) for everything of this user that belongs to a run of this machine."""
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
    """Return the boot id of this machine, which its containers share, or its name if there is no boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _remove(base: Path, name: str) -> None:
    """Remove a run's entries, the locked one last: without it the others count as a dead run's."""
    for path in sorted((path for run, path in _found(base) if run == name), key=lambda path: path.name == name):
        discard(path)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of ``path``; None if another process has it, or removed the path."""
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


def _is_private(folder: Path) -> bool:
    """Return whether it is a folder of this user, to which nobody else can write."""
    if not folder.exists():
        return False
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o22


def _base() -> Path:
    """Return the system's temporary folder; in a process of a run, the folder that contains the run's folder."""
    base = Path(tempfile.gettempdir())
    if _FOLDER.fullmatch(base.name) and (base / _MARK).is_file():
        base = base.parent
    return base if len(str(base)) <= _LONGEST_BASE else Path("/tmp")
