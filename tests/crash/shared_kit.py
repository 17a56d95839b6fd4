"""Several nodes without brokers: what they share has one order, and tests decide what is lost.

A node that `holds_writes` takes writes that the cluster gets later; one that `holds_arrivals` gets
nothing, not even what it has written itself. A dead node does nothing any more. A node that starts
reads what Kafka's compaction has left: the last entry of each key.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.errors import StorageError, UsageError
from polybus.log.interface import SHARED, Bounds, ClusterLog, LogTransaction, TopicSettings
from polybus.log.memory import MemoryLog
from polybus.services.accounts.accounts import Accounts
from polybus.services.accounts.cluster import ClusterAccountStore
from polybus.services.cluster_table import ClusterTable
from polybus.services.context import Context, Durability
from polybus.services.events import EventRecorder
from polybus.services.memory import MemoryGate
from polybus.services.sessions.inboxes import Inboxes
from polybus.services.state import StateDb
from polybus.testing import ManualClock


class Record(NamedTuple):
    """An entry of the cluster; without a value it is a tombstone."""

    offset: int
    key: bytes
    value: bytes | None
    sender: str

    def batch(self) -> Batch:
        made = Batch.of(SHARED, [self.value or b""], keys=[self.key])
        made.first_offset, made.sender = self.offset, self.sender
        return made


class FakeCluster:
    """The order of everything that nodes write."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.history: list[Record] = []
        """With what compaction has removed."""
        self.stop = 0
        self.nodes: list[FakeNode] = []
        self.names = itertools.count(1)
        # What happened to topics, for nodes that start later.
        self.happened: list[Callable[[FakeNode], None]] = []

    def store(self, batch: Batch) -> None:
        """Give entries their place, and all nodes the entries."""
        records = []
        for key, value in zip(batch.keys or (), batch.values(), strict=True):
            assert key is not None
            records.append(Record(self.stop, key, bytes(value) or None, ""))
            self.stop += 1
        # The writer knows its batch by the last of its entries.
        records[-1] = records[-1]._replace(sender=batch.sender)
        self.records += records
        self.history += records
        for node in self.nodes:
            node.get(functools.partial(node.cluster_table.arrive, [one.batch() for one in records]))

    def compacted(self) -> list[Record]:
        last = {record.key: record for record in self.records}
        return [one for one in last.values() if one.value is not None]

    def compact(self) -> None:
        self.records = sorted(self.compacted())

    def happen(self, what: Callable[[FakeNode], None]) -> None:
        self.happened.append(what)
        for node in self.nodes:
            node.get(functools.partial(what, node))

    def publish(self, topic: str, value: str) -> None:
        def arrive(node: FakeNode) -> None:
            if node.log.has(topic):
                node.bus.arrive(Batch.of(topic, [value.encode()]))

        self.happen(arrive)


class FakeNode:
    """A node: accounts and sessions over the fake cluster.

    Attributes:
        dies_at: its writes from this one on, counted from 0, do not happen; None lives.
        is_stored: the write at which it dies happens, but the node does not learn it.
    """

    def __init__(self, cluster: FakeCluster, data: Path, **settings: Any) -> None:
        self.cluster = cluster
        self.holds_writes = self.holds_arrivals = self.is_dead = False
        self.dies_at: int | None = None
        self.is_stored = False
        self.writes = 0
        self._held_writes: list[Batch] = []
        self._held_arrivals: list[Callable[[], None]] = []
        loop = asyncio.get_running_loop()
        raw = {"data": str(data), "connectors": [], "system": {"events": False}, **settings}
        config = msgspec.convert(raw, Config)
        self.loop = loop
        self.log = FakeLog(self)
        self.cluster_table = ClusterTable(loop, f"n{next(cluster.names)}")
        self.cluster_table.connect(self.log)
        self.cluster_table.arrive([record.batch() for record in sorted(cluster.compacted())])
        self.cluster_table.stop = cluster.stop
        self.store = ClusterAccountStore(data, self.cluster_table, loop)
        clock = ManualClock()
        self.bus = bus = Bus(self.log, clock_us=clock)
        for what in cluster.happened:
            what(self)
        self.accounts = Accounts(self.store, bus, config, loop)
        self.context = Context(
            bus=bus,
            config=config,
            loop=loop,
            clock_us=clock,
            memory=MemoryGate(self.log, loop, bytes_max=1 << 30),
            durability=Durability(bus),
            events=EventRecorder(bus, loop, clock, enabled=False),
            cluster_table=self.cluster_table,
        )
        self.inboxes = Inboxes(self.context, StateDb(data, fsync=False), self.accounts)
        cluster.nodes.append(self)

    async def start(self) -> FakeNode:
        await self.inboxes.start()
        return self

    def kill(self) -> None:
        """It is gone, with what it had not written yet."""
        self.is_dead = True
        self._held_writes.clear()
        self.inboxes.stop()
        if self in self.cluster.nodes:
            self.cluster.nodes.remove(self)

    def get(self, arrival: Callable[[], None]) -> None:
        if self.holds_arrivals:
            self._held_arrivals.append(arrival)
        else:
            arrival()

    def may_write(self) -> bool:
        """Count a write; whether it happens."""
        number, self.writes = self.writes, self.writes + 1
        if self.is_dead or self.dies_at is None or number < self.dies_at:
            return not self.is_dead
        self.kill()
        return self.is_stored

    def write(self, batch: Batch) -> None:
        if not self.may_write():
            return
        if self.holds_writes:
            self._held_writes.append(batch)
        else:
            self.loop.call_soon(self.cluster.store, batch)

    def heal(self) -> None:
        """The node reaches the cluster again: what it held happens in its order."""
        self.holds_writes = False
        for batch in self._held_writes:
            self.cluster.store(batch)
        self._held_writes.clear()
        self.holds_arrivals = False
        for arrival in self._held_arrivals:
            arrival()
        self._held_arrivals.clear()


def unreachable() -> StorageError:
    return StorageError("log.unreachable", "the node does not reach the cluster")


class FakeLog(MemoryLog, ClusterLog):
    """The log of one node; topics and messages of others come by the cluster."""

    def __init__(self, node: FakeNode) -> None:
        super().__init__(clock=lambda: 0, bytes_max=1 << 30)
        self._node = node

    @property
    def arrives_late(self) -> bool:  # type: ignore[override]
        return True

    @property
    def cluster(self) -> ClusterLog:  # type: ignore[override]
        return self

    def has(self, topic: str) -> bool:
        return topic in self._topics

    def admit(self, arrival: object) -> Sequence[Batch]:
        assert isinstance(arrival, Batch)
        self.append(arrival)
        return [arrival]

    # Topics: the methods that change something are called on other threads than the loop's

    def _happen(self, what: Callable[[FakeNode], None]) -> None:
        async def happen() -> bool:
            is_done = self._node.may_write()
            if is_done:
                self._node.cluster.happen(what)
            return is_done and not self._node.is_dead

        if not asyncio.run_coroutine_threadsafe(happen(), self._node.loop).result():
            raise unreachable()

    def create_topic(self, topic: str, settings: TopicSettings | None = None) -> Bounds:
        def create(node: FakeNode) -> None:
            MemoryLog.create_topics(node.log, {topic: settings or TopicSettings()})
            node.bus.topic_changed(topic, exists=True)

        if self.has(topic):
            raise UsageError("topic.exists", topic)
        self._happen(create)
        return self.bounds(topic)

    def create_topics(self, wanted: Mapping[str, TopicSettings]) -> None:
        for topic, settings in wanted.items():
            self.create_topic(topic, settings)

    def delete_topic(self, topic: str) -> None:
        self._log_of(topic)

        def delete(node: FakeNode) -> None:
            # Another node may delete it at the same time.
            if node.log.has(topic):
                MemoryLog.delete_topic(node.log, topic)
                node.bus.topic_changed(topic, exists=False)

        self._happen(delete)

    # What nodes share

    def catch_up(self, topic: str, epoch: int = 0) -> None:
        self.catch_up_all()
        self._log_of(topic)

    def catch_up_all(self) -> None:
        if self._node.is_dead or self._node.holds_arrivals or self._node.holds_writes:
            raise unreachable()

    def begin(self, producer: str) -> LogTransaction:
        raise NotImplementedError

    def settle(self, topic: str) -> None:
        self.catch_up_all()

    def share(self, batch: Batch) -> None:
        self._node.write(batch)

    def shared_stop(self) -> int:
        self.catch_up_all()
        return self._node.cluster.stop

    def forget_shared(self, keys: Sequence[bytes]) -> None:
        self.catch_up_all()
        if keys:
            made = Batch.of(SHARED, [b""] * len(keys), keys=list(keys))
            self._node.loop.call_soon_threadsafe(self._node.write, made)
