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
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from polybus.errors import StorageError

logger = logging.getLogger("polybus.state")
T = TypeVar("T")
NAME = "state.db"
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
PROBE = f"PRAGMA user_version = {FORMAT}"
"""Writes what is there already."""
PROBE_S = 1.0

Statement = tuple[str, Sequence[Any]]
"""SQL and its parameters: a tuple for one execution, a list of tuples for one each."""


class StateDb:
    """The database. Every method may be called from the loop's thread; none blocks it."""

    _db: sqlite3.Connection

    def __init__(self, data: Path, *, fsync: bool) -> None:
        self._path = data / NAME
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-state")
        self._closed = False
        self._probe: asyncio.TimerHandle | None = None
        self.error: StorageError | None = None
        """Why the last write failed; None once writing works again."""

    async def open(self) -> None:
        """Open or create the database.

        Raises:
            StorageError: `state.failed`, or `log.format` if a newer version wrote it.
        """
        await self._call(self._open)

    async def read(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises StorageError `state.failed`."""
        return await self._call(lambda: self._db.execute(query).fetchall())

    async def write(self, statements: Iterable[Statement]) -> None:
        """Execute the statements, all or nothing.

        Raises:
            StorageError: `state.failed`; nothing of it is written.
        """
        try:
            await self._call(lambda: self._write(statements))
        except StorageError as error:
            self._failed(error)
            raise
        self.error = None

    def _failed(self, error: StorageError) -> None:
        if self.error is None:
            logger.error("%s; trying every %g s", error.text, PROBE_S)
        self.error = error
        if self._probe is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._probe = loop.call_later(PROBE_S, lambda: loop.create_task(self._try_again()))

    async def _try_again(self) -> None:
        """Find out whether the disk has recovered: nobody else may write for a long time."""
        self._probe = None
        if self.error is not None and not self._closed:
            with contextlib.suppress(StorageError):
                await self.write([(PROBE, ())])

    async def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self._closed:
            self._closed = True
            if self._probe is not None:
                self._probe.cancel()
            await self._call(self._close)
            self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise StorageError("state.failed", f"{self._path}: {error}") from error

    # On the thread

    def _open(self) -> None:
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
        db.execute(PROBE)

    def _write(self, statements: Iterable[Statement]) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            for sql, parameters in statements:
                if isinstance(parameters, list):
                    db.executemany(sql, parameters)
                else:
                    db.execute(sql, parameters)
            db.execute("COMMIT")
        except BaseException:
            # A full disk may have rolled back already; its error is the one to report.
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _close(self) -> None:
        # It may have failed to open.
        if hasattr(self, "_db"):
            self._db.close()


@contextlib.contextmanager
def of_stopped_bus(data: Path) -> Iterator[sqlite3.Connection | None]:
    """The database of a stopped bus; None if it has none. Raises StorageError `state.failed`."""
    path = data / NAME
    if not path.exists():
        yield None
        return
    try:
        url = f"file:{quote(str(path))}?mode=rw"
        with contextlib.closing(sqlite3.connect(url, uri=True, isolation_level=None)) as db:
            db.executescript(SCHEMA)
            yield db
    except sqlite3.Error as error:
        raise StorageError("state.failed", f"{path}: {error}") from error
