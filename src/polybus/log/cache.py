"""The commits last written or read, kept in memory: what most readers want is among them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa


class CommitCache:
    """Verified commits by segment and position, the one unused for longest dropped first."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._commits: OrderedDict[tuple[Path, int], tuple[pa.RecordBatch, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, segment: Path, position: int) -> pa.RecordBatch | None:
        key = (segment, position)
        with self._lock:
            found = self._commits.get(key)
            if found is None:
                return None
            self._commits.move_to_end(key)
            return found[0]

    def put(self, segment: Path, position: int, rows: pa.RecordBatch) -> None:
        """Keep a commit; one that is larger than the whole cache is not kept."""
        key = (segment, position)
        size = rows.nbytes
        if size > self._bytes_max:
            return
        with self._lock:
            if key not in self._commits:
                self._bytes += size
            self._commits[key] = (rows, size)
            while self._bytes > self._bytes_max:
                _, (_, dropped_bytes) = self._commits.popitem(last=False)
                self._bytes -= dropped_bytes

    def forget(self, segment: Path) -> None:
        with self._lock:
            for key in [key for key in self._commits if key[0] == segment]:
                self._bytes -= self._commits.pop(key)[1]
