"""Caches of the journal: the batches written last, and the commits read last."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from polybus import scan
from polybus.batch import Batch
from polybus.scan import TopicEnd

_BATCH_OVERHEAD_BYTES = 512
_ENTRY_OVERHEAD_BYTES = 128


class RecentBatches:
    """The batches written last, over all topics: each stays in its topic's tail while they fit.

    They are dropped by socket read, because all batches of a read share its memory. For the
    committer's thread.
    """

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        # For each socket read the tails with its batches, and its size.
        self._kept: deque[tuple[list[deque[Batch]], int]] = deque()
        self._last_owner: object = None

    def keep(self, batches: Iterable[Batch], ends: Mapping[str, TopicEnd]) -> None:
        """Keep written batches; drop the oldest from their tails beyond the limit.

        Each is the first batch of its topic's tail that was not kept before.
        """
        reads, self._last_owner = scan.keep_batches(
            batches, ends, self._last_owner, _BATCH_OVERHEAD_BYTES, _extra_bytes
        )
        self._kept += reads
        self._bytes += sum([weight for _, weight in reads])
        while self._bytes > self._bytes_max:
            tails, weight = self._kept.popleft()
            scan.drop_oldest(tails)
            self._bytes -= weight
        if not self._kept:
            self._last_owner = None


def _extra_bytes(batch: Batch) -> int:
    """The approximate size of keys and headers."""
    total = 0
    for key in batch.keys or ():
        total += _ENTRY_OVERHEAD_BYTES + len(key or b"")
    for headers in batch.headers or ():
        for name, value in (headers or {}).items():
            total += _ENTRY_OVERHEAD_BYTES + len(name) + len(value)
    return total


class CommitCache:
    """Verified commits by segment and position, an LRU cache."""

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
        """Keep a commit, unless it is larger than the whole cache."""
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
