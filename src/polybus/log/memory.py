"""MemoryLog: the Log in memory. Messages are lost when the bus ends; topics may be on disk."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from polybus import scan
from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log.columns import copy_of, limited
from polybus.log.disk import Disk
from polybus.log.interface import LogCallbacks
from polybus.log.layout import DataLock
from polybus.log.topics import TopicMetadata, TopicStore, opened_data, unknown

_BATCH_OVERHEAD_BYTES = 512
_DROPPED_MAX = 1024


class MemoryTopic:
    """A topic's batches. One thread appends and drops; any thread reads.

    `parts` is (first offsets, batches), two lists that only grow. They are replaced when half of
    their entries were dropped, so a reader with the old pair is not disturbed.
    """

    __slots__ = ("bytes", "dropped", "epoch", "frozen", "parts", "start", "stop")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.frozen: StorageError | None = None
        self.start = 0
        self.stop = 0
        self.bytes = 0
        self.dropped = 0
        self.parts: tuple[array[int], list[Batch | None]] = (array("q"), [])

    def drop_oldest(self) -> None:
        firsts, batches = self.parts
        batches[self.dropped] = None
        self.dropped += 1
        whole = self.dropped < len(firsts)
        self.start = firsts[self.dropped] if whole else self.stop
        if self.dropped >= _DROPPED_MAX and self.dropped * 2 >= len(firsts):
            self.parts = (firsts[self.dropped :], batches[self.dropped :])
            self.dropped = 0

    def from_offset(self, offset: int) -> list[Batch]:
        """All batches from an offset on; the first one is cut to begin there."""
        # Read `stop` before the lists: they have at least the messages below it.
        stop = self.stop
        if not self.start <= offset <= stop:
            text = f"the topic has no offset {offset}; it holds {self.start} to {stop}"
            raise UsageError("log.offset-unknown", text)
        if offset == stop:
            return []
        firsts, batches = self.parts
        # Not beyond `stop`: an offset above it is not readable yet.
        found = batches[bisect_right(firsts, offset) - 1 : bisect_left(firsts, stop)]
        kept = [batch for batch in found if batch is not None]
        if len(kept) < len(found):
            raise UsageError("log.offset-unknown", f"offset {offset} was dropped meanwhile")
        kept[0] = kept[0].slice(offset - kept[0].first_offset, len(kept[0]))
        return kept


class MemoryLog(TopicStore[MemoryTopic]):
    """The Log in memory (polybus.log.interface has the promises).

    Every message counts as durable at once, although a crash loses all messages. When all topics
    together hold more than `bytes_max`, the oldest batches are dropped. With `data`, topics survive
    a restart with a new epoch, because their messages are lost.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], int],
        bytes_max: int,
        data: Path | None = None,
        callbacks: LogCallbacks | None = None,
    ) -> None:
        """Raises StorageError as FileLog does, if there is a data directory."""
        super().__init__(data, clock=clock, disk=Disk())
        self._on_durable = (callbacks or LogCallbacks()).on_durable
        self._bytes_max = bytes_max
        self._bytes = 0
        self._ticket = 0
        self._order: deque[tuple[MemoryTopic, int]] = deque()
        self._lock: DataLock | None = None
        if data is not None:
            with opened_data(data, self._disk) as self._lock:
                self._load_notes(data)
                self._renew_epochs(data)
        self._open_topics()

    def _opened(self, note: TopicMetadata) -> MemoryTopic:
        return MemoryTopic(note.epoch)

    def _renew_epochs(self, data: Path) -> None:
        """Give every topic a new epoch. topic.json keeps the one of the messages on disk."""
        epoch = max(self._clock() // 1000, self._epoch_max + 1)
        if self._notes:
            self._epoch_max = epoch
            self._write_data_note(data)
        for topic, note in self._notes.items():
            self._notes[topic] = msgspec.structs.replace(note, epoch=epoch)

    def describe(self, topic: str) -> dict[str, int]:
        return {
            "history-files": 0,
            "history-bytes": 0,
            "memory-bytes": self._log_of(topic).bytes,
        }

    def stored_bytes(self, topic: str, messages: int = 0, value_bytes: int = 0) -> int:
        return self._log_of(topic).bytes

    def delete_topic(self, topic: str) -> None:
        gone = self._log_of(topic)
        super().delete_topic(topic)
        self._bytes -= gone.bytes
        self._order = deque(entry for entry in self._order if entry[0] is not gone)

    def append(self, batch: Batch, *, urgent: bool = False) -> int:
        """Store the batch. Only if it is urgent, call `on_durable` before this returns."""
        log = self._topics.get(batch.topic)
        if log is None:
            raise unknown(batch.topic)
        if log.frozen is not None:
            raise log.frozen.copy()
        if not batch.timestamp_us:
            batch.timestamp_us = self._clock()
        batch.epoch = log.epoch
        batch.first_offset = log.stop
        self._ticket += 1
        if batch.spans:
            self._keep(log, batch)
        if urgent:
            self._on_durable(self._ticket)
        return self._ticket

    def takes(self, batches: Sequence[Batch]) -> bool:
        found = [self._topics.get(batch.topic) for batch in batches]
        return all(log is not None and log.frozen is None for log in found)

    def append_all(
        self, batches: Sequence[Batch], *, urgent: bool = False, is_taken: bool = False
    ) -> int:
        for batch in batches:
            log = self._log_of(batch.topic)
            if log.frozen is not None:
                raise log.frozen.copy()
        for batch in batches:
            self.append(batch)
        if urgent:
            self._on_durable(self._ticket)
        return self._ticket

    def _keep(self, log: MemoryTopic, batch: Batch) -> None:
        kept, weight = _own(batch)
        firsts, batches = log.parts
        batches.append(kept)
        firsts.append(batch.first_offset)
        log.stop += len(batch.spans) >> 1
        log.bytes += weight
        self._bytes += weight
        self._order.append((log, weight))
        while self._bytes > self._bytes_max and len(self._order) > 1:
            oldest, weight = self._order.popleft()
            oldest.drop_oldest()
            oldest.bytes -= weight
            self._bytes -= weight

    @property
    def durable(self) -> int:
        return self._ticket

    @property
    def pending_bytes(self) -> int:
        return 0

    def read(self, topic: str, offset: int, *, bytes_max: int = 1 << 20) -> list[Batch]:
        return limited(self._log_of(topic).from_offset(offset), bytes_max=bytes_max)

    def read_recent(self, topic: str, offset: int) -> list[Batch] | None:
        return [copy_of(batch) for batch in self._log_of(topic).from_offset(offset)]

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        log = self._log_of(topic)
        stop = log.stop
        firsts, batches = log.parts
        for batch in batches[: bisect_left(firsts, stop)]:
            if batch is not None and batch.timestamp_us >= timestamp_us:
                return batch.first_offset
        return stop

    def sync(self) -> None:
        self._on_durable(self._ticket)

    def close(self) -> None:
        self._topics = {}
        if self._lock is not None:
            self._lock.release()


def _own(batch: Batch) -> tuple[Batch, int]:
    """The batch as the log keeps it, and its size.

    A few messages must not keep a large read buffer in memory, nor the encodings for subscribers.
    """
    spans_bytes = len(batch.spans) * 4 + _BATCH_OVERHEAD_BYTES
    value_bytes = batch.value_bytes
    kept = batch.slice(0, 0)
    kept.keys, kept.headers, kept.stored = batch.keys, batch.headers, None
    if len(batch.buffer) <= 2 * value_bytes:
        kept.spans = batch.spans
        return kept, len(batch.buffer) + spans_bytes
    kept.buffer, ends = scan.gather([batch.buffer], [batch.spans])
    kept.spans = scan.spans_of_offsets(ends, 0, len(batch))
    return kept, value_bytes + spans_bytes
