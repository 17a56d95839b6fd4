"""confluent-kafka, Kafka's own client for Python, with the same brokers; and reading a whole topic.

Its producer waits for the same replicas as a receipt does (acks=all, idempotent, LZ4), and sends
records like those of a node: with the same two headers, and with payloads that differ as those of
the generator do. Reading begins at the first message, at a node that has nothing of the topic in
memory.
"""

import base64
import importlib.util
import itertools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from polybus.bench import BenchError
from polybus.bench.brokers import HOST
from polybus.bench.cluster import starting
from polybus.bench.measure import DEADLINE_EXTRA_S, Bench
from polybus.bench.report import NOT_INSTALLED, BenchFigure, Target, medians
from polybus.log.kafka.kafka_names import kafka_name
from polybus.testing.kafka import KafkaBrokers
from polybus.wire import boson_frames

WHO = "confluent-kafka"
MISSING = f"{NOT_INSTALLED}: pip install confluent-kafka"
TOPIC = "bench.0000"
PAYLOAD_BYTES = 100
PAYLOADS = 4096
"""As many as the generator has: LZ4 finds none of them twice in its window."""
HEADERS = [("protocol", b"boson"), ("sender", b"bench")]
BLOCK = 10_000
READ_BYTES = 1 << 20
READ_RATE_MIN = 3e6
READ_RATIO = 5.0
FILL_TIMEOUT_S = 120.0
PRODUCER = {
    "acks": "all",
    "enable.idempotence": True,
    "compression.type": "lz4",
    "linger.ms": 5,
    "queue.buffering.max.messages": 1_000_000,
}


def is_installed() -> bool:
    return importlib.util.find_spec("confluent_kafka") is not None


def measure_producing(
    bench: Bench, brokers: KafkaBrokers, tell: Callable[[str], None], *, like: BenchFigure
) -> BenchFigure:
    """Messages per second that its producer got acknowledged, for the work of another figure."""
    value = None
    if is_installed():
        runs = {WHO: partial(_produce, brokers, bench.run_s)}
        value = medians(runs, bench.rounds, tell, work="acknowledged publishes")[WHO]
    error = None if value else MISSING
    return replace(like, who=WHO, value=value, target=None, error=error)


def _produce(brokers: KafkaBrokers, run_s: float) -> float:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    servers = ",".join(brokers.addresses)
    name = kafka_name(TOPIC, starting.new_prefix())
    replicas, config = min(3, brokers.count), {"min.insync.replicas": str(min(2, brokers.count))}
    admin = AdminClient({"bootstrap.servers": servers})
    made = admin.create_topics([NewTopic(name, 1, replication_factor=replicas, config=config)])
    made[name].result(FILL_TIMEOUT_S)
    acknowledged = 0

    def count(error: Any, _: Any) -> None:
        nonlocal acknowledged
        if error is not None:
            raise BenchError(f"confluent-kafka failed: {error}")
        acknowledged += 1

    producer = Producer({"bootstrap.servers": servers, **PRODUCER})
    values = itertools.cycle([_payload() for _ in range(PAYLOADS)])
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < run_s:
        for value in itertools.islice(values, 1000):
            try:
                producer.produce(name, value, headers=HEADERS, on_delivery=count)
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush(FILL_TIMEOUT_S)
    return acknowledged / (time.perf_counter() - began_s)


def measure_reading(
    bench: Bench, brokers: KafkaBrokers, messages: int, tell: Callable[[str], None]
) -> list[BenchFigure]:
    """Messages per second of a topic that is read from its first message."""
    messages -= messages % BLOCK
    with starting.running_nodes(bench, brokers, [TOPIC]) as ((writer,), prefix):
        tell(f"writing {messages:,} messages to read")
        _fill(writer.port, messages)
        with starting.another_node(bench, brokers, prefix, [TOPIC]) as reader:
            runs: dict[str, Callable[[], float]] = {
                "polybus, one node": partial(_read, reader.port, messages)
            }
            if is_installed():
                runs[WHO] = partial(_consume, brokers, kafka_name(TOPIC, prefix), messages)
            rates = medians(runs, bench.rounds, tell, work="reading")
    (own, ours), *others = rates.items()
    scenario, work = "cluster-read", f"reading {messages:,} messages"
    least = Target(value=READ_RATE_MIN, at_least=True, absolute=True)
    figure = partial(BenchFigure, scenario=scenario, work=work, unit="messages/s")
    figures = [figure(who=own, value=ours, target=least)]
    ratio = Target(value=READ_RATIO, at_least=True)
    for who, rate in others:
        figures.append(figure(who=who, value=rate, ratio=ours / rate, target=ratio))
    if not others:
        figures.append(figure(who=WHO, value=None, error=MISSING))
    return figures


def run_count(rounds: int) -> int:
    return 1 + rounds * (2 if is_installed() else 1)


def _payload() -> bytes:
    # 64 letters, as those of the generator.
    return base64.b64encode(os.urandom(PAYLOAD_BYTES * 3 // 4))


def _fill(port: int, messages: int) -> None:
    block = bytes(boson_frames.encode_publish(TOPIC, [_payload() for _ in range(BLOCK)]))
    last = bytes(boson_frames.encode_publish(TOPIC, [_payload() for _ in range(BLOCK)], "all"))
    with socket.create_connection((HOST, port), FILL_TIMEOUT_S) as peer:
        for _ in range(messages // BLOCK - 1):
            peer.sendall(block)
        peer.sendall(last)
        if b"$receipt" not in (said := peer.recv(READ_BYTES)):
            raise BenchError(f"the node did not store the messages: {said[:100]!r}")


def _read(port: int, messages: int) -> float:
    frame_bytes = len(bytes(boson_frames.encode_publish(TOPIC, [_payload()])))
    missing = messages * frame_bytes
    room = bytearray(READ_BYTES)
    with socket.create_connection((HOST, port), DEADLINE_EXTRA_S) as peer:
        began_s = time.perf_counter()
        peer.sendall(boson_frames.encode_subscribe({TOPIC: "earliest"}, tell=False))
        while missing > 0:
            found = peer.recv_into(room)
            if not found:
                raise BenchError(f"the node closed the connection {missing:,} bytes too early")
            missing -= found
        taken_s = time.perf_counter() - began_s
    if missing:
        raise BenchError(f"the node sent {-missing:,} bytes more than the topic has")
    return messages / taken_s


def _consume(brokers: KafkaBrokers, name: str, messages: int) -> float:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": ",".join(brokers.addresses), "group.id": "bench"})
    try:
        consumer.assign([TopicPartition(name, 0, 0)])
        read, began_s = 0, time.perf_counter()
        while read < messages:
            found = consumer.consume(BLOCK, timeout=DEADLINE_EXTRA_S)
            if not found or any(one.error() for one in found):
                raise BenchError(f"confluent-kafka read {read:,} of {messages:,} messages")
            read += len(found)
        return messages / (time.perf_counter() - began_s)
    finally:
        consumer.close()
