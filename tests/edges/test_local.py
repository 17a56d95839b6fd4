"""Peers on this machine: a narrow window, until they send a lot at once."""

from __future__ import annotations

import socket

import pytest
from edge_kit import frame, open_connections, until

from polybus.edges.node import Node
from polybus.edges.tcp import local
from polybus.testing import ScriptedPeer, run_bus


@pytest.mark.parametrize(
    ("peer", "own", "expected"),
    [
        (("127.0.0.1", 4000), ("127.0.0.1", 55545), True),
        (("192.0.2.7", 4000), ("192.0.2.7", 55545), True),
        (("192.0.2.7", 4000), ("192.0.2.8", 55545), False),
        (("::1", 4000, 0, 0), ("::1", 55545, 0, 0), True),
        (None, ("127.0.0.1", 55545), False),
        ("", "", False),
    ],
)
def test_a_peer_is_local_when_both_ends_have_one_address(
    peer: object, own: object, expected: bool
) -> None:
    assert local.is_local({"peername": peer, "sockname": own}.get) is expected


def received_messages(node: Node, topic: str) -> int:
    return node.bus.log.bounds(topic).stop


def buffer_bytes(node: Node) -> int:
    """The receive buffer of the only connection; Linux says twice what was asked for."""
    (connection,) = open_connections(node)
    connected: socket.socket = connection.transport.get_extra_info("socket")
    return connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


async def test_the_window_is_narrow_until_a_peer_keeps_it_full() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        for _ in range(100):
            await peer.send(frame("news", b"x"))
        await until(lambda: received_messages(node, "news") == 100)
        assert buffer_bytes(node) <= 2 * local.NARROW_BYTES
        for _ in range(100):
            await peer.send(frame("news", bytes(1 << 20)))
        await until(lambda: received_messages(node, "news") == 200)
        assert buffer_bytes(node) > 4 * local.NARROW_BYTES


async def test_what_the_bus_sends_to_this_machine_is_not_paced() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(frame("news", b"x"))
        await until(lambda: received_messages(node, "news") == 1)
        (connection,) = open_connections(node)
        connected: socket.socket = connection.transport.get_extra_info("socket")
        control = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert control.rstrip(b"\0") == b"reno"
