"""The durable store: one thread that writes, one that reads, both on the database of a data folder.

Guarantees:

- What a future of ``write`` has answered survives a kill of the process ("normal"), of the machine too ("full"); with
  "none", what the operating system has.
- Writes take effect in the order of their calls. All that wait share a transaction.
- A write that finds the disk full is repeated until there is room; ``trouble`` names it meanwhile.
- A write that fails otherwise, and a read that SQLite refuses, are the last: ``check`` raises from then on, for the
  process to end. What is in memory may be ahead of the database then, which is the truth that the next process starts
  from.
- A folder is used by one process at a time. A database gets its name once it is complete, so one without a byte was
  emptied, and is refused.
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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from recipe.atropos.trajectory_api import database
from recipe.atropos.trajectory_api.database import RESTORE, TrajectoryStoreError
from recipe.atropos.utils.files import open_lock, usable

logger = logging.getLogger(__name__)

DATABASE = "trajectories.db"
_PARTIAL = "partial.db"  # a database that is being made
_MOST = 256  # writes in a transaction
_FULL_RETRY = 0.5  # s
_CLOSE_SECONDS = 10.0  # for the writes that are left
_OF_THE_DISK = ("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_BUSY", "SQLITE_LOCKED")
_PROBE = 1 << 16  # bytes
T = TypeVar("T")
_Write = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Future]


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


class TrajectoryStore:
    """A data folder in use. All methods but ``close`` are called in the event loop, which they never block."""

    def __init__(self, folder: str | Path, durability: str = "normal"):
        self.folder = Path(folder)
        self.path = self.folder / DATABASE
        self.trouble = ""
        self._failure: Exception | None = None
        with usable(f"data-dir={folder}", "a folder that can be written"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open_lock(self.folder / "lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with named_errors(self.path):
                self.connection = self._opened(durability)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise TrajectoryStoreError(
                    f"data-dir={folder}: another server uses it; end that one, or give another folder"
                ) from None
            raise
        self._reader: sqlite3.Connection | None = None
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="trajectory-reader")
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="trajectory-writer", daemon=True)

    def _opened(self, durability: str) -> sqlite3.Connection:
        """Open the folder's database, or a new one."""
        log, partial = self.path.with_name(f"{DATABASE}-wal"), self.folder / _PARTIAL
        if self.path.stat().st_size == 0 if self.path.exists() else log.exists():
            raise TrajectoryStoreError(f"{self.path} is damaged: it has lost its content; {RESTORE}")
        if not self.path.exists():
            for left in self.folder.glob(f"{_PARTIAL}*"):  # of a start that was killed
                left.unlink()
            database.connect(partial, durability).close()
            partial.rename(self.path)
        return database.connect(self.path, durability)

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
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # what was asked for is done, also if nobody waits for it any more
        self._writes.put((function, args, kwargs, future))
        answer = asyncio.wrap_future(future)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # which ``check`` raises
        return answer

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function of a connection in the reading thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, function, args)

    def close(self) -> None:
        """Finish all writes and release the folder; what a full disk still holds up was never answered."""
        if self._writer.is_alive():
            self._writes.put(None)
            self._writer.join(_CLOSE_SECONDS)
            if self._writer.is_alive():
                logger.error("%s: closed with unfinished writes: %s", self.path, self.trouble)
                return
        self._reading.shutdown()
        if self._reader is not None:
            self._reader.close()
        self.connection.close()
        os.close(self._lock)

    def size(self) -> int:
        """Return the bytes on disk."""
        files = (self.path, self.path.with_name(f"{DATABASE}-wal"))
        return sum(path.stat().st_size for path in files if path.exists())

    # ------------------------------------------------------------------ the reading thread

    def _read(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        try:
            if self._reader is None:
                self._reader = database.connect_to_read(self.path)
            return function(self._reader, *args)
        except sqlite3.Error as error:
            raise self._fail(error) from error

    # ------------------------------------------------------------------ the writing thread

    def _write_all(self) -> None:
        ended = False
        while not ended:
            batch = [self._writes.get()]
            while batch[-1] is not None and len(batch) < _MOST and not self._writes.empty():
                batch.append(self._writes.get())
            ended = batch[-1] is None
            if writes := [write for write in batch if write is not None]:
                self._commit(writes)

    def _commit(self, batch: list[_Write]) -> None:
        """Commit all writes, or none: what one of them fails with ends the store, but a full disk is waited for."""
        results: list[Any] | None = None
        while results is None:
            try:
                results = self._transaction(batch)
            except Exception as error:
                if not _is_full(error, self.folder):
                    failure = self._fail(error)
                    for *_, future in batch:
                        future.set_exception(failure)
                    return
                if not self.trouble:
                    logger.error("%s: %s; answers wait until there is room", self.path, error)
                self.trouble = f"{self.path}: {error}; make room there"
                time.sleep(_FULL_RETRY)
        self.trouble = ""
        for (*_, future), result in zip(batch, results, strict=True):
            future.set_result(result)

    def _transaction(self, batch: list[_Write]) -> list[Any]:
        self.check()
        with self.connection as connection:  # commits at its end, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            return [function(connection, *args, **kwargs) for function, args, kwargs, _ in batch]


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
