"""What the tests of the pump share: its two forms, peers that send together, what is stored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import pytest
from edge_kit import TIMEOUT_S, frame, open_connections, until

from polybus.edges.node import Node
from polybus.edges.tcp import context
from polybus.edges.tcp import pump as installed
from polybus.scan import plain
from polybus.testing import ScriptedPeer


@pytest.fixture(params=["installed", "source"], autouse=True)
def pump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    chosen = installed
    if request.param == "source":
        tcp = "polybus.edges.tcp"
        for name in (f"{tcp}.transport", f"{tcp}.handling", installed.__name__):
            chosen = plain.from_source(name)
            monkeypatch.setitem(sys.modules, name, chosen)
    monkeypatch.setattr(context, "Pump", chosen.Pump)
    yield chosen


@contextlib.asynccontextmanager
async def peers(node: Node, count: int) -> AsyncIterator[list[ScriptedPeer]]:
    """Peers whose protocol is known, and whose topic was seen before."""
    async with contextlib.AsyncExitStack() as stack:
        found = [ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) for _ in range(count)]
        for peer in found:
            await stack.enter_async_context(peer)
            await peer.send(frame("news?receipt=hello", b"hello"))
            await peer.read_frame()
        yield found


def sockets_of(found: list[ScriptedPeer]) -> list[socket.socket]:
    return [peer._writer.get_extra_info("socket") for peer in found]


def name_of(one: socket.socket) -> str:
    return f"127.0.0.1:{one.getsockname()[1]}"


def send_together(node: Node, found: list[ScriptedPeer], messages: list[bytes]) -> None:
    """Let all messages arrive before the loop continues: the pump reads them in one turn."""
    for one, message in zip(sockets_of(found), messages, strict=True):
        assert os.write(one.fileno(), message) == len(message)


async def stored(node: Node, topic: str, count: int) -> list[tuple[bytes, str]]:
    """Value and sender of a topic's last messages."""
    await until(lambda: node.bus.log.bounds(topic).stop >= count)
    await asyncio.to_thread(node.bus.log.sync)
    rows: list[tuple[bytes, str]] = []
    offset = node.bus.log.bounds(topic).stop - count
    while len(rows) < count:
        for batch in node.bus.log.read(topic, offset):
            senders = [batch.sender] * len(batch)
            if batch.stored is not None:
                senders = batch.stored.column("sender").to_pylist()
            rows += zip(batch.values(), senders, strict=True)
            offset = batch.last_offset + 1
    return rows


def transports_of(node: Node, found: list[ScriptedPeer]) -> list[Any]:
    by_name = {one.name: one.transport for one in open_connections(node)}
    return [by_name[name_of(one)] for one in sockets_of(found)]
