"""A client that loses its connection: nothing twice, nothing missed, and gaps are reported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from client_kit import SCHEMES, Proxy, take, taken_while_it_breaks, url_of

import polybus
from polybus.errors import PolybusError
from polybus.testing import run_bus


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def test_a_subscription_goes_on_after_the_last_message_it_saw(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        direct = polybus.connect(url_of("boson", bus.tcp_port))
        through = polybus.connect(url_of(scheme, proxy.port))
        async with direct as publisher, through as reader:
            async with reader.subscribe("news") as subscription:
                await publisher.publish_many("news", ["0", "1", "2"], receipt=True)
                before = await take(subscription, 3)
                proxy.cut()
                await publisher.publish_many("news", ["3", "4"], receipt=True)
                proxy.restore()
                after = await take(subscription, 2)
                await publisher.publish("news", "5")
                after += await take(subscription, 1)
    assert [message.text for message in before + after] == ["0", "1", "2", "3", "4", "5"]
    assert [message.offset for message in after] == [3, 4, 5]
    assert not any(message.gap for message in before + after)


async def test_a_subscription_that_saw_nothing_yet_misses_nothing(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        direct = polybus.connect(url_of("boson", bus.tcp_port))
        through = polybus.connect(url_of(scheme, proxy.port))
        async with direct as publisher, through as reader:
            await publisher.publish("news", "not for us", receipt=True)
            async with reader.subscribe("news") as subscription:
                proxy.cut()
                await publisher.publish("news", "for us", receipt=True)
                proxy.restore()
                (message,) = await take(subscription, 1)
    assert (message.text, message.gap) == ("for us", False)


async def test_the_first_message_after_what_is_lost_says_so(scheme: str) -> None:
    """The topic was recreated meanwhile: what was missed cannot be had any more."""
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        direct = polybus.connect(url_of("boson", bus.tcp_port))
        through = polybus.connect(url_of(scheme, proxy.port))
        async with direct as publisher, through as reader:
            async with reader.subscribe("news") as subscription:
                await publisher.publish("news", "old", receipt=True)
                (old,) = await take(subscription, 1)
                proxy.cut()
                bus.bus.delete_topic("news")
                bus.bus.create_topic("news")
                await publisher.publish_many("news", ["new", "newer"], receipt=True)
                proxy.restore()
                new, newer = await take(subscription, 2)
    assert (old.gap, new.gap, newer.gap) == (False, True, False)
    assert (new.text, new.offset) == ("new", 0)
    assert new.epoch > old.epoch


async def test_a_restarted_bus_goes_on_where_it_was(scheme: str, tmp_path: Path) -> None:
    async with run_bus("news", data=str(tmp_path)) as bus:
        port = bus.tcp_port
        client = polybus.connect(url_of(scheme, port))
        await client.open()
        subscription = await client.subscribe("news")
        await client.publish("news", "before", receipt=True)
        (before,) = await take(subscription, 1)
    connectors = [{"protocol": "tcp", "port": port}]
    async with run_bus("news", data=str(tmp_path), connectors=connectors):
        async with asyncio.timeout(10):
            await client.publish("news", "after", receipt=True, retry=True)
        (after,) = await take(subscription, 1)
        await client.close()
    assert (before.text, after.text) == ("before", "after")
    assert (after.epoch, after.offset, after.gap) == (before.epoch, 1, False)


async def test_a_receipt_in_flight_when_the_connection_broke_is_unknown(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        async with polybus.connect(url_of(scheme, proxy.port)) as c:
            await c.publish("news", "registers on goMS", receipt=True)
            waiting = asyncio.create_task(c.publish("news", "x", receipt=True))
            await asyncio.sleep(0)
            proxy.cut()
            with pytest.raises(PolybusError) as caught:
                await waiting
            assert caught.value.code == "client.receipt-unknown"
            proxy.restore()
            async with asyncio.timeout(10):
                assert await c.publish("news", "y", receipt=True) is not None


async def test_retry_publishes_again_until_the_receipt_comes(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        async with polybus.connect(url_of(scheme, proxy.port)) as c:
            await c.publish("news", "registers on goMS", receipt=True)
            waiting = asyncio.create_task(c.publish("news", "x", receipt=True, retry=True))
            await asyncio.sleep(0)
            proxy.cut()
            proxy.restore()
            async with asyncio.timeout(10):
                position = await waiting
    assert position is not None


async def test_without_reconnect_a_lost_connection_is_an_error(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        async with polybus.connect(url_of(scheme, proxy.port), reconnect=False) as c:
            async with c.subscribe("news") as subscription:
                proxy.cut()
                with pytest.raises(PolybusError, match="client.disconnected"):
                    await take(subscription, 1)
                with pytest.raises(PolybusError, match="client.disconnected"):
                    async with asyncio.timeout(10):
                        while True:
                            await c.publish("news", "x")
                            await asyncio.sleep(0)


@pytest.mark.parametrize("scheme", ["boson+properties", "goms"])
async def test_messages_dropped_for_a_slow_reader_are_a_gap(scheme: str) -> None:
    """With the policy drop-oldest the bus drops, and the client says where."""
    settings: Any = {"slow-subscriber": "drop-oldest", "limits": {"outbox-bytes-max": 1 << 20}}
    async with run_bus("news", **settings) as bus:
        url = url_of(scheme, bus.tcp_port)
        async with polybus.connect(url) as c, polybus.connect(url) as reader:
            async with reader.subscribe("news") as subscription:
                size = 1 << 18
                count = 200
                for number in range(count):
                    await c.publish("news", number.to_bytes(4, "big") + b"x" * size, receipt=True)
                seen = []
                async with asyncio.timeout(20):
                    async for message in subscription:
                        seen.append(message)
                        if message.offset == count - 1:
                            break
    assert len(seen) < count
    expected = 0
    for message in seen:
        assert int.from_bytes(message.value[:4], "big") == message.offset
        assert message.gap == (message.offset != expected)
        expected = message.offset + 1


@pytest.mark.slow
async def test_a_connection_that_breaks_again_and_again_costs_no_message(scheme: str) -> None:
    count = 3000
    messages = await taken_while_it_breaks(scheme, count, pause_s=0.01, intact_s=(0.01, 0.08))
    assert [message.text for message in messages] == [str(n) for n in range(count)]
    assert [message.offset for message in messages] == list(range(count))
    assert not any(message.gap for message in messages)
