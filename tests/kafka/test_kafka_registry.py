"""Which records of the registry count, with brokers that are played here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.log.kafka.directory import TopicDirectory
from polybus.log.kafka.link import KafkaLink
from polybus.log.kafka.metadata import PartitionState
from polybus.log.kafka.recent import KafkaTopic
from polybus.log.kafka.registry import KafkaOptions, KafkaTopics, Refusals, TopicRecord

REGISTRY = "Polybus-topics"
OLD, NEW, NEWER = "01" * 16, "02" * 16, "03" * 16


@pytest.mark.parametrize("age_s", [1e10, 1.7e308])
def test_an_age_that_means_forever_is_one_that_kafka_takes(age_s: float) -> None:
    settings = TopicSettings(retention_age_s=age_s)
    configs = KafkaTopics(cast("KafkaLink", None), KafkaOptions(node="n")).configs(settings)
    assert 1e12 < int(configs["retention.ms"]) < 1 << 63


class PlayedLink:
    """Brokers whose metadata a test sets; `written` has what was added to the registry."""

    def __init__(self, brokers: int = 3) -> None:
        self.loop = asyncio.get_running_loop()
        self.broker_ids = list(range(brokers))
        self.shown: dict[int, str] = {}
        self.written: list[TopicRecord] = []
        self.adopted: list[str] = []
        self.partitions: dict[str, PartitionState] = {}
        self.on_refreshed: list[Any] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.show("")

    def show(self, topic_id: str, *brokers: int) -> None:
        """What brokers, or all, show as the id of `t`; the first one is who is asked."""
        for broker in brokers or self.broker_ids:
            self.shown[broker] = topic_id
        self.partitions = {REGISTRY: PartitionState(bytes(16), 0, 1)}
        if self.shown[0]:
            self.partitions["t"] = PartitionState(bytes.fromhex(self.shown[0]), 0, 1)

    def leader_of(self, name: str) -> int:
        return 0

    def stale(self) -> None: ...

    async def refreshed(self, tries: int = 0) -> None:
        await asyncio.sleep(0)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def ask(self, request: Any) -> Any:
        return SimpleNamespace(topic_errors=[(REGISTRY, 36, "exists")])

    async def offsets(self, names: list[str], when: int) -> dict[str, int]:
        return dict.fromkeys(names, 0)

    async def send(self, broker: int, request: Any, group: str) -> Any:
        found = self.shown[broker]
        if not found:
            return SimpleNamespace(topics=[])
        partition: tuple[Any, ...] = (0, 0, 0, 0, [0], [0], [], {})
        return SimpleNamespace(topics=[(0, "t", bytes.fromhex(found), False, [partition], 0, {})])

    async def look(self) -> None:
        """What follows when the brokers' metadata has been asked for."""
        for callback in self.on_refreshed:
            callback()
        while self.tasks:
            await asyncio.gather(*self.tasks)


class Directory:
    """The directory of one node, which records are given to."""

    def __init__(self, link: PlayedLink) -> None:
        self.link = link
        kafka = PlayedTopics(cast(KafkaLink, link), KafkaOptions(node="n"))
        kafka.arrived = self.arrive
        self.changes: list[tuple[str, bool]] = []
        self.directory = TopicDirectory(cast(KafkaLink, link), kafka, self._changed)
        self._hand_on = self.directory.handing_on(lambda *_: None)

    def _changed(self, topic: KafkaTopic, exists: bool) -> None:
        self.changes.append((topic.record.id, exists))

    def arrive(self, *records: TopicRecord) -> None:
        values = [msgspec.json.encode(one) for one in records]
        registry = self.directory.followed[REGISTRY]
        registry.position += len(values)
        self._hand_on(registry, [Batch.of(REGISTRY, values)])

    @property
    def found(self) -> tuple[int, str] | None:
        known = self.directory.topics.get("t")
        return None if known is None else (known.epoch, known.record.id)


class PlayedTopics(KafkaTopics):
    """Stores records in the list of the link, and lets them arrive at once."""

    arrived: Any
    unfit = False

    async def adopt(self, wanted: Mapping[str, dict[str, str]]) -> Refusals:
        cast(PlayedLink, self._link).adopted += wanted
        error = UsageError("cluster.topic", "it has fewer replicas")
        return dict.fromkeys(wanted, error) if self.unfit else {}

    async def write(self, records: Sequence[TopicRecord]) -> int:
        link = cast(PlayedLink, self._link)
        link.written += records
        self.arrived(*records)
        return 0


async def opened(*records: TopicRecord, brokers: int = 3) -> Directory:
    found = Directory(PlayedLink(brokers))
    await found.directory.open()
    found.arrive(*records)
    if records:
        found.link.show(records[-1].id)
    return found


def live(epoch: int, topic_id: str, **more: Any) -> TopicRecord:
    return TopicRecord("t", epoch, topic_id, **more)


def gone(epoch: int, topic_id: str) -> TopicRecord:
    return TopicRecord("t", epoch, topic_id, deleted=True)


@pytest.mark.parametrize(
    ("records", "late", "counted"),
    [
        ([live(5, OLD), gone(5, OLD)], live(5, OLD), None),
        ([live(5, OLD), gone(5, OLD)], live(5, OLD, retention_bytes=9), None),
        ([live(5, OLD), gone(5, OLD), live(6, NEW)], live(5, OLD), (6, NEW)),
        ([live(5, OLD), gone(5, OLD), live(6, NEW)], gone(5, OLD), (6, NEW)),
        ([live(5, OLD), live(5, NEW)], gone(5, OLD), (5, NEW)),
    ],
    ids=["resurrected", "changed", "lower epoch", "deleted again", "deleted of another id"],
)
async def test_a_late_record_does_not_count_and_is_hidden_by_the_one_that_does(
    records: list[TopicRecord], late: TopicRecord, counted: tuple[int, str] | None
) -> None:
    node = await opened(*records)
    node.arrive(late)
    assert node.found == counted
    await node.link.look()
    # Kafka keeps the last record of a topic only: a node that starts later reads this one.
    assert node.link.written == [records[-1]]
    await node.link.look()
    assert node.link.written == [records[-1]]


async def test_a_record_that_arrives_twice_changes_nothing() -> None:
    node = await opened(live(5, OLD), live(5, OLD))
    await node.link.look()
    assert (node.found, node.link.written, node.changes) == ((5, OLD), [], [(OLD, True)])


async def test_the_same_epoch_with_another_id_is_followed_anew() -> None:
    node = await opened(live(5, OLD))
    node.directory.topics["t"].position = 7
    node.arrive(live(5, NEW))
    assert node.found == (5, NEW)
    assert node.directory.topics["t"].position == 0
    assert node.changes == [(OLD, True), (OLD, False), (NEW, True)]


@pytest.mark.parametrize("unfit", [False, True])
async def test_a_topic_that_all_brokers_show_with_a_new_id_gets_the_next_epoch(
    unfit: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PlayedTopics, "unfit", unfit)
    node = await opened(live(5, OLD, retention_bytes=9))
    node.link.show(NEW)
    await node.link.look()
    assert node.link.adopted == ["t"]
    assert ("it has fewer replicas" in caplog.text) == unfit
    assert node.link.written == [live(6, NEW, retention_bytes=9)]
    assert node.found == (6, NEW)


async def test_a_broker_that_lags_behind_changes_no_epoch() -> None:
    node = await opened(live(5, NEW))
    node.link.show(NEWER, 0)
    await node.link.look()
    assert (node.found, node.link.written) == ((5, NEW), [])


async def test_a_topic_never_returns_to_an_id_that_it_had_before() -> None:
    node = await opened(live(5, OLD), gone(5, OLD), live(6, NEW))
    node.link.show(OLD)
    await node.link.look()
    assert (node.found, node.link.written) == ((6, NEW), [])


class MakingLink(PlayedLink):
    """Creates Kafka topics, which get an id each; `requests` has the names in each request."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[list[str]] = []
        self.looks = 0

    def make(self, name: str) -> None:
        number = len(self.partitions)
        self.partitions[name] = PartitionState(number.to_bytes(16), 0, 3, 3)

    async def ask(self, request: Any) -> Any:
        asked = [name for name, *_ in request.create_topic_requests]
        errors = [(name, 36 if name in self.partitions else 0, "") for name in asked]
        for name in asked:
            if name not in self.partitions:
                self.make(name)
        if REGISTRY not in asked:
            self.requests.append(asked)
        return SimpleNamespace(topic_errors=errors)

    async def refreshed(self, tries: int = 0) -> None:
        self.looks += 1
        await super().refreshed()


async def test_a_thousand_topics_are_created_with_few_requests() -> None:
    link = MakingLink()
    node = Directory(link)
    await node.directory.open()
    # A node that died before it wrote the records has left these.
    left = [f"t{number}" for number in range(100)]
    for name in left:
        link.make(name)
    wanted = {f"t{number}": TopicSettings() for number in range(1200)}
    created = await node.directory.create(wanted)
    assert created.keys() == wanted.keys() == node.directory.topics.keys()
    assert [len(asked) for asked in link.requests] == [1000, 200]
    assert sorted(link.adopted) == sorted(left)
    assert link.looks <= 2
    ids = {record.id for record in link.written}
    assert len(ids) == len(link.written) == 1200


async def test_topics_that_another_node_has_created_meanwhile_are_left_to_it() -> None:
    link = MakingLink()
    node = Directory(link)
    await node.directory.open()
    link.make("t")
    node.arrive(live(5, link.partitions["t"].topic_id.hex()))
    created = await node.directory.create({"t": TopicSettings(), "u": TopicSettings()})
    assert list(created) == ["u"]
    assert [record.topic for record in link.written] == ["u"]


async def test_a_topic_without_a_leader_does_not_keep_others_from_being_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polybus.log.kafka.registry.ANSWER_TIMEOUT_S", 0.2)
    link = MakingLink()
    node = Directory(link)
    await node.directory.open()
    link.make("t")
    link.partitions["t"] = replace(link.partitions["t"], leader=None)
    with pytest.raises(StorageError, match="no leader of the topic t ") as caught:
        await node.directory.create({name: TopicSettings() for name in ("s", "t", "u")})
    assert caught.value.code == "log.unreachable"
    assert node.directory.topics.keys() == {"s", "u"}


async def test_a_topic_that_others_delete_again_and_again_does_not_hide_other_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = MakingLink()
    node = Directory(link)
    await node.directory.open()
    write = PlayedTopics.write

    async def write_and_lose(kafka: PlayedTopics, records: Sequence[TopicRecord]) -> int:
        await write(kafka, records)
        for one in records:
            if one.topic == "t":
                node.arrive(gone(one.epoch, one.id))
                del link.partitions["t"]
                # So that the next one has another id.
                link.make(f"other-{len(link.partitions)}")
        return 0

    monkeypatch.setattr(PlayedTopics, "write", write_and_lose)
    with pytest.raises(UsageError, match="1 more are refused"):
        await node.directory.create({one: TopicSettings() for one in ("/" * 100, "t", "u")})
    assert node.directory.topics.keys() == {"u"}
