"""A disk that fails at one of its operations, and a session's client that counts what it is given.

`FailingDisk` watches the operations of a process on one folder as disk_kit.py does, reads included.
From a given one on, some of them fail: before they have done anything, or after.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from disk_kit import WatchedDisk

_PREAD: Any = os.pread
_OPEN: Any = io.open
_PARQUET_FILE: Any = pq.ParquetFile


class Fault(NamedTuple):
    """`times` operations fail, from the one with the number `first` on."""

    first: int
    times: int
    error: int = errno.EIO
    is_late: bool = False
    """They fail after they have done what they should."""


class FailingDisk(WatchedDisk):
    """Counts changes, or with `reads` reads; some of them fail."""

    def __init__(self, root: Path, *, reads: bool = False) -> None:
        super().__init__(root, lambda _: None)
        self._reads = reads
        self._fault: Fault | None = None
        self._count = 0
        self.failed: list[str] = []

    def fail(self, fault: Fault) -> None:
        """The next operation has the number 0."""
        self._fault, self._count, self.failed = fault, 0, []

    def heal(self) -> None:
        self._fault = None

    def install(self) -> None:
        super().install()
        os.pread = self._reading("pread", _PREAD)
        opened: Any = io.open
        reading = self._reading("open", _OPEN)

        def open_file(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            chosen = opened if set(mode) & set("wax+") else reading
            return chosen(file, mode, *arguments, **named)

        builtins.open = io.open = open_file
        pq.ParquetFile = self._reading("parquet", _PARQUET_FILE)

    def uninstall(self) -> None:
        super().uninstall()
        os.pread, pq.ParquetFile = _PREAD, _PARQUET_FILE

    def act(self, what: str, operation: Callable[[], Any]) -> Any:
        # SQLite ends a transaction whatever the disk does.
        is_counted = not self._reads and what not in ("sqlite ROLLBACK", "sqlite close")
        return self._attempt(what, operation) if is_counted else operation()

    def _reading(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(file: Any, *arguments: Any, **named: Any) -> Any:
            path = self.path_of(file) if self._reads else None
            if path is None:
                return read(file, *arguments, **named)
            what = f"{name} {os.path.relpath(path, self._root)}"
            return self._attempt(what, lambda: read(file, *arguments, **named))

        return reading

    def _attempt(self, what: str, operation: Callable[[], Any]) -> Any:
        with self._lock:
            fault = self._fault
            number, self._count = self._count, self._count + 1
            if fault is None or not 0 <= number - fault.first < fault.times:
                return operation()
            self.failed.append(what)
            if fault.is_late:
                operation()
            if what.startswith("sqlite"):
                raise sqlite3.OperationalError(f"disk I/O error: {what}")
            raise OSError(fault.error, os.strerror(fault.error), what)


@dataclass
class CountingClient:
    """A session's client: what each number meant, and which numbers it has confirmed."""

    meaning: dict[int, Any] = field(default_factory=dict)
    notices: list[Any] = field(default_factory=list)

    def take(self, packs: list[tuple[int, bytes]]) -> list[int]:
        """Take packs as they came; their numbers."""
        numbers = [number for number, _ in packs if number]
        for number, text in packs:
            content = json.loads(text)
            if not number:
                self.notices += content
                continue
            assert number <= len(self.meaning) + 1, f"{number} follows {len(self.meaning)}"
            known = self.meaning.setdefault(number, content)
            assert content in ([], known), f"pack {number} was {known} and is {content}"
        return numbers

    def values(self, topic: str) -> list[str]:
        """The messages of a topic, in the order of their packs."""
        events = [event for number in sorted(self.meaning) for event in self.meaning[number]]
        return [event[1] for event in events if event[0] == topic]
