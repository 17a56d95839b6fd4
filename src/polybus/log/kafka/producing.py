"""Sends batches to the leaders of their topics, each once, in the order they were queued.

Rules:
- A topic has at most one RecordBatch in flight. It is sent again, byte for byte, until a leader has
  given a definite answer; its sequence number lets the broker recognise it.
- A broker has at most one request in flight, with one RecordBatch of each topic that has any:
  Kafka answers the requests of a connection one after the other.
- Only a definite refusal (too large, topic deleted) ends a batch. After any other error it is sent
  again. If several batches together are too large, fewer are sent together.
- `acks=all`: an answer means that every replica in sync has it, `min.insync.replicas` at least.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from polybus import scan
from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.kafka.link import LINK_ERRORS, PRODUCE, RETRY_S, KafkaLink
from polybus.log.kafka.record_batch import ProducerState, encode_batch
from polybus.log.topics import unknown

REQUEST_BYTES_MAX = 8 << 20
RECORDS_BYTES_MAX = 6 << 20
"""Batches of a topic that are sent together have about this size at most, before compression. With
a quarter a topic waits for its brokers so often that it has four fifths of the rate."""
RECORD_BYTES = 64
"""What a record has beside its value: lengths, and headers with protocol and sender."""
BROKER_TIMEOUT_MS = 5_000
STALL_S = 15.0
"""A topic counts as failed after this time without an answer, until its next answer."""
WATCH_S = 1.0
TOO_FEW_REPLICAS = (19, 20)
TOO_LARGE = (10, 18)
REFUSED = (*TOO_LARGE, 2, 17, 29, 31, 32, 44, 76, 87)
UNKNOWN_TOPIC = 3
WRONG_PRODUCER = (45, 47, 59)
DUPLICATE = 46


@dataclass(slots=True)
class QueuedBatch:
    """A batch that waits for its offset."""

    ticket: int
    batch: Batch
    value_bytes: int

    @property
    def record_bytes(self) -> int:
        return self.value_bytes + RECORD_BYTES * len(self.batch)


@dataclass(slots=True)
class InFlight:
    """Batches in one RecordBatch, and its bytes."""

    taken: list[QueuedBatch]
    data: bytes
    count: int


class TopicQueue:
    """The batches that a topic has yet to send, and its next sequence number."""

    __slots__ = (
        *("answered_s", "epoch", "name", "producer", "records_bytes_max", "sequence", "topic"),
        *("under_way", "waiting"),
    )

    def __init__(self, topic: str, name: str, epoch: int) -> None:
        self.topic = topic
        self.name = name
        self.epoch = epoch
        self.sequence = 0
        self.producer = (-1, -1)
        self.records_bytes_max = RECORDS_BYTES_MAX
        self.waiting: deque[QueuedBatch] = deque()
        self.under_way: InFlight | None = None
        self.answered_s = 0.0
        """When the topic had its last answer, or its first batch after having none."""

    def next(self, producer: tuple[int, int]) -> InFlight | None:
        """The RecordBatch to send now; None if there is none."""
        if self.under_way is None and self.waiting:
            taken = [self.waiting.popleft()]
            size = taken[0].record_bytes
            while self.waiting and size + self.waiting[0].record_bytes <= self.records_bytes_max:
                taken.append(self.waiting.popleft())
                size += taken[-1].record_bytes
            self.under_way = self._encoded(taken, producer)
        return self.under_way

    def _encoded(self, taken: list[QueuedBatch], producer: tuple[int, int]) -> InFlight:
        if producer != self.producer:
            # Sequence numbers belong to a producer.
            self.producer, self.sequence = producer, 0
        batches = [one.batch for one in taken]
        data = encode_batch(batches, ProducerState(*producer, self.sequence))
        return InFlight(taken, data, sum(map(len, batches)))

    def begin_again(self, producer: tuple[int, int]) -> None:
        """Send the batch in flight again, as another producer."""
        if self.under_way is not None:
            self.under_way = self._encoded(self.under_way.taken, producer)

    def divide(self) -> bool:
        """From now on send about half of what is in flight; False if that is one batch."""
        assert self.under_way is not None
        taken = self.under_way.taken
        if len(taken) == 1:
            return False
        self.under_way = None
        self.waiting.extendleft(reversed(taken))
        self.records_bytes_max = sum(one.record_bytes for one in taken) // 2
        return True

    def advance(self) -> list[QueuedBatch]:
        """The batch in flight has its answer."""
        assert self.under_way is not None
        done, self.under_way = self.under_way, None
        # After `divide`: the topic may take more by now.
        more = self.records_bytes_max + self.records_bytes_max // 64
        self.records_bytes_max = min(more, RECORDS_BYTES_MAX)
        # Kafka's sequence numbers are positive int32 and begin again at 0.
        self.sequence = (self.sequence + done.count) & 0x7FFFFFFF
        return done.taken


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducingCallbacks:
    """All are called on the link's loop.

    Attributes:
        acked: the batches have their offsets and are safe.
        refused: the batches are not in the log and will not be.
        failed: nothing can be written to this topic for a while.
    """

    acked: Callable[[Sequence[QueuedBatch]], None]
    refused: Callable[[Sequence[QueuedBatch], PolybusError], None]
    failed: Callable[[str, StorageError], None]


class Producing:
    """Sends what the log took. Everything except `put` runs on the link's loop."""

    def __init__(
        self,
        link: KafkaLink,
        queue_of: Callable[[str], TopicQueue | None],
        tell: ProducingCallbacks,
    ) -> None:
        """`queue_of` gives the queue of a topic; None if it was deleted."""
        self._link = link
        self._queue_of = queue_of
        self._tell = tell
        self._incoming: deque[QueuedBatch] = deque()
        self._busy: dict[str, TopicQueue] = {}
        self._wake: dict[int, asyncio.Event] = {}
        self._producer = (-1, -1)
        self._is_woken = False

    def put(self, taken: QueuedBatch) -> None:
        """Queue a batch, from the bus's thread."""
        self._incoming.append(taken)
        if not self._is_woken:
            self._is_woken = True
            self._link.soon(self._take_in)

    async def open(self) -> None:
        await self._renew_producer()
        self._link.on_refreshed.append(self._wake_all)
        self._link.start(self._watch())
        self._wake_all()

    async def _renew_producer(self) -> None:
        self._producer = await new_producer(self._link)

    def _take_in(self) -> None:
        self._is_woken = False
        while self._incoming:
            taken = self._incoming.popleft()
            queue = self._queue_of(taken.batch.topic)
            if queue is None:
                self._tell.refused([taken], unknown(taken.batch.topic))
                continue
            if self._busy.get(queue.topic) is not queue:
                queue.answered_s = self._link.loop.time()
            queue.waiting.append(taken)
            self._busy[queue.topic] = queue
        self._wake_all()

    def _wake_all(self) -> None:
        for broker in self._link.broker_ids:
            if broker not in self._wake:
                self._wake[broker] = asyncio.Event()
                self._link.start(self._serve(broker))
        for event in self._wake.values():
            event.set()

    async def _watch(self) -> None:
        """Report topics as failed if no answer comes for long."""
        while True:
            await asyncio.sleep(WATCH_S)
            late_s = self._link.loop.time() - STALL_S
            for queue in [one for one in self._busy.values() if one.answered_s < late_s]:
                text = f"Kafka has confirmed nothing of {queue.name} for {STALL_S:.0f} s"
                error = StorageError("log.unreachable", f"{text}; check its brokers")
                self._tell.failed(queue.topic, error)

    async def _serve(self, broker: int) -> None:
        """Send the topics that a broker leads, one request after the other."""
        wake = self._wake[broker]
        while True:
            await wake.wait()
            wake.clear()
            while parts := self._ready(broker):
                is_done = False
                with contextlib.suppress(StorageError):
                    is_done = await self._send(broker, parts)
                if not is_done:
                    self._link.stale()
                    await asyncio.sleep(RETRY_S)

    def _ready(self, broker: int) -> list[tuple[TopicQueue, InFlight]]:
        found: list[tuple[TopicQueue, InFlight]] = []
        size = 0
        for queue in self._busy.values():
            if self._link.leader_of(queue.name) != broker:
                continue
            part = queue.next(self._producer)
            if part is None:
                continue
            if found and size + len(part.data) > REQUEST_BYTES_MAX:
                break
            found.append((queue, part))
            size += len(part.data)
        return found

    async def _send(self, broker: int, parts: list[tuple[TopicQueue, InFlight]]) -> bool:
        """Send one request and process the answer; False if something must be sent again."""
        topics = [(queue.name, [(0, part.data)]) for queue, part in parts]
        request = ProduceRequest(None, -1, BROKER_TIMEOUT_MS, topics)
        try:
            answer = await self._link.send(broker, request, PRODUCE)
        except LINK_ERRORS:
            return False
        queues = {queue.name: (queue, part) for queue, part in parts}
        is_done = True
        for name, ((_, error, offset, *_),) in answer.topics:
            queue, part = queues[name]
            if queue.under_way is part:
                is_done &= await self._act(queue, part, error, offset)
        # Topics that have more go after those that were left out.
        for queue, _ in parts:
            if self._leave(queue) and (queue.under_way or queue.waiting):
                self._busy[queue.topic] = queue
        return is_done

    async def _act(self, queue: TopicQueue, part: InFlight, error: int, offset: int) -> bool:
        if error == DUPLICATE and offset < 0:
            # It is stored, so it is not sent again; without an offset there is no receipt.
            text = f"Kafka already has messages of the topic {queue.name} but gives no offset"
            self._tell.refused(queue.advance(), StorageError("log.refused", text))
            return True
        if error in (0, DUPLICATE):
            queue.answered_s = self._link.loop.time()
            for taken in queue.advance():
                taken.batch.epoch = queue.epoch
                taken.batch.first_offset = offset
                offset += len(taken.batch)
            self._tell.acked(part.taken)
            return True
        if error == UNKNOWN_TOPIC and self._queue_of(queue.topic) is not queue:
            self.refuse_all(queue, unknown(queue.topic))
            return True
        if error in TOO_LARGE and queue.divide():
            # The topic's limit in Kafka is lower than that of a node. Nothing of it was stored.
            return True
        if error in REFUSED:
            self._refuse(queue, part, error)
            return True
        if error in WRONG_PRODUCER:
            if queue.producer == self._producer:
                await self._renew_producer()
            # Only this topic: the answer for another may be on its way, and would be ignored.
            queue.begin_again(self._producer)
        elif error in TOO_FEW_REPLICAS:
            text = f"fewer replicas of {queue.name} are in sync than min.insync.replicas requires"
            failure = StorageError("log.replicas", f"{text}; check the brokers")
            self._tell.failed(queue.topic, failure)
        return False

    def _refuse(self, queue: TopicQueue, part: InFlight, error: int) -> None:
        name = for_code(error).__name__
        text = f"Kafka did not store messages of the topic {queue.name}: {name}"
        failure: PolybusError = StorageError("log.refused", text)
        if error in TOO_LARGE:
            failure = too_large(queue.name, [part.taken[0].batch])
        # The broker has not counted them.
        queue.under_way = None
        self._tell.refused(part.taken, failure)

    def _leave(self, queue: TopicQueue) -> bool:
        """Mark a queue as idle; return whether it was busy. A new topic of its name has its own
        queue.
        """
        is_busy = self._busy.get(queue.topic) is queue
        if is_busy:
            del self._busy[queue.topic]
        return is_busy

    def refuse_all(self, queue: TopicQueue, error: PolybusError) -> None:
        """The topic was deleted: refuse the batches that it has yet to send."""
        self._leave(queue)
        taken = [*(queue.under_way.taken if queue.under_way else ()), *queue.waiting]
        queue.under_way = None
        queue.waiting.clear()
        if taken:
            self._tell.refused(taken, error)


async def new_producer(link: KafkaLink) -> tuple[int, int]:
    """A producer id and epoch, by which a broker recognises batches that it already stored."""
    while True:
        answer = await link.ask(InitProducerIdRequest(None, 0))
        if answer.error_code == 0:
            return answer.producer_id, answer.producer_epoch
        await asyncio.sleep(RETRY_S)


def too_large(name: str, batches: Sequence[Batch]) -> UsageError:
    """The error for batches that a broker refused because of their size."""
    text = f"{scan.weigh(batches, 0, 0)} bytes are over max.message.bytes of the Kafka topic {name}"
    return UsageError("log.too-large", text)
