"""The durable store: one thread that writes, one that reads, both on the database of a data folder.

Guarantees:

- What a future of ``write`` has answered survives a kill of the process ("normal"), of the machine too ("full"); with
  "none", what the operating system has.
- Writes take effect in the order of their calls. All that wait share a transaction.
- A write that finds the disk full is repeated until there is room; ``trouble`` names it meanwhile.
- A write that fails otherwise, and a read that SQLite refuses, are the last: ``check`` raises from then on, for the
  process to end. What is in memory may be ahead of the database then, which is the truth that the next process starts
  from.
- A folder is used by one process at a time. ``archive`` moves the database aside and never deletes it; if it fails, or
  the process is killed meanwhile, the folder has the old database or the new one, whole. So a database without a byte
  was emptied, and is refused.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import queue
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.trajectory_api import database
from recipe.atropos.trajectory_api.database import RESTORE, TrajectoryStoreError

logger = logging.getLogger(__name__)

DATABASE = "trajectories.db"
_FRESH = "fresh.db"  # what takes its place, until it does
_PARTIAL = "partial.db"  # a database that is being made
_MOST = 256  # writes in a transaction
_FULL_RETRY = 0.5  # s
_BUSY_MS = 2000  # for other processes that read a database which is archived
_CLOSE_SECONDS = 10.0  # for the writes that are left
_OF_THE_DISK = ("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_BUSY", "SQLITE_LOCKED")
_PROBE = 1 << 16  # bytes
T = TypeVar("T")
_Write = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], asyncio.Future | None]


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Raise TrajectoryStoreError, which says what to do, if the block cannot use the database of a path."""
    try:
        yield
    except sqlite3.Error as error:
        raise _named(path, error) from error
    except (LookupError, TypeError, ValueError) as error:  # orjson's and msgspec's errors are ValueErrors
        raise TrajectoryStoreError(f"{path} is damaged: {error!r}; {RESTORE}") from error


def _named(path: Path, error: sqlite3.Error) -> TrajectoryStoreError:
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if _is_full(error, path.parent):
        return TrajectoryStoreError(f"{path}: {error}; make room there, or give another --data-dir")
    if name.startswith(_OF_THE_DISK):
        return TrajectoryStoreError(f"{path}: {error} ({name}); check that disk, and who may read and write there")
    return TrajectoryStoreError(f"{path} is damaged: {error} ({name}); {RESTORE}")


class Store:
    """A data folder in use. All methods but ``close`` are called in the event loop, which they never block."""

    def __init__(self, folder: str | Path, durability: str = "normal"):
        if durability not in database.SYNCHRONOUS:
            raise ConfigurationError(f"durability={durability}: choose none, normal or full")
        self.folder = Path(folder)
        self.path = self.folder / DATABASE
        self.trouble = ""
        self._failure: Exception | None = None
        self._durability = durability
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"data-dir={folder}: {error.strerror}; give a folder that can be written"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with named_errors(self.path):
                self.connection = self._opened()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                what = f"data-dir={folder}: another server uses it; end that one, or give another folder"
                raise TrajectoryStoreError(what) from None
            raise
        self._reader: sqlite3.Connection | None = None
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="trajectory-reader")
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="trajectory-writer", daemon=True)

    def _opened(self) -> sqlite3.Connection:
        """Open the folder's database, or a new one."""
        fresh, log = self.folder / _FRESH, self.path.with_name(f"{DATABASE}-wal")
        if not self.path.exists() and fresh.exists():  # killed while it archived
            fresh.rename(self.path)
        if self.path.stat().st_size == 0 if self.path.exists() else log.exists():
            raise TrajectoryStoreError(f"{self.path} is damaged: it has lost its content; {RESTORE}")
        if not self.path.exists():
            self._make(self.path)
        return self._open(self.path)

    def _make(self, path: Path, **kept: Any) -> None:
        """Make a database, which gets its name once it is complete."""
        partial = self.folder / _PARTIAL
        _rename(partial, None)  # of an earlier attempt
        with contextlib.closing(self._open(partial)) as connection:
            database.write_run(connection, **kept)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        _rename(partial, path)

    def _open(self, path: Path) -> sqlite3.Connection:
        with contextlib.ExitStack() as failed:
            connection = failed.enter_context(contextlib.closing(database.connect(path, self._durability)))
            found = database.read_run(connection).get("format", database.FORMAT)
            if found not in (1, database.FORMAT):
                raise TrajectoryStoreError(
                    f"{path} has format {found}, and this server reads 1 and {database.FORMAT}; give another folder"
                )
            database.write_run(connection, format=database.FORMAT)
            failed.pop_all()
            return connection

    def load(self) -> database.Loaded:
        """Return what the folder holds and start the writer; called once, first. Use ``named_errors``."""
        loaded = database.load(self.connection)
        self._writer.start()
        return loaded

    def check(self) -> None:
        """Raise what the store failed with, if it has."""
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> Exception:
        """Note the first failure, and return it."""
        if self._failure is None:
            self._failure = _named(self.path, error) if isinstance(error, sqlite3.Error) else error
        return self._failure

    def write(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> "asyncio.Future[T]":
        """Run a step of ``database`` in the next transaction; the future has its result once that is durable."""
        future = asyncio.get_running_loop().create_future()
        self._writes.put((function, args, kwargs, future))
        return future

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function of a connection in the reading thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, function, args)

    async def archive(self, **kept: Any) -> None:
        """Move the database to ``archive/`` and begin an empty one, whose run has the values ``kept``.

        Reads and writes wait meanwhile. A full disk holds it, as any write.

        Raises:
            OSError, sqlite3.Error: it failed otherwise, and nothing has changed.
        """
        future = asyncio.get_running_loop().create_future()
        self._writes.put((self._move, (), kept, future))
        await future

    def close(self) -> None:
        """Finish all writes and release the folder; what a full disk still holds up was never answered."""
        if self._writer.is_alive():
            self._writes.put(None)
            self._writer.join(_CLOSE_SECONDS)
            if self._writer.is_alive():
                logger.error("%s: closed with unfinished writes: %s", self.path, self.trouble)
                return
        self._reading.submit(self._close_reader).result()
        self._reading.shutdown()
        self.connection.close()
        os.close(self._lock)

    def size(self) -> int:
        """Return the bytes on disk."""
        size = 0
        for path in (self.path, self.path.with_name(f"{DATABASE}-wal")):
            with contextlib.suppress(FileNotFoundError):  # the writer archives it now
                size += path.stat().st_size
        return size

    # ------------------------------------------------------------------ the reading thread

    def _read(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        try:
            if self._reader is None:
                self._reader = database.connect_to_read(self.path)
            return function(self._reader, *args)
        except sqlite3.Error as error:
            raise self._fail(error) from error

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # ------------------------------------------------------------------ the writing thread

    def _write_all(self) -> None:
        ended = False
        while not ended:
            batch: list[_Write] = []
            item = self._writes.get()
            while item is not None and item[0] != self._move:
                batch.append(item)
                if len(batch) == _MOST or self._writes.empty():
                    break
                item = self._writes.get()
            if batch:
                self._commit(batch)
            if item is None:
                ended = True
            elif item[0] == self._move:
                _answer([(item[3], *_tried(self._move, **item[2]))])

    def _commit(self, batch: list[_Write]) -> None:
        """Commit all writes, or none: what one of them fails with, but for want of room, ends the store."""
        try:
            results = self._with_room(self._transaction, batch)
        except Exception as error:
            failure = self._fail(error)
            _answer([(write[3], None, failure) for write in batch])
        else:
            _answer([(write[3], result, None) for write, result in zip(batch, results, strict=True)])

    def _with_room(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns; repeat it while the disk is full."""
        while True:
            try:
                result = function(*args)
                self.trouble = ""
                return result
            except Exception as error:
                if not _is_full(error, self.folder):
                    raise
                if not self.trouble:
                    logger.error("%s: %s; answers wait until there is room", self.path, error)
                self.trouble = f"{self.path}: {error}; make room there"
                time.sleep(_FULL_RETRY)

    def _transaction(self, batch: list[_Write]) -> list[Any]:
        self.check()
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            results = [function(self.connection, *args, **kwargs) for function, args, kwargs, _ in batch]
            self.connection.execute("COMMIT")
            return results
        except Exception:
            with contextlib.suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")
            raise

    def _move(self, **kept: Any) -> None:
        self.check()
        if not database.holds_groups(self.connection):
            clear: _Write = (database.clear, (), {}, None)
            self._with_room(self._transaction, [clear, (database.write_run, (), kept, None)])
            return
        archived = self._with_room(self._prepare, kept)
        closed, moved = threading.Event(), threading.Event()
        self._reading.submit(lambda: (self._close_reader(), closed.set(), moved.wait()))
        closed.wait()
        try:
            self._with_room(self._merge)
            self.connection.close()
            try:
                _rename(self.path, archived)
                (self.folder / _FRESH).rename(self.path)
                self.connection = self._open(self.path)
            except BaseException:
                if archived.exists():
                    _rename(self.path, None)
                    _rename(archived, self.path)
                self.connection = self._with_room(self._open, self.path)
                raise
        finally:
            moved.set()

    def _prepare(self, kept: dict[str, Any]) -> Path:
        """Make the new database, while the old one is in use; return where that one will be."""
        archive, fresh = self.folder / "archive", self.folder / _FRESH
        archive.mkdir(exist_ok=True)
        self._make(fresh, **kept)
        number = 1 + max((int(path.stem) for path in archive.glob("*.db") if path.stem.isdigit()), default=0)
        return archive / f"{number:04d}.db"

    def _merge(self) -> None:
        """Merge the write-ahead log, since the database is moved without it."""
        self.connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        [(busy, *_)] = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if busy:
            raise OSError(f"{self.path}: another process reads it; end that one, and try again")


def _rename(path: Path, to: Path | None) -> None:
    """Rename a database that is closed and merged, or delete it, and delete the files beside it."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    if to is None:
        path.unlink(missing_ok=True)
    else:
        path.rename(to)


def _tried(function: Callable[..., Any], **kwargs: Any) -> tuple[Any, Exception | None]:
    try:
        return function(**kwargs), None
    except Exception as error:
        return None, error


def _is_full(error: Exception, folder: Path) -> bool:
    """Return whether an error means that the disk, or a quota, has no room; SQLite often calls that another error."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")):
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(_PROBE))
            return False
        except OSError as found:
            error = found
    return name == "SQLITE_FULL" or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))


def _answer(results: list[tuple[asyncio.Future | None, Any, Exception | None]]) -> None:
    """Resolve futures in their loop, with one call for all."""

    def resolve() -> None:
        for future, result, error in results:
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # nobody may wait for it, and ``check`` raises it

    loops = {future.get_loop() for future, _, _ in results if future is not None}
    for loop in loops:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(resolve)
