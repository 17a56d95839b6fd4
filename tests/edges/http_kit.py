"""What the tests of the HTTP edge share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from polybus.edges.http.polls import Poll
from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus

TIMEOUT_S = 20.0


class Http:
    """A client of one bus: the API, polls and WebSockets."""

    def __init__(self, node: Node, client: httpx.AsyncClient) -> None:
        self.node = node
        self.client = client

    async def open_session(self, *topics: str, **fields: Any) -> str:
        answer = await self.client.post("/v1/sessions", json={"topics": topics, **fields})
        assert answer.status_code == 201, answer.text
        key: str = answer.json()["sessionKey"]
        return key

    async def publish(self, topic: str, *values: bytes) -> None:
        for value in values:
            answer = await self.client.post(f"/v1/topics/{topic}/messages", content=value)
            assert answer.status_code == 200, answer.text

    async def post(self, key: str, *messages: Any) -> None:
        answer = await self.client.post(f"/v1/sessions/{key}/packs", json=messages)
        assert answer.status_code == 202, answer.text

    async def poll(
        self, key: str, confirm: str | None = None, *, hang: bool = False
    ) -> httpx.Response:
        query = {"sessionKey": key, "transport": "longpolling" if hang else "shortpolling"}
        if confirm is not None:
            query["confirmIds"] = confirm
        return await self.client.get("/msgstream", params=query)

    async def packs(self, key: str, confirm: str | None = None) -> dict[str, Any]:
        answer = await self.poll(key, confirm)
        if answer.status_code == 204:
            return {}
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def websocket(self, key: str) -> connect:
        return connect(f"ws://127.0.0.1:{self.node.tcp_port}/msgstream?sessionKey={key}")

    async def hanging_poll(self, key: str) -> asyncio.Task[httpx.Response]:
        """A long poll that the bus holds by now."""
        session = self.node.services.inboxes.find(key)
        assert session is not None
        poll = asyncio.create_task(self.poll(key, hang=True))
        await self.until(lambda: isinstance(session.receiver, Poll))
        return poll

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def http_bus(*topics: str, **settings: Any) -> AsyncIterator[Http]:
    async with run_bus(*topics, **settings) as node:
        base = f"http://127.0.0.1:{node.tcp_port}"
        async with httpx.AsyncClient(base_url=base, timeout=TIMEOUT_S) as client:
            yield Http(node, client)


async def recv(websocket: ClientConnection) -> dict[str, Any]:
    text = await asyncio.wait_for(websocket.recv(), TIMEOUT_S)
    return dict(json.loads(text))


async def raw(node: Node, request: bytes) -> bytes:
    """Everything the bus answers to these bytes until it closes."""
    async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        await peer.send(request)
        return await peer.read_to_end()
