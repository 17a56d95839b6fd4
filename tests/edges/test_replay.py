"""Subscriptions that begin in the past: no gap, no repeat, on every protocol."""

from __future__ import annotations

import asyncio
import json
import weakref
from datetime import UTC, datetime

import pytest
from edge_kit import NO_HEADERS, WAYS, frame, line, properties, read_properties, until

from polybus.batch import Batch
from polybus.edges.node import Node
from polybus.log.memory import MemoryLog
from polybus.services.catch_up import resolve
from polybus.testing import ManualClock, ScriptedPeer, run_bus
from polybus.wire.positions import parse_start

PROTOCOLS = ["boson-frames", "boson-properties", "goms"]


async def subscribe_from(
    peer: ScriptedPeer, protocol: str, start: str, topic: str = "news"
) -> None:
    request = {
        "boson-frames": frame("$subscribe", f"{topic} from={start}".encode()),
        "boson-properties": properties(("hbfs", f"{topic} from={start}".encode())),
        "goms": line("register", topics=[topic], **{"from": start}),
    }
    await peer.send(request[protocol])


async def next_value(peer: ScriptedPeer, protocol: str) -> str:
    if protocol == "boson-frames":
        return (await peer.read_frame())[1].decode()
    if protocol == "boson-properties":
        return (await read_properties(peer))["content"].decode()
    return str(json.loads(await peer.read_line())["data"])


async def publish(node: Node, numbers: range) -> None:
    """Publish and wait until all is durable."""
    async with ScriptedPeer(node.tcp_port) as peer:
        await peer.send(b"".join(frame("news", b"%d" % n) for n in numbers))
        await peer.send(frame("sport?receipt=1", b""))
        assert (await peer.read_frame())[0] == "$receipt"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("earliest", 0),
        ("EPOCH:0", 0),
        ("EPOCH:7", 7),
        ("EPOCH:10", 10),
        ("EPOCH:999", 10),
        ("0:5", 0),
        ("1970-01-01", 0),
        ("2999-01-01T00:00:00Z", 10),
        ("latest", 10),
    ],
)
async def test_a_subscription_begins_where_it_asks(protocol: str, start: str, first: int) -> None:
    async with run_bus("news", "sport") as node, ScriptedPeer(node.tcp_port) as peer:
        await publish(node, range(10))
        epoch = node.bus.log.bounds("news").epoch
        await subscribe_from(peer, protocol, start.replace("EPOCH", str(epoch)))
        if first < 10:
            assert [int(await next_value(peer, protocol)) for _ in range(first, 10)] == [
                *range(first, 10)
            ]
        else:
            # It is unknown when it is done, except by another request's answer.
            await subscribe_from(peer, protocol, "earliest", "sport")
            assert await next_value(peer, protocol) == ""
        await publish(node, range(10, 12))
        assert [int(await next_value(peer, protocol)) for _ in range(2)] == [10, 11]


async def test_a_time_is_the_first_message_at_or_after_it() -> None:
    async with run_bus("news", "sport") as node, ScriptedPeer(node.tcp_port) as peer:
        await publish(node, range(3))
        between = datetime.now(UTC).isoformat()
        await publish(node, range(3, 5))
        await subscribe_from(peer, "boson-frames", between)
        assert [await next_value(peer, "boson-frames") for _ in range(2)] == ["3", "4"]


@pytest.mark.parametrize("way", ["frames", "properties"])
async def test_those_who_ask_are_told_where_they_stand(way: str) -> None:
    async with run_bus("news", "sport") as node, ScriptedPeer(node.tcp_port) as peer:
        await publish(node, range(5))
        epoch = node.bus.log.bounds("news").epoch
        lines = b"news from=0:3 tell=position"
        if way == "frames":
            await peer.send(frame("$subscribe", lines))
            assert await peer.read_frame() == ("$position", b"%d:0 news" % epoch)
        else:
            await peer.send(properties(("hbfs", lines)))
            told = await read_properties(peer)
            assert (told["hbfp"], told["topic"]) == (b"%d:0" % epoch, b"news")


async def test_goms_tells_offsets_to_those_who_ask() -> None:
    async with run_bus("news", "sport") as node, ScriptedPeer(node.tcp_port) as peer:
        await publish(node, range(2))
        epoch = node.bus.log.bounds("news").epoch
        await peer.send(line("register", topics=["news"], ack=True, offsets=True))
        at = f"{epoch}:2"
        assert await peer.read_line() == line("reg-ack", topics=["news"], offsets=[at])
        await publish(node, range(2, 3))
        assert await peer.read_line() == line("message", topics=["news"], offsets=[at], data="2")


async def test_goms_tells_where_a_replay_begins() -> None:
    async with run_bus("news", "sport") as node, ScriptedPeer(node.tcp_port) as peer:
        await publish(node, range(2))
        epoch = node.bus.log.bounds("news").epoch
        request = {"from": "earliest", "ack": True, "offsets": True}
        await peer.send(line("register", topics=["news"], **request))
        said = [await peer.read_line() for _ in range(3)]
        assert line("reg-ack", topics=["news"], offsets=[f"{epoch}:0"]) in said


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_replay_turns_live_without_gap_or_repeat_while_messages_pour_in(
    protocol: str,
) -> None:
    """Subscribers begin at many moments of a steady flow; each gets every number once, in order."""
    count = 12_000
    async with run_bus("news", "sport", durability="interval") as node:
        epoch = node.bus.log.bounds("news").epoch
        delivered = WAYS[protocol if protocol != "goms" else "goms-tcp"].delivered
        numbers = [delivered("news", b"%d" % n, NO_HEADERS, epoch, n) for n in range(count)]
        expected = b"".join(numbers)
        readers = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pour(node, count))
            for _ in range(8):
                readers.append(tasks.create_task(follow(node, protocol, len(expected))))
                await asyncio.sleep(0.02)
        assert all(reader.result() == expected for reader in readers)


async def pour(node: Node, count: int) -> None:
    async with ScriptedPeer(node.tcp_port) as peer:
        for start in range(0, count, 100):
            await peer.send(b"".join(frame("news", b"%d" % n) for n in range(start, start + 100)))
            await asyncio.sleep(0)
        await peer.send(frame("sport?receipt=1", b""))
        assert (await peer.read_frame())[0] == "$receipt"


async def publish_large(writer: ScriptedPeer, value: bytes, count: int) -> None:
    """This many messages for news, all stored when it returns."""
    for _ in range(count):
        await writer.send(frame("news", value))
    await writer.send(frame("sport?receipt=1", b""))
    assert (await writer.read_frame())[0] == "$receipt"


async def follow(node: Node, protocol: str, size: int) -> bytes:
    async with ScriptedPeer(node.tcp_port, timeout_s=30) as peer:
        await subscribe_from(peer, protocol, "earliest")
        return await peer.read(size)


@pytest.mark.slow
async def test_a_reader_that_takes_its_time_gets_all_of_a_large_replay() -> None:
    """A replay goes no faster than its peer: waiting is no reason to be disconnected."""
    limits = {"outbox-bytes-max": 1 << 20}
    value, count = b"x" * (1 << 16), 400
    async with run_bus("news", "sport", durability="interval", limits=limits) as node:
        async with ScriptedPeer(node.tcp_port) as writer:
            await publish_large(writer, value, count)
        async with ScriptedPeer(node.tcp_port, timeout_s=20) as slow:
            # A small window, so that the bus and not the kernel holds what waits.
            slow._writer.transport.pause_reading()  # type: ignore[attr-defined]
            await subscribe_from(slow, "boson-frames", "earliest")
            await asyncio.sleep(2.0)
            slow._writer.transport.resume_reading()  # type: ignore[attr-defined]
            for _ in range(count):
                assert await slow.read_frame() == ("news", value)


class Piece(list[Batch]):
    """What the log read at once; a list of this kind can be watched."""


async def test_a_replay_that_waits_for_its_peer_keeps_nothing_it_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of them may wait, and only outboxes are counted and bounded."""
    pieces: list[weakref.ref[Piece]] = []
    async with run_bus("news", "sport", durability="interval") as node:
        async with ScriptedPeer(node.tcp_port) as writer:
            await publish_large(writer, b"x" * (1 << 16), 400)
        log = node.bus.log
        read = log.read

        def watched(topic: str, offset: int, *, bytes_max: int) -> Piece:
            piece = Piece(read(topic, offset, bytes_max=bytes_max))
            pieces.append(weakref.ref(piece))
            return piece

        monkeypatch.setattr(log, "read", watched)
        async with ScriptedPeer(node.tcp_port) as slow:
            slow._writer.transport.pause_reading()  # type: ignore[attr-defined]
            await subscribe_from(slow, "boson-frames", "earliest")
            await until(lambda: node.tcp.outboxes.congested)
            assert pieces
            # The thread that read it may hold it a moment longer.
            await until(lambda: not any(piece() is not None for piece in pieces))


async def test_a_topic_deleted_under_a_replay_is_told_and_its_successor_is_not_mixed_in() -> None:
    async with run_bus("news", "sport", durability="interval") as node:
        value = b"x" * (1 << 16)
        async with ScriptedPeer(node.tcp_port) as writer:
            await publish_large(writer, value, 400)
            async with ScriptedPeer(node.tcp_port, timeout_s=20) as slow:
                slow._writer.transport.pause_reading()  # type: ignore[attr-defined]
                await subscribe_from(slow, "boson-frames", "earliest")
                await until(lambda: node.tcp.outboxes.congested)
                node.bus.delete_topic("news")
                node.bus.create_topic("news")
                for _ in range(400):
                    await writer.send(frame("news", b"other"))
                slow._writer.transport.resume_reading()  # type: ignore[attr-defined]
                while (said := await slow.read_frame()) == ("news", value):
                    pass
                assert said[0] == "$error"
                assert said[1].startswith(b"topic.deleted ")
                # Its subscription is gone, and it may have a new one.
                await slow.send(frame("$subscribe", b"news from=earliest"))
                assert await slow.read_frame() == ("news", b"other")


@pytest.mark.parametrize(
    ("start", "offset"),
    [
        ("earliest", 0),
        ("latest", 3),
        ("1:2", 2),
        ("1:9", 3),
        ("7:2", 0),
        ("2023-11-14T22:13:20.000001Z", 1),
        ("2023-11-14", 0),
    ],
)
def test_what_a_start_means(start: str, offset: int) -> None:
    clock = ManualClock()
    log = MemoryLog(clock=clock, bytes_max=1 << 20)
    epoch = log.create_topic("news").epoch
    for _ in range(3):
        log.append(Batch.of("news", [b"x"]))
        clock.now_us += 1
    start = start.replace("1:", f"{epoch}:") if start[:2] == "1:" else start
    assert resolve(log, "news", parse_start(start)) == (epoch, offset)


@pytest.mark.parametrize("problem", [FileNotFoundError(2, "gone"), OSError(5, "bad disk")])
async def test_a_past_that_cannot_be_read_is_told_and_may_be_asked_for_again(
    problem: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as reader:
        log = node.bus.log

        def fail(topic: str, timestamp_us: int) -> int:
            raise problem

        monkeypatch.setattr(log, "offset_at", fail)
        await reader.send_json(
            {"messagetype": "register", "topics": ["news"], "from": "2020-01-01T00:00:00Z"}
        )
        assert (await reader.read_json())["error-code"] == "002001"
        await reader.send_json({"messagetype": "register", "topics": ["news"], "ack": True})
        assert (await reader.read_json())["topics"] == ["news"]
