"""The producers' last transactions in DATA/state.db, so that a start need not read all `$commits`.

The log is the truth: what is saved here is a beginning, completed from the saved offset on.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from polybus.errors import StorageError
from polybus.services.transactions.commits import Producer

SCHEMA = """
CREATE TABLE IF NOT EXISTS producers (name TEXT PRIMARY KEY, json BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS producers_read (
    id INTEGER PRIMARY KEY CHECK (id = 0), epoch INTEGER NOT NULL, next_offset INTEGER NOT NULL);
"""
BUSY_S = 30.0


class Position(NamedTuple):
    """Up to where `$commits` is in the saved state."""

    epoch: int
    offset: int


class CommitState:
    """Reads and writes the tables; every method may block. Each opens the file for itself."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[list[Producer], Position]:
        """Raises StorageError `state.failed`."""
        with _database(self._path) as db:
            db.executescript(SCHEMA)
            rows = db.execute("SELECT json FROM producers").fetchall()
            position = db.execute("SELECT epoch, next_offset FROM producers_read").fetchone()
            producers = [msgspec.json.decode(row[0], type=Producer) for row in rows]
            return producers, Position(*(position or (0, 0)))

    def save(self, rows: Collection[tuple[str, bytes]], position: Position) -> None:
        """Replace everything by these producers, as `row_of` makes them.

        Raises StorageError `state.failed`; nothing is written then.
        """
        with _database(self._path) as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("DELETE FROM producers")
            db.executemany("INSERT INTO producers VALUES (?, ?)", rows)
            db.execute("INSERT OR REPLACE INTO producers_read VALUES (0, ?, ?)", position)
            db.execute("COMMIT")


def row_of(producer: Producer) -> tuple[str, bytes]:
    """What is saved of a producer as it is now."""
    return producer.name, msgspec.json.encode(producer)


@contextlib.contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as db:
            # A transaction that does not end here is rolled back.
            yield db
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise StorageError("state.failed", f"{path}: {error}") from error
