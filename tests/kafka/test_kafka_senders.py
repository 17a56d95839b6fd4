"""Queues and goMS over UDP on several nodes: all get a message but the one that sent it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cluster_kit import ONE_BROKER
from edge_kit import UdpClient
from queue_connector_kit import bridged, message, queue

from polybus.edges.node import Node
from polybus.testing.kafka import KafkaBrokers

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def two_nodes(
    brokers: KafkaBrokers, prefix: str
) -> AsyncIterator[tuple[tuple[Node, int], tuple[Node, int]]]:
    """Nodes with a queue connector of the topic `news`, and that one's ports."""
    shared: dict[str, Any] = {"log": brokers.url, "cluster": {"prefix": prefix, **ONE_BROKER}}
    async with bridged("news", **shared) as a, bridged("news", **shared) as b:
        yield a, b


async def test_a_message_of_a_queue_reaches_the_queues_of_all_nodes_but_its_own(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with (
        two_nodes(brokers, prefix) as (a, b),
        queue(*a) as sender,
        queue(*a) as beside,
        queue(*b) as away,
    ):
        await sender.send(message(b"one"))
        for peer in (beside, away):
            assert await peer.read(7) == message(b"one")
        await away.send(message(b"two"))
        # The sender's first message is the one of the other.
        assert await sender.read(7) == await beside.read(7) == message(b"two")


async def test_a_goms_message_over_udp_reaches_all_peers_but_its_sender(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with (
        two_nodes(brokers, prefix) as ((a, _), (b, _)),
        UdpClient(a.udp_port) as sender,
        UdpClient(a.udp_port) as beside,
        UdpClient(b.udp_port) as away,
    ):

        async def send(peer: UdpClient, **fields: Any) -> None:
            await peer.send(json.dumps({"topics": ["news"], **fields}).encode() + b"\n")

        for peer in (sender, beside, away):
            await send(peer, messagetype="register", ack=True)
            assert json.loads(await peer.read_line())["messagetype"] == "reg-ack"
        await send(sender, messagetype="send", data="one")
        for peer in (beside, away):
            assert json.loads(await peer.read_line())["data"] == "one"
        await send(away, messagetype="send", data="two")
        assert json.loads(await sender.read_line())["data"] == "two"
