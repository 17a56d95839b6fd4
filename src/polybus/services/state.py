"""DATA/state.db (SQLite, WAL): sessions, packs, consumers and producers.

One thread reads and writes. Each save is one transaction, so a crash leaves all of it or nothing,
and SQLite's own recovery accepts every prefix of its writes. With `durability = "fsync"` a save
survives a power cut when its future is done, else the end of the process.

Rows refer to each other (packs to sessions and direct packs) only within one transaction's order:
a direct pack is inserted before the packs that refer to it, and deleted with the last of them.
Packs refer to messages in the log by position, and producers hold a prefix of `$commits`: for both
the log is the truth. What the log no longer has, or does not have yet, is dropped at the start.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Raw

from polybus.errors import StorageError

T = TypeVar("T")
FORMAT = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, digest BLOB NOT NULL, ttl_s REAL NOT NULL,
    next_id INTEGER NOT NULL, mark INTEGER NOT NULL, follows BLOB NOT NULL, lost BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS packs (
    session INTEGER NOT NULL, id INTEGER NOT NULL, topic TEXT NOT NULL, epoch INTEGER NOT NULL,
    first_offset INTEGER NOT NULL, count INTEGER NOT NULL, value_bytes INTEGER NOT NULL,
    direct INTEGER NOT NULL, PRIMARY KEY (session, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS direct (number INTEGER PRIMARY KEY, json BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS consumers (name TEXT PRIMARY KEY, note BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS producers (name TEXT PRIMARY KEY, json BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS producers_read (
    id INTEGER PRIMARY KEY CHECK (id = 0), epoch INTEGER NOT NULL, next_offset INTEGER NOT NULL);
"""
# One statement takes all rows as one JSON text, so that SQLite works without Python's lock. With a
# statement for each row, the thread and the event loop would contend for it.
SAVE_SESSIONS = """
INSERT OR REPLACE INTO sessions
SELECT json_extract(value, '$[0]'), substr(?2, key * 16 + 1, 16), json_extract(value, '$[1]'),
    json_extract(value, '$[2]'), json_extract(value, '$[3]'),
    CAST(json_extract(value, '$[4]') AS BLOB), CAST(json_extract(value, '$[5]') AS BLOB)
FROM json_each(?1)"""
SAVE_PACKS = f"""
INSERT OR REPLACE INTO packs
SELECT {", ".join(f"json_extract(value, '$[{column}]')" for column in range(8))} FROM json_each(?)
"""
# `{}` is a condition on the ids of a session's packs, by the number beside the session's.
DELETE_PACKS = """
DELETE FROM packs WHERE (session, id) IN (
    SELECT packs.session, packs.id FROM json_each(?) AS gone CROSS JOIN packs
    ON packs.session = json_extract(gone.value, '$[0]')
    AND packs.id {} json_extract(gone.value, '$[1]'))"""
DIGEST_BYTES = 16

PackRow = tuple[int, int, str, int, int, int, int, int]


@dataclass(slots=True)
class SessionRow:
    """A session as saved; `first_id`, `rewrite_from` and `confirmed` say which packs to delete."""

    number: int
    digest: bytes
    ttl_s: float
    next_id: int
    mark: int
    follows: bytes
    lost: bytes
    first_id: int = 0
    rewrite_from: int = 0
    confirmed: list[int] = field(default_factory=list)
    packs: list[PackRow] = field(default_factory=list)


@dataclass(slots=True)
class SessionChanges:
    """What one save of sessions writes."""

    sessions: list[SessionRow] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    direct: list[tuple[int, bytes]] = field(default_factory=list)
    direct_gone: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SavedSessions:
    """All sessions at a start."""

    sessions: list[SessionRow]
    direct: dict[int, bytes]


class StateDb:
    """The database. Every method may be called from the loop's thread; none blocks it."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self._path = path
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-state")
        self._db: sqlite3.Connection | None = None
        self._closed = False

    async def open(self) -> SavedSessions:
        """Open or create the database, and read the sessions.

        Raises:
            StorageError: `state.failed`, or `log.format` if a newer version wrote it.
        """
        return await self._call(self._open)

    async def save(self, changes: SessionChanges) -> None:
        """Write the changes, all or nothing.

        Raises:
            StorageError: `state.failed`; nothing of it is written.
        """
        await self._call(lambda: self._save(changes))

    async def read_consumers(self) -> dict[str, bytes]:
        """Each consumer's note by its group. Raises StorageError `state.failed`."""
        return await self._call(lambda: _read_consumers(self._opened()))

    async def save_consumers(self, rows: list[tuple[str, bytes]], gone: list[str]) -> None:
        """Write consumers' notes and delete those of `gone` groups; all or nothing.

        Raises:
            StorageError: `state.failed`.
        """
        await self._call(lambda: self._save_consumers(rows, gone))

    async def read_producers(self) -> tuple[list[bytes], tuple[int, int]]:
        """Each producer's row, and the epoch and offset up to which `$commits` is in them.

        Raises:
            StorageError: `state.failed`.
        """
        return await self._call(self._read_producers)

    async def save_producers(self, rows: list[tuple[str, bytes]], read_to: tuple[int, int]) -> None:
        """Replace all producers; all or nothing. Raises StorageError `state.failed`."""
        await self._call(lambda: self._save_producers(rows, read_to))

    async def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self._closed:
            self._closed = True
            await self._call(self._close)
            self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StorageError("state.failed", f"{self._path}: {error}") from error

    # On the thread

    def _open(self) -> SavedSessions:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Session keys are not in it, but messages are.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        self._db = db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if self._fsync else 'NORMAL'}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > FORMAT:
            text = f"{self._path} has format {version}; this version knows {FORMAT}"
            raise StorageError("log.format", text)
        db.executescript(SCHEMA)
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("DELETE FROM direct WHERE number NOT IN (SELECT direct FROM packs WHERE direct)")
        sessions = {row[0]: SessionRow(*row) for row in db.execute("SELECT * FROM sessions")}
        for row in db.execute("SELECT * FROM packs ORDER BY session, id"):
            if row[0] in sessions:
                sessions[row[0]].packs.append(row)
        return SavedSessions(
            list(sessions.values()), dict(db.execute("SELECT * FROM direct").fetchall())
        )

    def _save(self, changes: SessionChanges) -> None:
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO direct VALUES (?, ?)", changes.direct)
            _save_sessions(db, changes.sessions)
            _delete(db, "sessions WHERE number", changes.ended)
            _delete(db, "packs WHERE session", changes.ended)
            _delete(db, "direct WHERE number", changes.direct_gone)

    def _save_consumers(self, rows: list[tuple[str, bytes]], gone: list[str]) -> None:
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO consumers VALUES (?, ?)", rows)
            db.executemany("DELETE FROM consumers WHERE name = ?", [(one,) for one in gone])

    def _read_producers(self) -> tuple[list[bytes], tuple[int, int]]:
        db = self._opened()
        rows = [row[0] for row in db.execute("SELECT json FROM producers")]
        read_to = db.execute("SELECT epoch, next_offset FROM producers_read").fetchone()
        return rows, read_to or (0, 0)

    def _save_producers(self, rows: list[tuple[str, bytes]], read_to: tuple[int, int]) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM producers")
            db.executemany("INSERT INTO producers VALUES (?, ?)", rows)
            db.execute("INSERT OR REPLACE INTO producers_read VALUES (0, ?, ?)", read_to)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._opened()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            # A full disk may have rolled back already; its error is the one to report.
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _opened(self) -> sqlite3.Connection:
        assert self._db is not None
        return self._db

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()


def consumers_in(path: Path) -> dict[str, bytes]:
    """The consumers' notes of a stopped bus; empty if there are none. Raises StorageError."""
    if not path.exists():
        return {}
    with _stopped(path, "ro") as db:
        known = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'consumers'").fetchone()
        return _read_consumers(db) if known else {}


def forget_consumer(path: Path, group: str) -> bool:
    """Delete a consumer of a stopped bus; return whether it existed. Raises StorageError."""
    if group not in consumers_in(path):
        return False
    with _stopped(path, "rw") as db:
        return db.execute("DELETE FROM consumers WHERE name = ?", (group,)).rowcount > 0


@contextlib.contextmanager
def _stopped(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """The database of a stopped bus."""
    try:
        url = f"file:{quote(str(path))}?mode={mode}"
        with contextlib.closing(sqlite3.connect(url, uri=True, isolation_level=None)) as db:
            yield db
    except sqlite3.Error as error:
        raise StorageError("state.failed", f"{path}: {error}") from error


def _read_consumers(db: sqlite3.Connection) -> dict[str, bytes]:
    return dict(db.execute("SELECT name, note FROM consumers").fetchall())


def _save_sessions(db: sqlite3.Connection, rows: list[SessionRow]) -> None:
    if not rows:
        return
    fields = [
        (row.number, row.ttl_s, row.next_id, row.mark, Raw(row.follows), Raw(row.lost))
        for row in rows
    ]
    digests = b"".join(row.digest for row in rows)
    assert len(digests) == DIGEST_BYTES * len(rows)
    db.execute(SAVE_SESSIONS, (_json(fields), digests))
    gone = [
        ("<", [(row.number, row.first_id) for row in rows]),
        (">=", [(row.number, row.rewrite_from) for row in rows if row.rewrite_from]),
        ("=", [(row.number, one) for row in rows for one in row.confirmed]),
    ]
    for sign, places in gone:
        if places:
            db.execute(DELETE_PACKS.format(sign), (_json(places),))
    packs = [pack for row in rows for pack in row.packs]
    if packs:
        db.execute(SAVE_PACKS, (_json(packs),))


def _delete(db: sqlite3.Connection, where: str, numbers: list[int]) -> None:
    if numbers:
        db.execute(f"DELETE FROM {where} IN (SELECT value FROM json_each(?))", (_json(numbers),))


def _json(rows: Any) -> str:
    return msgspec.json.encode(rows).decode()
