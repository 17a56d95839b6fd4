"""Every publisher's protocol to every subscriber's, byte-exact on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
from edge_kit import (
    NO_HEADERS,
    WAYS,
    Headers,
    Pipe,
    connected,
    epoch_of,
    prepared,
    read_properties,
)

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus

PAIRS = list(itertools.product(WAYS, WAYS))
VALUES = {
    "text": b"hello",
    "empty": b"",
    "binary": bytes(range(256)),
    "almost text": b"caf\xc3",
    "json": b'{"a": [1, 2.50, "x\\ny"],  "b": null}',
    "unicode": 'h\xe9llo "w\xf6rld" \\ \n\t \U0001f600'.encode(),
    "null byte": b"\x00",
}
HEADERS: Headers = {
    "origin": b"sensor 7",
    "raw": b"\x00\xff",
    "empty": b"",
    "\xe9": "\xfc".encode(),
}


async def pass_on(
    node: Node, sender: str, receiver: str, messages: list[tuple[bytes, Headers]]
) -> None:
    """Publish the messages one way and read exactly their bytes the other way."""
    source, target = WAYS[sender], WAYS[receiver]
    epoch = epoch_of(node, "news")
    async with connected(node, receiver) as reader, connected(node, sender) as writer:
        await target.subscribe(reader, "news", epoch)
        await prepared(node, writer, sender, "news")
        for offset, (value, headers) in enumerate(messages):
            await writer.send(source.publish("news", value, headers))
            kept = headers if source.has_headers else NO_HEADERS
            expected = target.delivered("news", value, kept, epoch, offset)
            assert await reader.read(len(expected)) == expected
    stored = node.bus.log.read("news", 0, bytes_max=1 << 30)
    assert [value for batch in stored for value in batch.values()] == [one[0] for one in messages]
    kept_headers = [
        dict(one or {}) for batch in stored for one in batch.headers or [None] * len(batch)
    ]
    assert kept_headers == [dict(one[1]) if source.has_headers else {} for one in messages]


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
async def test_every_value_arrives_byte_for_byte(sender: str, receiver: str) -> None:
    async with run_bus("news") as node:
        await pass_on(node, sender, receiver, [(value, NO_HEADERS) for value in VALUES.values()])


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
async def test_headers_reach_every_protocol_that_has_them_and_the_log(
    sender: str, receiver: str
) -> None:
    async with run_bus("news") as node:
        await pass_on(node, sender, receiver, [(b"with", HEADERS), (b"without", NO_HEADERS)])


@pytest.mark.parametrize(("sender", "receiver"), [pair for pair in PAIRS if "goms-udp" not in pair])
async def test_a_mebibyte_arrives_whole(sender: str, receiver: str) -> None:
    large = bytes(range(256)) * 4096
    async with run_bus("news") as node:
        await pass_on(node, sender, receiver, [(large, NO_HEADERS), (b"x" * (1 << 20), NO_HEADERS)])


async def test_a_message_too_large_for_a_datagram_is_counted_and_the_next_arrives() -> None:
    async with run_bus("news") as node:
        epoch = epoch_of(node, "news")
        async with connected(node, "goms-udp") as reader, connected(node, "boson-frames") as writer:
            await WAYS["goms-udp"].subscribe(reader, "news", epoch)
            for value in (b"x" * 65_500, b"small"):
                await writer.send(WAYS["boson-frames"].publish("news", value, NO_HEADERS))
            expected = WAYS["goms-udp"].delivered("news", b"small", NO_HEADERS, epoch, 1)
            assert await reader.read(len(expected)) == expected
        assert node.bad_peers.counts["udp.message-too-large"] == 1


TCP_WAYS = [way for way in WAYS if way != "goms-udp"]
COUNT = 1500


@pytest.mark.parametrize("receiver", TCP_WAYS)
async def test_each_senders_messages_keep_their_order_and_none_is_lost(receiver: str) -> None:
    """Four senders, one of each protocol, thousands of messages, two topics."""
    topics = ["news", "sport"]
    async with run_bus(*topics) as node, contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(connected(node, receiver))
        # Open until all is read: a goMS sender does not read what the others send, and if it left
        # before, TCP would throw away what it sent.
        writers = {way: await stack.enter_async_context(connected(node, way)) for way in TCP_WAYS}
        for topic in topics:
            await WAYS[receiver].subscribe(reader, topic, epoch_of(node, topic))
            for way, writer in writers.items():
                await prepared(node, writer, way, topic)
        async with asyncio.TaskGroup() as tasks:
            for way, writer in writers.items():
                tasks.create_task(send_many(writer, way, topics))
            received = await read_many(reader, receiver, len(TCP_WAYS) * COUNT)
    assert received == {
        (way, topic): list(range(COUNT))[start::2]
        for way in TCP_WAYS
        for start, topic in enumerate(topics)
    }


async def send_many(writer: Pipe, way: str, topics: list[str]) -> None:
    """Number n goes to the topics in turn, in writes of uneven sizes."""
    messages = [
        WAYS[way].publish(topics[n % len(topics)], f"{way} {n}".encode(), NO_HEADERS)
        for n in range(COUNT)
    ]
    for start, stop in itertools.pairwise([0, 1, 8, 300, 301, 1000, COUNT]):
        await writer.send(b"".join(messages[start:stop]))


async def read_many(reader: Pipe, way: str, count: int) -> dict[tuple[str, str], list[int]]:
    """The numbers that arrived, by sender and topic, in the order of arrival."""
    assert isinstance(reader, ScriptedPeer)
    found: dict[tuple[str, str], list[int]] = {}
    for _ in range(count):
        if way == "goms-tcp":
            message = await reader.read_json()
            topic, value = message["topics"][0], message["data"]
        elif way == "boson-properties":
            pairs = await read_properties(reader)
            topic, value = pairs["topic"].decode(), pairs["content"].decode()
        else:
            topic, content = await reader.read_frame()
            value = content.decode()
        sender, _, number = value.partition(" ")
        found.setdefault((sender, topic), []).append(int(number))
    return found
