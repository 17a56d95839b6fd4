"""The HTTP client's pure parts, and its connection against servers that do odd things."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from client_kit import url_of

import polybus
from polybus.client.connection import Link
from polybus.client.http import connection as http_connection
from polybus.client.http.connection import HttpConnection, decode, refused
from polybus.client.http.publisher import REQUEST_BYTES_MAX, REQUEST_LINES_MAX, HttpPublisher
from polybus.client.http.sessions import SessionStream
from polybus.client.http.sources import Pack, StreamEvent, parse_packs
from polybus.client.options import ClientOptions, parse
from polybus.client.transport import PendingPublish
from polybus.errors import PeerError, PolybusError, StorageError
from polybus.services.context import Durability
from polybus.testing import run_bus

TARGET = "/v1/topics/news"
INVALID = "client.answer-invalid"


@contextlib.asynccontextmanager
async def server(*answers: bytes, cut: bool = False) -> AsyncIterator[str]:
    """Gives each request the next answer; then, or with `cut` after each, ends the connection."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"content-length: " in head:
                    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(length))
                writer.write(left.pop(0))
                if cut:
                    break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield url_of("http", listener.sockets[0].getsockname()[1])


def ok(body: bytes, *headers: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(body)
    return head + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


async def test_a_connection_is_used_again_and_made_again() -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
    )
    async with server(ok(b"1"), chunked, ok(b"3", b"connection: close"), ok(b"4")) as url:
        http = HttpConnection(ClientOptions(address=parse(url)))
        answers = [await http.request("GET", TARGET) for _ in range(4)]
        http.close()
    assert answers == [b"1", b"abcd", b"3", b"4"]


async def test_a_connection_that_rested_for_long_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "IDLE_S_MAX", -1.0)
    async with server(ok(b"1"), ok(b"2")) as url:
        http = HttpConnection(ClientOptions(address=parse(url)))
        await http.request("GET", TARGET)
        first = http._link
        await http.request("GET", TARGET)
        assert first is not None and http._link is not first
        http.close()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "client.answer-invalid"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "client.disconnected"),
        (b"", "client.disconnected"),
        (ok(b"x" * 2000), "client.answer-invalid"),
    ],
)
async def test_what_is_no_answer_is_an_error(answer: bytes, code: str) -> None:
    async with server(answer, cut=True) as url:
        http = HttpConnection(ClientOptions(address=parse(url), message_bytes_max=1000))
        with pytest.raises(PolybusError) as caught:
            await http.request("GET", TARGET)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (
            refused(503, b'{"code":"log.full","detail":"x"}'),
            StorageError,
            "log.full",
        ),
        (refused(502, b"<h1>Bad gateway</h1>"), PolybusError, INVALID),
    ],
)
def test_a_problem_is_the_error_of_its_code(
    error: PolybusError, kind: type[PolybusError], code: str
) -> None:
    assert (type(error), error.code) == (kind, code)


@pytest.mark.parametrize("body", [b"<h1>Welcome</h1>", b"\xff"])
def test_an_answer_that_is_no_json_is_an_error(body: bytes) -> None:
    with pytest.raises(PolybusError) as caught:
        decode(body, dict)
    assert caught.value.code == INVALID


async def test_a_publish_that_a_web_server_answers_may_be_stored_or_not() -> None:
    async with server(ok(b"<h1>Welcome</h1>"), ok(b'{"epoch":1,"offsets":[]}')) as url:
        async with polybus.connect(url) as c:
            for _ in range(2):
                with pytest.raises(PolybusError, match=r"client\.receipt-unknown"):
                    await c.publish("news", "x", receipt=True)


async def never(_: Durability, given: asyncio.Future[None]) -> None:
    """Replaces `Durability.wait_for`: nothing becomes durable."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("scheme", ["http", "ws"])
@pytest.mark.parametrize("retry", [False, True])
async def test_a_receipt_over_http_that_does_not_come_is_given_up(
    scheme: str, retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[PolybusError] = []
    async with run_bus("news") as node:
        url = url_of(scheme, node.tcp_port)
        async with polybus.connect(url, receipt_timeout_s=1.5, on_error=errors.append) as c:
            monkeypatch.setattr(Durability, "wait_for", never)
            with pytest.raises(PolybusError, match=r"no receipt for 1\.5 seconds") as caught:
                async with asyncio.timeout(20):
                    await c.publish("news", "x", receipt=True, retry=retry)
            monkeypatch.undo()
            position = await c.publish("news", "y", receipt=True)
    assert caught.value.code == "client.receipt-unknown"
    assert position is not None and position.offset == 1
    assert errors == []


async def test_a_receipt_over_http_is_not_given_up_while_the_message_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsent = iter([9, 8, 7, 6, 6])
    monkeypatch.setattr(Link, "unsent_bytes", property(lambda _: next(unsent)))
    async with run_bus("news") as node:
        url = url_of("http", node.tcp_port)
        async with polybus.connect(url, receipt_timeout_s=0.01) as c:
            monkeypatch.setattr(Durability, "wait_for", never)
            with pytest.raises(PolybusError, match="no receipt for 0.01 seconds"):
                await c.publish("news", "x", receipt=True)
            monkeypatch.undo()
    assert list(unsent) == []


def test_packs_come_in_the_order_of_their_numbers() -> None:
    packs = parse_packs(b'{"10":[["a"]],"9":[["b",[1, 2]],["c",null]],"0":[]}')
    assert packs == [
        Pack(0, []),
        Pack(9, [StreamEvent("b", b"[1, 2]", 9), StreamEvent("c", b"null", 9)]),
        Pack(10, [StreamEvent("a", b"", 10)]),
    ]
    assert [event.data for event in packs[1].events] == [[1, 2], None]


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b'{"1":[[]]}', b'{"1":[[1]]}', b'{"x":[]}', b'{"1":{}}', b"\xff", b'{"1":['],
)
def test_what_is_no_packs_is_the_bus_s_fault(text: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        parse_packs(text)
    assert caught.value.code == "msgstream.pack-invalid"


async def test_packs_that_make_no_sense_end_the_stream() -> None:
    async with server(ok(b"[]")) as url:
        stream = SessionStream(ClientOptions(address=parse(url)), key="key")
        with pytest.raises(PeerError):
            await stream.receive()


async def test_a_pack_of_the_session_before_confirms_nothing_of_the_next() -> None:
    async with server(ok(b'{"1":[["a"]]}'), ok(b'{"1":[["b"]]}')) as url:
        stream = SessionStream(ClientOptions(address=parse(url)), key="key")
        (old,) = await stream.receive()
        await stream.disconnect()
        stream.use("other")
        (new,) = await stream.receive()
        stream.handled(old)
        assert list(stream._unhandled.values()) == [new]
        await stream.disconnect()


async def test_a_publish_is_cut_by_lines_too() -> None:
    publisher = HttpPublisher(ClientOptions(address=parse("http://127.0.0.1:1")))
    publisher._queue += [
        PendingPublish("news", [b""] * (2 * REQUEST_LINES_MAX + 1)),
        PendingPublish("news", [b"x"]),
        PendingPublish("sport", [b"x" * 2 * REQUEST_BYTES_MAX, b"y"]),
    ]
    requests = [
        [(len(part.values), part.is_last) for part in publisher._next_parts()] for _ in range(5)
    ]
    assert requests == [
        [(REQUEST_LINES_MAX, False)],
        [(REQUEST_LINES_MAX, False)],
        [(1, True), (1, True)],
        [(1, False)],
        [(1, True)],
    ]
    assert not publisher._queue
