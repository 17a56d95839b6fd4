"""State that is not messages: sessions and their packs, in DATA/state.db (SQLite, WAL).

One thread writes, many changes in one transaction. A save is on disk when its future is done; with
`durability = "fsync"` it then survives a power cut, else the end of the process.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

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
"""
SAVE_SESSION = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)"
SAVE_PACK = "INSERT OR REPLACE INTO packs VALUES (?, ?, ?, ?, ?, ?, ?, ?)"

PackRow = tuple[int, int, str, int, int, int, int, int]


@dataclass(slots=True)
class SessionRow:
    """A session as it is saved; `first_id`, `rewrite_from` and `confirmed` say which packs go."""

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
class Changes:
    """What one save writes."""

    sessions: list[SessionRow] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    direct: list[tuple[int, bytes]] = field(default_factory=list)
    direct_gone: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sessions or self.ended or self.direct or self.direct_gone)


@dataclass(slots=True)
class Saved:
    """Everything there is at a start."""

    sessions: list[SessionRow]
    direct: dict[int, bytes]


class State:
    """The database. Every method may be called from the loop's thread; none blocks it."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self._path = path
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-state")
        self._db: sqlite3.Connection | None = None
        self._closed = False

    async def open(self) -> Saved:
        """Open, or create, and read everything.

        Raises:
            StorageError: `state.failed`, or `log.format` if a newer version wrote it.
        """
        return await self._call(self._open)

    async def save(self, changes: Changes) -> None:
        """Write the changes, all or nothing.

        Raises:
            StorageError: `state.failed`; nothing of it is written.
        """
        await self._call(lambda: self._save(changes))

    async def close(self) -> None:
        """Close the file; nothing happens the second time."""
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

    def _open(self) -> Saved:
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
        return Saved(list(sessions.values()), dict(db.execute("SELECT * FROM direct").fetchall()))

    def _save(self, changes: Changes) -> None:
        db = self._db
        assert db is not None
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany("INSERT OR REPLACE INTO direct VALUES (?, ?)", changes.direct)
            for row in changes.sessions:
                _save_session(db, row)
            _delete(db, "sessions WHERE number", changes.ended)
            _delete(db, "packs WHERE session", changes.ended)
            _delete(db, "direct WHERE number", changes.direct_gone)
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()


def _save_session(db: sqlite3.Connection, row: SessionRow) -> None:
    number = row.number
    db.execute(
        SAVE_SESSION,
        (number, row.digest, row.ttl_s, row.next_id, row.mark, row.follows, row.lost),
    )
    db.execute("DELETE FROM packs WHERE session = ? AND id < ?", (number, row.first_id))
    if row.rewrite_from:
        db.execute("DELETE FROM packs WHERE session = ? AND id >= ?", (number, row.rewrite_from))
    if row.confirmed:
        ids = ((number, one) for one in row.confirmed)
        db.executemany("DELETE FROM packs WHERE session = ? AND id = ?", ids)
    if row.packs:
        db.executemany(SAVE_PACK, row.packs)


def _delete(db: sqlite3.Connection, where: str, numbers: Iterable[int]) -> None:
    db.executemany(f"DELETE FROM {where} = ?", ((number,) for number in numbers))
