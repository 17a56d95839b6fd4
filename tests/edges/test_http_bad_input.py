"""Bad input over HTTP: an answer or a close as HTTP and msgstream say, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_kit import http_bus, raw, recv
from raw_http_kit import assert_untouched, two_sessions
from websockets.exceptions import ConnectionClosed

from polybus.testing import ScriptedPeer

UNSET = b'{"0":[["session.unset","noSession"]]}'


# Keys, transports and parameters


@pytest.mark.parametrize(
    "key", ["nobody", "%00", "%ff%fe", "..%2f..", "x" * 5000, "1'--", "%F0%9F"]
)
async def test_every_unknown_key_is_one_and_the_same_answer(key: str) -> None:
    async with http_bus() as http:
        for transport in ("shortpolling", "longpolling"):
            answer = await http.client.get(f"/msgstream?sessionKey={key}&transport={transport}")
            assert (answer.status_code, answer.content) == (200, UNSET)
        async with http.websocket(key) as websocket:
            assert await websocket.recv() == UNSET.decode()


@pytest.mark.parametrize("transport", ["", "LONGPOLLING", "long polling", "<script>", "x" * 5000])
async def test_an_unknown_transport_is_told_without_being_echoed_at_length(transport: str) -> None:
    async with http_bus() as http:
        answer = await http.client.get("/msgstream", params={"transport": transport})

        assert answer.status_code == 400
        assert answer.headers["content-type"] == "text/plain; charset=UTF-8"
        assert answer.text == f"Unknown HTTP transport: {transport[:40]}"


async def test_of_a_repeated_key_or_transport_the_first_counts() -> None:
    async with http_bus() as http:
        one, two = await two_sessions(http)
        await assert_untouched(http, one, two)
        query = f"sessionKey={one}&sessionKey={two}&transport=shortpolling&transport=nix"

        answer = await http.client.get(f"/msgstream?{query}&confirmIds=1")

        assert answer.json() == {"2": [["b"]]}
        await assert_untouched(http, two)
        async with http.websocket(f"{two}&sessionKey={one}") as websocket:
            assert list(await recv(websocket)) == ["1", "2"]


# Confirmations

MEGABYTE_OF_IDS = ",".join(["7"] * (1 << 19))


async def test_a_megabyte_of_ids_in_a_url_is_414_and_confirms_nothing() -> None:
    async with http_bus() as http:
        one, two = await two_sessions(http)
        target = f"/msgstream?sessionKey={one}&transport=shortpolling&confirmIds={MEGABYTE_OF_IDS}"

        answer = await raw(http.node, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

        assert answer.startswith(b"HTTP/1.1 414 ")
        await assert_untouched(http, one, two)


async def test_a_megabyte_of_ids_on_a_websocket_is_1009_and_confirms_nothing() -> None:
    async with http_bus() as http:
        one, two = await two_sessions(http)
        async with http.websocket(one) as websocket:
            with contextlib.suppress(ConnectionClosed):
                await websocket.send("1,2," + MEGABYTE_OF_IDS)
            await websocket.wait_closed()
            assert websocket.close_code == 1009
        await assert_untouched(http, one, two)


async def test_a_list_as_long_as_allowed_is_read_at_once() -> None:
    async with http_bus(msgstream={"websocket-message-bytes-max": 2 << 20}) as http:
        one, two = await two_sessions(http)
        await assert_untouched(http, one, two)
        began_s = time.process_time()
        assert list(await http.packs(one, "7," * 10_000 + "1")) == ["2"]
        async with http.websocket(two) as websocket:
            await websocket.send(MEGABYTE_OF_IDS + ",1")
            await (await websocket.ping())
        assert time.process_time() - began_s < 8
        assert list(await http.packs(two)) == ["2"]


@pytest.mark.parametrize(
    "ids", ["3", "999999999999999", "9" * 5000, "-1", "1e0", "0x1", "١", "1.0"]
)
async def test_what_no_pack_has_as_its_id_confirms_nothing(ids: str) -> None:
    async with http_bus() as http:
        one, two = await two_sessions(http)
        await http.packs(one, ids)
        async with http.websocket(one) as websocket:
            await recv(websocket)
            await websocket.send(ids)
            await (await websocket.ping())
        await assert_untouched(http, one, two)
        await http.post(one, ["c"])
        assert (await http.packs(one))["3"] == [["c"]]


# Limits


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * 70_000), 414),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: %b\r\n\r\n" % (b"x" * 70_000), 431),
        (b"GET / HTTP/1.1\r\n%b\r\n" % (b"X: y\r\n" * 20_000), 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: %b" % (b"x" * 200_000), 431),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET  HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /v1/broadcast HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
    ids=[
        *("url", "header", "headers", "endless header", "version", "no target", "no colon"),
        *("negative length", "two kinds of length", "two lengths", "chunk size"),
    ],
)
async def test_a_bad_head_is_answered_and_closed(request_: bytes, status: int) -> None:
    async with http_bus() as http:
        answer = await raw(http.node, request_)

        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close\r\n" in answer.lower()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/topics/news/messages"])
async def test_a_body_over_the_limit_is_413_and_nothing_of_it_counts(
    path: str, chunked: bool
) -> None:
    limits = {"message-bytes-max": 100_000, "parts-bytes-max": 100_000}
    async with http_bus("news", limits=limits, http={"json-bytes-max": 100_000}) as http:
        pieces = [b"x" * 10_000] * 11

        async def stream() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        body: Any = stream() if chunked else b"".join(pieces)
        answer = await http.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )

        assert (answer.status_code, answer.json()["code"]) == (413, "http.body-too-large")
        assert answer.headers["connection"] == "close"
        assert http.node.bus.log.bounds("news").stop == 0
        assert len(http.node.services.inboxes) == 0


BOMBS = {
    "deep arrays": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "never closed": b"[" * 1_000_000,
    "a number of a million digits": b"9" * 1_000_000,
    "a million commas": b"[" + b"," * 1_000_000 + b"]",
    "invalid UTF-8": b'[["\xff"]]',
    "a lone surrogate": b'[["\\ud800"]]',
    "nothing": b"",
    "a NUL": b"\0",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/broadcast", "/v1/topics"])
async def test_a_json_bomb_is_400_at_once_and_nothing_of_it_counts(path: str, bomb: str) -> None:
    async with http_bus() as http:
        key = await http.open_session()
        began_s = time.process_time()

        answer = await http.client.post(
            path, content=BOMBS[bomb], headers={"content-type": "application/json"}
        )

        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(answer.content) < 1000
        assert time.process_time() - began_s < 4
        assert await http.packs(key) == {}
        assert len(http.node.services.inboxes) == 1


async def test_a_number_as_long_as_allowed_is_delivered_as_it_is_and_a_longer_one_is_not() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        statuses = []
        for digits in (300, 301):
            body = b'[["t",%b]]' % (b"9" * digits)
            answer = await http.client.post(f"/v1/sessions/{key}/packs", content=body)
            statuses.append(answer.status_code)

        assert statuses == [202, 400]
        assert (await http.poll(key)).content == b'{"1":[["t",%b]]}' % (b"9" * 300)


async def test_a_pack_as_deep_as_allowed_is_delivered_and_one_deeper_is_not() -> None:
    async with http_bus(limits={"json-depth-max": 10}) as http:
        key = await http.open_session()
        statuses = []
        for depth in (8, 9):
            data = json.loads("[" * depth + "]" * depth)
            answer = await http.client.post(f"/v1/sessions/{key}/packs", json=[["t", data]])
            statuses.append(answer.status_code)

        assert statuses == [202, 400]
        assert len(await http.packs(key)) == 1


# Heads


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /msgstream HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 505),
        (b"GET /healthz HTTP/0.9\r\nHost: localhost\r\n\r\n", 505),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 200),
    ],
)
async def test_a_request_has_one_host_and_a_version(head: bytes, status: int) -> None:
    """HTTP/1.0 had no Host."""
    async with http_bus() as http, ScriptedPeer(http.node.tcp_port) as peer:
        await peer.send(head)
        said = await peer.read_to_end()
        assert said.startswith(b"HTTP/1.1 %d " % status), said
