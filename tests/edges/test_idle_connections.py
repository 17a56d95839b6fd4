"""An idle connection takes little memory: pieces of many are what a storm leaves behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc

import pytest
from edge_kit import frame, line, open_connections, until
from raw_http_kit import UPGRADE

from polybus.edges.node import Node
from polybus.testing import run_bus

COUNT = 200
GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
REGISTER = line("register", topics=["news"], ack=True)
# Of each protocol the first bytes, and what a connection may take: a quarter more than measured.
PEERS = {
    "boson": (frame("$subscribe", b"news tell=position"), 2300),
    "goms": (REGISTER, 2300),
    "http": (GET, 4700),
    "websocket": (UPGRADE.encode(), 5000),
}


def connected(port: int, data: bytes, count: int) -> list[socket.socket]:
    """Peers that have their answer."""
    peers = []
    for _ in range(count):
        peer = socket.create_connection(("127.0.0.1", port), timeout=20)
        peer.sendall(data)
        assert peer.recv(1 << 16)
        peers.append(peer)
    return peers


async def opened(node: Node, data: bytes, count: int) -> list[socket.socket]:
    return await asyncio.to_thread(connected, node.tcp_port, data, count)


@pytest.mark.parametrize("protocol", PEERS)
async def test_an_idle_connection_is_small(protocol: str) -> None:
    data, bytes_max = PEERS[protocol]
    async with run_bus("news") as node:
        few = await opened(node, data, 20)
        gc.collect()
        tracemalloc.start()
        try:
            many = await opened(node, data, COUNT)
            await until(lambda: len(open_connections(node)) == 20 + COUNT)
            gc.collect()
            ours = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(False, __file__), tracemalloc.Filter(False, socket.__file__)]
            )
        finally:
            tracemalloc.stop()
        each = sum(one.size for one in ours.statistics("filename")) / COUNT
        for peer in (*few, *many):
            peer.close()
    assert each < bytes_max, f"{each:.0f} bytes"
