"""DATA/state.db (SQLite, WAL): sessions, packs, consumers and producers.

One thread reads and writes. Each save is one transaction, so a crash leaves all of it or nothing,
and SQLite's own recovery accepts every prefix of its writes. A save survives a power cut when its
future is done; with `durability = "memory"` it survives only the end of the process. Rows have
checksums: a start sets damaged ones aside (state_rows.py), and the services continue without them.

Rows refer to each other (packs to sessions and direct packs), so a transaction has an order:
a direct pack is inserted before the packs that refer to it, and deleted with the last of them.
Packs refer to messages in the log by position, and producers hold a prefix of `$commits`: for both
the log is the truth. Rows about messages that the log does not have are dropped at the start.
"""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from polybus.errors import StorageError
from polybus.services.state_rows import FORMAT, NAME, StateDamage, files_of, open_or_renew
from polybus.services.threads import in_thread

logger = logging.getLogger("polybus.state")
T = TypeVar("T")
PROBE = f"PRAGMA user_version = {FORMAT}"
"""A write that changes nothing."""
PROBE_S = 1.0
FORGET_FAILED = "PRAGMA wal_checkpoint(TRUNCATE)"
"""Removes a failed or truncated save from the write-ahead log: two of them would look like damage
to the next start.
"""
DAMAGED = "state.damaged"
DAMAGES_LOGGED_MAX = 20

SqlStatement = tuple[str, Sequence[Any]]
"""SQL and its parameters: a tuple for one execution, a list of tuples for one each."""


class StateDb:
    """The database. Every method may be called from the loop's thread; none blocks it."""

    _db: sqlite3.Connection

    def __init__(self, data: Path, *, fsync: bool) -> None:
        self._path = data / NAME
        self._fsync = fsync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-state")
        self._closed = False
        # Used by the thread: whether the last write failed.
        self._has_failed = False
        self._probe: asyncio.TimerHandle | None = None
        self.damages: list[StateDamage] = []
        """The rows that this start and those of the last weeks have lost."""
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

    async def write(self, statements: Iterable[SqlStatement]) -> None:
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
        """Find out whether the disk has recovered: it may take long until the next write."""
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
            return await in_thread(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise StorageError("state.failed", f"{self._path}: {error}") from error

    # On the thread

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._db = db = _opened(self._path, fsync=self._fsync)
        self.damages = [StateDamage(*row) for row in db.execute("SELECT * FROM damages")]

    def _write(self, statements: Iterable[SqlStatement]) -> None:
        db = self._db
        if self._has_failed:
            db.execute(FORGET_FAILED)
            self._has_failed = False
        db.execute("BEGIN IMMEDIATE")
        try:
            for sql, parameters in statements:
                if isinstance(parameters, list):
                    db.executemany(sql, parameters)
                else:
                    db.execute(sql, parameters)
            db.execute("COMMIT")
        except BaseException:
            self._has_failed = True
            # SQLite may have rolled back on a full disk; report its original error.
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _close(self) -> None:
        # It may have failed to open.
        if hasattr(self, "_db"):
            self._db.close()


@contextlib.contextmanager
def changing_stopped_bus(data: Path, *, fsync: bool) -> Iterator[sqlite3.Connection | None]:
    """The state of a stopped bus, for changes; None if it has none. Raises StorageError.

    Damaged rows are set aside first and logged, as at a start.
    """
    path = data / NAME
    if not files_of(data):
        yield None
        return
    try:
        with contextlib.closing(_opened(path, fsync=fsync)) as db:
            yield db
    except (sqlite3.Error, OSError) as error:
        raise StorageError("state.failed", f"{path}: {error}") from error


def _opened(path: Path, *, fsync: bool) -> sqlite3.Connection:
    """Open the file after examining it: SQLite may now change it and the files beside it."""
    found = open_or_renew(path, fsync=fsync)
    for damage in found[-DAMAGES_LOGGED_MAX:]:
        logger.error("%s: %s: %s", DAMAGED, path, damage)
    if len(found) > DAMAGES_LOGGED_MAX:
        logger.error("%s: %s: %d damages in all", DAMAGED, path, len(found))
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        db.execute(FORGET_FAILED)
    except BaseException:
        db.close()
        raise
    return db
