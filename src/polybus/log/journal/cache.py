"""Caches of the log: the batches written last, and the data read last."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from polybus import scan
from polybus.batch import Batch
from polybus.scan import TopicEnd

K = TypeVar("K")
V = TypeVar("V")
_BATCH_OVERHEAD_BYTES = 512
# A read of one message makes ten objects for ten bytes of text. Thousands of reads, each between
# two connections of a storm, would keep the allocator from returning the memory of those
# connections.
_READS_MAX = 1024
_ENTRY_OVERHEAD_BYTES = 128


class RecentBatches:
    """The batches written last, over all topics: each stays in its topic's tail while they fit.

    All batches of a socket read share its memory, so they are dropped together. Only the
    journal's writer uses this, under the lock of the topics.
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
        self._bytes = scan.drop_oldest(self._kept, self._bytes, self._bytes_max, _READS_MAX)
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


class LruCache(Generic[K, V]):
    """The most recently used values, up to a total weight. Thread-safe.

    A value in use may be taken out and put back later, so that no two threads share it.
    """

    def __init__(self, weight_max: int) -> None:
        self._weight_max = weight_max
        self._weight = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def take(self, key: K) -> V | None:
        with self._lock:
            value, weight = self._kept.pop(key, (None, 0))
            self._weight -= weight
            return value

    def put(self, key: K, value: V, weight: int = 1) -> None:
        """Keep a value, unless it is larger than the whole cache."""
        if weight > self._weight_max:
            return
        with self._lock:
            self._weight += weight - self._kept.pop(key, (value, 0))[1]
            self._kept[key] = (value, weight)
            while self._weight > self._weight_max:
                self._weight -= self._kept.popitem(last=False)[1][1]
