"""What is written to a socket: large pieces go past the transport, and all stay in order."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from edge_kit import frame

from polybus.testing import ScriptedPeer, run_bus

LARGE = 64 << 10


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
async def test_large_and_small_messages_arrive_in_order_at_a_slow_reader(pause_s: float) -> None:
    dice = random.Random(7)
    sizes = [dice.choice([1, 100, LARGE - 20, LARGE, 3 * LARGE, 20 * LARGE]) for _ in range(30)]
    frames = [frame("news", dice.randbytes(size)) for size in sizes]
    # Rows of the log, not blobs.
    settings: dict[str, Any] = {"slow-subscriber": "wait", "limits": {"inline-bytes-max": 64 << 20}}
    async with (
        run_bus("news", **settings) as node,
        ScriptedPeer(node.tcp_port) as subscriber,
        ScriptedPeer(node.tcp_port) as publisher,
    ):
        await subscriber.send(frame("$subscribe", b"news tell=position"))
        await subscriber.read_frame()

        async def publish() -> None:
            for one in frames:
                await publisher.send(one)

        publishing = asyncio.create_task(publish())
        for one in frames:
            assert await subscriber.read(len(one)) == one
            await asyncio.sleep(pause_s)
        await publishing


async def test_a_large_message_to_a_peer_that_is_gone_disturbs_nobody() -> None:
    value = bytes(40 * LARGE)
    limits = {"inline-bytes-max": 64 << 20}
    async with run_bus("news", limits=limits) as node, ScriptedPeer(node.tcp_port) as publisher:
        async with ScriptedPeer(node.tcp_port) as gone:
            await gone.send(frame("$subscribe", b"news tell=position"))
            await gone.read_frame()
            await publisher.send(frame("news", value))
        async with ScriptedPeer(node.tcp_port) as subscriber:
            await subscriber.send(frame("$subscribe", b"news from=earliest"))
            whole = frame("news", value)
            assert await subscriber.read(len(whole)) == whole
