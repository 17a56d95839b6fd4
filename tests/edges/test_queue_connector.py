"""A queue connector: a port that is a topic, for programs that speak nothing but messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from edge_kit import FRAMES, NO_HEADERS, TIMEOUT_S, WAYS, connected, epoch_of, prepared, until
from queue_connector_kit import VALUES, bridged, message, queue, stored

from polybus.config_file import load
from polybus.errors import ConfigError
from polybus.testing import ScriptedPeer

DATAGRAM_VALUES = VALUES[:-1]


# Through the bus


async def test_a_message_goes_to_every_queue_but_the_one_it_came_on() -> None:
    async with (
        bridged() as (node, port),
        queue(node, port) as sender,
        queue(node, port) as first,
        queue(node, port) as second,
    ):
        await sender.send(message(b"to all"))
        for other in (first, second):
            assert await other.read(10) == message(b"to all")
        await first.send(message(b"back"))
        # The first thing the sender hears is the other's: its own did not come before it.
        assert await sender.read(8) == await second.read(8) == message(b"back")
        assert stored(node) == [b"to all", b"back"]


@pytest.mark.parametrize("way", WAYS)
async def test_what_queues_send_reaches_every_protocol_byte_for_byte(way: str) -> None:
    values = DATAGRAM_VALUES if way == "goms-udp" else VALUES
    async with bridged() as (node, port), connected(node, way) as reader:
        epoch = epoch_of(node, "news")
        await WAYS[way].subscribe(reader, "news", epoch)
        async with queue(node, port) as sender:
            for offset, value in enumerate(values):
                await sender.send(message(value))
                expected = WAYS[way].delivered("news", value, NO_HEADERS, epoch, offset)
                assert await reader.read(len(expected)) == expected
        assert stored(node) == values


@pytest.mark.parametrize("way", WAYS)
async def test_what_others_publish_reaches_queues_byte_for_byte_without_headers(way: str) -> None:
    values = DATAGRAM_VALUES if way == "goms-udp" else VALUES
    headers = {"origin": b"sensor 7"} if WAYS[way].has_headers else NO_HEADERS
    async with (
        bridged() as (node, port),
        queue(node, port) as reader,
        connected(node, way) as writer,
    ):
        await prepared(node, writer, way, "news")
        for value in values:
            await writer.send(WAYS[way].publish("news", value, headers))
            assert await reader.read(4 + len(value)) == message(value)


async def test_a_queue_hears_nothing_of_other_topics() -> None:
    async with bridged("sport") as (node, port), queue(node, port) as reader:
        async with ScriptedPeer(node.tcp_port) as writer:
            await writer.send(FRAMES.publish("sport", b"not for you", NO_HEADERS))
            await writer.send(FRAMES.publish("news", b"for you", NO_HEADERS))
        assert await reader.read(11) == message(b"for you")


async def test_a_message_in_any_pieces_is_one_message() -> None:
    stream = b"".join(map(message, [b"one", b"", b"three" * 20]))
    async with bridged() as (node, port), queue(node, port) as reader:
        async with queue(node, port) as writer:
            for byte in stream:
                await writer.send(bytes([byte]))
            assert await reader.read(len(stream)) == stream
    assert stored(node) == [b"one", b"", b"three" * 20]


async def test_thousands_of_messages_both_ways_keep_their_order() -> None:
    count = 20_000
    async with (
        bridged() as (node, port),
        queue(node, port) as left,
        queue(node, port) as right,
        asyncio.TaskGroup() as tasks,
    ):
        streams = {
            name: b"".join(message(f"{name} {n}".encode()) for n in range(count)) for name in "lr"
        }
        tasks.create_task(left.send(streams["l"]))
        tasks.create_task(right.send(streams["r"]))
        reads = [left.read(len(streams["r"])), right.read(len(streams["l"]))]
        assert await asyncio.gather(*reads) == [streams["r"], streams["l"]]


async def test_a_queue_that_only_reads_may_be_silent_for_ever() -> None:
    """Others must say in time what they speak; here that is known."""
    async with bridged(limits={"detect-timeout-s": 0.1, "message-timeout-s": 0.1}) as (node, port):
        async with queue(node, port) as reader:
            connections = list(node.tcp.connections)
            assert connections[0] not in node.tcp.assembly.overdue()
            assert not node.tcp.assembly._deadlines
            async with ScriptedPeer(node.tcp_port) as writer:
                await writer.send(FRAMES.publish("news", b"late", NO_HEADERS))
                assert await reader.read(8) == message(b"late")


async def test_what_was_sent_before_a_goodbye_is_stored() -> None:
    async with bridged() as (node, port):
        async with queue(node, port) as sender:
            await sender.send(message(b"last words"))
            sender.send_eof()
            assert await sender.read_to_end() == b""
        assert stored(node) == [b"last words"]


async def test_what_queues_sent_is_there_after_a_restart_but_not_sent_again(tmp_path: Path) -> None:
    async with bridged(data=str(tmp_path)) as (node, port), queue(node, port) as sender:
        await sender.send(message(b"before"))
        await until(lambda: stored(node) == [b"before"])
    async with bridged(data=str(tmp_path)) as (node, port), queue(node, port) as reader:
        assert stored(node) == [b"before"]
        async with ScriptedPeer(node.tcp_port) as writer:
            await writer.send(FRAMES.publish("news", b"after", NO_HEADERS))
            assert await reader.read(9) == message(b"after")


# Its topic


async def test_the_connectors_topic_is_created_and_its_name_is_lower_case() -> None:
    async with bridged(topic="Not Declared") as (node, port):
        assert node.bus.has_topic("not declared")
        async with queue(node, port) as reader, queue(node, port) as writer:
            await writer.send(message(b"x"))
            assert await reader.read(5) == message(b"x")
        assert stored(node, "not declared") == [b"x"]


async def test_without_its_topic_queues_are_closed_until_it_is_back() -> None:
    async with bridged() as (node, port):
        async with queue(node, port) as peer:
            node.bus.delete_topic("news")
            assert await peer.read_to_end() == b""
        assert node.bad_peers.counts["topic.deleted"] == 1
        async with ScriptedPeer(port, timeout_s=TIMEOUT_S) as early:
            assert await early.read_to_end() == b""
        assert node.bad_peers.counts["topic.unknown"] == 1
        node.bus.create_topic("news")
        async with queue(node, port) as reader, queue(node, port) as writer:
            await writer.send(message(b"again"))
            assert await reader.read(9) == message(b"again")


# Its settings


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"topic": None}, "connectors[0].topic"),
        ({"topic": ""}, "connectors[0].topic"),
        ({"topic": "$system"}, "connectors[0].topic"),
        ({"topic": "x" * 256}, "connectors[0].topic"),
        ({"speaks": ["queue", "goms"]}, "connectors[0].speaks"),
        ({"protocol": "udp"}, "connectors[0].protocol"),
    ],
)
def test_a_queue_connector_that_cannot_be_is_an_error_that_names_the_key(
    wrong: dict[str, Any], key: str, tmp_path: Path
) -> None:
    connector = {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "news"} | wrong
    path = tmp_path / "bus.json"
    path.write_text(json.dumps({"connectors": [connector]}))
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert key in caught.value.text


def test_the_old_spelling_of_a_connector_loads_and_declares_its_topic(tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    connector = {"protocoll": "tcp", "ip": "127.0.0.1", "port": 4000, "speaks": "queue"}
    path.write_text(json.dumps({"connectors": [connector | {"topic": "News"}]}))
    config = load(path, {})
    assert config.connectors[0].protocols == ("queue",)
    assert [topic.name for topic in config.topic_list()] == ["news"]
