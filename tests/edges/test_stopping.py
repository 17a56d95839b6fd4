"""How connections and the bus end: everything owed goes out first."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from edge_kit import TIMEOUT_S, connected, frame, line, until

from polybus.testing import ScriptedPeer, run_bus


async def test_a_stopping_bus_gives_subscribers_what_waits_for_them() -> None:
    """Also when somebody else has come and gone before."""
    count, value = 40, b"x" * (1 << 18)
    async with run_bus("news", durability="memory") as node:
        async with ScriptedPeer(node.tcp_port) as early:
            await early.send(frame("news", b"early"))
        await until(lambda: not node.tcp.connections)
        async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as reader:
            await reader.send(frame("$subscribe", b"news tell=position"))
            await reader.read_frame()
            async with ScriptedPeer(node.tcp_port) as writer:
                for _ in range(count):
                    await writer.send(frame("news", value))
                await until(lambda: node.bus.log.bounds("news").stop == count + 1)
            stopping = asyncio.create_task(node.server.stop())
            said = await reader.read_to_end()
            reader.send_eof()
            await stopping
    assert said == frame("news", value) * count


async def test_a_stopping_bus_acknowledges_datagrams_that_are_stored() -> None:
    async with run_bus("news") as node, connected(node, "goms-udp") as udp:
        await udp.send(line("register", topics=["news"], ack=True))
        await udp.read(len(line("reg-ack", topics=["news"])))
        await udp.send(line("send", topics=["news"], ack=True, data="last"))
        await until(lambda: node.bus.log.bounds("news").stop == 1)
        await node.server.stop()
        assert b"send-ack" in await udp.read(40)


async def test_a_stopping_bus_reads_nothing_more() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(frame("news?receipt=1", b"x"))
        await peer.read_frame()
        stopping = asyncio.create_task(node.server.stop())
        await asyncio.sleep(0)
        await peer.send(frame("news", b"late"))
        assert await peer.read_to_end() == b""
        peer.send_eof()
        await stopping
        assert node.bus.log.bounds("news").stop == 1


async def test_a_gzip_stream_is_ended_properly() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(gzip.compress(frame("news?receipt=1", b"x")))
        peer.send_eof()
        epoch = node.bus.log.bounds("news").epoch
        # gzip.decompress refuses a stream without its end.
        said = gzip.decompress(await peer.read_to_end())
        assert said == frame("$receipt", b"1 %d:0" % epoch)


async def test_an_error_reaches_a_peer_that_is_still_sending() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(frame("news", b"", 9) + b"x" * (4 << 20))
        assert b"boson.flag-unknown" in await peer.read_to_end()


@pytest.mark.slow
async def test_a_peer_that_never_closes_is_dropped_in_the_end() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(frame("news", b"", 9))
        await peer.read_to_end()
        await until(lambda: not node.tcp.connections)
