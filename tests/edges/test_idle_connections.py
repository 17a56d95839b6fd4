"""An idle connection takes little memory: pieces of many are what a storm leaves behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc

import httpx
import pytest
from edge_kit import frame, line, open_connections, until
from raw_http_kit import UPGRADE

from polybus.edges.node import Node
from polybus.services.figures import rings
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

# The peers themselves, and the figures of the bus, of which each series gets its room once.
OTHERS = (__file__, socket.__file__, rings.__file__)


def connected(port: int, first_bytes: list[bytes]) -> list[socket.socket]:
    """Peers that have their answer."""
    peers = []
    for data in first_bytes:
        peer = socket.create_connection(("127.0.0.1", port), timeout=20)
        peer.sendall(data)
        assert peer.recv(1 << 16)
        peers.append(peer)
    return peers


async def opened(node: Node, first_bytes: list[bytes]) -> list[socket.socket]:
    return await asyncio.to_thread(connected, node.tcp_port, first_bytes)


async def session_key(http: httpx.AsyncClient, node: Node) -> bytes:
    answer = await http.post(f"http://127.0.0.1:{node.tcp_port}/v1/sessions", json={"topics": []})
    return bytes(answer.json()["sessionKey"], "ascii")


@pytest.mark.parametrize("protocol", PEERS)
async def test_an_idle_connection_is_small(protocol: str) -> None:
    data, bytes_max = PEERS[protocol]
    async with run_bus("news") as node, httpx.AsyncClient() as http:
        first_bytes = [data] * (20 + COUNT)
        if b"{key}" in data:
            keys = [await session_key(http, node) for _ in first_bytes]
            first_bytes = [data.replace(b"{key}", key) for key in keys]
        await http.aclose()
        await until(lambda: not open_connections(node))
        few = await opened(node, first_bytes[:20])
        gc.collect()
        tracemalloc.start()
        try:
            many = await opened(node, first_bytes[20:])
            await until(lambda: len(open_connections(node)) == 20 + COUNT)
            gc.collect()
            ours = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(False, file) for file in OTHERS]
            )
        finally:
            tracemalloc.stop()
        each = sum(one.size for one in ours.statistics("filename")) / COUNT
        for peer in (*few, *many):
            peer.close()
    assert each < bytes_max, f"{each:.0f} bytes"
