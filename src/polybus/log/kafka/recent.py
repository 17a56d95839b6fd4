"""Messages of topics in memory: the newest of all, and what readers of older ones need next.

Most readers follow the live end. The bus's thread adds, any thread reads. When all topics together
hold more than the limit, the oldest batches are removed first.

A reader of old messages gets them in pieces, and a fetch brings whole RecordBatches, which may be
many pieces. The rest after a piece is kept for the next one, so that no RecordBatch is fetched
twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

from polybus.batch import Batch
from polybus.log.columns import copy_of, weight_of
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.following import from_offset
from polybus.log.kafka.producing import TopicQueue
from polybus.log.kafka.registry import TopicRecord

READERS_MAX = 16
"""For how many readers the rest of a fetch is kept."""


class KafkaTopic(Followed):
    """A topic of the cluster, as this node knows it: readers see it up to `stop`."""

    def __init__(self, record: TopicRecord, name: str) -> None:
        super().__init__(record.topic, name, record.epoch, record.first)
        self.record = record
        self.stop = record.first
        self.tail: deque[Batch] = deque()
        self.tail_start = record.first
        self.queue = TopicQueue(record.topic, name, record.epoch)
        self.acked_stop = 0
        self.missing_since_s = 0.0


class RecentMessages:
    """The tails of all topics, within a limit."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._order: deque[tuple[KafkaTopic, int]] = deque()
        # Held for as long as it takes to add or copy references.
        self.lock = threading.Lock()

    def add(self, topic: KafkaTopic, batches: Sequence[Batch], stop: int) -> None:
        with self.lock:
            for batch in batches:
                kept = copy_of(batch)
                topic.tail.append(kept)
                weight = weight_of(kept) + len(kept.buffer) // max(1, len(batches))
                self._bytes += weight
                self._order.append((topic, weight))
            topic.stop = stop
            while self._bytes > self._bytes_max and len(self._order) > 1:
                oldest, weight = self._order.popleft()
                self._bytes -= weight
                if oldest.tail:
                    oldest.tail.popleft()
                    rest = oldest.tail
                    oldest.tail_start = rest[0].first_offset if rest else oldest.stop

    def forget(self, topic: KafkaTopic) -> None:
        with self.lock:
            topic.tail.clear()
            self._bytes -= sum(weight for one, weight in self._order if one is topic)
            self._order = deque(entry for entry in self._order if entry[0] is not topic)

    def since(self, topic: KafkaTopic, offset: int) -> list[Batch] | None:
        """Everything from an offset to the end; None if not all of it is in memory."""
        with self.lock:
            if offset < topic.tail_start:
                return None
            found: list[Batch] = []
            # From the newest on: most readers need only the last few.
            for batch in reversed(topic.tail):
                if batch.last_offset < offset:
                    break
                found.append(batch)
        found.reverse()
        if found and found[0].first_offset < offset:
            found[0] = found[0].slice(offset - found[0].first_offset, len(found[0]))
        return found


class ReadAhead:
    """Messages that fetches brought beyond the requested pieces, by their first offset."""

    def __init__(self) -> None:
        self._left: OrderedDict[tuple[str, int, int], list[Batch]] = OrderedDict()
        # Held for as long as it takes to look up a key.
        self._lock = threading.Lock()

    def take(self, topic: KafkaTopic, offset: int) -> list[Batch] | None:
        with self._lock:
            return self._left.pop((topic.name, topic.epoch, offset), None)

    def keep(self, topic: KafkaTopic, batches: Sequence[Batch], offset: int) -> None:
        """Keep the messages from the offset on, if there are any."""
        left = from_offset(list(batches), offset, topic.epoch)
        if left:
            with self._lock:
                self._left[topic.name, topic.epoch, offset] = left
                while len(self._left) > READERS_MAX:
                    self._left.popitem(last=False)
