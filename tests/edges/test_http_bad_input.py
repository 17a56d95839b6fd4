"""Bad input over HTTP: an answer or a close as HTTP and msgstream say, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_kit import TIMEOUT_S, Http, http_bus, raw, recv
from websockets.exceptions import ConnectionClosed

from polybus.testing import ScriptedPeer

UNSET = b'{"0":[["session.unset","noSession"]]}'
UPGRADE = (
    "GET /msgstream?sessionKey={key} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, CONTINUATION, CLOSE, PING = 1, 0, 8, 9


def frame(opcode: int, data: bytes, *, fin: bool = True, claims: int | None = None) -> bytes:
    """A client's frame, masked with zeros; `claims` is the length it says it has."""
    size = len(data) if claims is None else claims
    head = bytes([opcode | (0x80 if fin else 0)])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += b"\xfe" + struct.pack("!H", size)
    else:
        head += b"\xff" + struct.pack("!Q", size)
    return head + b"\0\0\0\0" + data


@contextlib.asynccontextmanager
async def raw_websocket(http: Http, key: str) -> AsyncIterator[ScriptedPeer]:
    """A WebSocket whose frames are ours to break."""
    async with ScriptedPeer(http.node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        await peer.send(UPGRADE.format(key=key).encode())
        while await peer.read_line() != b"\r\n":
            pass
        yield peer


async def close_code(peer: ScriptedPeer) -> int:
    """The code of the close frame that ends everything the bus still sends."""
    said = await peer.read_to_end()
    at = said.rindex(b"\x88")
    return int.from_bytes(said[at + 2 : at + 4], "big")


async def two_sessions(http: Http) -> tuple[str, str]:
    """A session to be attacked with two packs, and one that must not notice."""
    keys = await http.open_session(), await http.open_session()
    for key in keys:
        await http.post(key, ["a"])
        await http.post(key, ["b"])
    return keys


async def assert_untouched(http: Http, *keys: str) -> None:
    for key in keys:
        assert await http.packs(key) == {"1": [["a"]], "2": [["b"]]}


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

        answer = await raw(http.node, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

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
        began = time.monotonic()
        assert list(await http.packs(one, "7," * 10_000 + "1")) == ["2"]
        async with http.websocket(two) as websocket:
            await websocket.send(MEGABYTE_OF_IDS + ",1")
            await (await websocket.ping())
        assert time.monotonic() - began < 2
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


# Frames

BAD_FRAMES: dict[str, tuple[bytes, int]] = {
    "binary": (frame(2, b"1"), 1003),
    "binary in fragments": (frame(2, b"1", fin=False) + frame(CONTINUATION, b"2"), 1003),
    "a length beyond the limit": (frame(TEXT, b"", claims=(64 << 10) + 1), 1009),
    "a length of 2**63-1": (frame(TEXT, b"", claims=(1 << 63) - 1), 1009),
    "fragments beyond the limit": (
        frame(TEXT, b"1," * 20_000, fin=False) + frame(CONTINUATION, b"1," * 20_000),
        1009,
    ),
    "not masked": (b"\x81\x011", 1002),
    "a reserved bit": (frame(TEXT | 0x40, b"1"), 1002),
    "an unknown opcode": (frame(3, b"1"), 1002),
    "a continuation of nothing": (frame(CONTINUATION, b"1"), 1002),
    "a text in a text": (frame(TEXT, b"1", fin=False) + frame(TEXT, b"2"), 1002),
    "a ping in fragments": (frame(PING, b"", fin=False), 1002),
    "a ping of 126 bytes": (frame(PING, b"x" * 126), 1002),
    "a close of one byte": (frame(CLOSE, b"x"), 1002),
    "invalid UTF-8": (frame(TEXT, b"\xff"), 1007),
    "UTF-8 cut off": (frame(TEXT, "é".encode()[:1]), 1007),
    "a surrogate": (frame(TEXT, b"\xed\xa0\x80"), 1007),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_frame_closes_the_connection_with_its_code_and_loses_nothing(name: str) -> None:
    data, code = BAD_FRAMES[name]
    async with http_bus() as http:
        one, two = await two_sessions(http)
        async with http.websocket(two) as bystander, raw_websocket(http, one) as peer:
            assert len(await recv(bystander)) == 2
            await peer.send(data)
            assert await close_code(peer) == code
            await http.post(two, ["still here"])
            assert await recv(bystander) == {"3": [["still here"]]}
        await assert_untouched(http, one)


async def test_a_confirmation_cut_anywhere_is_one_confirmation() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        for number in range(12):
            await http.post(key, ["n", number])
        # Only what was sent can be confirmed.
        assert len(await http.packs(key)) == 12
        # A letter of two bytes is cut too, a ping comes between, and some fragments are empty.
        text = "é,11".encode()
        cuts = [frame(CONTINUATION, text[at : at + 1], fin=False) for at in range(1, len(text))]
        async with raw_websocket(http, key) as peer:
            await peer.send(frame(TEXT, text[:1], fin=False) + b"".join(cuts))
            await peer.send(frame(CONTINUATION, b"", fin=False) * 1000 + frame(PING, b"?"))
            await peer.send(frame(CONTINUATION, b"") + frame(CLOSE, struct.pack("!H", 1000)))
            assert await close_code(peer) == 1000
        assert "11" not in await http.packs(key)
        assert len(await http.packs(key)) == 11


@pytest.mark.parametrize(
    "head",
    [
        "Sec-WebSocket-Version: 12\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        "Sec-WebSocket-Version: 13\r\n",
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: short\r\n",
    ],
)
async def test_a_bad_handshake_is_refused_and_takes_the_session_from_nobody(head: str) -> None:
    async with http_bus() as http:
        key, _ = await two_sessions(http)
        async with http.websocket(key) as websocket:
            await recv(websocket)
            request = f"GET /msgstream?sessionKey={key} HTTP/1.1\r\nHost: x\r\n"
            request += f"Connection: Upgrade\r\nUpgrade: websocket\r\n{head}\r\n"
            answer = await raw(http.node, request.encode())

            assert answer.split()[1] in (b"400", b"426")
            await http.post(key, ["c"])
            assert await recv(websocket) == {"3": [["c"]]}


# Peers that do not read


def deaf_socket(port: int, request: bytes) -> socket.socket:
    """A connection that sent this and takes almost nothing back."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", port))
    deaf.sendall(request)
    return deaf


async def test_who_reads_a_byte_now_and_then_holds_up_nobody_and_loses_nothing() -> None:
    """Of many unread megabytes the bus holds a few; the session gets all of them in the end."""
    async with http_bus("news") as http:
        slow, quick = await http.open_session("news"), await http.open_session("news")
        with deaf_socket(http.node.tcp_port, UPGRADE.format(key=slow).encode()) as deaf:
            async with http.websocket(quick) as websocket:
                for number in range(24):
                    await http.publish("news", b"%d" % number + b"x" * 1_000_000)
                    packs = await recv(websocket)
                    await websocket.send(",".join(packs))
                    assert len(deaf.recv(1)) == 1
                    peers = http.node.http.websockets
                    assert max(one._transport.get_write_buffer_size() for one in peers) < 8 << 20
        got = []
        while packs := await http.packs(slow):
            got += [message[1] for pack in packs.values() for message in pack]
            await http.packs(slow, ",".join(packs))
        assert [int(value.rstrip("x")) for value in got] == list(range(24))


async def test_who_reads_nothing_is_let_go_at_the_next_pings() -> None:
    async with http_bus("news", msgstream={"ping-interval-s": 0.2}) as http:
        key = await http.open_session("news")
        with deaf_socket(http.node.tcp_port, UPGRADE.format(key=key).encode()):
            await http.until(lambda: http.node.http.websockets)
            for _ in range(12):
                await http.publish("news", b"x" * (1 << 20))
            await http.until(lambda: not http.node.http.websockets)
        assert http.node.server.ledger.bytes == 0
        assert len(await http.packs(key)) > 0


async def test_pongs_that_nobody_reads_do_not_fill_the_memory() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        pings = frame(PING, b"x" * 125) * 1000
        with deaf_socket(http.node.tcp_port, UPGRADE.format(key=key).encode()) as deaf:
            await http.until(lambda: http.node.http.websockets)
            deaf.setblocking(False)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < 64 << 20:
                    await asyncio.wait_for(
                        asyncio.get_running_loop().sock_sendall(deaf, pings), 0.3
                    )
                    sent += len(pings)
            (peer,) = http.node.http.websockets
            assert sent < 32 << 20
            assert peer._transport.get_write_buffer_size() < 8 << 20


async def test_answers_that_nobody_reads_are_counted_and_cost_their_connections() -> None:
    """Not the memory of the bus, and not the others' messages."""
    limits = {"memory-bytes-max": 16 << 20}
    async with http_bus("news", limits=limits) as http:
        await http.publish("news", *[b"x" * (1 << 20)] * 12)
        request = b"GET /v1/topics/news/messages HTTP/1.1\r\nHost: x\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(deaf_socket(http.node.tcp_port, request))
            await http.until(lambda: http.node.server.over_memory())
            await http.until(lambda: not http.node.server.over_memory())

            await http.publish("news", b"others go on")


# Slow requests

PATIENCE = {"detect-timeout-s": 0.3, "message-timeout-s": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun",
    [
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"GET /msgstream?sessionKey=",
        b"POST /v1/topics/news/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx",
        b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
        b"POST /v1/broadcast HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[[",
    ],
)
@pytest.mark.parametrize("drips", [False, True])
async def test_a_request_that_does_not_come_is_cut_off(begun: bytes, drips: bool) -> None:
    """Whether it stands still or comes a byte at a time."""
    async with http_bus("news", limits=PATIENCE) as http:
        async with ScriptedPeer(http.node.tcp_port, timeout_s=TIMEOUT_S) as peer:
            await peer.send(begun)
            answer = asyncio.create_task(peer.read_to_end())
            while drips and not answer.done():
                with contextlib.suppress(ConnectionError):
                    await peer.send(b"x")
                await asyncio.sleep(0.05)

            assert (await answer).startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))
        assert (await http.client.get("/healthz")).status_code == 200
        assert http.node.server.bus.log.bounds("news").stop == 0


@pytest.mark.slow
async def test_who_waits_for_messages_is_not_a_slow_request() -> None:
    async with http_bus(limits=PATIENCE, msgstream={"heartbeat-s": 2.5}) as http:
        one, two = await http.open_session(), await http.open_session()
        async with http.websocket(two) as websocket:
            began = time.monotonic()

            answer = await http.poll(one, hang=True)

            assert answer.status_code == 204
            assert time.monotonic() - began > 2.4
            await http.post(two, ["a"])
            assert await recv(websocket) == {"1": [["a"]]}


# Limits


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 70_000), 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (b"x" * 70_000), 431),
        (b"GET / HTTP/1.1\r\n%b\r\n" % (b"X: y\r\n" * 20_000), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: %b" % (b"x" * 200_000), 431),
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
        assert http.node.server.bus.log.bounds("news").stop == 0
        assert len(http.node.http.inboxes) == 0


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
        began = time.monotonic()

        answer = await http.client.post(
            path, content=BOMBS[bomb], headers={"content-type": "application/json"}
        )

        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(answer.content) < 1000
        assert time.monotonic() - began < 1
        assert await http.packs(key) == {}
        assert len(http.node.http.inboxes) == 1


async def test_a_number_that_no_computer_counts_with_is_passed_on_as_it_is() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        body = b'[["t",%b]]' % (b"9" * 1_000_000)

        answer = await http.client.post(f"/v1/sessions/{key}/packs", content=body)

        assert answer.status_code == 202
        assert (await http.poll(key)).content == b'{"1":%b}' % body


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
