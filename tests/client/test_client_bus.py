"""The client against a running bus, on every protocol."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from client_kit import SCHEMES, take, url_of

import polybus
from polybus.client.connection import Link
from polybus.client.message import StartFrom
from polybus.client.publisher import StreamPublisher
from polybus.edges.node import Node
from polybus.errors import PolybusError, UsageError
from polybus.testing import run_bus

PAIRS = list(itertools.product(SCHEMES, SCHEMES))


@pytest.fixture
async def bus() -> AsyncIterator[Node]:
    async with run_bus("news", "sport") as node:
        yield node


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
async def test_every_byte_arrives_from_any_protocol_on_any_other(
    bus: Node, sender: str, receiver: str
) -> None:
    values = [b"", b"text", "h\xe9llo \U0001f600".encode(), bytes(range(256)), b"x" * 100_000]
    async with (
        polybus.connect(url_of(sender, bus.tcp_port)) as publisher,
        polybus.connect(url_of(receiver, bus.tcp_port)) as reader,
        reader.subscribe("news") as subscription,
    ):
        for value in values:
            await publisher.publish("news", value)
        messages = await take(subscription, len(values))
    assert [message.value for message in messages] == values
    assert [message.offset for message in messages] == list(range(len(values)))
    assert not any(message.gap for message in messages)


async def test_a_receipt_is_the_place_where_the_message_is_found(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        await c.publish("news", "before")
        position = await c.publish("news", "this", receipt=True)
        assert position is not None
        async with c.subscribe("news", start=position) as subscription:
            (message,) = await take(subscription, 1)
    assert (message.text, message.position) == ("this", position)


async def test_a_receipt_for_many_is_the_last_ones(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        position = await c.publish_many("news", ["a", "b", "c"], receipt=True)
        assert position is not None and position.offset == 2
        assert await c.publish_many("news", [], receipt=True) is None


async def test_receipts_may_be_awaited_all_at_once(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        topics = ["news", "sport"] * 50
        calls = [c.publish(topic, str(n), receipt=True) for n, topic in enumerate(topics)]
        positions = await asyncio.gather(*calls)
    for topic in ("news", "sport"):
        pairs = zip(topics, positions, strict=True)
        assert [place.offset for name, place in pairs if name == topic and place] == [*range(50)]


async def test_publishing_to_an_unknown_topic_is_refused_with_the_buss_code(
    bus: Node, scheme: str
) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        with pytest.raises(UsageError, match="topic.unknown"):
            await c.publish("nowhere", "x", receipt=True)
        assert await c.publish("news", "x", receipt=True) is not None


@pytest.mark.parametrize("scheme", ["boson", "boson+properties"])
async def test_a_refusal_without_a_receipt_goes_to_on_error(bus: Node, scheme: str) -> None:
    errors: list[PolybusError] = []
    async with polybus.connect(url_of(scheme, bus.tcp_port), on_error=errors.append) as c:
        await c.publish("nowhere", "x")
    assert [error.code for error in errors] == ["topic.unknown"]


async def test_subscribing_to_an_unknown_topic_is_refused(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        with pytest.raises(UsageError, match="topic.unknown"):
            async with c.subscribe(["news", "nowhere"]):
                pass


async def test_subscriptions_start_where_they_are_told(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        first = await c.publish("news", "one", receipt=True)
        between = datetime.now(UTC)
        second = await c.publish("news", "two", receipt=True)
        assert first is not None and second is not None
        starts: list[tuple[StartFrom, str]] = [
            ("earliest", "one"),
            (str(first), "one"),
            (second, "two"),
            (between, "two"),
            (between.isoformat(), "two"),
        ]
        for start, expected in starts:
            async with c.subscribe("news", start) as subscription:
                (message,) = await take(subscription, 1)
            assert (message.text, message.gap) == (expected, False), start
        async with c.subscribe("news", "latest") as subscription:
            await c.publish("news", "three")
            (message,) = await take(subscription, 1)
        assert message.text == "three"


async def test_one_subscription_can_have_many_topics(bus: Node, scheme: str) -> None:
    async with (
        polybus.connect(url_of(scheme, bus.tcp_port)) as c,
        c.subscribe(["news", "SPORT"]) as subscription,
    ):
        await c.publish("News", "a")
        await c.publish("sport", "b")
        messages = await take(subscription, 2)
    assert {(message.topic, message.text) for message in messages} == {
        ("news", "a"),
        ("sport", "b"),
    }


@pytest.mark.parametrize("scheme", ["boson+properties", "goms"])
async def test_headers_travel_with_the_message(bus: Node, scheme: str) -> None:
    async with (
        polybus.connect(url_of(scheme, bus.tcp_port)) as c,
        c.subscribe("news") as subscription,
    ):
        await c.publish("news", "x", headers={"lang": "en", "raw": b"\xff"})
        (message,) = await take(subscription, 1)
    assert message.headers == {"lang": b"en", "raw": b"\xff"}


async def test_batches_give_all_that_has_arrived(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        await c.publish_many("news", [str(n) for n in range(1000)], receipt=True)
        async with c.subscribe("news", "earliest") as subscription:
            values: list[str] = []
            async for batch in subscription.batches():
                values += [message.text for message in batch]
                if len(values) == 1000:
                    break
    assert values == [str(n) for n in range(1000)]


async def test_two_subscriptions_of_one_client_do_not_disturb_each_other(
    bus: Node, scheme: str
) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        await c.publish("news", "old", receipt=True)
        async with c.subscribe("news", "earliest") as all_of_it, c.subscribe("news") as new:
            await c.publish("news", "new")
            assert [message.text for message in await take(all_of_it, 2)] == ["old", "new"]
            assert [message.text for message in await take(new, 1)] == ["new"]


async def test_a_receipt_comes_while_a_subscription_is_not_read(bus: Node, scheme: str) -> None:
    """A program that publishes for each message it reads must not wait for itself."""
    async with (
        polybus.connect(url_of(scheme, bus.tcp_port)) as c,
        c.subscribe("news") as subscription,
    ):
        for _ in range(20):
            await c.publish("news", b"x" * (1 << 20))
        async with asyncio.timeout(10):
            assert await c.publish("sport", "x", receipt=True) is not None
        assert len(await take(subscription, 20)) == 20


async def test_what_is_published_in_one_turn_is_one_write(
    bus: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    async with polybus.connect(url_of("boson", bus.tcp_port)) as c:
        publisher = c._publisher
        assert isinstance(publisher, StreamPublisher) and publisher._connection.link is not None
        transport = publisher._connection.link._transport
        assert transport is not None
        real = transport.write

        def write(data: bytes) -> None:
            writes.append(len(data))
            real(data)

        monkeypatch.setattr(transport, "write", write)
        for _ in range(100):
            await c.publish("news", "x")
        assert writes == []
        await asyncio.sleep(0)
        assert len(writes) == 1
        await c.publish("news", "last", receipt=True)


async def test_a_publisher_that_outruns_the_bus_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = asyncio.Event()

    async def read_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await taken.wait()
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(read_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, polybus.connect(url_of("boson", port)) as c:
        sent = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                while True:
                    await c.publish("news", bytes(1 << 16))
                    sent += 1
        assert sent * (1 << 16) < 64 << 20
        taken.set()


async def test_closing_sends_everything_first(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        for n in range(1000):
            await c.publish("news", str(n))
    async with (
        polybus.connect(url_of("boson", bus.tcp_port)) as c,
        c.subscribe("news", "earliest") as subscription,
    ):
        assert len(await take(subscription, 1000)) == 1000


async def test_flush_hands_everything_to_the_system(bus: Node) -> None:
    async with polybus.connect(url_of("boson", bus.tcp_port)) as c:
        await c.publish("news", bytes(4 << 20))
        await c.flush()
        assert isinstance(c._publisher, StreamPublisher)
        link = c._publisher._connection.link
        assert isinstance(link, Link) and link._transport is not None
        assert link._transport.get_write_buffer_size() == 0


async def test_closing_the_client_ends_its_subscriptions(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        subscription = await c.subscribe("news")
        waiting = asyncio.create_task(take(subscription, 1))
        await asyncio.sleep(0)
    assert await waiting == []
    with pytest.raises(UsageError, match="client.closed"):
        await c.publish("news", "x")
    with pytest.raises(UsageError, match="client.closed"):
        c.subscribe("news")


async def test_a_bus_that_is_not_there_is_unreachable() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(PolybusError, match="client.unreachable"):
        async with polybus.connect(url_of("boson", port)):
            pass


@pytest.mark.parametrize("scheme", ["boson", "boson+properties"])
async def test_gzip_streams_work_both_ways(bus: Node, scheme: str) -> None:
    async with (
        polybus.connect(url_of(scheme, bus.tcp_port) + "?gzip=1") as c,
        c.subscribe("news") as subscription,
    ):
        assert await c.publish("news", bytes(100_000), receipt=True) is not None
        (message,) = await take(subscription, 1)
    assert message.value == bytes(100_000)


async def test_goms_has_no_gzip(bus: Node) -> None:
    with pytest.raises(UsageError, match="client.url"):
        async with polybus.connect(url_of("goms", bus.tcp_port) + "?gzip=1"):
            pass


@pytest.mark.parametrize("topic", ["", "$error", "a\nb"])
async def test_a_name_that_no_topic_can_have_is_refused_here(bus: Node, topic: str) -> None:
    async with polybus.connect(url_of("boson", bus.tcp_port)) as c:
        with pytest.raises(UsageError, match=r"topic\."):
            await c.publish(topic, "x")


async def silent_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)
    writer.close()


async def test_a_bus_that_never_confirms_is_a_timeout() -> None:
    server = await asyncio.start_server(silent_server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, polybus.connect(url_of("goms", port), connect_timeout_s=0.1) as c:
        with pytest.raises(PolybusError, match="client.timeout"):
            await c.publish("news", "x")
        subscription = c.subscribe("news")
        for _ in range(2):
            with pytest.raises(PolybusError, match="client.timeout"):
                await take(subscription, 1)


async def test_a_subscription_that_was_refused_stays_refused(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        subscription = c.subscribe("nowhere")
        for _ in range(2):
            with pytest.raises(UsageError, match="topic.unknown"):
                await take(subscription, 1)


async def test_a_closed_subscription_is_at_its_end(bus: Node, scheme: str) -> None:
    async with polybus.connect(url_of(scheme, bus.tcp_port)) as c:
        never_opened = c.subscribe("news")
        await never_opened.aclose()
        assert await take(never_opened, 1) == []
        opened = await c.subscribe("news")
        await opened.aclose()
        await opened.aclose()
        assert await take(opened, 1) == []
