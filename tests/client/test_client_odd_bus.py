"""The client against a bus that does odd things, said byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from client_kit import take, url_of

import polybus
from polybus.batch import Batch
from polybus.client import Message
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.wire import boson_frames as wire

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def odd_bus(*behaviours: Behaviour) -> AsyncIterator[str]:
    """A server whose first connection gets the first behaviour, and so on; the last one stays."""
    left = list(behaviours)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behaviour = left.pop(0) if len(left) > 1 else left[0]
        with contextlib.suppress(ConnectionError):
            await behaviour(reader, writer)
            await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield url_of("boson", server.sockets[0].getsockname()[1])


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


def says(*frames: bytes) -> Behaviour:
    """Answers the first bytes it gets with these frames."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"".join(frames))

    return behave


def message(text: bytes) -> bytes:
    return bytes(wire.encode(Batch.of("news", [text])))


async def two_of(*behaviours: Behaviour) -> list[Message]:
    """The first two messages a subscription gets."""
    async with odd_bus(says_nothing, *behaviours) as url, polybus.connect(url) as c:
        async with c.subscribe("news") as subscription:
            return await take(subscription, 2)


async def test_a_stream_that_makes_no_sense_is_given_up_and_begun_again() -> None:
    garbage = says(wire.encode_position("news", 1, 5), message(b"a"), b"\xff" * 100)
    sane = says(wire.encode_position("news", 1, 6), message(b"b"))
    messages = await two_of(garbage, sane)
    assert [(one.text, one.offset, one.gap) for one in messages] == [
        ("a", 5, False),
        ("b", 6, False),
    ]


async def test_a_position_told_in_the_middle_is_a_gap() -> None:
    frames = [
        wire.encode_position("news", 1, 0),
        message(b"a"),
        wire.encode_position("news", 1, 9),
        message(b"b"),
    ]
    messages = await two_of(says(*frames))
    assert [(one.offset, one.gap) for one in messages] == [(0, False), (9, True)]


async def test_offsets_that_went_back_are_told_as_a_gap_and_not_dropped() -> None:
    """The bus crashed and lost what it had delivered before it was safe; its offsets come again."""
    before = says(wire.encode_position("news", 1, 8), message(b"lost"), b"\xff" * 100)
    after = says(wire.encode_position("news", 1, 8), message(b"other"))
    messages = await two_of(before, after)
    assert [(one.text, one.offset, one.gap) for one in messages] == [
        ("lost", 8, False),
        ("other", 8, True),
    ]


async def test_no_receipt_is_awaited_from_a_log_that_takes_no_writes() -> None:
    refusal = says(wire.encode_error("log.full", "no space left on device"))
    async with odd_bus(refusal) as url, polybus.connect(url) as c:
        calls = [c.publish(topic, "x", receipt=True) for topic in ("a", "b")]
        results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        assert isinstance(result, StorageError)
        assert result.code == "log.full"


async def test_a_refusal_that_names_a_topic_concerns_no_other() -> None:
    frames = [
        wire.encode_error("topic.unknown", "there is no topic 'b'"),
        wire.encode_frame(wire.RECEIPT, b"1 7:3"),
    ]
    async with odd_bus(says(*frames)) as url, polybus.connect(url) as c:
        calls = [c.publish(topic, "x", receipt=True) for topic in ("a", "b")]
        stored, refused = await asyncio.gather(*calls, return_exceptions=True)
    assert stored == polybus.Position(7, 3)
    assert isinstance(refused, UsageError)


async def test_the_reason_for_a_lost_receipt_is_passed_on() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(wire.encode_error("outbox.full", "you read too slowly"))
        await writer.drain()
        writer.write_eof()

    errors: list[PolybusError] = []
    async with odd_bus(refuse, says_nothing) as url:
        async with polybus.connect(url, on_error=errors.append) as c:
            with pytest.raises(PolybusError, match=r"outbox\.full") as caught:
                await c.publish("news", "x", receipt=True)
    assert caught.value.code == "client.receipt-unknown"
    assert [error.code for error in errors] == ["outbox.full"]


async def test_a_bus_that_closes_at_once_is_not_asked_without_end() -> None:
    attempts = 0

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.transport.abort()

    async with odd_bus(says_nothing, leave) as url, polybus.connect(url) as c:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await c.subscribe("news")
    assert 2 <= attempts <= 10


async def test_a_publish_waits_for_the_connection_to_come_back() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def store(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = re.search(rb"\?receipt=(\d+)", await reader.read(1 << 16))
        assert asked is not None
        writer.write(wire.encode_frame(wire.RECEIPT, asked[1] + b" 7:3"))

    async with odd_bus(leave, leave, store) as url, polybus.connect(url) as c:
        async with asyncio.timeout(10):
            position = await c.publish("news", "x", receipt=True, retry=True)
    assert position == polybus.Position(7, 3)
