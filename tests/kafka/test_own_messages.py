"""What nodes have published themselves, over real brokers: one order, with all of each message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from polybus.batch import Batch
from polybus.log.kafka import record_batch
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.registry import KafkaOptions
from polybus.testing.kafka import KafkaBrokers

pytestmark = pytest.mark.slow
OpenKafka = Callable[..., KafkaLog]


@pytest.fixture
def open_kafka(brokers: KafkaBrokers, prefix: str) -> Iterator[OpenKafka]:
    """Opens the logs of several nodes of one bus; they are closed at the end."""
    logs: list[KafkaLog] = []

    def open_it(node: str, **options: Any) -> KafkaLog:
        found = KafkaOptions(node=node, prefix=prefix, **options)
        clock = lambda: time.time_ns() // 1000  # noqa: E731
        logs.append(KafkaLog(brokers.url, options=found, clock=clock))
        return logs[-1]

    yield open_it
    for log in logs:
        log.close()


def message(sender: str, number: int) -> Batch:
    text = b"%s-%d" % (sender.encode(), number)
    batch = Batch.of("t", [text, text + b"!"], keys=[b"k", None], headers=[{"h": b"v"}, None])
    batch.sender, batch.protocol = sender, "boson"
    return batch


def everything(log: KafkaLog, topic: str = "t") -> list[tuple[Any, ...]]:
    """All of each message, with its place."""
    log.catch_up(topic)
    bounds = log.bounds(topic)
    found: list[tuple[Any, ...]] = []
    offset = bounds.start
    while offset < bounds.stop:
        batches = log.read(topic, offset)
        if not batches:
            break
        for batch in batches:
            count = len(batch)
            keys, headers = batch.keys or [None] * count, batch.headers or [None] * count
            offset = batch.last_offset + 1
            found += [
                (batch.first_offset + at, value, keys[at], headers[at] or None, *about(batch))
                for at, value in enumerate(batch.values())
            ]
    return found


def about(batch: Batch) -> tuple[Any, ...]:
    return batch.epoch, batch.timestamp_us, batch.sender, batch.protocol


def test_messages_of_two_nodes_and_of_transactions_have_one_order_everywhere(
    open_kafka: OpenKafka,
) -> None:
    a, b = open_kafka("a"), open_kafka("b")
    a.create_topic("t")
    b.catch_up("t", a.bounds("t").epoch)

    def publish(log: KafkaLog, sender: str) -> None:
        for number in range(150):
            log.append(message(sender, number))
            if number % 7 == 0:
                log.sync()
        log.sync()

    def commit(log: KafkaLog, sender: str) -> None:
        for number in range(6):
            transaction = log.begin(sender)
            transaction.append([message(sender, number)])
            if number % 2:
                transaction.abort()
            else:
                transaction.commit()

    with ThreadPoolExecutor(4) as threads:
        work = [
            threads.submit(publish, a, "of a"),
            threads.submit(publish, b, "of b"),
            threads.submit(commit, a, "of the producer a"),
            threads.submit(commit, b, "of the producer b"),
        ]
        for one in work:
            one.result(120)
    shown = everything(a)
    assert shown == everything(b) == everything(open_kafka("c"))
    for sender, count in (("of a", 150), ("of b", 150)):
        texts = [text for _, text, *_, who, _ in shown if who == sender]
        wanted = [list(message(sender, number).values()) for number in range(count)]
        assert texts == [text for pair in wanted for text in pair]
    for sender in ("of the producer a", "of the producer b"):
        texts = [text for _, text, *_, who, _ in shown if who == sender]
        assert texts[::2] == [b"%s-%d" % (sender.encode(), number) for number in (0, 2, 4)]


def test_a_node_does_not_decode_what_it_has_published(
    open_kafka: OpenKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_kafka("a")
    log.create_topic("t")
    decoded: list[str] = []
    original = record_batch._messages

    def noting(topic: str, *given: Any) -> list[Batch]:
        decoded.append(topic)
        return original(topic, *given)

    monkeypatch.setattr(record_batch, "_messages", noting)
    for number in range(30):
        log.append(message("of a", number))
        log.sync()
    # A fetch may be answered just before the publish is.
    assert decoded.count("t") <= 15
    assert [text for _, text, *_ in everything(log)][::2] == [b"of a-%d" % n for n in range(30)]


def test_a_topic_with_the_times_of_its_leader_has_them_at_the_node_that_published(
    open_kafka: OpenKafka, brokers: KafkaBrokers, prefix: str
) -> None:
    admin = AdminClient({"bootstrap.servers": ",".join(brokers.addresses)})
    config = {"message.timestamp.type": "LogAppendTime"}
    name = f"{prefix}t"
    made = NewTopic(name, num_partitions=1, replication_factor=3, config=config)
    admin.create_topics([made])[name].result(30)
    log = open_kafka("a")
    log.create_topic("t")
    for number in range(5):
        batch = message("of a", number)
        batch.timestamp_us = 1_000_000
        log.append(batch)
        log.sync()
    shown = everything(log)
    assert len(shown) == 10
    assert all(time_us > 1_000_000 for *_, time_us, _, _ in shown)
    assert shown == everything(open_kafka("b"))
