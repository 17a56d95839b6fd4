"""What the tests of event streams share: a bus, a client of it, and every transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from client_kit import url_of

import polybus
from polybus.client.msgstream import EventStream
from polybus.edges.node import Node
from polybus.testing import run_bus

TRANSPORTS = ("websocket", "longpolling", "shortpolling")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def bus() -> AsyncIterator[Node]:
    async with run_bus("shop") as node:
        yield node


@pytest.fixture
async def client(bus: Node) -> AsyncIterator[polybus.Client]:
    async with polybus.connect(url_of("http", bus.tcp_port)) as c:
        yield c


def make(client: polybus.Client, transport: Any, **options: Any) -> EventStream:
    events = client.events(["shop"], transport=transport, **options)
    events.poll_interval_s = 0.02
    return events


async def push(client: polybus.Client, events: EventStream, *pack: Any) -> None:
    assert events.session_key is not None
    await client.sessions.push(events.session_key, pack)


async def run(events: EventStream) -> None:
    async with asyncio.timeout(10):
        await events.run()
