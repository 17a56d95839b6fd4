"""What the tests of the bus share: a subscriber that writes down, a slow log, and a small bus."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Hashable, Sequence

from polybus.batch import Batch, Buffer
from polybus.bus.access import EVERYTHING
from polybus.bus.bus import Bus
from polybus.bus.subscriptions import Publisher, Subscriber
from polybus.config import Config, Msgstream
from polybus.errors import PolybusError
from polybus.log.memory import MemoryLog
from polybus.services.sessions.feeds import Feeds
from polybus.testing import ManualClock


class Recorder(Subscriber):
    """A subscriber and publisher that records every call."""

    protocol = "test"
    access = EVERYTHING

    def __init__(self, *, takes_own: bool = True) -> None:
        self.takes_own = takes_own
        self.got: list[tuple[str, bytes]] = []
        self.joint: list[list[str]] = []
        self.whole: list[bytes] = []
        self.refused: list[str] = []
        self.receipts: list[Batch] = []
        self.receipt_calls = 0
        self.created: list[str] = []
        self.deleted: list[str] = []

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        self.got += [(batch.topic, value) for value in batch.values()]

    def deliver_whole(
        self, batches: Sequence[Batch], whole: Buffer, publisher: Publisher | None = None
    ) -> None:
        self.whole.append(bytes(whole))
        for batch in batches:
            self.deliver(batch)

    def deliver_joint(self, batches: Sequence[Batch], publisher: Publisher | None = None) -> None:
        self.joint.append([batch.topic for batch in batches])

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self.refused.append(error.code)

    def receipt(self, batches: Sequence[Batch]) -> None:
        self.receipts += batches
        self.receipt_calls += 1

    def hold(self, gate: Hashable) -> bool:
        return False

    def release(self, gate: Hashable) -> None: ...

    def topic_created(self, topic: str) -> bool:
        self.created.append(topic)
        return True

    def topic_deleted(self, topic: str) -> None:
        self.deleted.append(topic)


class SlowLog(MemoryLog):
    """Says that something is durable only when told to."""

    durable_ticket = 0

    @property
    def durable(self) -> int:
        return self.durable_ticket


def new_bus(*topics: str, log: MemoryLog | None = None) -> Bus:
    clock = ManualClock()
    bus = Bus(log or MemoryLog(clock=clock, bytes_max=1 << 24), clock_us=clock, topics_max=10)
    for topic in topics:
        bus.create_topic(topic)
    return bus


def closed_loop() -> asyncio.AbstractEventLoop:
    """For an object that the test gives nothing to do later."""
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


def new_feeds(limits: Msgstream) -> Feeds:
    return Feeds(new_bus(), closed_loop(), Config(msgstream=limits), lambda topic: None)


def wanting_receipt(topic: str, value: bytes) -> Batch:
    batch = Batch(topic, value + b"id", array("i", [0, len(value)]))
    batch.receipt_ids = array("i", [len(value), len(value) + 2])
    return batch
