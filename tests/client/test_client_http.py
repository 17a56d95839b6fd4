"""http:// and ws:// — the client through the HTTP API and a session of the bus."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from client_kit import held_packs, take, url_of

import polybus
from polybus.client.http.publisher import REQUEST_BYTES_MAX
from polybus.client.options import Address, parse
from polybus.edges.node import Node
from polybus.errors import PolybusError, UsageError
from polybus.testing import run_bus

TLS = Path(__file__).parent / "tls"


@pytest.fixture(params=["http", "ws"])
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def bus() -> AsyncIterator[Node]:
    async with run_bus("news", "sport") as node:
        yield node


# Publishing


async def test_a_receipt_tells_where_the_message_is_safe(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        first = await c.publish("news", "one", receipt=True)
        last = await c.publish_many("news", ["two", b"\xff", ""], receipt=True)
    assert first is not None and last is not None
    assert (first.offset, last.offset, last.epoch) == (0, 3, first.epoch)


async def test_values_and_headers_reach_other_protocols_byte_for_byte(
    bus: Node, scheme: str
) -> None:
    values = [b"text", b'{"a": [1,  2]}', b'"quoted"', b"\xff\x00", b"", b"line\nline"]
    headers: dict[str, bytes | str] = {"lang": "en", "raw": b"\xfe"}
    async with (
        polybus.connect(url_of(scheme, bus.tcp_port)) as c,
        polybus.connect(url_of("goms", bus.tcp_port)) as goms,
        goms.subscribe("news") as messages,
    ):
        await c.publish_many("news", values, headers=headers)
        for value in values:
            await c.publish("news", value)
        found = await take(messages, 2 * len(values))
    assert [message.value for message in found] == values * 2
    assert [dict(message.headers) for message in found] == (
        [{"lang": b"en", "raw": b"\xfe"}] * len(values) + [{}] * len(values)
    )


async def test_many_receipts_share_requests_and_keep_their_order(bus: Node, scheme: str) -> None:
    count = 2000
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        waiting = [c.publish("news", str(n), receipt=True) for n in range(count)]
        positions = await asyncio.gather(*waiting)
        async with c.subscribe("news", start="earliest") as messages:
            found = await take(messages, count)
    assert [place.offset for place in positions if place is not None] == list(range(count))
    assert [message.text for message in found] == [str(n) for n in range(count)]


async def test_a_publish_larger_than_a_request_is_cut_into_several(bus: Node, scheme: str) -> None:
    values = [bytes([n]) * (REQUEST_BYTES_MAX // 3) for n in range(10)]
    values.append(b"x" * (3 * REQUEST_BYTES_MAX))
    async with (
        polybus.connect(url_of(scheme, bus.tcp_port)) as c,
        polybus.connect(url_of("boson", bus.tcp_port)) as boson,
        boson.subscribe("news") as messages,
    ):
        position = await c.publish_many("news", values, receipt=True)
        assert [message.value for message in await take(messages, 11)] == values
    assert position is not None and position.offset == 10


async def test_a_refusal_is_raised_or_told(bus: Node, scheme: str) -> None:
    told: list[PolybusError] = []
    url = url_of(scheme, bus.tcp_port)
    async with polybus.connect(url, on_error=told.append) as c:
        with pytest.raises(UsageError, match=r"topic\.unknown"):
            await c.publish("nowhere", "x", receipt=True)
        await c.publish("nowhere", "x")
        await c.publish("news", "the connection stays", receipt=True)
    assert [error.code for error in told] == ["topic.unknown"]


async def test_a_client_that_closes_sends_everything_first(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        for number in range(100):
            await c.publish("sport" if number % 3 else "news", str(number))
    assert bus.bus.log.bounds("news").stop == 34
    assert bus.bus.log.bounds("sport").stop == 66


# Subscribing


async def test_what_a_value_becomes_on_its_way_through_a_session(bus: Node, scheme: str) -> None:
    values = {
        b"text": b"text",
        b'{"a": [1,  2]}': b'{"a":[1,2]}',  # JSON comes without its white space
        b'"quoted"': b"quoted",  # a JSON string cannot be distinguished from text
        b"1.50": b"1.50",
        b"\xff\x00": b"\xff\x00",
        b"": b"",
        b'{"base64":"?"}': b'{"base64":"?"}',
        rb'"\ud800"': rb'"\ud800"',  # no text of Python's
    }
    async with (
        polybus.connect(url_of("boson", bus.tcp_port)) as boson,
        polybus.connect(url_of(scheme, bus.tcp_port)) as c,
        c.subscribe("news") as messages,
    ):
        await boson.publish_many("news", values)
        found = await take(messages, len(values))
    assert [message.value for message in found] == list(values.values())
    assert {(one.topic, one.position, one.gap) for one in found} == {("news", None, False)}


async def test_a_subscription_starts_where_it_is_told(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        await c.publish_many("news", ["0", "1", "2"], receipt=True)
        position = await c.publish("sport", "s", receipt=True)
        assert position is not None
        epoch = bus.bus.log.bounds("news").epoch
        async with (
            c.subscribe(["News", "sport"], start="earliest") as all_of_it,
            c.subscribe("news", start=polybus.Position(epoch, 2)) as the_end,
        ):
            texts = [message.text for message in await take(all_of_it, 4)]
            assert sorted(texts) == ["0", "1", "2", "s"]
            assert (await take(the_end, 1))[0].text == "2"


async def test_a_subscription_that_is_refused_says_why(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        with pytest.raises(UsageError, match=r"topic\.unknown"):
            async with c.subscribe(["news", "nowhere"]):
                pass
    assert len(bus.http.inboxes) == 0


async def test_a_pack_is_confirmed_when_its_reader_asks_for_more(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        async with c.subscribe("news") as messages:
            await c.publish_many("news", ["one", "two"], receipt=True)
            assert len(await take(messages, 2)) == 2
            await held_packs(bus, 1)
            reading = asyncio.create_task(take(messages, 1))
            await held_packs(bus, 0)
            await c.publish("news", "three")
            assert (await reading)[0].text == "three"


async def test_a_session_ends_with_its_subscription(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        async with c.subscribe("news"):
            assert len(bus.http.inboxes) == 1
        assert len(bus.http.inboxes) == 0
        forgotten = await c.subscribe("news")
    assert len(bus.http.inboxes) == 0
    assert [message async for message in forgotten] == []


@pytest.mark.slow
async def test_a_slow_reader_holds_little_and_loses_nothing(scheme: str) -> None:
    """Many times what a subscription holds, read only after it was all published."""
    count = 60
    async with run_bus("news") as bus:
        async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
            async with c.subscribe("news") as messages:
                for number in range(count):
                    await c.publish("news", b"%03d" % number + bytes(1 << 19), receipt=True)
                found = await take(messages, count)
    assert [int(message.value[:3]) for message in found] == list(range(count))


async def test_messages_travel_encrypted(scheme: str) -> None:
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    tls = {"cert": str(TLS / "cert.pem"), "key": str(TLS / "key.pem")}
    async with run_bus("news", connectors=[{"protocol": "tcp", "port": 0, "tls": tls}]) as bus:
        url = f"{scheme}s://localhost:{bus.tcp_port}"
        async with (
            polybus.connect(url, ssl_context=trusting) as c,
            c.subscribe("news") as messages,
        ):
            await c.publish("news", "secret", receipt=True)
            assert (await take(messages, 1))[0].text == "secret"
        with pytest.raises(PolybusError, match=r"client\.unreachable"):
            await polybus.connect(url).open()


async def test_a_session_key_is_in_no_log_line(
    bus: Node, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        async with c.events(["news"]) as events:
            key = events.session_key
            events.on("news", lambda event: events.stop())
            await c.publish("news", "x")
            await events.run()
            bus.http.inboxes.end(next(iter(bus.http.inboxes.sessions())))
            events.on("session", lambda event: events.stop())
            await events.run()
    assert key is not None and key not in caplog.text


# Addresses


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("ws://h", Address("ws", "h", 55545)),
        ("wss://h:1", Address("ws", "h", 1, tls=True)),
        ("https://h", Address("http", "h", 55545, tls=True)),
        ("http+tls://[::1]:7", Address("http", "::1", 7, tls=True)),
    ],
)
def test_an_s_at_the_end_is_tls(url: str, address: Address) -> None:
    assert parse(url) == address


def test_http_has_no_gzip_layer() -> None:
    with pytest.raises(UsageError, match=r"client\.url: http:// .*gzip"):
        polybus.connect("http://127.0.0.1?gzip=1")


async def test_streams_have_no_events_and_say_so(bus: Node) -> None:
    async with polybus.connect(url_of("boson", bus.tcp_port)) as c:
        with pytest.raises(UsageError, match=r"client\.unsupported"):
            c.events(["news"])
        with pytest.raises(UsageError, match=r"client\.unsupported"):
            _ = c.sessions


async def test_no_bus_is_unreachable(scheme: str, unused_tcp_port: int) -> None:
    with pytest.raises(PolybusError, match=r"client\.unreachable"):
        async with polybus.connect(url_of(scheme, unused_tcp_port)):
            pass
