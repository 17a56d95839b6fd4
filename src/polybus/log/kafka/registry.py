"""The topics of all nodes: records in a compacted Kafka topic, of which the last one counts.

Two stores must agree, the registry and Kafka's own list of topics. The order of writes:

    create:  1. the Kafka topic    2. its record, with Kafka's id of the topic and a new epoch
             Many topics are created together: all of 1, then all of 2. One that Kafka refuses is
             skipped, and reported when the others exist.
    delete:  1. a record `deleted`, with the id    2. the Kafka topic, by its id
    import:  1. the Kafka topic, without messages    2. a record `deleted`, with its id
             3. empty messages up to the first offset    4. their removal
             5. the topic's record, with the epoch of its source

A crash between 1 and 2 of a creation leaves a Kafka topic that no node knows; creating it again
adopts it. Creating a topic that another Kafka program made adopts it too: its messages are then
those of the bus. Two nodes that create a topic at once both succeed: the second adopts it, and
their records have the same epoch, because that only depends on the registry.

A crash between 1 and 2 of a deletion, or between 2 and 5 of an import, leaves a Kafka topic whose
id is in a record `deleted`; creating or importing it again removes it first. A crash between 1 and
2 of an import leaves a topic without messages, which a creation or an import may adopt. An import
never adopts a topic with messages, and removes none that it has not written itself.

A write that was not confirmed is repeated, so a record may arrive twice, or late. Which of two
counts is decided by `counts`: epochs only ascend, and a deleted one stays deleted. A record that
does not count would hide the other one when Kafka compacts the topic; so the nodes that see it
rewrite the other one. A Kafka topic is deleted by its id, so a late repetition of a deletion does
not delete a topic that was created meanwhile.

A topic that all brokers show under an id that no record has was recreated by another program: the
nodes that see it write a record with the next epoch, all the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
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
from polybus.config import AGE_S_MAX
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.log.kafka.kafka_names import REGISTRY
from polybus.log.kafka.link import ADMIN, ANSWER_TIMEOUT_S, LINK_ERRORS, RETRY_S, KafkaLink
from polybus.log.kafka.metadata import DeleteRequest
from polybus.log.kafka.producing import RECORDS_BYTES_MAX, TOO_FEW_REPLICAS
from polybus.log.kafka.record_batch import encode_batch
from polybus.structs import decode

NONE, INVALID_TOPIC, ALREADY_EXISTS, UNKNOWN_ID = 0, 17, 36, 100
MADE = (NONE, ALREADY_EXISTS)
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
    # A start also reads records that are not compacted yet.
    "segment.bytes": str(64 << 20),
    "min.cleanable.dirty.ratio": "0.2",
    "min.compaction.lag.ms": str(60_000),
}
Configs = dict[str, str]
"""The settings of a topic in Kafka's words."""
Refusals = dict[str, PolybusError]
"""Topics for which Kafka refused a request, and why; it was successful for the others."""
KEPT_BY_KEY = ("$commits",)
"""Topics of the bus that are compacted: only the last message of each key is kept, forever."""


class TopicRecord(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """A topic in the registry; `first` is the offset at which nodes begin to follow it."""

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
    """Whether a record counts after `last`, the last one of its topic that counted."""
    if last is None or record.epoch != last.epoch:
        return last is None or record.epoch > last.epoch
    if record.deleted and not last.deleted:
        # Two nodes may have created the topic at once: this may delete the other one.
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
        waits: take batches even while too few replicas are in sync, instead of refusing them.
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
        _, refused = await self.make({name: {**self.configs(TopicSettings()), **COMPACTED}})
        if refused:
            raise refused[name]
        while self._link.leader_of(name) is None:
            await self._link.refreshed()

    def configs(self, settings: TopicSettings, topic: str = "") -> Configs:
        largest = max(self._options.message_bytes_max, RECORDS_BYTES_MAX)
        found = {
            "min.insync.replicas": str(self._options.insync_min),
            # Including the envelope of a batch.
            "max.message.bytes": str(min(largest + (2 << 20), 2**31 - 1)),
            "retention.ms": "-1",
        }
        age_s = settings.retention_age_s or self._options.retention.retention_age_s
        if age_s is not None:
            found["retention.ms"] = str(int(min(age_s, AGE_S_MAX) * 1000))
        size = settings.retention_bytes or self._options.retention.retention_bytes
        if size is not None:
            found["retention.bytes"] = str(size)
        return {**found, **COMPACTED} if topic in KEPT_BY_KEY else found

    async def make(self, wanted: Mapping[str, Configs]) -> tuple[set[str], Refusals]:
        """Create Kafka topics with one request; return those that are new, and those refused.

        A refusal is a UsageError `topic.invalid` or a StorageError `log.refused`.

        Raises StorageError `log.unreachable`.
        """
        new: set[str] = set()
        refused: Refusals = {}
        failures = dict.fromkeys(wanted, (NONE, ""))
        deadline = self._link.loop.time() + ANSWER_TIMEOUT_S
        while self._link.loop.time() < deadline:
            topics: list[tuple[Any, ...]] = [
                (name, 1, self._options.replicas, [], list(wanted[name].items()))
                for name in failures
            ]
            answer = await self._link.ask(CreateTopicsRequest(topics, ADMIN_TIMEOUT_MS, False))
            for name, error, said in answer.topic_errors:
                failures[name] = (error, said)
                if error == INVALID_TOPIC:
                    text = f"Kafka refuses the name of the topic {name}: {said}"
                    refused[name] = UsageError("topic.invalid", text)
                elif error in (POLICY, *DENIED):
                    refused[name] = _refused(f"create the topic {name}", error, said)
            done = [name for name, (error, _) in failures.items() if error in MADE]
            new.update(name for name in done if failures[name][0] == NONE)
            for name in done + list(failures.keys() & refused):
                del failures[name]
            if not failures:
                break
            await asyncio.sleep(RETRY_S)
        self._link.stale()
        for name, (error, said) in failures.items():
            action = f"create the topic {name} within {ANSWER_TIMEOUT_S:.0f} s"
            refused[name] = _refused(action, error, said)
        return new, refused

    async def adopt(self, wanted: Mapping[str, Configs]) -> Refusals:
        """Adopt existing Kafka topics: correct settings that would weaken the guarantee of
        receipts.

        Other settings stay. Returns those that cannot be adopted, with StorageError `log.refused`
        or UsageError `cluster.topic`.
        """
        refused = {name: error for name in wanted if (error := self._unfit(name)) is not None}
        fit = wanted.keys() - refused
        if not fit:
            return refused
        resources = [(TOPIC_RESOURCE, name, None) for name in fit]
        answer = await self._link.ask(DescribeConfigsRequest(resources))
        changed: dict[str, Configs] = {}
        for error, said, _, name, entries in answer.resources:
            if error:
                action = f"show the settings of the topic {name}"
                refused[name] = _refused(action, error, said)
                continue
            found = {one: value for one, value, *_ in entries}
            needed = wanted[name]
            weak = {one: needed[one] for one in AT_LEAST if int(found[one]) < int(needed[one])}
            if weak:
                own = {one: value for one, value, _, source, *_ in entries if source == OF_TOPIC}
                changed[name] = own | weak
        return refused | await self.change(changed)

    def _unfit(self, name: str) -> PolybusError | None:
        """Why this Kafka topic cannot be one of the bus: UsageError `cluster.topic`."""
        state = self._link.partitions.get(name)
        if state is None:
            return StorageError("log.unreachable", f"Kafka no longer lists the topic {name}")
        unfit = ""
        if state.partitions != 1:
            unfit = f"has {state.partitions} partitions, and a topic of the bus has one"
            unfit = f"{unfit}; use another name, or copy its messages"
        elif state.replicas < self._options.replicas:
            unfit = f"has fewer replicas ({state.replicas}) than cluster.replicas"
            unfit = (
                f"{unfit} ({self._options.replicas}); add some with kafka-reassign-partitions.sh"
            )
        if not unfit:
            return None
        return UsageError("cluster.topic", f"the topic {name!r} exists in Kafka and {unfit}")

    async def change(self, wanted: Mapping[str, Configs]) -> Refusals:
        """Replace the configs of Kafka topics; return those that Kafka refuses."""
        if not wanted:
            return {}
        resources = [(TOPIC_RESOURCE, name, list(one.items())) for name, one in wanted.items()]
        answer = await self._link.ask(AlterConfigsRequest(resources, False))
        return {
            name: _refused(f"change the settings of the topic {name}", error, said)
            for error, said, _, name in answer.resources
            if error
        }

    async def remove(self, name: str, topic_id: str) -> None:
        """Delete the Kafka topic with this id, but not another one of the same name.

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

    async def ids_of(self, old_ids: Mapping[str, str]) -> tuple[dict[str, str], Refusals]:
        """Kafka's ids of topics, other than these, once the brokers list all of them.

        A topic that they do not list with a leader in time gets StorageError `log.unreachable`.
        """
        found: dict[str, str] = {}
        tries = 0
        deadline = self._link.loop.time() + ANSWER_TIMEOUT_S
        while self._link.loop.time() < deadline:
            for name in old_ids.keys() - found.keys():
                state = self._link.partitions.get(name)
                if state is not None and state.leader is not None:
                    shown = state.topic_id.hex()
                    if shown != old_ids[name]:
                        found[name] = shown
            if len(found) == len(old_ids):
                break
            await self._link.refreshed(tries)
            tries += 1
        refused: Refusals = {}
        for name in old_ids.keys() - found.keys():
            text = f"Kafka shows no leader of the topic {name} after {ANSWER_TIMEOUT_S:.0f} s"
            refused[name] = StorageError("log.unreachable", f"{text}; check its brokers")
        return found, refused

    async def write(self, records: Sequence[TopicRecord]) -> int:
        """Add records, each once or twice; return the offset of the last one when they are durable.

        Raises StorageError `log.refused`, `log.unreachable`.
        """
        values = [msgspec.json.encode(record) for record in records]
        batch = Batch.of(REGISTRY, values, keys=[record.topic.encode() for record in records])
        batch.protocol = "polybus"
        # Records of a compacted topic do not expire, so any time is valid.
        batch.timestamp_us = time.time_ns() // 1000
        first = await self.produce(self.registry, encode_batch([batch]))
        return first + len(records) - 1

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


def raise_first(refused: Refusals) -> None:
    """Raise the error of the first of these topics, with the number of the others."""
    if refused:
        error = refused[min(refused)]
        if len(refused) > 1:
            more = f"; and {len(refused) - 1} more are refused"
            raise type(error)(error.code, error.text + more) from error
        raise error


def topic_exists(topic: str) -> PolybusError:
    return UsageError("topic.exists", f"the topic '{topic}' already exists")
