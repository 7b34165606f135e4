"""The sessions' database: what a killed server needs to go on as if nothing had happened.

Each write is one transaction and done before it returns, so a turn is stored before its reply leaves. SQLite's WAL with
``synchronous=NORMAL`` loses nothing when a process is killed.
"""

import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

from recipe.atropos.errors import AtroposError

_TABLES = """
PRAGMA journal_mode=WAL;
PRAGMA synchronous=NORMAL;
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, state BLOB NOT NULL, due REAL, ended INTEGER
);
CREATE TABLE IF NOT EXISTS groups (id TEXT PRIMARY KEY, state BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
    session TEXT, number INTEGER, request BLOB, delivered INTEGER, record BLOB, crc INTEGER,
    PRIMARY KEY (session, number)
) WITHOUT ROWID;
"""


_KEPT, _PRUNED_EVERY = 20_000, 256  # sessions


class DamagedTurn(AtroposError, RuntimeError):
    """Error for a turn whose record is not what was stored; the message names the database and the session."""


class SessionStore:
    """The open database; one process writes it. ``read_only``: it is there, and its server may run meanwhile."""

    def __init__(self, path: Path, read_only: bool = False):
        self.path = path
        # without a log nobody has it open, and its folder may be one that cannot be written
        mode = "?mode=ro" if path.with_name(f"{path.name}-wal").exists() else "?immutable=1"
        uri = path.absolute().as_uri() + mode * read_only
        self._database = sqlite3.connect(uri, uri=True, isolation_level=None)
        if not read_only:
            self._database.executescript(_TABLES)
            columns = [name for _, name, *_ in self._database.execute("PRAGMA table_info(sessions)")]
            for name, kind in (("due", "REAL"), ("ended", "INTEGER")):
                if name not in columns:
                    self._database.execute(f"ALTER TABLE sessions ADD COLUMN {name} {kind}")  # of an older run
                self._database.execute(f"CREATE INDEX IF NOT EXISTS sessions_{name} ON sessions ({name})")

    def close(self) -> None:
        self._database.close()

    def put_session(self, session: str, state: bytes, due: float | None = None, ended: bool = False) -> None:
        """Store a session's state; it is among ``due`` once ``due``, in seconds since 1970, is over. With its turns it
        is kept until ``_KEPT`` others are opened after it has ``ended``, or 5 times as many after it was opened.
        """
        query = (  # the number of the newest session says when it ended
            "INSERT INTO sessions (id, state, due, ended)"
            " VALUES (?, ?, ?, iif(?, (SELECT max(number) FROM sessions), NULL))"
            " ON CONFLICT (id) DO UPDATE SET state = excluded.state, due = excluded.due, ended = excluded.ended"
        )
        row = self._database.execute(query, (session, state, due, ended)).lastrowid
        if row and row % _PRUNED_EVERY == 0:
            old, until = "ended <= ? OR number <= ?", (row - _KEPT, row - 5 * _KEPT)
            self._database.execute(f"DELETE FROM turns WHERE session IN (SELECT id FROM sessions WHERE {old})", until)
            self._database.execute(f"DELETE FROM sessions WHERE {old}", until)

    def session(self, session: str) -> bytes | None:
        found = self._database.execute("SELECT state FROM sessions WHERE id = ?", (session,)).fetchone()
        return found and found[0]

    def due(self, now: float) -> list[str]:
        """Return the ids of the sessions that are due, until they are stored otherwise."""
        found = self._database.execute("SELECT id FROM sessions WHERE due <= ? ORDER BY due", (now,))
        return [session for (session,) in found]

    def put_group(self, group: str, state: bytes) -> None:
        """Store a group that is not posted yet."""
        self._database.execute("INSERT OR REPLACE INTO groups VALUES (?, ?)", (group, state))

    def remove_group(self, group: str) -> None:
        self._database.execute("DELETE FROM groups WHERE id = ?", (group,))

    def groups(self) -> list[bytes]:
        return [state for (state,) in self._database.execute("SELECT state FROM groups ORDER BY id")]

    def newest(self, limit: int) -> list[str]:
        """Return the ids of the sessions that were opened last, the newest first."""
        query = "SELECT id FROM sessions ORDER BY number DESC LIMIT ?"
        return [session for (session,) in self._database.execute(query, (limit,))]

    def add_turn(self, session: str, number: int, request: bytes, record: bytes) -> None:
        row = (session, number, request, record, zlib.crc32(record))
        self._database.execute("INSERT INTO turns VALUES (?, ?, ?, 0, ?, ?)", row)

    def set_delivered(self, session: str, number: int) -> None:
        """Note that a turn's reply was wholly written to its client."""
        self._database.execute("UPDATE turns SET delivered = 1 WHERE session = ? AND number = ?", (session, number))

    def turns(self, session: str, number: int | None = None) -> Iterator[tuple[int, bytes, bool, bytes]]:
        """Yield number, request, whether it was delivered, and record of a session's turns in order, or of one.

        Raises:
            DamagedTurn: a record is not what was stored.
        """
        query = "SELECT number, request, delivered, record, crc FROM turns WHERE session = ?"
        one = "" if number is None else f" AND number = {int(number)}"
        for at, request, delivered, record, crc in self._database.execute(f"{query}{one} ORDER BY number", (session,)):
            if zlib.crc32(record) != crc:
                raise DamagedTurn(
                    f"{self.path}: turn {at} of session {session} is not what was stored; repeat the session"
                )
            yield at, request, bool(delivered), record
