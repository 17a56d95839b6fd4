"""The client that msgstream was made for, on each of its transports, against a real bus."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sdk_kit import Bus, install_sdk, running_bus, sdk

TRANSPORTS = ("shortpolling", "longpolling", "websocket")

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("transport", TRANSPORTS)]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install_sdk()


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with running_bus(tmp_path, "news", "shop.orders") as bus:
        yield bus


async def test_messages_arrive_in_order_and_each_once(bus: Bus, transport: str) -> None:
    key = await bus.open_session("news")
    await bus.publish("news", *range(5))
    async with sdk(bus, key, transport, "news", "direct") as client:
        await client.until(lambda: len(client.events) == 5)
        for number in range(5, 40):
            if number % 10:
                await bus.publish("news", number)
            else:
                await bus.post(key, ["direct", number])
        await client.until(lambda: len(client.events) >= 40)

        assert [line["data"] for line in client.events] == list(range(40))
        assert client.pack_ids == list(range(1, 41))
        await bus.confirmed()


async def test_dotted_names_are_emitted_from_most_to_least_relevant(
    bus: Bus, transport: str
) -> None:
    key = await bus.open_session("shop.orders")
    names = ("a.b.c", "a.b", "a", "shop", "shop.orders")
    async with sdk(bus, key, transport, *names) as client:
        await bus.post(key, ["a.b.c", {"item": "boots"}], ["a"])
        await bus.publish("shop.orders", {"n": 1})
        await client.until(lambda: len(client.events) == 6)

        assert client.events[:4] == [
            {"event": "a.b.c", "path": "a.b.c", "data": {"item": "boots"}},
            {"event": "a.b", "path": "a.b.c", "data": {"item": "boots"}},
            {"event": "a", "path": "a.b.c", "data": {"item": "boots"}},
            {"event": "a", "path": "a"},
        ]
        assert client.events[4:] == [
            {"event": "shop.orders", "path": "shop.orders", "data": {"n": 1}},
            {"event": "shop", "path": "shop.orders", "data": {"n": 1}},
        ]


async def test_what_is_confirmed_does_not_come_again_and_numbers_go_on(
    bus: Bus, transport: str
) -> None:
    key = await bus.open_session("news")
    async with sdk(bus, key, transport, "news") as client:
        await bus.publish("news", "a", "b")
        await client.until(lambda: len(client.events) == 2)
        await bus.confirmed()
    async with sdk(bus, key, transport, "news") as client:
        await bus.publish("news", "c")
        await client.until(lambda: len(client.events) == 1)

        assert client.data_of("news") == ["c"]
        assert client.pack_ids == [3]


async def test_unconfirmed_packs_come_again_after_reconnecting(bus: Bus, transport: str) -> None:
    key = await bus.open_session("news")
    async with sdk(bus, key, transport, "news", hold=True) as forgetful:
        await bus.publish("news", "a")
        await forgetful.until(lambda: set(forgetful.pack_ids) == {1})
        await bus.publish("news", "b")
        await forgetful.until(lambda: set(forgetful.pack_ids) == {1, 2})
        if transport == "websocket":
            # One connection gets each pack once; every poll is a new connection.
            assert forgetful.pack_ids == [1, 2]
    async with sdk(bus, key, transport, "news") as client:
        await client.until(lambda: len(client.events) == 2)

        assert client.data_of("news") == ["a", "b"]
        assert client.pack_ids == [1, 2]
        await bus.confirmed()


async def test_a_client_that_aborts_and_starts_again_misses_nothing(
    bus: Bus, transport: str
) -> None:
    key = await bus.open_session("news")
    async with sdk(bus, key, transport, "news") as client:
        await bus.publish("news", 0)
        await client.until(lambda: client.data_of("news") == [0])
        client.tell("abort")
        await bus.publish("news", 1)
        client.tell("start")
        await bus.publish("news", 2)
        await client.until(lambda: {0, 1, 2} <= set(client.data_of("news")))

        # An abort may take a confirmation with it: then the pack comes again, in its place.
        assert list(dict.fromkeys(client.data_of("news"))) == [0, 1, 2]
        await bus.confirmed()


async def test_a_session_that_ends_is_told_by_an_event(bus: Bus, transport: str) -> None:
    key = await bus.open_session("news")
    async with sdk(bus, key, transport, "news", "session.unset") as client:
        await bus.publish("news", "last")
        await client.until(lambda: client.data_of("news") == ["last"])
        await bus.request("DELETE", f"/v1/sessions/{key}")
        await client.until(lambda: bool(client.data_of("session.unset")))

        assert client.data_of("session.unset")[0] == "noSession"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_unconfirmed_packs_come_again_after_the_bus_was_away(
    bus: Bus, transport: str, how: signal.Signals
) -> None:
    key = await bus.open_session("news")
    async with sdk(bus, key, transport, "news", "direct", hold=True) as forgetful:
        await bus.publish("news", "a", "b")
        await bus.post(key, ["direct", "c"])
        await forgetful.until(lambda: set(forgetful.pack_ids) == {1, 2, 3})
        before = {name: pack for packs in forgetful.deliveries for name, pack in packs.items()}
        await bus.stop(how)
        await bus.start()
    async with sdk(bus, key, transport, "news", "direct") as client:
        await bus.publish("news", "d")
        await client.until(lambda: len(client.events) >= 4)

        assert [line["data"] for line in client.events] == ["a", "b", "c", "d"]
        after = {name: pack for packs in client.deliveries for name, pack in packs.items()}
        assert {name: after[name] for name in before} == before
        assert client.pack_ids == sorted(set(client.pack_ids))
        await bus.confirmed()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_client_goes_on_by_itself_after_the_bus_was_away(
    bus: Bus, transport: str, how: signal.Signals
) -> None:
    key = await bus.open_session("news")
    async with sdk(bus, key, transport, "news") as client:
        await bus.publish("news", *range(3))
        await client.until(lambda: client.data_of("news") == [0, 1, 2])
        await bus.confirmed()
        await bus.stop(how)
        await bus.start()
        await bus.publish("news", *range(3, 6))
        await client.until(lambda: 5 in client.data_of("news"))

        numbers = client.data_of("news")
        if how is signal.SIGTERM:
            assert numbers == [0, 1, 2, 3, 4, 5]
            assert client.pack_ids == sorted(set(client.pack_ids))
        else:
            # A confirmation that was not on disk yet is forgotten, and its pack comes again.
            assert list(dict.fromkeys(numbers)) == [0, 1, 2, 3, 4, 5]
        assert client.pack_ids[-1] > 3
        await bus.confirmed()
