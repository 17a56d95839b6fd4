"""What the tests of queue connectors share: a bus with one, and queues that it knows of."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

from edge_kit import TIMEOUT_S, until

from polybus.edges.node import Node
from polybus.edges.protocols.queue import QueueTranslator
from polybus.testing import ScriptedPeer, run_bus

VALUES = [
    b"hello",
    b"",
    bytes(range(256)),
    'h\xe9llo "w"\n'.encode(),
    b"\0\0\0\0",
    b"x" * (1 << 20),
]


def message(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


@contextlib.asynccontextmanager
async def bridged(
    *topics: str, topic: str = "news", **settings: Any
) -> AsyncIterator[tuple[Node, int]]:
    """A bus with a queue connector of the topic behind the usual two, and that one's port."""
    connectors = [
        {"protocol": "tcp", "port": 0},
        {"protocol": "udp", "port": 0, "speaks": "goms"},
        {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": topic},
    ]
    async with run_bus(*topics, connectors=connectors, **settings) as node:
        yield node, int(node.addresses[2].rpartition(":")[2])


def queues_of(node: Node) -> list[QueueTranslator]:
    """The queues that are subscribed."""
    return [
        one.translator
        for one in node.tcp.connections
        if isinstance(one.translator, QueueTranslator) and one.translator.subscriptions
    ]


@contextlib.asynccontextmanager
async def queue(node: Node, port: int) -> AsyncIterator[ScriptedPeer]:
    """A queue the bus knows of: nothing on the wire says that a subscription has begun."""
    known = len(queues_of(node))
    async with ScriptedPeer(port, timeout_s=TIMEOUT_S) as peer:
        await until(lambda: len(queues_of(node)) == known + 1)
        yield peer


def stored(node: Node, topic: str = "news") -> list[bytes]:
    batches = node.bus.log.read(topic, 0, bytes_max=1 << 30)
    return [value for batch in batches for value in batch.values()]
