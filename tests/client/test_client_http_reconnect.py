"""http:// and ws:// when connections break, the bus restarts, or a session is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from client_kit import Proxy, held_packs, take, taken_while_it_breaks, url_of

import polybus
from polybus.client.http.connection import HttpConnection
from polybus.client.options import ClientOptions, parse
from polybus.errors import PolybusError
from polybus.testing import run_bus


@pytest.fixture(params=["http", "ws"])
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def test_a_subscription_goes_on_where_it_was(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        direct = polybus.connect(url_of("boson", bus.tcp_port))
        through = polybus.connect(url_of(scheme, proxy.port))
        async with direct as publisher, through as reader, reader.subscribe("news") as messages:
            await publisher.publish_many("news", ["0", "1", "2"], receipt=True)
            found = await take(messages, 2)
            proxy.cut()
            await publisher.publish("news", "3", receipt=True)
            proxy.restore()
            found += await take(messages, 2)
            await publisher.publish("news", "4", receipt=True)
            found += await take(messages, 1)
    assert [(one.text, one.gap) for one in found] == [(str(n), False) for n in range(5)]


async def test_a_confirmation_that_was_lost_is_given_again(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        direct = polybus.connect(url_of("boson", bus.tcp_port))
        through = polybus.connect(url_of(scheme, proxy.port))
        async with direct as publisher, through as reader, reader.subscribe("news") as messages:
            await publisher.publish("news", "one", receipt=True)
            await take(messages, 1)
            proxy.cut()
            reading = asyncio.create_task(take(messages, 1))  # done with the first one, unheard
            await held_packs(bus, 1)
            proxy.restore()
            await held_packs(bus, 0)
            await publisher.publish("news", "two", receipt=True)
            assert [message.text for message in await reading] == ["two"]


async def test_a_connection_that_breaks_again_and_again_costs_no_message(scheme: str) -> None:
    count = 2000
    found = await taken_while_it_breaks(scheme, count, pause_s=0.02, intact_s=(0.02, 0.1))
    assert [message.text for message in found] == [str(n) for n in range(count)]
    assert not any(message.gap for message in found)


async def test_a_restarted_bus_goes_on_where_it_was(scheme: str, tmp_path: Path) -> None:
    async with run_bus("news", data=str(tmp_path)) as bus:
        port = bus.tcp_port
        client = polybus.connect(url_of(scheme, port))
        await client.open()
        messages = await client.subscribe("news")
        await client.publish("news", "before", receipt=True)
        found = await take(messages, 1)
    connectors = [{"protocol": "tcp", "port": port}]
    async with run_bus("news", data=str(tmp_path), connectors=connectors):
        async with asyncio.timeout(10):
            await client.publish("news", "after", receipt=True, retry=True)
        found += await take(messages, 1)
        await client.close()
    assert [(one.text, one.gap) for one in found] == [("before", False), ("after", False)]


async def test_a_session_that_is_gone_is_replaced_and_the_gap_is_told(scheme: str) -> None:
    async with run_bus("news") as bus:
        async with (
            polybus.connect(url_of(scheme, bus.tcp_port)) as c,
            c.subscribe("news") as messages,
        ):
            await c.publish("news", "before", receipt=True)
            await take(messages, 1)
            reading = asyncio.create_task(take(messages, 2))
            await held_packs(bus, 0)
            (session,) = bus.http.inboxes.sessions()
            bus.http.inboxes.end(session)
            async with asyncio.timeout(10):
                while not bus.http.inboxes:  # noqa: ASYNC110  the bus has no event for it
                    await asyncio.sleep(0.005)
            await c.publish_many("news", ["after", "later"], receipt=True)
            after, later = await reading
    assert (after.text, after.gap, later.gap) == ("after", True, False)


async def test_without_reconnect_a_session_that_is_gone_is_an_error(scheme: str) -> None:
    async with run_bus("news") as bus:
        async with (
            polybus.connect(url_of(scheme, bus.tcp_port), reconnect=False) as c,
            c.subscribe("news") as messages,
        ):
            (session,) = bus.http.inboxes.sessions()
            bus.http.inboxes.end(session)
            with pytest.raises(PolybusError, match=r"session\.unset"):
                await take(messages, 1)


async def test_without_reconnect_a_lost_connection_is_an_error(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        async with polybus.connect(url_of(scheme, proxy.port), reconnect=False) as c:
            async with c.subscribe("news") as messages:
                proxy.cut()
                with pytest.raises(PolybusError, match=r"client\.(disconnected|unreachable)"):
                    await take(messages, 1)
                with pytest.raises(PolybusError, match=r"client\.disconnected"):
                    async with asyncio.timeout(10):
                        while True:
                            await c.publish("news", "x")
                            await asyncio.sleep(0)


async def test_what_a_full_session_lost_is_a_gap(scheme: str) -> None:
    msgstream = {"session-packs-max": 4}
    async with run_bus("news", msgstream=msgstream) as bus, Proxy(bus.tcp_port) as proxy:
        direct = polybus.connect(url_of("boson", bus.tcp_port))
        through = polybus.connect(url_of(scheme, proxy.port))
        async with direct as publisher, through as reader, reader.subscribe("news") as messages:
            proxy.cut()
            for number in range(20):
                await publisher.publish("news", str(number), receipt=True)
            proxy.restore()
            found = await take(messages, 1)
            while found[-1].text != "19":
                found += await take(messages, 1)
    assert 0 < len(found) < 20
    assert [one.gap for one in found] == [True] + [False] * (len(found) - 1)
    numbers = [int(one.text) for one in found]
    assert numbers == list(range(numbers[0], 20))


async def test_a_receipt_in_flight_when_the_connection_broke_is_unknown(scheme: str) -> None:
    async with run_bus("news") as bus, Proxy(bus.tcp_port) as proxy:
        told: list[PolybusError] = []
        url = url_of(scheme, proxy.port)
        async with polybus.connect(url, on_error=told.append) as c:
            for wants_receipt in (True, False):
                await c.publish("news", "connects the proxy", receipt=True)
                # The request is on its way, and its answer will not come through.
                waiting = asyncio.create_task(c.publish("news", "x", receipt=wants_receipt))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                proxy.cut()
                if wants_receipt:
                    with pytest.raises(PolybusError, match=r"client\.receipt-unknown"):
                        await waiting
                else:
                    await waiting
                    await c.flush()
                proxy.restore()
                async with asyncio.timeout(10):
                    assert await c.publish("news", "y", receipt=True) is not None
    assert [error.code for error in told] == ["client.receipt-unknown"]


async def test_messages_wait_for_a_bus_that_is_away(scheme: str, tmp_path: Path) -> None:
    async with run_bus("news", data=str(tmp_path)) as bus:
        port = bus.tcp_port
        c = polybus.connect(url_of(scheme, port))
        await c.open()
        await c.publish("news", "before", receipt=True)
    waiting = asyncio.create_task(c.publish("news", "after", receipt=True))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    async with run_bus(data=str(tmp_path), connectors=[{"protocol": "tcp", "port": port}]):
        async with asyncio.timeout(10):
            position = await waiting
        await c.close()
    assert position is not None and position.offset == 1


async def test_what_could_not_be_sent_before_the_end_is_told(scheme: str) -> None:
    told: list[PolybusError] = []
    async with run_bus("news") as bus:
        address = parse(url_of(scheme, bus.tcp_port))
        options = ClientOptions(address=address, on_error=told.append, close_timeout_s=0.1)
        c = polybus.Client(options)
        await c.open()
        await c.publish("news", "before", receipt=True)
    await c.publish("news", "after")
    await c.close()
    assert [error.code for error in told] == ["client.disconnected"]


async def test_a_request_that_was_given_up_does_not_answer_the_next_one() -> None:
    async with run_bus("news") as bus:
        http = HttpConnection(ClientOptions(address=parse(url_of("http", bus.tcp_port))))
        target = "/v1/topics/news/messages?offset=0&wait-s=1"
        with pytest.raises(PolybusError, match=r"client\.timeout"):
            await http.request("GET", target, timeout_s=0.05)
        answer = await http.request("GET", "/v1/topics/news")
        assert b'"name":"news"' in answer
        http.close()
