"""Topics in Kafka and in the registry, over real brokers: deletions, imports, foreign topics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster_kit import until
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from polybus.batch import Batch
from polybus.errors import UsageError
from polybus.log.cluster_location import ClusterLocation
from polybus.log.interface import Bounds, TopicSettings
from polybus.log.kafka import filling
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.reader import ClusterReader, close_links
from polybus.log.kafka.registry import KafkaOptions, KafkaTopics
from polybus.testing.kafka import KafkaBrokers

pytestmark = pytest.mark.slow
OpenKafka = Callable[..., KafkaLog]
EPOCH = 1 << 42


@pytest.fixture
def open_kafka(brokers: KafkaBrokers, prefix: str) -> Iterator[OpenKafka]:
    """Opens the logs of several nodes of one bus; they are closed at the end."""
    logs: list[KafkaLog] = []

    def open_it(**options: Any) -> KafkaLog:
        found = KafkaOptions(node="n", prefix=prefix, **options)
        clock = lambda: time.time_ns() // 1000  # noqa: E731
        logs.append(KafkaLog(brokers.url, options=found, clock=clock))
        return logs[-1]

    yield open_it
    for log in logs:
        log.close()


def append(log: KafkaLog, topic: str, *values: bytes) -> None:
    log.append(Batch.of(topic, values))
    log.sync()


def values_of(log: KafkaLog, topic: str) -> list[bytes]:
    bounds = log.bounds(topic)
    found = log.read(topic, bounds.start) if bounds.stop > bounds.start else []
    return [value for batch in found for value in batch.values()]


class Crash(Exception):
    """The process dies."""


class Writes:
    """All that is written to Kafka for a topic; dies before a write of a number."""

    def __init__(self, patched: pytest.MonkeyPatch, crash_at: int = -1) -> None:
        self.done: list[str] = []
        self._crash_at = crash_at
        for name in ("make", "produce", "discard", "remove"):
            patched.setattr(KafkaTopics, name, self._around(name, getattr(KafkaTopics, name)))

    def _around(self, name: str, write: Any) -> Any:
        async def crashing(*arguments: Any) -> Any:
            if len(self.done) == self._crash_at:
                raise Crash
            self.done.append(name)
            return await write(*arguments)

        return crashing


# Creating many


def test_hundreds_of_topics_are_created_in_seconds_also_by_two_nodes_at_once(
    open_kafka: OpenKafka,
) -> None:
    nodes = [open_kafka(replicas=1, insync_min=1) for _ in range(2)]
    wanted = {f"t{number}": TopicSettings() for number in range(300)}
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(node.create_topics, wanted) for node in nodes]:
            with contextlib.suppress(UsageError):
                # The other one was so much faster that they already exist.
                one.result(60)
    assert time.monotonic() - began_s < 30
    for node in nodes:
        until(lambda: set(node.topics()) == wanted.keys())  # noqa: B023
    epochs = {node.bounds(topic).epoch for node in nodes for topic in wanted}
    assert len(epochs) == 1
    for topic in ("t0", "t299"):
        append(nodes[0], topic, b"x")
        nodes[1].catch_up(topic)
        assert values_of(nodes[1], topic) == [b"x"]
    with pytest.raises(UsageError) as caught:
        nodes[0].create_topics({"t7": TopicSettings()})
    assert caught.value.code == "topic.exists"


# Deletions


def test_a_deletion_that_arrives_late_spares_the_topic_that_was_created_meanwhile(
    open_kafka: OpenKafka, prefix: str
) -> None:
    a, b = open_kafka(), open_kafka()
    a.create_topic("t")
    old_id = a.topic("t").record.id
    a.delete_topic("t")
    b.create_topic("t")
    append(b, "t", b"kept")
    # The answer to the first request was lost, so it is sent again.
    a.link.run(KafkaTopics(a.link, a._options).remove(f"{prefix}t", old_id))
    a.catch_up("t")
    assert values_of(a, "t") == [b"kept"]


def test_a_record_that_arrives_late_brings_no_deleted_topic_back(
    open_kafka: OpenKafka, brokers: KafkaBrokers, prefix: str
) -> None:
    a, b = open_kafka(), open_kafka()
    a.create_topic("t")
    record = a.topic("t").record
    until(lambda: "t" in b.topics())
    b.delete_topic("t")
    reader = ClusterReader(ClusterLocation(log=brokers.url, prefix=prefix))
    try:
        # The answer to the creation was lost, so its record is sent again.
        a.link.run(KafkaTopics(a.link, a._options).write([record]))
        a.create_topic("other")
        b.catch_up("other")
        assert "t" not in a.topics() and "t" not in b.topics()
        assert reader.topics() == ["other"]
        assert b.create_topic("t").epoch == record.epoch + 1
    finally:
        close_links()


def test_two_nodes_that_create_a_topic_after_half_a_deletion_agree(
    open_kafka: OpenKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_kafka(), open_kafka()
    a.create_topic("t")
    append(a, "t", b"old")
    old = a.bounds("t").epoch
    with monkeypatch.context() as patched, pytest.raises(Crash):
        Writes(patched, 1)
        a.delete_topic("t")
    a.create_topic("t")
    append(a, "t", b"new")
    with pytest.raises(UsageError) as caught:
        b.create_topic("t")
    assert caught.value.code == "topic.exists"
    b.catch_up("t")
    assert values_of(b, "t") == values_of(a, "t") == [b"new"]
    assert a.bounds("t").epoch == b.bounds("t").epoch == old + 1


# Imports


def positions(
    open_kafka: OpenKafka, patch: pytest.MonkeyPatch, start: int
) -> Iterator[tuple[KafkaLog, str, list[str]]]:
    """A topic for each write before which its import died; the last one is complete."""
    patch.setattr(filling, "FILL_COUNT", 2)
    log = open_kafka(replicas=1, insync_min=1)
    for position in range(20):
        topic = f"t{position}"
        with patch.context() as patched:
            writes = Writes(patched, position)
            with contextlib.suppress(Crash):
                log.import_topic(topic, TopicSettings(), Bounds(EPOCH, start, start))
        yield log, topic, writes.done
        if len(writes.done) < position:
            return
    pytest.fail("the import does not end")


EXPECTED = ["make", "produce", "produce", "produce", "discard", "produce"]
"""A record, the empty messages in two parts, their removal, and the record that counts."""


def test_an_import_that_was_killed_at_any_write_is_done_again(
    open_kafka: OpenKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    for log, topic, done in positions(open_kafka, monkeypatch, 3):  # noqa: B007
        if topic not in log.topics():
            log.import_topic(topic, TopicSettings(), Bounds(EPOCH, 3, 3))
        append(log, topic, b"first")
        assert log.bounds(topic) == Bounds(EPOCH, 3, 4), topic
        assert values_of(log, topic) == [b"first"], topic
    assert done == EXPECTED


def test_a_topic_created_after_an_import_that_was_killed_has_no_empty_messages(
    open_kafka: OpenKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = open_kafka(replicas=1, insync_min=1).create_topic("reference").epoch
    for log, topic, done in positions(open_kafka, monkeypatch, 3):
        if done == EXPECTED:
            continue
        log.create_topic(topic)
        append(log, topic, b"first")
        # The epochs of a cluster begin where those of no other do.
        assert log.bounds(topic) == Bounds(reference, 0, 1), topic
        assert values_of(log, topic) == [b"first"], topic


# Topics of other programs


@pytest.fixture
def admin(brokers: KafkaBrokers) -> AdminClient:
    return AdminClient({"bootstrap.servers": ",".join(brokers.addresses)})


def make_foreign(admin: AdminClient, name: str, **about: Any) -> None:
    made = NewTopic(
        name,
        num_partitions=about.get("partitions", 1),
        replication_factor=about.get("replicas", 3),
        config=about.get("config", {}),
    )
    admin.create_topics([made])[name].result(30)


def produce_foreign(brokers: KafkaBrokers, name: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": ",".join(brokers.addresses)})
    for value in values:
        producer.produce(name, value)
    assert producer.flush(30) == 0


def test_an_import_leaves_the_messages_of_another_program_alone(
    open_kafka: OpenKafka, brokers: KafkaBrokers, admin: AdminClient, prefix: str
) -> None:
    log = open_kafka(replicas=1, insync_min=1)
    make_foreign(admin, f"{prefix}t", replicas=1)
    produce_foreign(brokers, f"{prefix}t", *[b"theirs"] * 5)
    with pytest.raises(UsageError) as caught:
        log.import_topic("t", TopicSettings(), Bounds(EPOCH, 250, 250))
    assert caught.value.code == "topic.exists"
    log.create_topic("t")
    log.catch_up("t")
    found = log.read("t", 0)
    assert [value for batch in found for value in batch.values()] == [b"theirs"] * 5


def test_an_import_stops_when_another_program_writes_to_its_topic(
    open_kafka: OpenKafka,
    brokers: KafkaBrokers,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = open_kafka(replicas=1, insync_min=1)
    monkeypatch.setattr(filling, "FILL_COUNT", 2)
    original = KafkaTopics.produce

    async def beside(self: KafkaTopics, name: str, data: bytes) -> int:
        offset = await original(self, name, data)
        if name == f"{prefix}t" and offset == 0:
            await log.link.loop.run_in_executor(None, produce_foreign, brokers, name, b"theirs")
        return offset

    monkeypatch.setattr(KafkaTopics, "produce", beside)
    discarded: list[str] = []
    monkeypatch.setattr(KafkaTopics, "discard", lambda *given: discarded.append("all"))
    with pytest.raises(UsageError) as caught:
        log.import_topic("t", TopicSettings(), Bounds(EPOCH, 6, 6))
    assert (caught.value.code, discarded) == ("topic.exists", [])
    assert "t" not in log.topics()


def configs_of(admin: AdminClient, name: str) -> dict[str, str]:
    wanted = ConfigResource(ResourceType.TOPIC, name)
    found = admin.describe_configs([wanted])[wanted].result(30)
    return {key: entry.value for key, entry in found.items()}


def test_weak_settings_of_a_topic_that_becomes_one_of_the_bus_are_corrected(
    open_kafka: OpenKafka, admin: AdminClient, prefix: str
) -> None:
    log = open_kafka()
    config = {"min.insync.replicas": "1", "retention.ms": "7200000"}
    make_foreign(admin, f"{prefix}t", config=config)
    log.create_topic("t")
    found = configs_of(admin, f"{prefix}t")
    assert found["min.insync.replicas"] == "2"
    assert int(found["max.message.bytes"]) > 64 << 20
    assert found["retention.ms"] == "7200000"
    append(log, "t", b"x" * (2 << 20))


@pytest.mark.parametrize(
    ("about", "advice"),
    [({"partitions": 2}, "another name"), ({"replicas": 1}, "kafka-reassign-partitions")],
)
def test_a_topic_that_cannot_keep_the_promises_of_the_bus_is_refused(
    open_kafka: OpenKafka, admin: AdminClient, prefix: str, about: dict[str, Any], advice: str
) -> None:
    log = open_kafka()
    make_foreign(admin, f"{prefix}t", **about)
    with pytest.raises(UsageError, match=advice) as caught:
        log.create_topic("t")
    assert caught.value.code == "cluster.topic"
    assert "t" not in log.topics()


def test_a_topic_that_another_program_recreates_has_the_next_epoch_and_strong_settings(
    open_kafka: OpenKafka, brokers: KafkaBrokers, admin: AdminClient, prefix: str
) -> None:
    log = open_kafka()
    epoch = log.create_topic("t").epoch
    append(log, "t", b"old")
    admin.delete_topics([f"{prefix}t"])[f"{prefix}t"].result(30)
    make_foreign(admin, f"{prefix}t", config={"min.insync.replicas": "1"})
    produce_foreign(brokers, f"{prefix}t", b"new")
    deadline = time.monotonic() + 60
    while log.bounds("t").epoch == epoch:
        assert time.monotonic() < deadline, "no node has seen it"
        time.sleep(0.05)
    log.catch_up("t")
    assert log.bounds("t").epoch == epoch + 1
    assert values_of(log, "t") == [b"new"]
    assert configs_of(admin, f"{prefix}t")["min.insync.replicas"] == "2"


@pytest.mark.parametrize("bad", ["a_b", "wide", "é" * 100])
def test_one_topic_that_kafka_refuses_does_not_stop_the_others(
    open_kafka: OpenKafka, admin: AdminClient, prefix: str, bad: str
) -> None:
    """`a_b` collides with `a.b` in Kafka, `wide` has two partitions, and a name may be too long."""
    make_foreign(admin, f"{prefix}wide", partitions=2)
    log = open_kafka()
    log.create_topic("a.b")
    wanted = dict.fromkeys(("c", bad, "z"), TopicSettings())
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            log.create_topics({one: wanted[one] for one in wanted.keys() - set(log.topics())})
        assert caught.value.code == ("cluster.topic" if bad == "wide" else "topic.invalid")
        assert "more" not in caught.value.text
        assert sorted(log.topics()) == ["a.b", "c", "z"]
    append(log, "z", b"1")
    assert values_of(log, "z") == [b"1"]
    with pytest.raises(UsageError, match="and 1 more are refused"):
        log.create_topics(dict.fromkeys(("wide", "a_b"), TopicSettings()))
