"""queue:// — the client on a queue connector, which knows messages and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from client_kit import Proxy, take, url_of

import polybus
from polybus.client.options import Address, parse
from polybus.client.protocols import QueueTransport
from polybus.client.transport import Delivery, PendingPublish, Refusal
from polybus.edges.node import Node
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.testing import run_bus

LIMIT = 1 << 20


@contextlib.asynccontextmanager
async def bridged() -> AsyncIterator[tuple[Node, int]]:
    """A bus whose second connector is a queue of the topic news, and its port."""
    connectors = [
        {"protocol": "tcp", "port": 0},
        {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "news"},
    ]
    async with run_bus(connectors=connectors) as node:
        yield node, int(node.addresses[1].rpartition(":")[2])


async def listening(node: Node, count: int) -> None:
    """Wait until this many listen to the topic: on a queue the bus does not say when it does."""
    (topic,) = node.bus.topics()
    async with asyncio.timeout(10):
        while len(topic.subscribers) != count:  # noqa: ASYNC110  the bus has no event for it
            await asyncio.sleep(0.01)


# Against a bus


async def test_messages_cross_from_any_protocol_to_a_queue_and_back() -> None:
    async with (
        bridged() as (node, port),
        polybus.connect(url_of("queue", port)) as queues,
        polybus.connect(url_of("boson", node.tcp_port)) as boson,
        queues.subscribe("news") as from_queue,
        boson.subscribe("news") as from_boson,
    ):
        await listening(node, 3)
        await boson.publish_many("news", [b"one", b"", b"\xff" * 300_000])
        values = [message.value for message in await take(from_queue, 3)]
        assert values == [b"one", b"", b"\xff" * 300_000]
        await take(from_boson, 3)
        await queues.publish("news", "from the queue")
        assert (await take(from_boson, 1))[0].text == "from the queue"
        # Another connection of the same client, so it is notified too.
        (message,) = await take(from_queue, 1)
        assert (message.topic, message.text) == ("news", "from the queue")
        assert message.position is None and not message.headers and not message.gap


async def test_many_messages_keep_their_order() -> None:
    count = 20_000
    async with bridged() as (node, port), polybus.connect(url_of("queue", port)) as client:
        async with client.subscribe("news") as messages:
            await listening(node, 2)
            await client.publish_many("news", [str(n) for n in range(count)])
            found = [int(message.value) for message in await take(messages, count)]
    assert found == list(range(count))


async def test_a_lost_connection_is_made_again_and_the_gap_is_told() -> None:
    async with (
        bridged() as (node, port),
        Proxy(port) as proxy,
        polybus.connect(url_of("queue", proxy.port)) as through,
        polybus.connect(url_of("boson", node.tcp_port)) as direct,
    ):
        async with through.subscribe("news") as messages:
            await listening(node, 2)
            await direct.publish("news", "before", receipt=True)
            assert [one.gap for one in await take(messages, 1)] == [False]
            proxy.cut()
            await listening(node, 0)
            await direct.publish("news", "missed", receipt=True)
            proxy.restore()
            await listening(node, 2)
            await direct.publish("news", "after", receipt=True)
            (message,) = await take(messages, 1)
            assert (message.text, message.gap) == ("after", True)


async def test_what_a_queue_cannot_do_is_a_usage_error_and_the_client_goes_on() -> None:
    async with bridged() as (node, port), polybus.connect(url_of("queue", port)) as client:
        with pytest.raises(UsageError, match="client.unsupported.*receipts"):
            await client.publish("news", "x", receipt=True)
        with pytest.raises(UsageError, match="headers.invalid"):
            await client.publish("news", "x", headers={"a": "b"})
        await client.publish("news", "x")
        with pytest.raises(UsageError, match="client.unsupported.*one topic"):
            await client.publish("sport", "y")
        for topics, start in (("news", "earliest"), ("news", "1:0"), (["news", "sport"], "latest")):
            with pytest.raises(UsageError, match="client.unsupported"):
                await client.subscribe(topics, start)
        async with client.subscribe("news") as messages:
            await listening(node, 2)
            await client.publish("news", "y")
            assert (await take(messages, 1))[0].text == "y"


async def test_a_bus_that_ends_the_queue_is_an_error_without_reconnect() -> None:
    async with (
        bridged() as (node, port),
        polybus.connect(url_of("queue", port), reconnect=False) as client,
        client.subscribe("news") as messages,
    ):
        await listening(node, 2)
        node.bus.delete_topic("news")
        with pytest.raises(PolybusError, match="client.disconnected"):
            await take(messages, 1)


def test_a_queue_has_no_gzip() -> None:
    with pytest.raises(UsageError, match="client.url"):
        polybus.connect("queue://127.0.0.1:4000?gzip=1")


def test_a_queue_has_no_usual_port() -> None:
    with pytest.raises(UsageError, match="client.url.*port"):
        polybus.connect("queue+tls://127.0.0.1")
    assert parse("queue://h:7") == Address("queue", "h", 7)


# Bytes alone


def test_a_publish_is_length_and_bytes_of_each_value() -> None:
    data = QueueTransport(LIMIT).publish(PendingPublish("news", [b"ab", b"", b"c"]))
    assert data == b"\0\0\0\2ab\0\0\0\0\0\0\0\1c"


def test_messages_are_of_the_topic_subscribed_to_in_any_chunking() -> None:
    transport = QueueTransport(LIMIT)
    assert transport.subscribe({"news": "latest"}, positions=True) == b""
    stream = b"\0\0\0\2ab\0\0\0\0\0\0\0\1c"
    events = [event for byte in stream for event in transport.receive(bytes([byte]))]
    assert [(one.topic, one.values) for one in events if isinstance(one, Delivery)] == [
        ("news", [b"ab"]),
        ("news", [b""]),
        ("news", [b"c"]),
    ]


def test_a_publisher_is_not_told_what_others_publish() -> None:
    transport = QueueTransport(LIMIT)
    transport.publish(PendingPublish("news", [b"x"]))
    assert transport.receive(b"\0\0\0\2ab") == []


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
def test_an_impossible_length_is_a_final_refusal_after_what_came_before(length: bytes) -> None:
    transport = QueueTransport(LIMIT)
    transport.subscribe({"news": "latest"}, positions=True)
    first, last = transport.receive(b"\0\0\0\2ab" + length + b"garbage")
    assert isinstance(first, Delivery) and first.values == [b"ab"]
    assert isinstance(last, Refusal) and last.final and isinstance(last.error, PeerError)
