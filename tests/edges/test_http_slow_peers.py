"""HTTP peers that do not read, or do not finish their request: they hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import cast

import pytest
from http_kit import TIMEOUT_S, http_bus, recv
from raw_http_kit import PING, UPGRADE, frame

from polybus.edges.http.edge import HttpProtocol
from polybus.edges.http.websocket import WebSocketPeer
from polybus.edges.tcp.connection import Connection
from polybus.testing import ScriptedPeer

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
                    peers = cast(set[WebSocketPeer], http.node.http.websockets)
                    assert max(one._transport.get_write_buffer_size() for one in peers) < 8 << 20
        got = []
        while packs := await http.packs(slow):
            got += [message[1] for pack in packs.values() for message in pack]
            await http.packs(slow, ",".join(packs))
        assert [int(value.rstrip("x")) for value in got] == list(range(24))


async def test_who_comes_back_again_and_again_and_reads_nothing_holds_one_answer() -> None:
    """The packs are in memory, so each connection is sent to in the turn in which it comes."""
    async with http_bus("news") as http:
        key = await http.open_session("news")
        async with http.websocket(key) as websocket:
            for _ in range(12):
                await http.publish("news", b"x" * 1_000_000)
                await recv(websocket)
        peers = cast(set[WebSocketPeer], http.node.http.websockets)
        await http.until(lambda: not peers)
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                request = UPGRADE.format(key=key).encode()
                stack.enter_context(deaf_socket(http.node.tcp_port, request))
                await http.until(lambda: any(one._paused for one in peers))
                held = [one._transport.get_write_buffer_size() for one in peers]
                assert sum(held) < 8 << 20
                assert http.node.context.memory.ledger.bytes < 8 << 20


async def test_who_keeps_a_connection_open_between_requests_holds_no_request() -> None:
    head = b"POST /v1/topics/news/messages HTTP/1.1\r\nhost: localhost\r\n"
    request = head + b"content-length: 5\r\n\r\nhello"
    async with http_bus("news") as http, ScriptedPeer(http.node.tcp_port) as peer:
        for _ in range(2):
            # Two at once, the second one in two parts.
            await peer.send(request + request[:-2])
            await peer.send(request[-2:])
            for _ in range(2):
                assert await peer.read_line() == b"HTTP/1.1 200 OK\r\n"
                while (line := await peer.read_line()) != b"\r\n":
                    if line.startswith(b"content-length:"):
                        size = int(line.split()[1])
                await peer.read(size)
            uvicorn_state = http.node._http_edge._uvicorn_state
            (protocol,) = cast(set[HttpProtocol], uvicorn_state.connections)
            assert protocol.cycle is None and protocol.scope is None


async def test_who_does_not_read_a_last_answer_counts_until_it_is_gone() -> None:
    request = "GET /v1/topics/news/messages?offset=0 HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    async with http_bus("news", limits={"inline-bytes-max": 16 << 20}) as http:
        await http.publish("news", b"x" * (8 << 20))
        memory = http.node.context.memory
        with deaf_socket(http.node.tcp_port, f"{request}connection: close\r\n\r\n".encode()):
            connections = cast(set[Connection], http.node.tcp.connections)
            await http.until(lambda: any(one.is_closing() for one in connections))
            assert memory.ledger.bytes > 8 << 20
            await http.until(lambda: not memory.ledger.bytes)


async def test_who_reads_nothing_is_let_go_at_the_next_pings() -> None:
    async with http_bus("news", msgstream={"ping-interval-s": 0.2}) as http:
        key = await http.open_session("news")
        with deaf_socket(http.node.tcp_port, UPGRADE.format(key=key).encode()):
            await http.until(lambda: http.node.http.websockets)
            for _ in range(12):
                await http.publish("news", b"x" * (1 << 20))
            await http.until(lambda: not http.node.http.websockets)
        assert http.node.context.memory.ledger.bytes == 0
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
            (peer,) = cast(set[WebSocketPeer], http.node.http.websockets)
            assert sent < 32 << 20
            assert peer._transport.get_write_buffer_size() < 8 << 20


async def test_answers_that_nobody_reads_are_counted_and_cost_their_connections() -> None:
    """Not the memory of the bus, and not the others' messages."""
    limits = {"memory-bytes-max": 16 << 20}
    async with http_bus("news", limits=limits) as http:
        await http.publish("news", *[b"x" * (1 << 20)] * 12)
        request = b"GET /v1/topics/news/messages HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(deaf_socket(http.node.tcp_port, request))
            await http.until(lambda: http.node.context.memory.is_full())
            await http.until(lambda: not http.node.context.memory.is_full())

            await http.publish("news", b"others go on")


# Slow requests

PATIENCE = {"detect-timeout-s": 0.3, "message-timeout-s": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "begun",
    [
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"GET /msgstream?sessionKey=",
        b"POST /v1/topics/news/messages HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 1000\r\n\r\nx",
        b"POST /v1/sessions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 1000\r\n\r\n",
        b"POST /v1/broadcast HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[[",
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
        assert http.node.bus.log.bounds("news").stop == 0


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
