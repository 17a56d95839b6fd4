"""What the tests of Boson's words share: a bus, a reader of its topics in frames, and a writer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus


@pytest.fixture
async def bus() -> AsyncIterator[Node]:
    async with run_bus("news", "sport", "two words") as node:
        yield node


@pytest.fixture
async def reader(bus: Node) -> AsyncIterator[ScriptedPeer]:
    """A subscriber to all topics in frames."""
    async with ScriptedPeer(bus.tcp_port) as peer:
        await subscribe(peer, "news", "sport", "two words")
        yield peer


@pytest.fixture
async def writer(bus: Node) -> AsyncIterator[ScriptedPeer]:
    async with ScriptedPeer(bus.tcp_port) as peer:
        yield peer


async def subscribe(peer: ScriptedPeer, *topics: str) -> None:
    await peer.send_frame("$subscribe", "\n".join(f"{t} tell=position" for t in topics).encode())
    for topic in topics:
        name, content = await peer.read_frame()
        assert name == "$position" and content.endswith(b" " + topic.encode())
