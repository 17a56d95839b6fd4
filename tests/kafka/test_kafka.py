"""Kafka under the log, over three real brokers: one file, so that all tests share them.

Each test has topics of its own, by a prefix of their Kafka names.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from cluster_kit import until
from confluent_kafka import Consumer, Producer

import polybus
from polybus.batch import Batch
from polybus.cli.cluster import cluster
from polybus.client import Message, Subscription
from polybus.edges.node import Node
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.cluster_location import ClusterLocation
from polybus.log.interface import Log, LogCallbacks, TopicSettings
from polybus.log.kafka.following import fetch_at
from polybus.log.kafka.kafka_names import kafka_name
from polybus.log.kafka.link import KafkaLink
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.metadata import TopicsRequest
from polybus.log.kafka.reader import ClusterReader, close_links
from polybus.log.kafka.registry import KafkaOptions
from polybus.spark.location import BusLocation
from polybus.spark.origin import RemoteLog
from polybus.testing import ScriptedPeer, run_bus
from polybus.testing.kafka import KafkaBrokers

sys.path.insert(0, str(Path(__file__).parents[1] / "log"))

from log_contract import LogContract, OpenLog, numbered, values_from

pytestmark = pytest.mark.slow
OpenKafka = Callable[..., KafkaLog]


def clock_us() -> int:
    return time.time_ns() // 1000


@pytest.fixture
def open_kafka(brokers: KafkaBrokers, prefix: str) -> Iterator[OpenKafka]:
    """Opens the logs of several nodes of one bus; they are closed at the end."""
    logs: list[KafkaLog] = []

    def open_it(node: str = "n", **options: Any) -> KafkaLog:
        found = KafkaOptions(node=node, prefix=prefix, **options)
        logs.append(KafkaLog(brokers.url, options=found, clock=clock_us))
        return logs[-1]

    yield open_it
    for log in logs:
        log.close()


class TestKafkaLog(LogContract):
    """The promises of every log."""

    @pytest.fixture
    def open_log(self, brokers: KafkaBrokers, prefix: str, callbacks: LogCallbacks) -> OpenLog:
        options = KafkaOptions(node="n", prefix=prefix)
        return lambda: KafkaLog(brokers.url, options=options, clock=clock_us, callbacks=callbacks)


# The log of several nodes


def test_two_nodes_show_one_order_and_topics_of_each_other(open_kafka: OpenKafka) -> None:
    a, b = open_kafka("a"), open_kafka("b")
    epoch = a.create_topic("t").epoch
    assert until(lambda: "t" in b.topics()) < 2
    for number in range(100):
        (a if number % 2 else b).append(numbered("t", 3 * number, 3))
    a.sync()
    b.sync()
    a.catch_up("t")
    b.catch_up("t")
    assert values_from(a, "t", 0) == values_from(b, "t", 0)
    assert len(values_from(a, "t", 0)) == 300
    assert b.bounds("t").epoch == epoch


def test_a_recreated_topic_has_a_new_epoch_on_every_node(open_kafka: OpenKafka) -> None:
    a, b = open_kafka("a"), open_kafka("b")
    old = a.create_topic("t").epoch
    a.append(numbered("t", 0, 5))
    a.sync()
    b.delete_topic("t")
    assert until(lambda: "t" not in a.topics()) < 2
    with pytest.raises(UsageError, match="t"):
        a.append(numbered("t", 0, 1))
    new = b.create_topic("t").epoch
    until(lambda: "t" in a.topics())
    assert a.bounds("t").epoch == b.bounds("t").epoch == new > old
    assert a.bounds("t").stop == 0


def test_only_one_of_two_nodes_creates_a_topic(open_kafka: OpenKafka) -> None:
    a, b = open_kafka("a"), open_kafka("b")
    a.create_topic("t")
    until(lambda: "t" in b.topics())
    with pytest.raises(UsageError) as caught:
        b.create_topic("t")
    assert caught.value.code == "topic.exists"


def test_messages_that_left_memory_are_read_from_the_brokers(open_kafka: OpenKafka) -> None:
    log = open_kafka(recent_bytes_max=10_000)
    log.create_topic("t")
    for number in range(50):
        log.append(numbered("t", 100 * number, 100))
        log.sync()
    assert log.read_recent("t", 0) is None
    assert values_from(log, "t", 0, bytes_max=5_000) == [b"t-%d" % n for n in range(5000)]


def test_messages_that_are_read_in_pieces_are_fetched_once(
    open_kafka: OpenKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []

    def counted(link: Any, one: Any, offset: int, *given: Any) -> Any:
        fetched.append(offset)
        return fetch_at(link, one, offset, *given)

    monkeypatch.setattr("polybus.log.kafka.log.fetch_at", counted)
    log = open_kafka(recent_bytes_max=10_000)
    log.create_topics({"t": TopicSettings(), "u": TopicSettings()})
    for first in (0, 5000):
        log.append(numbered("t", first, 5000))
        log.sync()
    log.append(numbered("u", 0, 5000))
    log.sync()
    assert log.read_recent("t", 0) is None
    assert values_from(log, "t", 0, bytes_max=5_000) == [b"t-%d" % n for n in range(10000)]
    assert len(fetched) <= 2


def test_whoever_reads_on_has_the_next_fetch_begun_and_one_that_failed_is_repeated(
    open_kafka: OpenKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    failing: list[int] = []

    async def one_record_batch(link: Any, one: Any, offset: int, stop: int, *_: Any) -> Any:
        fetched.append(offset)
        if offset in failing:
            failing.remove(offset)
            raise StorageError("log.unreachable", "the leader is gone")
        found = await fetch_at(link, one, offset, stop, 1)
        return found[:1]

    monkeypatch.setattr("polybus.log.kafka.log.fetch_at", one_record_batch)
    log = open_kafka(recent_bytes_max=1000)
    log.create_topics({"t": TopicSettings(), "u": TopicSettings()})
    for first in range(0, 400, 100):
        log.append(numbered("t", first, 100))
        log.sync()
    log.append(numbered("u", 0, 100))
    log.sync()
    read = partial(log.read, "t", bytes_max=300)
    (piece,) = read(0)
    assert fetched == [0], "a reader of one piece fetches no more"
    read(piece.last_offset + 1)
    until(lambda: fetched == [0, 100])
    failing.append(200)
    assert values_from(log, "t", 0, bytes_max=300) == [b"t-%d" % n for n in range(400)]
    assert failing == [] and fetched.count(200) == 2
    assert log.read("t", 400) == []


@pytest.mark.parametrize("step", ["created", "deleted"])
def test_a_crash_between_the_two_writes_of_a_topic_is_repaired_by_creating_it(
    open_kafka: OpenKafka, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry module has the order of writes."""
    from polybus.log.kafka import registry

    class Crash(Exception):
        pass

    async def crash(*_: object) -> None:
        raise Crash

    log = open_kafka("a")
    if step == "deleted":
        log.create_topic("t")
        log.append(numbered("t", 0, 3))
        log.sync()
    name = "write" if step == "created" else "remove"
    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(registry.KafkaTopics, name, crash)
        if step == "created":
            log.create_topic("t")
        else:
            log.delete_topic("t")
    other = open_kafka("b")
    assert "t" not in other.topics()
    assert other.create_topic("t").stop == 0
    other.append(numbered("t", 0, 1))
    other.sync()
    assert values_from(other, "t", other.bounds("t").start) == [b"t-0"]


@pytest.fixture
def link(brokers: KafkaBrokers) -> Iterator[KafkaLink]:
    found = KafkaLink(brokers.url.removeprefix("kafka://").split(","), client_id="t")
    found.open()
    yield found
    found.stop()


def test_a_connection_that_its_broker_ended_is_closed_before_the_next_is_opened(
    link: KafkaLink,
) -> None:
    async def ask_twice() -> tuple[bool, bool]:
        broker = link.broker_ids[0]
        await link.send(broker, TopicsRequest(None), "t")
        old = link._client._conns[broker, "t"]
        transport = old._writer.transport
        # The end has arrived, and the task that reads has not run since.
        old._reader.feed_eof()
        await link.send(broker, TopicsRequest(None), "t")
        return transport.is_closing(), link._client._conns[broker, "t"] is old

    assert link.run(ask_twice()) == (True, False)


def test_what_another_thread_waits_for_ends_with_the_link(link: KafkaLink) -> None:
    has_begun = threading.Event()

    async def never() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(link.run, never())
        assert has_begun.wait(20)
        link.stop()
        with pytest.raises(StorageError) as found:
            waiting.result(20)
    assert found.value.code == "log.closed"


def test_brokers_that_do_not_answer_are_a_clear_error() -> None:
    with pytest.raises(StorageError) as caught:
        KafkaLog("kafka://127.0.0.1:1", options=KafkaOptions(node="n"), clock=clock_us)
    assert caught.value.code == "log.unreachable"


# Other Kafka programs


def test_another_kafka_program_reads_our_messages_with_headers_and_key(
    open_kafka: OpenKafka, brokers: KafkaBrokers, prefix: str
) -> None:
    log = open_kafka()
    log.create_topic("a/ü")
    batch = Batch.of("a/ü", [b"1", b"2" * 2000], keys=[b"k", None], headers=[{"h": b"v"}, None])
    batch.protocol, batch.sender = "goms", "10.0.0.1:9"
    log.append(batch)
    log.sync()
    consumer = Consumer(
        {
            "bootstrap.servers": ",".join(brokers.addresses),
            "group.id": prefix,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([kafka_name("a/ü", prefix)])
    try:
        found = consumer.consume(2, 30)
    finally:
        consumer.close()
    assert [(one.key(), one.value()) for one in found] == [(b"k", b"1"), (None, b"2" * 2000)]
    ours = [("protocol", b"goms"), ("sender", b"10.0.0.1:9")]
    assert [one.headers() for one in found] == [[*ours, ("h", b"v")], ours]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_record_of_another_kafka_producer_is_a_message(
    open_kafka: OpenKafka, brokers: KafkaBrokers, prefix: str, compression: str
) -> None:
    log = open_kafka()
    log.create_topic("t")
    settings = {
        "bootstrap.servers": ",".join(brokers.addresses),
        "compression.type": compression,
        "linger.ms": 50,
    }
    producer = Producer(settings)
    for number in range(20):
        headers = [("h", b"v")] if number == 3 else None
        producer.produce(f"{prefix}t", b"x" * 200 + b"%d" % number, headers=headers)
    producer.flush(30)
    log.catch_up("t")
    assert values_from(log, "t", 0) == [b"x" * 200 + b"%d" % number for number in range(20)]
    first = log.read("t", 0)[0]
    assert first.protocol == "kafka"
    assert log.read("t", 3)[0].headers is not None


# Nodes


@contextlib.asynccontextmanager
async def nodes(
    brokers: KafkaBrokers, prefix: str, *topics: str, count: int = 3, **settings: Any
) -> AsyncIterator[list[Node]]:
    async with contextlib.AsyncExitStack() as stack:
        cluster = {"prefix": prefix}
        yield [
            await stack.enter_async_context(
                run_bus(*topics, log=brokers.url, cluster=cluster, **settings)
            )
            for _ in range(count)
        ]


def url(node: Node, scheme: str = "boson") -> str:
    return f"{scheme}://127.0.0.1:{node.tcp_port}"


async def take(subscription: Subscription, count: int) -> list[Message]:
    async with asyncio.timeout(60):
        return [await anext(aiter(subscription)) for _ in range(count)]


async def eventually(is_reached: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Wait for something that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not await is_reached():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


SCHEMES = ("boson", "boson+properties", "goms", "ws")


async def test_every_protocol_on_every_node_gets_all_messages_in_one_order(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        found = await stack.enter_async_context(nodes(brokers, prefix, "t"))
        readers = []
        for node, scheme in itertools.product(found, SCHEMES):
            client = await stack.enter_async_context(polybus.connect(url(node, scheme)))
            readers.append(await stack.enter_async_context(client.subscribe("t")))

        async def publish(node: Node, scheme: str) -> None:
            async with polybus.connect(url(node, scheme)) as client:
                for number in range(5):
                    await client.publish("t", f"{node.tcp_port} {scheme} {number}", receipt=True)

        await asyncio.gather(*(publish(*one) for one in itertools.product(found, SCHEMES)))
        orders = [[one.text for one in await take(reader, 60)] for reader in readers]
        assert len(set(orders[0])) == 60
        assert all(order == orders[0] for order in orders)


async def test_a_position_taken_at_one_node_resumes_at_another(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with nodes(brokers, prefix, "t", count=2) as (a, b), polybus.connect(url(a)) as client:
        async with client.subscribe("t") as subscription:
            for number in range(20):
                last = await client.publish("t", f"{number}", receipt=True)
                (message,) = await take(subscription, 1)
                assert (message.text, message.position) == (f"{number}", last)
                async with polybus.connect(url(b)) as other:
                    following = polybus.Position(message.epoch, message.offset)
                    async with other.subscribe("t", following) as resumed:
                        assert [one.text for one in await take(resumed, 1)] == [f"{number}"]


async def test_topics_are_created_deleted_and_recreated_for_all_nodes_over_http(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with nodes(brokers, prefix, count=2) as (a, b), httpx.AsyncClient() as http:

        async def epoch_at(node: Node) -> int | None:
            answer = await http.get(f"{url(node, 'http')}/v1/topics/t")
            return None if answer.status_code == 404 else int(answer.json()["epoch"])

        async def becomes(node: Node, expected: int | None) -> None:
            async def is_so() -> bool:
                return await epoch_at(node) == expected

            await eventually(is_so, 2)

        epochs = []
        for _ in range(2):
            made = await http.post(f"{url(a, 'http')}/v1/topics", json={"name": "t"})
            epochs.append(made.json()["epoch"])
            await becomes(b, epochs[-1])
            sent = await http.post(f"{url(b, 'http')}/v1/topics/t/messages", content=b"x")
            assert sent.json()["offsets"] == [0]
            read = await http.get(f"{url(a, 'http')}/v1/topics/t/messages?offset=0")
            assert len(read.json()["messages"]) == 1
            assert (await http.delete(f"{url(b, 'http')}/v1/topics/t")).status_code < 300
            await becomes(a, None)
        assert epochs[1] > epochs[0]


async def test_a_goms_sender_is_left_out_of_its_own_messages_only(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with (
        nodes(brokers, prefix, "t", count=2) as (a, b),
        ScriptedPeer(a.tcp_port) as sender,
        ScriptedPeer(a.tcp_port) as beside,
        ScriptedPeer(b.tcp_port) as away,
    ):
        for peer in (sender, beside, away):
            await peer.send_json({"messagetype": "register", "topics": ["t"], "ack": True})
            await peer.read_json()
        await sender.send_json({"messagetype": "send", "topics": ["t"], "data": "one"})
        for peer in (beside, away):
            assert (await peer.read_json())["data"] == "one"
        await away.send_json({"messagetype": "send", "topics": ["t"], "data": "two"})
        # The sender's first message is the one of the other.
        assert (await sender.read_json())["data"] == "two"


async def test_what_does_not_work_over_kafka_is_refused_with_the_setting(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with nodes(brokers, prefix, "t", count=1) as (node,), httpx.AsyncClient() as http:
        answer = await http.put(f"{url(node, 'http')}/v1/topics/t/blob", content=b"x")
        assert answer.json()["code"] == "cluster.unsupported"
        assert "`log`" in answer.json()["detail"]
        async with ScriptedPeer(node.tcp_port) as peer:
            # Before anything of it has arrived.
            host = f"Host: 127.0.0.1:{node.tcp_port}"
            head = f"PUT /v1/topics/t/blob HTTP/1.1\r\n{host}\r\nContent-Length: 9\r\n\r\n"
            await peer.send(head.encode())
            assert b" 400 " in await peer.read_line()


# Faults


def follow(reader: ClusterReader | RemoteLog, is_over: threading.Event) -> list[bytes]:
    """What a reader of offsets sees until the end, as Spark's source is one."""
    seen: list[bytes] = []
    offset, is_last = 0, False
    while not is_last:
        is_last = is_over.is_set()
        # Longer than readers remember where a topic ends.
        time.sleep(0.1)
        end = reader.bounds("t").stop
        for rows in reader.read("t", offset, end, columns=["value"]):
            seen += rows.column(0).to_pylist()
        offset = end
    return seen


async def test_a_killed_leader_costs_no_receipted_message_and_no_order(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with nodes(brokers, prefix, "t") as found:
        log: Log = found[0].bus.log
        assert isinstance(log, KafkaLog)
        leader = log.link.leader_of(f"{prefix}t")
        assert leader is not None
        receipted: list[set[str]] = []
        stop = asyncio.Event()

        async def load(node: Node) -> None:
            mine: set[str] = set()
            receipted.append(mine)
            async with polybus.connect(url(node)) as client:
                for number in itertools.count():
                    if stop.is_set():
                        return
                    text = f"{node.tcp_port} {number}"
                    with contextlib.suppress(PolybusError):
                        await client.publish("t", text, receipt=True)
                        mine.add(text)

        is_over = threading.Event()
        readers = (
            ClusterReader(ClusterLocation(log=brokers.url, prefix=prefix)),
            RemoteLog(BusLocation(url=url(found[0], "http"))),
        )
        following = [
            asyncio.create_task(asyncio.to_thread(follow, one, is_over)) for one in readers
        ]
        tasks = [asyncio.create_task(load(node)) for node in found]

        async def all_have(count: int) -> None:
            async def have() -> bool:
                return len(receipted) == 3 and all(len(mine) >= count for mine in receipted)

            await eventually(have, 60)

        await all_have(5)
        await asyncio.to_thread(brokers.kill, leader)
        await all_have(max(map(len, receipted)) + 5)
        await asyncio.to_thread(brokers.launch, leader)
        await asyncio.to_thread(brokers.wait, leader)
        stop.set()
        await asyncio.gather(*tasks)
        orders = []
        for node in found:
            await asyncio.to_thread(node.bus.log.catch_up, "t")
            orders.append(await asyncio.to_thread(values_from, node.bus.log, "t", 0))
        is_over.set()
        stored = [value.decode() for value in orders[0]]
        assert orders[1:] == [orders[0], orders[0]]
        assert await asyncio.gather(*following) == [orders[0], orders[0]]
        close_links()
        assert len(stored) == len(set(stored))
        assert set().union(*receipted) <= set(stored)


async def test_too_few_replicas_refuse_publishes_until_they_are_back(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with nodes(brokers, prefix, "t", count=1) as (node,), httpx.AsyncClient() as http:
        health = f"{url(node, 'http')}/healthz"
        assert (await http.get(health)).status_code == 200
        log = node.bus.log
        assert isinstance(log, KafkaLog)
        leader = log.link.leader_of(f"{prefix}t")
        followers = [one for one in (1, 2, 3) if one != leader]
        for number in followers:
            await asyncio.to_thread(brokers.kill, number)
        async with polybus.connect(url(node), receipt_timeout_s=60) as client:
            waiting = asyncio.create_task(client.publish("t", "waits", receipt=True))

            async def is_red() -> bool:
                return (await http.get(health)).status_code == 503

            await eventually(is_red, 60)
            with pytest.raises(PolybusError) as caught:
                async with polybus.connect(url(node)) as other:
                    await other.publish("t", "refused", receipt=True)
            assert caught.value.code in ("log.replicas", "log.unreachable")
            for number in followers:
                await asyncio.to_thread(brokers.launch, number)
            assert await asyncio.wait_for(waiting, 90) is not None
            await client.publish("t", "after", receipt=True)
        assert (await http.get(health)).status_code == 200
        found = await asyncio.to_thread(values_from, log, "t", 0)
        assert found == [b"waits", b"after"]


def test_cluster_up_names_an_option_that_is_out_of_range() -> None:
    ended = CliRunner().invoke(cluster, ["up", "--brokers", "0", "--data", "unused"])
    assert ended.exit_code == 2
    assert "--brokers" in ended.output


async def test_cluster_up_prints_its_nodes_and_a_client_survives_the_death_of_its_own(
    tmp_path: Path,
) -> None:
    command = ["cluster", "up", "--brokers", "1", "--nodes", "2", "--topic", "t", "--demo"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "polybus.cli", *command, "--data", str(tmp_path / "c"),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        addresses: list[str] = []
        pids: list[int] = []
        async with asyncio.timeout(90):
            while len(addresses) < 2:
                line = (await process.stdout.readline()).decode()
                assert line, "it ended early"
                if line.startswith("node "):
                    which, ready, address, pid = line.split()[1:]
                    assert (which, ready) == (f"{len(pids) + 1}", "ready:")
                    addresses.append(address.removeprefix("tcp://"))
                    pids.append(int(pid.removeprefix("pid=")))
            said = ""
            while "Ctrl-C" not in said:
                said += (line := (await process.stdout.readline()).decode())
                assert line, "it ended early"
        url = f"boson://{','.join(addresses)}"
        assert f"tail demo --url {url}\n" in said and f"kill -9 {pids[0]} " in said
        async with polybus.connect(url) as client:
            async with client.subscribe("t") as subscription, client.subscribe("demo") as demo:
                for number in range(10):
                    if number == 5:
                        os.kill(pids[0], signal.SIGKILL)
                    await client.publish("t", f"{number}", receipt=True, retry=True)
                texts = [one.text for one in await take(subscription, 10)]
                assert (await take(demo, 1))[0].text.startswith("message ")
        assert texts == [str(number) for number in range(10)]
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert json.loads((tmp_path / "c" / "kafka" / "ports.json").read_text())
