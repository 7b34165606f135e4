"""The tables of a run's trajectories in SQLite, and what is done to them, each step on a connection that is given.

The functions that change something are steps of a transaction that the caller commits. Records are in a table of their
own, so that reading the index reads no record.

Guarantee: a record is returned as it was stored, or ``DamagedRecord`` is raised.
"""

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from isal import isal_zlib

from recipe.atropos.errors import AtroposError
from recipe.atropos.trajectory_api.batching import UNBOUNDED, Entry

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS environments (id INTEGER PRIMARY KEY, registration TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, number INTEGER NOT NULL, env INTEGER, sequences INTEGER NOT NULL, tokens INTEGER NOT NULL,
    due INTEGER NOT NULL, time REAL NOT NULL, batch INTEGER, place INTEGER
);
CREATE INDEX IF NOT EXISTS groups_by_batch ON groups (batch, place);
CREATE TABLE IF NOT EXISTS records (id INTEGER PRIMARY KEY, data BLOB NOT NULL, digest INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tickets (
    number INTEGER PRIMARY KEY, env INTEGER, sequences INTEGER NOT NULL, due INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS posts (key TEXT PRIMARY KEY, groups INTEGER NOT NULL); -- a digest of its groups
"""
_ENTRY = "number, env, sequences, tokens, id, due"  # the columns of an ``Entry``
FORMAT = 2  # since records have digests
SYNCHRONOUS = {"none": "OFF", "normal": "NORMAL", "full": "FULL"}
KEPT_POSTS = 1 << 16  # idempotency keys; a post is repeated within minutes
_PAGE = 16_384  # bytes; a record takes many pages, and fewer large ones are written and read faster
_WAL_PAGES = 8_000  # 128 MiB: rare checkpoints, each of which stops the writer for a moment
RESTORE = (
    "restore it from a copy, or move its folder away and start again: a run goes on from its checkpoint with new groups"
)


class TrajectoryStoreError(AtroposError, RuntimeError):
    """Error for a data folder that cannot be used, or that another process uses; the message says what to do."""


class DamagedRecord(TrajectoryStoreError):
    """Error for a group whose record is not what was stored; the message names database, batch and group."""


@dataclass
class Loaded:
    """What a server starts from."""

    run: dict[str, Any]
    environments: dict[int, dict[str, Any]]
    entries: list[Entry]  # groups that are in no batch, and open tickets
    last_id: int
    posts: dict[str, int]


def connect(path: str | Path, durability: str = "normal") -> sqlite3.Connection:
    """Open a database for reading and writing, creating it if needed.

    Raises:
        TrajectoryStoreError: another version of the recipe wrote it.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    try:
        connection.executescript(
            f"""
            PRAGMA page_size = {_PAGE};
            PRAGMA journal_mode = WAL;
            PRAGMA synchronous = {SYNCHRONOUS[durability]};
            PRAGMA wal_autocheckpoint = {_WAL_PAGES};
            {SCHEMA}
            """
        )
        check_format(connection)
        write_run(connection, format=FORMAT)
    except BaseException:
        connection.close()  # later, it would delete the log of another that has the path then
        raise
    return connection


def connect_to_read(path: str | Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{Path(path).resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False, timeout=30
    )
    connection.execute("PRAGMA mmap_size = 1073741824")
    return connection


def check_format(connection: sqlite3.Connection) -> None:
    """Raise TrajectoryStoreError if another version of the recipe wrote the database."""
    if (found := read_run(connection).get("format", FORMAT)) != FORMAT:
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        raise TrajectoryStoreError(f"{path} has format {found}, and this version reads {FORMAT}; give another folder")


def _digest(id: int, record: bytes) -> int:
    """Return a record's checksum, which another group's record does not have."""
    return isal_zlib.crc32(record, id & 0xFFFFFFFF)


def load(connection: sqlite3.Connection) -> Loaded:
    """Return all that a server needs to go on; no record is read."""
    rows = connection.execute
    forget_posts(connection)
    tickets = rows("SELECT number, env, sequences, due FROM tickets ORDER BY number").fetchall()
    return Loaded(
        read_run(connection),
        {number: orjson.loads(text) for number, text in rows("SELECT id, registration FROM environments")},
        queued(connection) + [Entry(*row, due=due or UNBOUNDED) for *row, due in tickets],
        _last_id(connection),
        dict(rows("SELECT key, groups FROM posts").fetchall()),
    )


def _last_id(connection: sqlite3.Connection) -> int:
    [kept] = connection.execute("SELECT COALESCE(MAX(id), 0) FROM groups").fetchone()
    return max(kept, read_run(connection).get("last_id", 0))


def forget_posts(connection: sqlite3.Connection) -> None:
    """Forget all but the last idempotency keys."""
    connection.execute("DELETE FROM posts WHERE rowid <= (SELECT MAX(rowid) FROM posts) - ?", (KEPT_POSTS,))


def reset(connection: sqlite3.Connection, **kept: Any) -> Loaded:
    """Take all groups out of the run, and forget everything else but the values ``kept``; return what is left.

    Records stay, in no batch that is served.
    """
    connection.execute("UPDATE groups SET batch = 0")
    for table in ("run", "environments", "tickets", "posts"):
        connection.execute(f"DELETE FROM {table}")
    write_run(connection, format=FORMAT, **kept)
    return load(connection)


def queued(connection: sqlite3.Connection) -> list[Entry]:
    """Return the groups that are in no batch, in order."""
    rows = connection.execute(f"SELECT {_ENTRY} FROM groups WHERE batch IS NULL ORDER BY number, id")
    return [Entry(*row) for row in rows]


def read_run(connection: sqlite3.Connection) -> dict[str, Any]:
    return {key: orjson.loads(value) for key, value in connection.execute("SELECT key, value FROM run")}


def write_run(connection: sqlite3.Connection, **values: Any) -> None:
    connection.executemany(
        "INSERT OR REPLACE INTO run VALUES (?, ?)",
        [(key, orjson.dumps(value).decode()) for key, value in values.items()],
    )


def newest_batch(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT COALESCE(MAX(batch), 0) FROM groups").fetchone()[0]


def write_environment(connection: sqlite3.Connection, number: int, registration: dict[str, Any]) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO environments VALUES (?, ?)", (number, orjson.dumps(registration).decode())
    )


def forget_environment(connection: sqlite3.Connection, number: int) -> None:
    connection.execute("DELETE FROM environments WHERE id = ?", (number,))


def append(
    connection: sqlite3.Connection,
    groups: Sequence[Entry],
    records: Sequence[bytes],
    digests: Mapping[str, int] | None = None,
    ticket: int | None = None,
) -> None:
    """Store a post's groups and their records, its idempotency key with their digest, and the end of its ticket."""
    now = time.time()
    connection.executemany(
        f"INSERT INTO groups ({_ENTRY}, time) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(one.number, one.env, one.size, one.tokens, one.id, one.due, now) for one in groups],
    )
    connection.executemany(
        "INSERT INTO records (id, data, digest) VALUES (?, ?, ?)",
        [(one.id, record, _digest(one.id, record)) for one, record in zip(groups, records, strict=True)],
    )
    if digests:
        connection.executemany("INSERT OR REPLACE INTO posts VALUES (?, ?)", digests.items())
        forget_posts(connection)
    if ticket is not None:
        end_tickets(connection, [ticket])


def begin_ticket(connection: sqlite3.Connection, number: int, env: int | None, sequences: int, due: int) -> None:
    connection.execute("INSERT INTO tickets VALUES (?, ?, ?, ?)", (number, env, sequences, due))


def end_tickets(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    connection.executemany("DELETE FROM tickets WHERE number = ?", [(number,) for number in numbers])


def cut(connection: sqlite3.Connection, number: int, ids: Sequence[int]) -> None:
    """Make groups the batch ``number``, in this order."""
    connection.executemany(
        "UPDATE groups SET batch = ?, place = ? WHERE id = ?", [(number, place, id) for place, id in enumerate(ids)]
    )
    write_run(connection, last=number)


def drop(connection: sqlite3.Connection, ids: Sequence[int]) -> None:
    """Take groups out of the queue for good; their records stay, in no batch that is served."""
    connection.executemany("UPDATE groups SET batch = 0 WHERE id = ?", [(id,) for id in ids])


def register(connection: sqlite3.Connection, last: int, **values: Any) -> list[Entry]:
    """Write a trainer's registration; return the groups of the batches after ``last``, which are queued again.

    They keep their numbers, and so their order.
    """
    requeue = f"UPDATE groups SET batch = NULL, place = NULL WHERE batch > ? RETURNING {_ENTRY}"
    rows = connection.execute(requeue, (last,)).fetchall()
    write_run(connection, last=last, **values)
    return sorted((Entry(*row) for row in rows), key=Entry.place)


def delete_batches(connection: sqlite3.Connection, through: int, limit: int = 4096) -> bool:
    """Delete groups of batches through a number, at most ``limit``; return whether more are left."""
    write_run(connection, last_id=_last_id(connection))  # no number is used again
    ids = connection.execute(
        "SELECT id FROM groups WHERE batch <= ? ORDER BY batch LIMIT ?", (through, limit)
    ).fetchall()
    connection.executemany("DELETE FROM records WHERE id = ?", ids)
    connection.executemany("DELETE FROM groups WHERE id = ?", ids)
    return len(ids) == limit


def read_batch(connection: sqlite3.Connection, number: int) -> list[bytes]:
    """Return the records of a batch in its order; [] if there is no such batch.

    Raises:
        DamagedRecord: one is not what was stored, or is missing.
    """
    rows = connection.execute(
        "SELECT place, groups.id, data, digest FROM groups LEFT JOIN records USING (id) WHERE batch = ? ORDER BY place",
        (number,),
    ).fetchall()  # an error must leave no read transaction open
    for place, (stored, id, data, digest) in enumerate(rows):
        if data is None or stored != place:
            raise _damaged(connection, f"batch {number}: group {id}", "a record is missing")
        _check_digest(connection, f"batch {number}: group {id}", id, data, digest)
    return [data for _, _, data, _ in rows]


def _check_digest(connection: sqlite3.Connection, what: str, id: int, data: bytes, digest: int) -> None:
    if digest != _digest(id, data):
        raise _damaged(connection, what, "its record has changed since it was stored")


def _damaged(connection: sqlite3.Connection, what: str, why: str) -> DamagedRecord:
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return DamagedRecord(f"{path}, {what} is damaged: {why}; {RESTORE}")


def read_record(connection: sqlite3.Connection, id: int) -> bytes | None:
    """Return a record, None if there is none; raise DamagedRecord if it is not what was stored."""
    row = connection.execute("SELECT data, digest FROM records WHERE id = ?", (id,)).fetchone()
    if row is None:
        return None
    _check_digest(connection, f"group {id}", id, *row)
    return row[0]


def list_batches(connection: sqlite3.Connection) -> list[tuple[int, int, int, int, int, float]]:
    """Return number, groups, sequences, tokens, environments and time of the newest group of every batch kept."""
    return connection.execute(
        "SELECT batch, COUNT(*), SUM(sequences), SUM(tokens), COUNT(DISTINCT env), MAX(time) FROM groups "
        "WHERE batch > 0 GROUP BY batch ORDER BY batch"
    ).fetchall()
