"""KafkaLog: the Log in a Kafka cluster that several nodes share.

`append` only takes a batch. The link's thread sends it to the leader of its topic; the answer gives
it its offset and makes its ticket durable. Independently every node follows all topics and passes
on what the cluster has confirmed (`on_arrived`), so that all nodes have one order, and no reader
sees a message that the cluster may still lose.

Threads: the bus's thread appends and admits; the link's thread owns topics, queues and fetches; any
thread reads. Tickets are settled in their order, although leaders answer independently.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polybus import scan
from polybus.batch import Batch
from polybus.config_file import brokers_of
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.columns import copy_of, limited
from polybus.log.disk import Disk
from polybus.log.interface import (
    SHARED,
    Bounds,
    ClusterLog,
    LogCallbacks,
    LogTransaction,
    TopicSettings,
)
from polybus.log.kafka.directory import TopicDirectory
from polybus.log.kafka.entries_topic import EntriesTopic
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.following import READ_BYTES, Following, fetch_at
from polybus.log.kafka.link import (
    ANSWER_TIMEOUT_S,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    KafkaLink,
)
from polybus.log.kafka.producing import Producing, ProducingCallbacks, QueuedBatch, TopicQueue
from polybus.log.kafka.recent import KafkaTopic, ReadAhead, RecentMessages, up_to
from polybus.log.kafka.registry import KafkaOptions, KafkaTopics, topic_exists
from polybus.log.kafka.transacting import KafkaTransaction
from polybus.log.layout import DataLock
from polybus.log.topics import frozen_error, opened_data, unknown

UNADMITTED_BYTES_MAX = 32 << 20
"""Messages that were fetched and not yet given to subscribers; beyond this, fetching stops."""
CATCH_UP_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 8.0
LONG_S = 3600.0
"""For calls with their own time limit."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """New messages of a topic, for `admit`; the topic is complete up to `stop`."""

    topic: KafkaTopic
    batches: list[Batch]
    stop: int
    value_bytes: int


class KafkaLog:
    """The Log in a Kafka cluster (polybus.log.interface has the promises)."""

    arrives_late = True

    def __init__(
        self,
        url: str,
        *,
        options: KafkaOptions,
        clock: Callable[[], int],
        data: Path | None = None,
        callbacks: LogCallbacks | None = None,
    ) -> None:
        """`data` is the node's own folder, which it locks.

        Raises StorageError `log.unreachable`, `log.refused`, or as FileLog does.
        """
        self._clock = clock
        self._options = options
        self._waits = options.waits
        self._callbacks = callbacks or LogCallbacks()
        self._recent = RecentMessages(bytes_max=options.recent_bytes_max)
        self._ahead = ReadAhead(self._begin_fetch)
        self._changed = threading.Condition()
        self._frozen: dict[str, StorageError] = {}
        self._failing: dict[str, StorageError] = {}
        """Topics that cannot be written to at the moment, and why."""
        self._ticket = 0
        self._durable = 0
        self._taken_bytes = self._done_bytes = self._fetched_bytes = self._admitted_bytes = 0
        self._open_tickets: deque[int] = deque()
        self._settled: set[int] = set()
        self._lock: DataLock | None = None
        addresses = brokers_of(url)
        if data is not None:
            with opened_data(data, Disk()) as self._lock:
                pass
        client_id = f"polybus-{options.node}"
        self.link = KafkaLink(addresses, client_id=client_id, **options.security)
        try:
            self.link.open()
            kafka = KafkaTopics(self.link, options)
            self._directory = TopicDirectory(self.link, kafka, self._topic_changed)
            self._shared = EntriesTopic(self.link, kafka, self._callbacks.on_shared)
            self._directory.followed[self._shared.name] = self._shared
            self._following = Following(
                self.link, self._directory.followed, self._directory.handing_on(self._arrived)
            )
            tell = ProducingCallbacks(acked=self._acked, refused=self._refused, failed=self._failed)
            self._producing = Producing(self.link, self._queue_of, tell)
            self.link.run(self._open())
        except BaseException:
            self._release()
            raise

    async def _open(self) -> None:
        await self._directory.open()
        await self._shared.open()
        self._following.open()
        await self._producing.open()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = ANSWER_TIMEOUT_S) -> T:
        """Wait for Kafka, on a thread without an event loop. Raises as `KafkaLink.run` does."""
        try:
            refuse_on_loop()
        except RuntimeError:
            work.close()
            raise
        return self.link.run(work, timeout_s)

    def _release(self) -> None:
        self.link.stop()
        if self._lock is not None:
            self._lock.release()

    # Topics

    def topic(self, topic: str) -> KafkaTopic:
        """Raises UsageError `topic.unknown`."""
        found = self._directory.topics.get(topic)
        if found is None:
            raise unknown(topic)
        return found

    def topics(self) -> list[str]:
        return list(self._directory.topics)

    @property
    def frozen(self) -> dict[str, StorageError]:
        return dict(self._frozen)

    def freeze(self, topic: str, reason: str) -> None:
        self.topic(topic)
        self._frozen[topic] = frozen_error(topic, reason)

    def settings(self, topic: str) -> TopicSettings:
        return self.topic(topic).record.settings

    def change_settings(self, topic: str, settings: TopicSettings) -> None:
        """Waits for the cluster, as `create_topic` does."""
        self.run(self._directory.change(topic, settings))

    def describe(self, topic: str) -> dict[str, int]:
        self.topic(topic)
        return {"history-files": 0, "history-bytes": 0}

    def stored_bytes(self, topic: str, messages: int = 0, value_bytes: int = 0) -> int:
        """The brokers store the messages, so this is 0."""
        self.topic(topic)
        return 0

    def create_topic(self, topic: str, settings: TopicSettings | None = None) -> Bounds:
        """Waits for the cluster, so the bus's running thread must not call it."""
        wanted = {topic: settings or TopicSettings()}
        made = self.run(self._directory.create(wanted)).get(topic)
        if made is None:
            raise topic_exists(topic)
        return Bounds(made.epoch, made.start, made.stop)

    def import_topic(self, topic: str, settings: TopicSettings, bounds: Bounds) -> None:
        """Create an empty topic with the epoch and the first offset of one in another log.

        Raises UsageError `topic.exists`; StorageError.
        """
        work = self._directory.import_topic(topic, settings, bounds.epoch, bounds.start)
        self.run(work, LONG_S)

    def create_topics(self, wanted: Mapping[str, TopicSettings]) -> None:
        """Waits for the cluster, as `create_topic` does. Another node may create one meanwhile."""
        for topic in wanted:
            if topic in self._directory.topics:
                raise topic_exists(topic)
        self.run(self._directory.create(wanted), LONG_S)

    def delete_topic(self, topic: str) -> None:
        """Waits for the cluster, as `create_topic` does."""
        self.run(self._directory.delete(topic))

    def _topic_changed(self, topic: KafkaTopic, exists: bool) -> None:
        """A topic was added or removed. On the link's thread."""
        if not exists:
            self._recent.forget(topic)
            self._frozen.pop(topic.topic, None)
            self._producing.refuse_all(topic.queue, unknown(topic.topic))
        self._callbacks.on_topic(topic.topic, exists)

    def _queue_of(self, topic: str) -> TopicQueue | None:
        if topic == SHARED:
            return self._shared.queue
        found = self._directory.topics.get(topic)
        return None if found is None else found.queue

    # Writing

    def append(self, batch: Batch, *, urgent: bool = False) -> int:
        """Take the batch. Its offset is -1 until its ticket is durable."""
        self._check_takes(batch.topic)
        return self._put(batch)

    def _check_takes(self, topic: str) -> None:
        """Raises UsageError `topic.unknown`; StorageError if the topic takes no writes."""
        self.topic(topic)
        failure = self._failing.get(topic)
        if failure is not None and not self._waits:
            raise failure.copy()
        if topic in self._frozen:
            raise self._frozen[topic].copy()

    def _put(self, batch: Batch) -> int:
        if not batch.timestamp_us:
            batch.timestamp_us = self._clock()
        self._ticket += 1
        if not batch.spans:
            with self._changed:
                self._open_tickets.append(self._ticket)
            self.link.soon(self._settle, (self._ticket,))
            return self._ticket
        value_bytes = batch.value_bytes
        self._taken_bytes += value_bytes
        with self._changed:
            self._open_tickets.append(self._ticket)
        self._producing.put(QueuedBatch(self._ticket, batch, value_bytes))
        return self._ticket

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Always false: subscribers get nothing before the cluster has it."""
        return False

    def append_all(
        self, batches: Sequence[Batch], *, urgent: bool = False, is_taken: bool = False
    ) -> int:
        """Take all batches. They are not one commit: a crash may keep some of them."""
        for batch in batches:
            # Before any is taken: the caller publishes all of them again if this raises.
            self._check_takes(batch.topic)
        for batch in batches:
            self._put(batch)
        return self._ticket

    def _acked(self, taken: Sequence[QueuedBatch]) -> None:
        topic = self._directory.topics.get(taken[-1].batch.topic)
        if topic is not None:
            topic.acked_stop = max(topic.acked_stop, taken[-1].batch.last_offset + 1)
        self._answered(taken)

    def _answered(self, taken: Sequence[QueuedBatch]) -> None:
        """A broker has answered for batches of a topic."""
        self._done_bytes += sum(one.value_bytes for one in taken)
        self._failing.pop(taken[-1].batch.topic, None)
        self._settle([one.ticket for one in taken])

    def _refused(self, taken: Sequence[QueuedBatch], error: PolybusError) -> None:
        for one in taken:
            self._callbacks.on_refused(one.batch, error)
        self._answered(taken)

    def _failed(self, topic: str, error: StorageError) -> None:
        if topic not in self._failing:
            self._failing[topic] = error
            self._callbacks.on_failed(error)

    def _settle(self, tickets: Sequence[int]) -> None:
        """Announce how far tickets are settled without a gap.

        The first gap is a batch without an answer: if its topic fails, the log stays failed.
        """
        with self._changed:
            before = self._durable
            self._settled.update(tickets)
            while self._open_tickets and self._open_tickets[0] in self._settled:
                self._durable = self._open_tickets.popleft()
                self._settled.discard(self._durable)
        if self._durable > before:
            self._callbacks.on_durable(self._durable)
            for error in list(self._failing.values())[:1]:
                # Another topic had failed, too.
                self._callbacks.on_failed(error)
        with self._changed:
            self._changed.notify_all()

    @property
    def durable(self) -> int:
        return self._durable

    @property
    def pending_bytes(self) -> int:
        return self._taken_bytes - self._done_bytes

    # Arrivals

    def _arrived(self, followed: Followed, batches: list[Batch]) -> None:
        """Pass fetched messages to the bus, or admit them here. On the link's thread."""
        if isinstance(followed, EntriesTopic):
            followed.hand_on(batches)
            return
        assert isinstance(followed, KafkaTopic)
        size = scan.weigh(batches, 0, 0)
        self._fetched_bytes += size
        if self._fetched_bytes - self._admitted_bytes > UNADMITTED_BYTES_MAX:
            self._following.hold(is_full=True)
        arrival = Arrival(followed, batches, followed.position, size)
        if self._callbacks.on_arrived is None:
            self.admit(arrival)
        else:
            self._callbacks.on_arrived(arrival)

    def admit(self, arrival: object) -> Sequence[Batch]:
        """Make arrived messages visible to readers; return them for subscribers."""
        assert isinstance(arrival, Arrival)
        self._admitted_bytes += arrival.value_bytes
        if self._fetched_bytes - self._admitted_bytes <= UNADMITTED_BYTES_MAX // 2:
            self.link.soon(lambda: self._following.hold(is_full=False))
        topic = arrival.topic
        if self._directory.topics.get(topic.topic) is not topic:
            return ()
        self._recent.add(topic, arrival.batches, arrival.stop)
        with self._changed:
            self._changed.notify_all()
        return arrival.batches

    # Reading

    def bounds(self, topic: str) -> Bounds:
        found = self.topic(topic)
        frozen = self._frozen.get(topic)
        if frozen is not None:
            raise frozen.copy()
        stop = found.stop
        return Bounds(found.epoch, min(found.start, stop), stop)

    def catch_up(self, topic: str, epoch: int = 0) -> None:
        """Wait until this node has everything that the cluster had when this was called.

        Raises UsageError `topic.unknown`; StorageError `log.unreachable` if it does not catch up.
        """
        known = self._directory.topics.get(topic)
        if known is None or known.epoch < epoch:
            self.run(self._directory.refresh())
        self._reach_end(topic, READ_COMMITTED, CATCH_UP_TIMEOUT_S)

    def catch_up_all(self) -> None:
        self.run(self._directory.refresh())
        known = list(self._directory.topics.values())
        ends = self.run(self.link.offsets([one.name for one in known], LATEST))

        def is_behind(topic: KafkaTopic) -> bool:
            is_ours = self._directory.topics.get(topic.topic) is topic
            return is_ours and topic.stop < ends.get(topic.name, 0)

        if not self._wait_until(lambda: not any(map(is_behind, known)), CATCH_UP_TIMEOUT_S):
            text = "this node is behind the cluster"
            raise StorageError("log.unreachable", f"{text}; try another node, or later")

    def settle(self, topic: str) -> None:
        self._reach_end(topic, READ_UNCOMMITTED, self._options.transaction_timeout_s)

    def _reach_end(self, topic: str, isolation: int, timeout_s: float) -> None:
        found = self.topic(topic)
        ends = self.run(self.link.offsets([found.name], LATEST, isolation))
        latest = ends.get(found.name, 0)
        if not self._wait_until(lambda: found.stop >= latest, timeout_s):
            self.topic(topic)
            text = f"this node is behind the cluster: it has {found.stop} of {latest} messages"
            raise StorageError("log.unreachable", f"{text}; try another node, or later")

    def wait_for(self, topic: KafkaTopic, stop: int) -> bool:
        """Wait until readers see a topic up to an offset; False if that takes too long."""
        return self._wait_until(lambda: topic.stop >= stop, CATCH_UP_TIMEOUT_S)

    def _wait_until(self, is_reached: Callable[[], bool], timeout_s: float | None) -> bool:
        refuse_on_loop()
        with self._changed:
            return self._changed.wait_for(is_reached, timeout_s)

    def read(self, topic: str, offset: int, *, bytes_max: int = 1 << 20) -> list[Batch]:
        found = self.topic(topic)
        stop = found.stop
        start = min(found.start, stop)
        if not start <= offset <= stop:
            raise _offset_unknown(offset, start, stop)
        if offset == stop:
            return []
        recent = self._recent.since(found, offset)
        if recent is not None:
            return limited(recent, bytes_max=bytes_max)
        refuse_on_loop()
        visible = self._ahead.take(found, offset, stop)
        if visible is None:
            visible = self._fetched(found, offset, start, stop)
        piece = limited(visible, bytes_max=bytes_max)
        if piece:
            self._ahead.keep(found, visible, piece[-1].last_offset + 1)
        return piece

    def _fetched(self, topic: KafkaTopic, offset: int, start: int, stop: int) -> list[Batch]:
        """The messages that the leader has from an offset on, up to `stop`."""
        try:
            return up_to(self.run(fetch_at(self.link, topic, offset, stop, READ_BYTES)), stop)
        except LookupError:
            raise _offset_unknown(offset, start, stop) from None

    def _begin_fetch(self, topic: KafkaTopic, offset: int) -> Future[list[Batch]]:
        return self.link.begin(fetch_at(self.link, topic, offset, topic.stop, READ_BYTES))

    def read_recent(self, topic: str, offset: int) -> list[Batch] | None:
        found = self.topic(topic)
        recent = self._recent.since(found, offset)
        return None if recent is None else [copy_of(batch) for batch in recent]

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        found = self.topic(topic)
        stop = found.stop
        # Kafka's times are milliseconds.
        when = max(0, -(-timestamp_us // 1000))
        offset = self.run(self.link.offsets([found.name], when)).get(found.name, -1)
        return stop if offset < 0 else min(offset, stop)

    # What nodes share beside messages

    @property
    def cluster(self) -> ClusterLog:
        return self

    def begin(self, producer: str) -> LogTransaction:
        name = f"{self._options.prefix}polybus.{producer}"
        timeout_s = self._options.transaction_timeout_s
        transaction = KafkaTransaction(self.link, name, timeout_s)
        self.run(transaction.begin(), timeout_s + ANSWER_TIMEOUT_S)
        return BlockingTransaction(self, transaction)

    def share(self, batch: Batch) -> None:
        self._put(batch)

    def shared_stop(self) -> int:
        return self.run(self._shared.stop())

    def forget_shared(self, keys: Sequence[bytes]) -> None:
        self.run(self._shared.forget(keys))

    # The end

    def sync(self) -> None:
        """Block until everything taken so far is durable and has arrived here."""
        ticket = self._ticket
        self._wait_until(lambda: self._durable >= ticket, None)
        for topic in list(self._directory.topics.values()):
            self.wait_for(topic, topic.acked_stop)

    def close(self) -> None:
        """Wait a while for pending batches; those without a receipt by then may be lost."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with contextlib.suppress(asyncio.CancelledError):
            ticket = self._ticket
            self._wait_until(lambda: self._durable >= ticket, deadline - time.monotonic())
        self._release()


class BlockingTransaction:
    """A transaction for other threads than the link's."""

    def __init__(self, log: KafkaLog, transaction: KafkaTransaction) -> None:
        self._log = log
        self._transaction = transaction
        self._stops: dict[KafkaTopic, int] = {}

    def append(self, batches: Sequence[Batch]) -> None:
        by_topic: dict[KafkaTopic, list[Batch]] = {}
        for batch in batches:
            if batch.spans:
                by_topic.setdefault(self._log.topic(batch.topic), []).append(batch)
        self._log.run(self._transaction.append(list(by_topic.items())), LONG_S)
        for topic, its_batches in by_topic.items():
            self._stops[topic] = its_batches[-1].last_offset + 1

    def commit(self) -> None:
        """Commit; return when this node has all messages."""
        self._log.run(self._transaction.end(is_committed=True), LONG_S)
        for topic, stop in self._stops.items():
            self._log.wait_for(topic, stop)

    def abort(self) -> None:
        with contextlib.suppress(StorageError):
            self._log.run(self._transaction.end(is_committed=False))


def refuse_on_loop() -> None:
    """Raises RuntimeError on an event loop: all peers of the bus would wait for Kafka."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("this waits for Kafka: call it on another thread than an event loop's")


def _offset_unknown(offset: int, start: int, stop: int) -> UsageError:
    text = f"the topic has no offset {offset}; it holds {start} to {stop}"
    return UsageError("log.offset-unknown", text)
