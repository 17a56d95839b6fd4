"""Floods of small or wrong things: they meet a limit, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from bad_input_kit import MEBI, START, Growth, ResidentGrowth
from edge_kit import frame, is_alive, line, open_connections, properties, until

from polybus.edges.node import Node
from polybus.edges.tcp.connection import Connection
from polybus.testing import ScriptedPeer, run_bus


@pytest.mark.slow
@pytest.mark.parametrize("flag", [1, 2, 3])
@pytest.mark.parametrize("protocol", ["boson-frames", "boson-properties"])
async def test_a_million_one_byte_parts_meet_the_limit_of_parts(protocol: str, flag: int) -> None:
    if protocol == "boson-frames":
        part = frame("news", b"x", flag)
    else:
        part = properties(("hbff", bytes([flag])), ("topic", b"news"), ("content", b"x"))
    async with run_bus("news", "alive", durability="memory") as node:
        with ResidentGrowth() as growth:
            async with ScriptedPeer(node.tcp_port, timeout_s=50) as peer:
                sending = asyncio.create_task(flood(peer, part * 10_000, 100))
                await until(lambda: node.tcp.connections)
                assert await is_alive(node) < 4
                said = await peer.read_to_end()
                await sending
        assert b"boson.parts-too-many" in said
        assert growth.peak_bytes < 64 * MEBI
        assert node.bus.log.bounds("news").stop == (100_000 if flag == 3 else 0)


async def flood(peer: ScriptedPeer, chunk: bytes, count: int) -> None:
    try:
        for _ in range(count):
            await peer.send(chunk)
    except ConnectionError:
        pass


@pytest.mark.parametrize("protocol", ["boson-frames", "boson-properties"])
async def test_parts_are_bounded_in_bytes_together(protocol: str) -> None:
    content = b"x" * 1000
    if protocol == "boson-frames":
        part = frame("news", content, 2)
    else:
        part = properties(("hbff", b"\x02"), ("topic", b"news"), ("content", content))
    async with run_bus("news", "alive", limits={"parts-bytes-max": 100_000}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(part * 101)
            said = await peer.read_to_end()
        assert b"boson.parts-too-large" in said
        assert node.bus.log.bounds("news").stop == 0


@pytest.mark.parametrize(
    ("protocol", "unit"),
    [
        pytest.param("boson-frames", bytes(7), id="empty frames"),
        pytest.param("boson-properties", bytes(4), id="messages without properties"),
        pytest.param("goms", b"\n", id="empty lines"),
        pytest.param("goms", b"{}", id="empty objects"),
        pytest.param("goms", b"[]\n", id="no objects"),
        pytest.param("boson-frames", frame("$x", b""), id="control frames of no meaning"),
        pytest.param("boson-frames", frame("nix", b""), id="an unknown topic"),
    ],
)
@pytest.mark.slow
async def test_a_flood_of_nothing_costs_no_more_than_its_bytes(protocol: str, unit: bytes) -> None:
    """Many of the smallest wrong thing there is, and others are answered meanwhile."""
    data = unit * (MEBI // 4 // len(unit))
    async with run_bus("news", "alive") as node:
        with Growth() as growth:
            async with ScriptedPeer(node.tcp_port, timeout_s=50) as peer:
                await peer.send(START[protocol])
                sending = asyncio.create_task(flood(peer, data, 1))
                reading = asyncio.create_task(read_and_forget(peer))
                await until(lambda: node.tcp.connections)
                # Not less: how long a calm loop takes on a busy machine is not the question.
                assert await is_alive(node) < 10
                await sending
                peer.send_eof()
                await reading
        assert growth.peak_bytes < 64 * MEBI


async def read_and_forget(peer: ScriptedPeer) -> None:
    """Read to the end; either side's memory is the bus's concern here, so nothing is kept."""
    async with asyncio.timeout(50):
        while await peer._reader.read(MEBI):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("protocol", START)
async def test_a_hundred_thousand_one_byte_chunks_do_not_stall_the_loop(protocol: str) -> None:
    """Each byte a read of its own: the cost stays linear, and the loop free for others."""
    message = {
        "boson-frames": frame("news", b"x" * 100_000),
        "boson-properties": properties(("topic", b"news"), ("content", b"x" * 100_000)),
        "goms": line("send", topics=["news"], data="x" * 100_000),
    }[protocol]
    async with run_bus("news", "alive", durability="memory") as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(START[protocol])
            (connection,) = await first_connection(node)
            before = node.bus.log.bounds("news").stop
            await until(lambda: connection.translator is not None)
            worst = 0.0
            # As the pump does it, without a hundred thousand packets. What counts is the time of
            # this thread: other programs may take the processor.
            for byte in message:
                began_s = time.thread_time()
                carry, connection.carry = connection.carry, b""
                connection.receive(carry + bytes([byte]))
                worst = max(worst, time.thread_time() - began_s)
            await is_alive(node)
        assert node.bus.log.bounds("news").stop >= before + 1
        assert worst < 0.2


async def first_connection(node: Node) -> list[Connection]:
    await until(lambda: node.tcp.connections)
    return open_connections(node)


@pytest.mark.slow
async def test_a_hundred_thousand_mistakes_are_few_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_bus("news", "alive") as node:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with caplog.at_level(logging.WARNING, "polybus"):
            async with ScriptedPeer(node.tcp_port, timeout_s=50) as peer:
                await peer.send(START["goms"])
                sending = asyncio.create_task(flood(peer, b"[]\n" * 1000, 100))
                said = 0
                while said < 100_000:
                    said += (await peer.read_line()).count(b"000001")
                await sending
            elapsed_s = loop.time() - began
        assert node.bad_peers.counts["goms.000001"] == 100_000
        assert 0 < len(caplog.records) <= 10 * (elapsed_s + 2)
