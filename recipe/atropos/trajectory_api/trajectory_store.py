"""The durable store: one thread that writes, one that reads, both on the database of a data folder. Guarantees:

- What a future of ``write`` has answered survives a kill of the process ("normal"), of the machine too ("full"); with
  "none", what the operating system has.
- Writes take effect in the order of their calls. All that wait share a transaction.
- A write that finds the disk full is repeated until there is room; ``trouble`` names it meanwhile.
- A folder is used by one process at a time. ``archive`` moves the database aside and never deletes it.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.trajectory_api import database

logger = logging.getLogger(__name__)

DATABASE = "trajectories.db"
_MOST = 256  # writes in a transaction
_FULL_RETRY = 0.5  # s
_CLOSE_SECONDS = 10.0  # for the writes that are left
T = TypeVar("T")
_Write = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], asyncio.Future | None]


class TrajectoryStoreError(AtroposError, RuntimeError):
    """Error for a data folder that another process uses, or whose content is of another format."""


class Store:
    """A data folder in use. All methods but ``close`` are called in the event loop, which they never block."""

    def __init__(self, folder: str | Path, durability: str = "normal"):
        if durability not in database.SYNCHRONOUS:
            raise ConfigurationError(f"durability={durability}: choose none, normal or full")
        self.folder = Path(folder)
        self.path = self.folder / DATABASE
        self.trouble = ""
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
            self.connection = self._open()
        except BlockingIOError:
            os.close(self._lock)
            raise TrajectoryStoreError(
                f"data-dir={folder}: another server uses it; end that one, or give another folder"
            ) from None
        except sqlite3.Error as error:
            os.close(self._lock)
            raise TrajectoryStoreError(f"{self.path}: {error}; make room, or give another --data-dir") from error
        self._reader: sqlite3.Connection | None = None
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="trajectory-reader")
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="trajectory-writer", daemon=True)

    def _open(self) -> sqlite3.Connection:
        connection = database.connect(self.path, self._durability)
        found = database.read_run(connection).get("format", database.FORMAT)
        if found != database.FORMAT:
            raise TrajectoryStoreError(
                f"{self.path} has format {found}, and this server reads {database.FORMAT}; give another folder"
            )
        database.write_run(connection, format=database.FORMAT)
        return connection

    def load(self) -> database.Loaded:
        """Return what the folder holds and start the writer; called once, first."""
        loaded = database.load(self.connection)
        self._writer.start()
        return loaded

    def write(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> "asyncio.Future[T]":
        """Run a step of ``database`` in the next transaction; the future has its result once that is durable."""
        future = asyncio.get_running_loop().create_future()
        self._writes.put((function, args, kwargs, future))
        return future

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function of a connection in the reading thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, function, args)

    async def archive(self) -> None:
        """Move the database to ``archive/`` and begin an empty one. Reads and writes wait meanwhile."""
        future = asyncio.get_running_loop().create_future()
        self._writes.put((self._move, (), {}, future))
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
        paths = (self.path, self.path.with_name(f"{DATABASE}-wal"))
        return sum(path.stat().st_size for path in paths if path.exists())

    # ------------------------------------------------------------------ the reading thread

    def _read(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self._reader is None:
            self._reader = database.connect_to_read(self.path)
        return function(self._reader, *args)

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
                _answer([(item[3], *_tried(self._move))])

    def _commit(self, batch: list[_Write]) -> None:
        """Commit all writes; repeat while the disk is full. A write that fails otherwise is left out alone."""
        while True:
            try:
                results = self._transaction(batch)
                self.trouble = ""
                return _answer([(write[3], result, None) for write, result in zip(batch, results, strict=True)])
            except Exception as error:
                with contextlib.suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                if _is_full(error):
                    if not self.trouble:
                        logger.error("%s: %s; answers wait until there is room", self.path, error)
                    self.trouble = f"{self.path}: {error}; make room there"
                    time.sleep(_FULL_RETRY)
                elif len(batch) == 1:
                    return _answer([(batch[0][3], None, error)])
                else:
                    for write in batch:
                        self._commit([write])
                    return None

    def _transaction(self, batch: list[_Write]) -> list[Any]:
        self.connection.execute("BEGIN IMMEDIATE")
        results = [function(self.connection, *args, **kwargs) for function, args, kwargs, _ in batch]
        self.connection.execute("COMMIT")
        return results

    def _move(self) -> None:
        if not database.holds_groups(self.connection):
            database.clear(self.connection)
            return
        closed, moved = threading.Event(), threading.Event()
        self._reading.submit(lambda: (self._close_reader(), closed.set(), moved.wait()))
        closed.wait()
        archive = self.folder / "archive"
        try:
            archive.mkdir(exist_ok=True)
            number = 1 + max((int(path.stem) for path in archive.glob("*.db") if path.stem.isdigit()), default=0)
            self.connection.close()  # the last one: it merges the write-ahead log
            self.path.rename(archive / f"{number:04d}.db")
        finally:
            self.connection = self._open()
            moved.set()


def _tried(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _is_full(error: Exception) -> bool:
    name = getattr(error, "sqlite_errorname", "")
    return name == "SQLITE_FULL" or name.startswith("SQLITE_IOERR")


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

    loops = {future.get_loop() for future, _, _ in results if future is not None}
    for loop in loops:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(resolve)
