"""Which topics there are, for all nodes: records in a compacted Kafka topic, the last one counts.

Two stores must agree, the registry and Kafka's own list of topics. The order of writes:

    create:  1. the Kafka topic    2. its record, with Kafka's id of the topic and a new epoch
    delete:  1. a record `deleted`, with the id    2. the Kafka topic, by its id
    import:  1. the Kafka topic, without messages    2. a record `deleted`, with its id
             3. empty messages up to the first offset    4. their removal
             5. the topic's record, with the epoch of its source

A crash between 1 and 2 of a creation leaves a Kafka topic that no node knows; creating it again
adopts it. So does creating a topic that another Kafka program made: its messages are then those of
the bus.
Two nodes that create a topic at once both succeed: the second adopts it, and their records have
the same epoch, because that only depends on the registry.

A crash between 1 and 2 of a deletion, or between 2 and 5 of an import, leaves a Kafka topic whose
id is in a record `deleted`; creating or importing it again removes it first. A crash between 1 and
2 of an import leaves a topic without messages, which either may take. An import never takes a topic
with messages, and removes none that it has not written itself.

A write that was not confirmed is repeated, so a record may arrive twice, or late. Which of two
counts is decided by `counts`: epochs only ascend, and a deleted one stays deleted. A record that
does not count would hide the other one when Kafka compacts the topic; so the nodes that see it
write the other one again. A Kafka topic is deleted by its id, so a deletion that is repeated late
spares the topic that was created meanwhile.

A topic that all brokers show under an id that no record has was recreated by another program: the
nodes that see it write a record with the next epoch, all the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiokafka.errors import for_code
from aiokafka.protocol.admin import (
    AlterConfigsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DescribeConfigsRequest,
)
from aiokafka.protocol.produce import ProduceRequest

from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.log.kafka.kafka_names import REGISTRY
from polybus.log.kafka.link import ADMIN, ANSWER_TIMEOUT_S, LINK_ERRORS, RETRY_S, KafkaLink
from polybus.log.kafka.metadata import DeleteRequest
from polybus.log.kafka.producing import TOO_FEW_REPLICAS
from polybus.log.kafka.record_batch import encode_batch
from polybus.structs import decode

NONE, INVALID_TOPIC, ALREADY_EXISTS, UNKNOWN_ID = 0, 17, 36, 100
DENIED = (29, 31)
POLICY = 44
TOPIC_RESOURCE = 2
AT_LEAST = ("min.insync.replicas", "max.message.bytes")
OF_TOPIC = 1
"""Kafka's mark of settings that were made for one topic."""
ADMIN_TIMEOUT_MS = 10_000
COMPACTED = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    # A start reads what is not compacted yet.
    "segment.bytes": str(64 << 20),
    "min.cleanable.dirty.ratio": "0.2",
    "min.compaction.lag.ms": str(60_000),
}
KEPT_BY_KEY = ("$commits",)
"""Topics of the bus whose last message of each key is kept forever, and no other."""


class TopicRecord(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """A topic as the registry has it; `first` is where nodes begin to follow it."""

    topic: str
    epoch: int
    id: str
    first: int = 0
    deleted: bool = False
    retention_age_s: float | None = None
    retention_bytes: int | None = None

    @property
    def settings(self) -> TopicSettings:
        return TopicSettings(
            retention_age_s=self.retention_age_s, retention_bytes=self.retention_bytes
        )


def counts(record: TopicRecord, last: TopicRecord | None) -> bool:
    """Whether a record counts that comes after `last`, the last one of its topic that did."""
    if last is None or record.epoch != last.epoch:
        return last is None or record.epoch > last.epoch
    if record.deleted and not last.deleted:
        # A deletion of what two nodes had created at once may be of the other one.
        return record.id == last.id
    return record.deleted or not last.deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaOptions:
    """How a node uses its cluster.

    Attributes:
        node: its name, which brokers log.
        replicas, insync_min, message_bytes_max: of new topics.
        prefix: begins the names of all its Kafka topics.
        retention: of new topics that set none.
        recent_bytes_max: memory for the newest messages.
        transaction_timeout_s: a transaction that takes longer is aborted.
        security: what `polybus.log.kafka.security` gives for its connections.
        waits: take batches even while too few replicas are there, instead of refusing them.
    """

    node: str
    replicas: int = 3
    insync_min: int = 2
    message_bytes_max: int = 64 << 20
    prefix: str = ""
    retention: TopicSettings = TopicSettings()
    recent_bytes_max: int = 64 << 20
    transaction_timeout_s: float = 30.0
    security: dict[str, Any] = field(default_factory=dict)
    waits: bool = False


def read_records(batch: Batch) -> list[TopicRecord]:
    """The records in messages of the registry; messages that are not records are skipped."""
    found = []
    for value in batch.values():
        try:
            found.append(decode(value, TopicRecord))
        except msgspec.MsgspecError:
            continue
    return found


class KafkaTopics:
    """Makes and removes Kafka topics, and writes their records. Runs on the link's loop."""

    def __init__(self, link: KafkaLink, options: KafkaOptions) -> None:
        self._link = link
        self._options = options
        self.prefix = options.prefix
        self.registry = options.prefix + REGISTRY

    async def ensure_compacted(self, name: str) -> None:
        """Create a Kafka topic that keeps the last record of each key. Raises StorageError."""
        await self.make(name, {**self.configs(TopicSettings()), **COMPACTED})
        while self._link.leader_of(name) is None:
            await self._link.refreshed()

    def configs(self, settings: TopicSettings, topic: str = "") -> dict[str, str]:
        """The settings of a topic in Kafka's words."""
        found = {
            "min.insync.replicas": str(self._options.insync_min),
            # With what surrounds the messages of a batch.
            "max.message.bytes": str(min(self._options.message_bytes_max + (2 << 20), 2**31 - 1)),
            "retention.ms": "-1",
        }
        age_s = settings.retention_age_s or self._options.retention.retention_age_s
        if age_s is not None:
            found["retention.ms"] = str(int(age_s * 1000))
        size = settings.retention_bytes or self._options.retention.retention_bytes
        if size is not None:
            found["retention.bytes"] = str(size)
        return {**found, **COMPACTED} if topic in KEPT_BY_KEY else found

    async def make(self, name: str, configs: dict[str, str]) -> bool:
        """Create a Kafka topic; False if it exists.

        Raises:
            UsageError: `topic.invalid`.
            StorageError: `log.refused`, Kafka does not accept it; `log.unreachable`.
        """
        topic: tuple[Any, ...] = (name, 1, self._options.replicas, [], list(configs.items()))
        error, said = NONE, ""
        deadline = self._link.loop.time() + ANSWER_TIMEOUT_S
        while self._link.loop.time() < deadline:
            request = CreateTopicsRequest([topic], ADMIN_TIMEOUT_MS, False)
            answer = await self._link.ask(request)
            ((_, error, said),) = answer.topic_errors
            if error in (NONE, ALREADY_EXISTS):
                self._link.stale()
                return bool(error == NONE)
            if error == INVALID_TOPIC:
                raise UsageError("topic.invalid", f"Kafka refuses the name of the topic: {said}")
            if error in (POLICY, *DENIED):
                raise _refused(f"create the topic {name}", error, said)
            await asyncio.sleep(RETRY_S)
        raise _refused(f"create the topic {name} within {ANSWER_TIMEOUT_S:.0f} s", error, said)

    async def adopt(self, name: str, configs: dict[str, str]) -> None:
        """Take a Kafka topic that exists: correct settings with which receipts would promise less.

        Other settings of it stay. Raises StorageError `log.refused`; UsageError `cluster.topic`.
        """
        state = self._link.partitions.get(name)
        if state is None:
            raise StorageError("log.unreachable", f"Kafka no longer lists the topic {name}")
        unfit = ""
        if state.partitions != 1:
            unfit = f"has {state.partitions} partitions, and a topic of the bus has one"
            unfit = f"{unfit}; use another name, or copy its messages"
        elif state.replicas < self._options.replicas:
            unfit = f"has fewer replicas ({state.replicas}) than cluster.replicas"
            unfit = (
                f"{unfit} ({self._options.replicas}); add some with kafka-reassign-partitions.sh"
            )
        if unfit:
            raise UsageError("cluster.topic", f"the topic {name!r} exists in Kafka and {unfit}")
        answer = await self._link.ask(DescribeConfigsRequest([(TOPIC_RESOURCE, name, None)]))
        ((error, said, _, _, entries),) = answer.resources
        if error:
            raise _refused(f"show the settings of the topic {name}", error, said)
        found = {one: value for one, value, *_ in entries}
        weak = {one: configs[one] for one in AT_LEAST if int(found[one]) < int(configs[one])}
        if weak:
            own = {one: value for one, value, _, source, *_ in entries if source == OF_TOPIC}
            await self.change(name, own | weak)

    async def change(self, name: str, configs: dict[str, str]) -> None:
        """Replace the configs of a Kafka topic. Raises StorageError `log.refused`."""
        wanted = [(TOPIC_RESOURCE, name, list(configs.items()))]
        answer = await self._link.ask(AlterConfigsRequest(wanted, False))
        ((error, said, *_),) = answer.resources
        if error:
            raise _refused(f"change the settings of the topic {name}", error, said)

    async def remove(self, name: str, topic_id: str) -> None:
        """Delete the Kafka topic with this id; no other one of the name.

        Raises StorageError `log.refused`.
        """
        while True:
            request = DeleteRequest(bytes.fromhex(topic_id), ADMIN_TIMEOUT_MS)
            answer = await self._link.ask(request)
            ((_, _, error, *_),) = answer.responses
            if error in (NONE, UNKNOWN_ID):
                break
            if error in DENIED:
                raise _refused(f"delete the topic {name}", error, None)
            await asyncio.sleep(RETRY_S)
        await self._link.refreshed()

    async def discard(self, name: str, stop: int) -> None:
        """Remove the records of a Kafka topic below an offset. Raises StorageError."""
        request = DeleteRecordsRequest([(name, [(0, stop)])], ADMIN_TIMEOUT_MS)
        deadline = self._link.loop.time() + ANSWER_TIMEOUT_S
        while self._link.loop.time() < deadline:
            leader = self._link.leader_of(name)
            with contextlib.suppress(*LINK_ERRORS):
                if leader is not None:
                    answer = await self._link.send(leader, request, ADMIN)
                    ((_, ((_, _, error, *_),), *_),) = answer.topics
                    if error == NONE:
                        return
            await self._link.refreshed()
        raise StorageError("log.refused", f"Kafka does not remove old messages of {name}")

    async def id_of(self, name: str, *, other_than: str = "") -> str:
        """Kafka's id of a topic, once the brokers list it.

        Raises StorageError `log.unreachable`.
        """
        deadline = self._link.loop.time() + ANSWER_TIMEOUT_S
        while self._link.loop.time() < deadline:
            state = self._link.partitions.get(name)
            if state is not None and state.leader is not None:
                found = state.topic_id.hex()
                if found != other_than:
                    return found
            await self._link.refreshed()
        text = f"Kafka does not list the topic {name} after {ANSWER_TIMEOUT_S:.0f} s"
        raise StorageError("log.unreachable", f"{text}; check its brokers")

    async def write(self, record: TopicRecord) -> int:
        """Add a record, once or twice; return its offset when it is safe.

        Raises StorageError `log.refused`, `log.unreachable`.
        """
        batch = Batch.of(REGISTRY, [msgspec.json.encode(record)], keys=[record.topic.encode()])
        batch.protocol = "polybus"
        # A compacted topic is not removed by age; any time will do.
        batch.timestamp_us = time.time_ns() // 1000
        return await self.produce(self.registry, encode_batch([batch]))

    async def produce(self, name: str, data: bytes) -> int:
        """Add a RecordBatch, once or twice; once if it has a sequence number. Return its offset.

        Raises StorageError `log.refused`, `log.replicas`, `log.unreachable`.
        """
        request = ProduceRequest(None, -1, ADMIN_TIMEOUT_MS, [(name, [(0, data)])])
        error = NONE
        deadline = self._link.loop.time() + ANSWER_TIMEOUT_S
        while self._link.loop.time() < deadline:
            leader = self._link.leader_of(name)
            try:
                if leader is not None:
                    answer = await self._link.send(leader, request, ADMIN)
                    ((_, ((_, error, offset, *_),)),) = answer.topics
                    if error == NONE:
                        return int(offset)
            except LINK_ERRORS:
                pass
            await self._link.refreshed()
        if error:
            raise _refused(f"write to the topic {name}", error, None)
        text = f"no Kafka broker has confirmed a write to {name} for {ANSWER_TIMEOUT_S:.0f} s"
        raise StorageError("log.unreachable", f"{text}; check the brokers")


def _refused(action: str, error: int, said: str | None) -> StorageError:
    reason = f"{for_code(error).__name__}: {said}" if said else for_code(error).__name__
    code = "log.replicas" if error in TOO_FEW_REPLICAS else "log.refused"
    return StorageError(code, f"Kafka did not {action}: {reason}")


def topic_exists(topic: str) -> PolybusError:
    return UsageError("topic.exists", f"the topic '{topic}' exists already")
