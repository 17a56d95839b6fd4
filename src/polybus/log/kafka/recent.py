"""Messages of topics in memory: the newest of all, and what readers of older ones need next.

Most readers follow the live end. The bus's thread adds, any thread reads. When all topics together
hold more than the limit, the oldest batches are removed first.

A reader of old messages gets them in pieces, and a fetch brings whole RecordBatches, which may be
many pieces. The rest after a piece is kept for the next one, so that no RecordBatch is fetched
twice, and the next fetch begins before it is requested (read-ahead).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.columns import copy_of, weight_of
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.following import from_offset
from polybus.log.kafka.link import ANSWER_TIMEOUT_S
from polybus.log.kafka.producing import TopicQueue
from polybus.log.kafka.registry import TopicRecord

KEPT_MAX = 32
"""Fetches that are kept: for each reader the rest of one, and the next."""

ReadFrom = tuple[str, int, int]
"""A topic's name in Kafka, its epoch, and an offset."""


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
    """Messages that fetches brought beyond the requested pieces, by their first offset.

    A reader that takes some will continue, so the fetch of the next messages begins at once: while
    the bus delivers the pieces of one fetch, the brokers work on the next.
    """

    def __init__(self, begin: Callable[[KafkaTopic, int], Future[list[Batch]]]) -> None:
        """`begin` starts a fetch of the messages of a topic from an offset on."""
        self._begin = begin
        self._left: OrderedDict[ReadFrom, list[Batch] | Future[list[Batch]]] = OrderedDict()
        # Held for as long as it takes to look up a key.
        self._lock = threading.Lock()

    def take(self, topic: KafkaTopic, offset: int, stop: int) -> list[Batch] | None:
        """The messages from the offset on, up to `stop`; None if not fetched yet. May block."""
        with self._lock:
            found = self._left.pop((topic.name, topic.epoch, offset), None)
        if isinstance(found, Future):
            try:
                found = up_to(found.result(ANSWER_TIMEOUT_S), stop)
            except (LookupError, StorageError, CancelledError, TimeoutError):
                # The reader fetches it again, and gets the error if it persists.
                return None
        if not found:
            return None
        behind = found[-1].last_offset + 1
        if behind < stop:
            with suppress(StorageError):
                self._keep(topic, behind, lambda: self._begin(topic, behind))
        return found

    def keep(self, topic: KafkaTopic, batches: Sequence[Batch], offset: int) -> None:
        """Keep the messages from the offset on, if there are any."""
        left = from_offset(list(batches), offset, topic.epoch)
        if left:
            self._keep(topic, offset, lambda: left)

    def _keep(
        self, topic: KafkaTopic, offset: int, made: Callable[[], list[Batch] | Future[list[Batch]]]
    ) -> None:
        key = topic.name, topic.epoch, offset
        with self._lock:
            if key not in self._left:
                self._left[key] = made()
            while len(self._left) > KEPT_MAX:
                _, oldest = self._left.popitem(last=False)
                if isinstance(oldest, Future):
                    oldest.cancel()


def up_to(batches: Sequence[Batch], stop: int) -> list[Batch]:
    """Batches without messages at or after `stop`."""
    return [
        batch.slice(0, min(len(batch), stop - batch.first_offset))
        for batch in batches
        if batch.first_offset < stop
    ]
