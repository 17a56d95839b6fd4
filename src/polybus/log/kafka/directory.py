"""The topics of the cluster as this node knows them, kept up to date from the registry.

`polybus.log.kafka.registry` has the order of writes and what a crash leaves. Everything runs on the
link's loop; other threads only look topics up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.log.kafka.fetch_session import Followed
from polybus.log.kafka.filling import fill, has_messages
from polybus.log.kafka.following import Arrived, read_to
from polybus.log.kafka.kafka_names import REGISTRY, kafka_name
from polybus.log.kafka.link import (
    ADMIN,
    ANSWER_TIMEOUT_S,
    EARLIEST,
    LATEST,
    LINK_ERRORS,
    READ_UNCOMMITTED,
    KafkaLink,
)
from polybus.log.kafka.metadata import TopicsRequest, states_of
from polybus.log.kafka.recent import KafkaTopic
from polybus.log.kafka.registry import (
    KafkaTopics,
    Refusals,
    TopicRecord,
    counts,
    raise_first,
    read_records,
    topic_exists,
)
from polybus.log.topics import unknown

logger = logging.getLogger("polybus.server")

EPOCH_BYTES = 5
CREATE_TRIES = 5
CREATED_AT_ONCE = 1000
"""Topics in one request. A controller writes at most 10,000 records at once, about six for each."""
MISSING_S = 60.0
"""A topic that Kafka has not shown for this long was deleted by another program."""


@dataclass(frozen=True, slots=True)
class MadeTopic:
    """A Kafka topic without a record yet: its id, and the last record of the topic."""

    id: str
    is_new: bool
    last: TopicRecord | None


class TopicDirectory:
    """`topics` are those that exist, by name; `followed` those that are fetched, by Kafka name."""

    def __init__(
        self,
        link: KafkaLink,
        kafka: KafkaTopics,
        changed: Callable[[KafkaTopic, bool], None],
    ) -> None:
        """`changed` is called for each topic that is added (True) or removed (False)."""
        self._link = link
        self._kafka = kafka
        self._epoch_base = 0
        self._changed = changed
        self._records: dict[str, TopicRecord] = {}
        """The record of each topic that counts."""
        self._ids: dict[str, set[str]] = {}
        """All ids that a topic had, by what is in the registry."""
        self._hidden: set[str] = set()
        """Topics of which the last record does not count."""
        self.topics: dict[str, KafkaTopic] = {}
        self._prefix = kafka.prefix
        self._registry = Followed(REGISTRY, self._kafka.registry, 0, 0)
        self.followed: dict[str, Followed] = {self._registry.name: self._registry}
        self._news = asyncio.Condition()
        self._is_open = False
        self._repairing: set[str] = set()

    async def open(self) -> None:
        """Read the registry, and find where each topic begins and ends. Raises StorageError."""
        await self._kafka.ensure_compacted(self._registry.name)
        registry_id = self._link.partitions[self._registry.name].topic_id
        self._epoch_base = int.from_bytes(registry_id[:EPOCH_BYTES])
        await self._catch_up()
        names = [topic.name for topic in self.topics.values()]
        starts = await self._link.offsets(names, EARLIEST)
        stops = await self._link.offsets(names, LATEST)
        for topic in self.topics.values():
            topic.start = starts.get(topic.name, 0)
            topic.position = topic.stop = topic.tail_start = stops.get(topic.name, 0)
        self._is_open = True
        self._link.on_refreshed.append(self._look)

    def handing_on(self, arrived: Arrived) -> Arrived:
        """The function that takes fetched messages: those of the registry here, others by
        `arrived`.
        """

        def hand_on(followed: Followed, batches: list[Batch]) -> None:
            if followed is self._registry:
                self._apply_all(batches)
            else:
                arrived(followed, batches)

        return hand_on

    async def _catch_up(self) -> None:
        """Apply all records that are in the registry now."""
        stop = (await self._link.offsets([self._registry.name], LATEST))[self._registry.name]
        if self._is_open:
            await self._wait_for(lambda: self._registry.position >= stop)
            return
        await read_to(self._link, self._registry, stop, self._apply_all)

    async def refresh(self) -> None:
        """Know every topic that any node has created by now. Raises StorageError."""
        await self._catch_up()

    async def _wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Raises StorageError `log.unreachable`."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), self._news:
                await self._news.wait_for(is_reached)
        except TimeoutError as error:
            text = "the list of topics does not arrive from Kafka; check its brokers"
            raise StorageError("log.unreachable", text) from error

    def _apply_all(self, batches: list[Batch]) -> None:
        for batch in batches:
            for record in read_records(batch):
                self._apply(record)
        self._link.start(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _apply(self, record: TopicRecord) -> None:
        self._ids.setdefault(record.topic, set()).add(record.id)
        if not counts(record, self._records.get(record.topic)):
            self._hidden.add(record.topic)
            return
        self._hidden.discard(record.topic)
        self._records[record.topic] = record
        known = self.topics.get(record.topic)
        if known is not None:
            is_same = (known.epoch, known.record.id) == (record.epoch, record.id)
            if is_same and not record.deleted:
                known.record = record
                return
            del self.topics[record.topic]
            self.followed.pop(known.name, None)
            if self._is_open:
                self._changed(known, False)
        if not record.deleted:
            topic = KafkaTopic(record, kafka_name(record.topic, self._prefix))
            self.topics[record.topic] = topic
            self.followed[topic.name] = topic
            self._link.stale()
            if self._is_open:
                self._changed(topic, True)

    # Changes by this node

    async def import_topic(
        self, topic: str, settings: TopicSettings, epoch: int, start: int
    ) -> None:
        """Create a topic with the epoch and the first offset that it has in another log.

        Raises UsageError `topic.exists` if the topic, or messages under its name in Kafka, exist;
        StorageError.
        """
        refused: Refusals = {}
        made = (await self._make({topic: settings}, refused)).get(topic)
        raise_first(refused)
        if made is None:
            raise topic_exists(topic)
        last, name = made.last, kafka_name(topic, self._prefix)
        if last is not None and epoch <= last.epoch:
            text = f"the topic '{topic}' was deleted here with a later epoch; use another prefix"
            raise UsageError("topic.exists", text)
        if not made.is_new and (await self._link.offsets([name], LATEST, READ_UNCOMMITTED))[name]:
            raise has_messages(name)
        below = 0 if last is None else last.epoch
        await self._write([TopicRecord(topic, below, made.id, deleted=True)])
        await fill(self._link, self._kafka, name, start)
        await self._write([_record(topic, epoch, made.id, settings)])

    async def create(self, wanted: Mapping[str, TopicSettings]) -> dict[str, KafkaTopic]:
        """Create the topics that do not exist, and return them; another node may be faster.

        Raises UsageError `topic.invalid`, `cluster.topic`, or StorageError, for one that cannot be
        created, when all others exist.
        """
        created: dict[str, KafkaTopic] = {}
        refused: Refusals = {}
        topics = list(wanted)
        for first in range(0, len(topics), CREATED_AT_ONCE):
            part = topics[first : first + CREATED_AT_ONCE]
            created |= await self._create({topic: wanted[topic] for topic in part}, refused)
        raise_first(refused)
        return created

    async def _create(
        self, wanted: Mapping[str, TopicSettings], refused: Refusals
    ) -> dict[str, KafkaTopic]:
        created: dict[str, KafkaTopic] = {}
        for _ in range(CREATE_TRIES):
            made = await self._make(wanted, refused)
            old = [kafka_name(topic, self._prefix) for topic in made if not made[topic].is_new]
            firsts = await self._link.offsets(old, LATEST)
            await self._write(
                [
                    _record(
                        topic,
                        self._next_epoch(one.last),
                        one.id,
                        wanted[topic],
                        firsts.get(kafka_name(topic, self._prefix), 0),
                    )
                    for topic, one in made.items()
                ]
            )
            for topic, one in made.items():
                found = self.topics.get(topic)
                if found is not None and found.record.id == one.id:
                    created[topic] = found
            # Others were deleted meanwhile, by another node.
            wanted = {topic: wanted[topic] for topic in made if topic not in created}
            if not wanted:
                break
        for topic in wanted:
            text = f"other nodes delete the topic {topic!r} while it is created; try again"
            refused[topic] = StorageError("log.refused", text)
        return created

    async def _make(
        self, wanted: Mapping[str, TopicSettings], refused: Refusals
    ) -> dict[str, MadeTopic]:
        """Create the missing Kafka topics; `refused` gets those that cannot be created."""
        names: dict[str, str] = {}
        for topic in [one for one in wanted if one not in self.topics]:
            try:
                names[topic] = kafka_name(topic, self._prefix)
            except UsageError as error:
                refused[topic] = error
        configs = {name: self._kafka.configs(wanted[one], one) for one, name in names.items()}
        if not configs:
            return {}
        new, failed = await self._kafka.make(configs)
        await self._catch_up()
        last = {
            topic: self._records.get(topic)
            for topic, name in names.items()
            if topic not in self.topics and name not in failed
        }
        old_ids = {names[topic]: "" if one is None else one.id for topic, one in last.items()}
        if not new.issuperset(old_ids):
            await self._link.refreshed()
        for name in old_ids.keys() - new:
            state = self._link.partitions.get(name)
            if state is not None and state.topic_id.hex() == old_ids[name]:
                # A crash interrupted the deletion, or the import, before this.
                await self._kafka.remove(name, old_ids[name])
                again = await self._kafka.make({name: configs[name]})
                new |= again[0]
                failed |= again[1]
        ids, silent = await self._kafka.ids_of(
            {one: old_ids[one] for one in old_ids.keys() - failed}
        )
        failed |= silent
        failed |= await self._kafka.adopt({name: configs[name] for name in ids.keys() - new})
        refused |= {topic: failed[name] for topic, name in names.items() if name in failed}
        return {
            topic: MadeTopic(ids[names[topic]], names[topic] in new, before)
            for topic, before in last.items()
            if names[topic] not in failed
        }

    async def _write(self, records: Sequence[TopicRecord]) -> None:
        """Write records; return when they have arrived here, whether they count or not."""
        if not records:
            return
        offset = await self._kafka.write(records)
        await self._wait_for(lambda: self._registry.position > offset)

    def _next_epoch(self, last: TopicRecord | None) -> int:
        """The same on every node, so that two that create a topic at once agree.

        The base differs from that of any other cluster, so that positions of others are not valid
        here.
        """
        return max(self._epoch_base, 0 if last is None else last.epoch) + 1

    async def delete(self, topic: str) -> None:
        """Raises UsageError `topic.unknown`; StorageError."""
        known = self.topics.get(topic)
        if known is None:
            raise unknown(topic)
        record = known.record
        await self._write([TopicRecord(topic, record.epoch, record.id, deleted=True)])
        await self._kafka.remove(known.name, record.id)

    async def change(self, topic: str, settings: TopicSettings) -> None:
        """Replace a topic's settings. Raises UsageError `topic.unknown`; StorageError."""
        known = self.topics.get(topic)
        if known is None:
            raise unknown(topic)
        raise_first(await self._kafka.change({known.name: self._kafka.configs(settings, topic)}))
        record = known.record
        await self._write([_record(topic, record.epoch, record.id, settings, record.first)])
        if self.topics.get(topic) is not known:
            # Another node has deleted it meanwhile.
            raise unknown(topic)

    # Changes by other programs

    def _look(self) -> None:
        """Find topics that another program deleted or recreated."""
        now_s = self._link.loop.time()
        if self._registry.name not in self._link.partitions:
            # A broker that has just started does not know the topics yet.
            return
        for name in self._hidden:
            self._repair(self._records[name])
        for topic in list(self.topics.values()):
            record = topic.record
            state = self._link.partitions.get(topic.name)
            if state is None:
                topic.missing_since_s = topic.missing_since_s or now_s
                if now_s - topic.missing_since_s > MISSING_S:
                    gone = TopicRecord(topic.topic, record.epoch, record.id, deleted=True)
                    self._repair(gone, topic)
                continue
            topic.missing_since_s = 0.0
            shown = state.topic_id.hex()
            # A broker that lags behind shows an id that the topic had earlier.
            if shown not in self._ids[topic.topic]:
                # Every node that sees it writes the same record.
                self._repair(_record(topic.topic, topic.epoch + 1, shown, record.settings), topic)

    def _repair(self, record: TopicRecord, shown: KafkaTopic | None = None) -> None:
        """Write a record, if all brokers agree with what one of them reported of a topic."""
        if record.topic not in self._repairing:
            self._repairing.add(record.topic)
            self._link.start(self._write_repaired(record, shown))

    async def _write_repaired(self, record: TopicRecord, shown: KafkaTopic | None) -> None:
        try:
            expected = "" if record.deleted else record.id
            if shown is None or await self._ids_at_brokers(shown.name) == {expected}:
                if shown is not None and not record.deleted:
                    await self._strengthen(shown)
                await self._write([record])
        except (PolybusError, *LINK_ERRORS):
            # The next check of Kafka's topics finds it again.
            pass
        finally:
            self._repairing.discard(record.topic)

    async def _strengthen(self, topic: KafkaTopic) -> None:
        """Correct the settings of a topic that another program has recreated, as far as possible.

        It stays a topic of the bus: readers and publishers use it already.
        """
        try:
            configs = self._kafka.configs(topic.record.settings, topic.topic)
            raise_first(await self._kafka.adopt({topic.name: configs}))
        except PolybusError as error:
            logger.warning("receipts of topic %r have a weaker guarantee: %s", topic.topic, error)

    async def _ids_at_brokers(self, name: str) -> set[str]:
        """The ids under which the brokers show a Kafka topic; "" if one does not show it.

        Raises one of LINK_ERRORS if not all of them answer.
        """
        found = set()
        for broker in self._link.broker_ids:
            answer = await self._link.send(broker, TopicsRequest([name]), ADMIN)
            state = states_of(answer).get(name)
            found.add("" if state is None else state.topic_id.hex())
        return found


def _record(
    topic: str, epoch: int, topic_id: str, settings: TopicSettings, first: int = 0
) -> TopicRecord:
    return TopicRecord(
        topic,
        epoch,
        topic_id,
        first=first,
        retention_age_s=settings.retention_age_s,
        retention_bytes=settings.retention_bytes,
    )
