"""Messages that were begun: they must continue, and share a bounded pool."""

from __future__ import annotations

import asyncio

import pytest
from bad_input_kit import MEBI, START
from edge_kit import (
    TIMEOUT_S,
    frame,
    is_alive,
    line,
    open_connections,
    properties,
    read_properties,
    until,
)

from polybus.testing import ScriptedPeer, run_bus


@pytest.mark.slow
@pytest.mark.parametrize("protocol", START)
async def test_a_message_that_stands_still_ends_its_connection_with_an_error(protocol: str) -> None:
    half = {
        "boson-frames": frame("news", b"x" * 100)[:50],
        "boson-properties": properties(("topic", b"news"), ("content", b"x" * 100))[:50],
        "goms": line("send", topics=["news"], data="x" * 100)[:50],
    }[protocol]
    async with run_bus("news", "alive", limits={"message-timeout-s": 0.1}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(START[protocol] + half)
            said = await peer.read_to_end()
        assert (b"000001" if protocol == "goms" else b"peer.too-slow") in said
        assert node.bad_peers.counts["peer.too-slow"] == 1
        await is_alive(node)


@pytest.mark.slow
async def test_a_slow_drip_does_not_keep_a_message_open_for_ever() -> None:
    async with run_bus("news", "alive", limits={"message-timeout-s": 0.2}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            # Fast first: that must not buy time for later.
            await peer.send(frame("news", b"x" * MEBI)[: MEBI // 2])
            dripping = asyncio.create_task(drip(peer))
            said = await peer.read_to_end()
            dripping.cancel()
        assert b"peer.too-slow" in said


async def drip(peer: ScriptedPeer) -> None:
    try:
        while True:
            await peer.send(b"x")
            await asyncio.sleep(0.02)
    except ConnectionError:
        pass


@pytest.mark.slow
async def test_idle_connections_between_messages_stay() -> None:
    async with run_bus("news", limits={"message-timeout-s": 0.1}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(START["boson-properties"])
            await asyncio.sleep(1.5)
            await peer.send(properties(("hbfs", b"news tell=position")))
            assert "hbfp" in await read_properties(peer)


async def test_many_large_unfinished_messages_share_a_bounded_pool() -> None:
    """Those who want more than there is wait; small clients, and one large at a time, continue."""
    limits = {"assembly-bytes-max": 4 * MEBI, "inline-bytes-max": 4 * MEBI}
    size = 2 * MEBI
    message = frame("news?receipt=1", b"x" * size)
    async with run_bus("news", "alive", durability="memory", limits=limits) as node:
        peers = [ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) for _ in range(12)]
        senders = []
        for peer in peers:
            await peer.__aenter__()
            # All but the last byte, so that none can finish by itself.
            senders.append(asyncio.create_task(peer.send(message[:-1])))
        held = open_connections(node)
        await until(lambda: any("assembly" in one._held_by for one in held))
        assert await is_alive(node) < 4
        assert sum(one.unfinished_bytes for one in held) < 12 * MEBI
        # Now all may finish, one after another.
        finishing = [
            asyncio.create_task(finish(peer, sender))
            for peer, sender in zip(peers, senders, strict=True)
        ]
        await asyncio.gather(*finishing)
        assert node.bus.log.bounds("news").stop == 12
        for peer in peers:
            await peer.__aexit__(None, None, None)


async def finish(peer: ScriptedPeer, sender: asyncio.Task[None]) -> None:
    await sender
    await peer.send(b"x")
    assert (await peer.read_frame())[0] == "$receipt"
