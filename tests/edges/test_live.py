"""/v1/live: figures and tails for many pages, and what a page cannot do to the bus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from accounts_http_kit import PASSWORDS, accounts_bus
from http_kit import TIMEOUT_S, http_bus
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from polybus.batch import Batch
from polybus.edges.http import routes
from polybus.edges.http.api import info as info_api
from polybus.edges.http.live.hub import LiveChannel
from polybus.edges.http.live.page import LivePeer
from polybus.edges.node import Node


@contextlib.asynccontextmanager
async def page(node: Node, **how: Any) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://127.0.0.1:{node.tcp_port}/v1/live", **how) as websocket:
        yield websocket


async def ask(websocket: ClientConnection, op: str, **fields: Any) -> None:
    await websocket.send(json.dumps({"op": op, **fields}))


async def hear(websocket: ClientConnection, number: int | None = None) -> dict[str, Any]:
    """The next text, or the next of a subscription."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found = dict(json.loads(await websocket.recv()))
            if number is None or found.get("id") == number:
                return found


async def test_figures_come_at_once_and_again() -> None:
    async with http_bus("news") as http, page(http.node) as websocket:
        await http.publish("news", b"1")
        http.node.http.figures.sample()
        await ask(websocket, "subscribe", id=7, channel="figures")
        first = await hear(websocket, 7)
        second = await hear(websocket, 7)

        assert first["channel"] == "figures"
        assert first["data"]["topics"]["news"][2] == 1
        assert second["data"]["time"] >= first["data"]["time"]
        assert set(first["data"]["series"]) >= {"connections", "outbox-bytes", "fsync-ms", "lag"}


async def test_a_tail_shows_what_is_published_on_any_protocol_and_ends_with_its_topic() -> None:
    async with http_bus("news") as http, page(http.node) as websocket:
        await ask(websocket, "subscribe", id=1, channel="tail", topic="News")
        await ask(websocket, "subscribe", id=2, channel="tail", topic="news", text="WORLD")
        await http.until(lambda: http.node.http.websockets and tails(http.node) == 2)
        await http.publish("news", b"hello", b'{"a":"world"}')
        found: list[dict[str, Any]] = []
        while len(found) < 2:
            found += (await hear(websocket, 1))["data"]["messages"]
        matching = (await hear(websocket, 2))["data"]["messages"]

        assert [(one["offset"], one.get("text"), one.get("value")) for one in found] == [
            (0, "hello", None),
            (1, None, {"a": "world"}),
        ]
        assert found[0]["protocol"] == "http" and found[0]["sender"].startswith("127.0.0.1:")
        assert [one["offset"] for one in matching] in ([1], [])
        await http.client.delete("/v1/topics/news")
        assert (await hear(websocket, 1))["error"]["code"] == "topic.deleted"


def tails(node: Node) -> int:
    """How many subscriptions the pages have."""
    peers = [one for one in node.http.websockets if isinstance(one, LivePeer)]
    return sum(len(one.subscriptions) for one in peers)


async def test_a_busy_topic_is_sampled_and_what_is_skipped_is_counted() -> None:
    async with http_bus("news", http={"live-rows-per-s": 50}) as http, page(http.node) as websocket:
        await ask(websocket, "subscribe", id=1, channel="tail", topic="news")
        await http.until(lambda: http.node.http.websockets and tails(http.node) == 1)
        http.node.bus.commit([Batch.of("news", [b"x" * 20_000] * 500)])
        shown = (await hear(websocket, 1))["data"]

        assert len(shown["messages"]) + shown["skipped"] == 500
        assert len(shown["messages"]) <= 50
        assert shown["messages"][-1]["offset"] == 499
        assert shown["messages"][-1]["cut"] and shown["messages"][-1]["size"] == 20_000


UPGRADE = (
    b"GET /v1/live HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


async def slow_page(node: Node) -> asyncio.StreamWriter:
    """A page that follows `news` and does not read."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", node.tcp_port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
    writer.write(UPGRADE)
    await reader.readuntil(b"\r\n\r\n")
    text = json.dumps({"op": "subscribe", "id": 1, "channel": "tail", "topic": "news"}).encode()
    writer.write(b"\x81" + bytes([0x80 | len(text)]) + b"\0\0\0\0" + text)
    return writer


async def test_a_page_that_does_not_read_gets_less_and_others_get_all() -> None:
    async with http_bus("news") as http, page(http.node) as websocket:
        slow = await slow_page(http.node)
        await ask(websocket, "subscribe", id=1, channel="tail", topic="news")
        await http.until(lambda: tails(http.node) == 2)
        seen = sent = 0
        while not any(
            isinstance(one, LivePeer) and one.is_paused for one in http.node.http.websockets
        ):
            http.node.bus.commit([Batch.of("news", [b"x" * 16_000] * 40)])
            sent += 40
            while seen < sent:
                data = (await hear(websocket, 1))["data"]
                seen += len(data["messages"]) + data["skipped"]
        waiting = http.node.context.memory.ledger.bytes
        for peer in list(http.node.http.websockets) * 2:
            peer.ping()
        slow.close()

        assert seen == sent and waiting < 16 << 20
        await http.until(lambda: tails(http.node) <= 1)


async def test_an_account_sees_its_own_and_has_to_log_in() -> None:
    async with accounts_bus() as bus, page(bus.node) as websocket:
        await ask(websocket, "subscribe", id=1, channel="figures")
        assert (await hear(websocket))["error"]["code"] == "auth.needed"
        await ask(websocket, "login", user="other", password="guessed")
        assert (await hear(websocket))["error"]["code"] == "auth.failed"
        await ask(websocket, "login", user="other", password=PASSWORDS["other"])
        assert await hear(websocket) == {"op": "login", "account": "other"}
        await ask(websocket, "subscribe", id=1, channel="figures")
        assert (await hear(websocket, 1))["data"]["series"] == {}
        for topic in ("shop/news", "default/news", "nix"):
            await ask(websocket, "subscribe", id=2, channel="tail", topic=topic)
            assert (await hear(websocket, 2))["error"]["code"] == "topic.unknown"
        await ask(websocket, "subscribe", id=2, channel="tail", topic="shop/shared")
        await bus_until(bus.node, 2)
        bus.node.accounts.revoke("shop", "other", "shared")
        bus.node.bus.commit([Batch.of("shop/shared", [b"secret"])])
        assert (await hear(websocket, 2))["error"]["code"] == "topic.deleted"


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_a_page_is_disconnected_when_its_token_is_over(end: str) -> None:
    async with accounts_bus() as bus:
        accounts = bus.node.accounts
        token = accounts.store.make_token("shop", expires=time.time() + 3600)
        header = {"authorization": f"Bearer {token}"}
        async with page(bus.node, additional_headers=header) as websocket:
            assert await hear(websocket) == {"op": "login", "account": "shop"}
            await ask(websocket, "subscribe", id=1, channel="tail", topic="news")
            await ask(websocket, "subscribe", id=2, channel="figures")
            await hear(websocket, 2)
            if end == "revoked":
                accounts.revoke_token("shop", token.split("_")[1])
            else:
                accounts._clock_s = lambda: time.time() + 7200
                accounts._on_sweep()
            bus.node.bus.commit([Batch.of("shop/news", [b"secret"])])
            told = []
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    told.append(await hear(websocket))
        codes = {one["id"]: one["error"]["code"] for one in told if "error" in one}
        assert codes == {1: "auth.ended", 2: "auth.ended"}
        assert not any("messages" in one.get("data", {}) for one in told)
        assert caught.value.rcvd is not None and caught.value.rcvd.reason == "auth.ended"


async def test_a_page_without_subscriptions_gets_none_after_its_token_was_revoked() -> None:
    async with accounts_bus() as bus:
        token = bus.node.accounts.store.make_token("shop")
        header = {"authorization": f"Bearer {token}"}
        async with page(bus.node, additional_headers=header) as websocket:
            assert await hear(websocket) == {"op": "login", "account": "shop"}
            bus.node.accounts.revoke_token("shop", token.split("_")[1])
            await ask(websocket, "subscribe", id=1, channel="figures")
            assert (await hear(websocket, 1))["error"]["code"] == "auth.ended"
            with pytest.raises(ConnectionClosed):
                await hear(websocket)


async def test_a_page_that_does_not_log_in_is_disconnected() -> None:
    async with accounts_bus(limits={"login-timeout-s": 0.1}) as bus, page(bus.node) as websocket:
        assert (await hear(websocket))["error"]["code"] == "auth.needed"
        await websocket.wait_closed()

        assert websocket.close_code == 1008


async def bus_until(node: Node, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while tails(node) != count:  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"op":"x"}', '{"op":"subscribe","channel":"nix"}', "[" * 99]
)
async def test_a_bad_request_is_answered_and_the_connection_stays(text: str) -> None:
    async with http_bus() as http, page(http.node) as websocket:
        await websocket.send(text)
        assert (await hear(websocket))["error"]["code"] == "live.invalid"
        await ask(websocket, "subscribe", id=1, channel="figures")
        assert (await hear(websocket, 1))["data"]["time"] >= 0


async def test_subscriptions_of_a_page_are_limited_and_a_number_is_used_again() -> None:
    async with http_bus("news", http={"live-subscriptions-max": 2}) as http:
        async with page(http.node) as websocket:
            for number in (1, 1, 1, 2, 3):
                await ask(websocket, "subscribe", id=number, channel="tail", topic="news")
            assert (await hear(websocket, 3))["error"]["code"] == "live.too-many"
            await ask(websocket, "unsubscribe", id=1)
            await ask(websocket, "subscribe", id=3, channel="figures")
            assert "data" in await hear(websocket, 3)


async def test_binary_and_too_large_texts_end_the_connection() -> None:
    async with http_bus() as http:
        for text in (b"\0", "x" * 20_000):
            async with page(http.node) as websocket:
                await websocket.send(text)
                with pytest.raises(ConnectionClosed):
                    await hear(websocket)
        assert not http.node.http.websockets or await _gone(http.node)


async def _gone(node: Node) -> bool:
    async with asyncio.timeout(TIMEOUT_S):
        while node.http.websockets:  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)
    return True


async def test_a_channel_that_fails_is_logged_once_and_others_are_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(routes.CHANNELS, "graph", LiveChannel(fail, 0.0))
    monkeypatch.setitem(routes.CHANNELS, "figures", LiveChannel(info_api.live_sample, 0.0))
    async with http_bus("news") as http, page(http.node) as websocket:
        http.node.http.figures.sample()
        await ask(websocket, "subscribe", id=1, channel="graph")
        await ask(websocket, "subscribe", id=2, channel="figures")
        for _ in range(4):
            await hear(websocket, 2)
    assert [one.message for one in caplog.records].count(
        "live figures cannot be computed: graph"
    ) == 1
