"""Peers that are gone before the bus looks at them: nobody knows where they came from."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from edge_kit import frame, line

from polybus.testing import run_bus

REQUEST = (
    b"POST /v1/topics/news/messages?receipt=memory HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"content-length: 1\r\n\r\nx"
)


@pytest.mark.parametrize(
    "data",
    [
        frame("news", b"x"),
        line("register", topics=["news"]) + line("send", topics=["news"], data="x"),
        REQUEST,
    ],
    ids=["frames", "goms", "http"],
)
async def test_a_peer_that_is_gone_at_once_is_not_taken_for_one_of_this_machine(
    data: bytes,
) -> None:
    async with run_bus("news") as node:
        # The loop does not run meanwhile, so the bus accepts a connection that was reset. It has
        # no address any more, but its bytes can be read.
        with socket.create_connection(("127.0.0.1", node.tcp_port)) as peer:
            peer.sendall(data)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert node.bus.log.bounds("news").stop == 0
