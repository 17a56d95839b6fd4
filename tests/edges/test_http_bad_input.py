"""HTTP under fire: what is malformed, too large or too slow is answered or closed, and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_kit import Http, http_bus, raw

from polybus.testing import ScriptedPeer


async def healthy(http: Http) -> bool:
    return bool((await http.client.get("/healthz")).status_code == 200)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET  HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", b"431"),
    ],
)
async def test_what_is_no_request_is_answered_and_closed(
    request_bytes: bytes, status: bytes
) -> None:
    async with http_bus() as http:
        answer = await raw(http.node, request_bytes)

        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"application/problem+json" in answer
        assert await healthy(http)


async def test_a_confirm_list_of_a_megabyte_is_414() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        await http.post(key, ["kept"])
        ids = b",".join(b"%d" % number for number in range(150_000))
        answer = await raw(
            http.node,
            b"GET /msgstream?transport=shortpolling&sessionKey=%b&confirmIds=%b HTTP/1.1\r\n\r\n"
            % (key.encode(), ids),
        )

        assert answer.startswith(b"HTTP/1.1 414")
        assert await http.packs(key) == {"1": [["kept"]]}


async def test_a_head_that_never_ends_is_cut_off() -> None:
    async with http_bus() as http, ScriptedPeer(http.node.tcp_port) as peer:
        await peer.send(b"GET / HTTP/1.1\r\nx: ")
        await peer.send(b"y" * 200_000)

        assert (await peer.read(12)) == b"HTTP/1.1 431"
        assert await healthy(http)


@pytest.mark.slow
async def test_a_slow_head_is_cut_off() -> None:
    async with http_bus(limits={"detect-timeout-s": 0.3}) as http:
        answer = await raw(http.node, b"GET / HTTP/1.1\r\nhost: ")

        assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.slow
async def test_a_slow_body_is_cut_off() -> None:
    async with http_bus("news", limits={"message-timeout-s": 0.3}) as http:
        head = b"POST /v1/topics/news/messages HTTP/1.1\r\ncontent-length: 100\r\n\r\n"
        answer = await raw(http.node, head + b"x")

        assert answer.startswith(b"HTTP/1.1 408")
        assert http.node.server.bus.log.bounds("news").stop == 0


async def test_a_body_over_the_limit_is_413_and_closed() -> None:
    async with http_bus("news", limits={"message-bytes-max": 1000}) as http:
        answer = await http.client.post("/v1/topics/news/messages", content=b"x" * 1001)
        chunked = await raw(
            http.node,
            b"POST /v1/topics/news/messages HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"3e8\r\n"
            + b"x" * 1000
            + b"\r\n"
            + b"1\r\nx\r\n0\r\n\r\n",
        )

        assert (answer.status_code, answer.json()["code"]) == (413, "http.body-too-large")
        assert chunked.startswith(b"HTTP/1.1 413")
        assert http.node.server.bus.log.bounds("news").stop == 0


async def test_json_has_its_own_limit_and_depth() -> None:
    async with http_bus(http={"json-bytes-max": 1000}) as http:
        large = await http.client.post("/v1/sessions", json={"topics": ["x" * 1000]})
        deep = await http.client.post("/v1/broadcast", content=b"[" * 900)

        assert large.status_code == 413
        assert deep.status_code == 400


async def test_another_content_type_is_415() -> None:
    async with http_bus() as http:
        answer = await http.client.post(
            "/v1/sessions", content=b"{}", headers={"content-type": "text/xml"}
        )

        assert answer.status_code == 415


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"1e999999", b'{"ttl-s":' + b"9" * 10**6 + b"}"]
)
async def test_bad_json_is_400(body: bytes) -> None:
    async with http_bus() as http:
        answer = await http.client.post(
            "/v1/sessions", content=body, headers={"content-type": "application/json"}
        )

        assert answer.status_code == 400, answer.text


async def test_a_thousand_requests_in_one_write_are_refused_in_time() -> None:
    async with http_bus() as http:
        answer = await raw(http.node, b"GET /healthz HTTP/1.1\r\n\r\n" * 1000)

        assert answer.startswith(b"HTTP/1.1 ")
        assert answer.count(b"200 OK") < 200
        assert await healthy(http)


async def test_requests_after_one_another_on_one_connection_are_answered_in_order() -> None:
    async with http_bus() as http:
        answer = await raw(
            http.node,
            b"GET /healthz HTTP/1.1\r\n\r\nGET /nix HTTP/1.1\r\nconnection: close\r\n\r\n",
        )

        assert answer.index(b"200 OK") < answer.index(b"404 Not Found")


async def test_a_client_that_reads_nothing_holds_nobody_up() -> None:
    async with http_bus("news") as http:
        slow, quick = await http.open_session("news"), await http.open_session("news")
        upgrade = (
            "GET /msgstream?sessionKey={} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        async with ScriptedPeer(http.node.tcp_port) as peer:
            await peer.send(upgrade.format(slow).encode())
            total = 0
            for number in range(16):
                await http.publish("news", b"%02d" % number + b"x" * (1 << 20))
                packs: dict[str, Any] = await http.packs(quick)
                total += len(packs)
                await http.packs(quick, ",".join(packs))
            assert total == 16
            # What the slow one did not take is in the log, not in memory.
            transport = next(iter(http.node.http.websockets))._transport
            held = transport.connection.transport.get_write_buffer_size()  # type: ignore[attr-defined]
            assert held < 8 << 20
        got: list[Any] = []
        while packs := await http.packs(slow):
            got += [message[1][:2] for pack in packs.values() for message in pack]
            await http.packs(slow, ",".join(packs))
            packs = {}
            if len(got) >= 16:
                break
        assert got == [f"{number:02d}" for number in range(16)]


async def test_hundreds_of_bad_requests_are_few_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with http_bus() as http:
        for _ in range(30):
            await asyncio.gather(*[raw(http.node, b"GET nothing\r\n\r\n") for _ in range(10)])
        lines = [line for line in caplog.records if not line.name.startswith("httpx")]
        assert len(lines) < 30
