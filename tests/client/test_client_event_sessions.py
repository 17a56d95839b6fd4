"""Sessions of event streams: taken up, lost and replaced, full, and kept while one works."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client_kit import held_packs, url_of
from events_kit import bus, client, make, push, run, transport

import polybus
from polybus.client.http import sources
from polybus.client.msgstream import StreamEvent
from polybus.edges.node import Node
from polybus.errors import PolybusError, UsageError
from polybus.testing import run_bus

__all__ = ["bus", "client", "transport"]


async def test_a_session_that_is_there_is_taken_up_and_left(
    bus: Node, client: polybus.Client, transport: Any
) -> None:
    key = await client.sessions.create(["shop"])
    await client.publish("shop", "waits for us", receipt=True)
    heard: list[str] = []
    for _ in range(2):
        async with client.events(session_key=key, transport=transport) as events:
            events.on("shop", lambda event: heard.append(event.data))
            events.on("shop", lambda event, events=events: events.stop())  # type: ignore[misc]
            await run(events)
        # Confirmed before it left, so it does not come again.
        await held_packs(bus, 0)
        await client.publish("shop", "again", receipt=True)
    assert heard == ["waits for us", "again"]
    await client.sessions.delete(key)


async def test_an_event_is_confirmed_whose_handler_closes_the_stream(
    bus: Node, client: polybus.Client, transport: Any
) -> None:
    key = await client.sessions.create(["shop"])
    await client.publish("shop", "the last", receipt=True)
    events = client.events(session_key=key, transport=transport)

    async def close(event: StreamEvent) -> None:
        await events.aclose()

    events.on("shop", close)
    await run(events)
    await held_packs(bus, 0)
    await client.sessions.delete(key)


async def test_a_given_session_that_is_gone_is_an_error(
    client: polybus.Client, transport: Any
) -> None:
    key = await client.sessions.create()
    await client.sessions.delete(key)
    async with client.events(session_key=key, transport=transport) as events:
        with pytest.raises(PolybusError, match=r"session\.unset"):
            await run(events)


async def test_a_session_of_its_own_that_is_gone_is_told_and_replaced(
    bus: Node, client: polybus.Client, transport: Any
) -> None:
    heard: list[Any] = []
    async with make(client, transport) as events:
        before = events.session_key
        events.on("session", lambda event: heard.append((event.name, event.data)))
        events.on("shop", lambda event: heard.append(event.data))
        events.on("shop", lambda event: events.stop())
        (session,) = bus.http.inboxes.sessions()
        bus.http.inboxes.end(session)
        running = asyncio.create_task(run(events))
        async with asyncio.timeout(10):
            while events.session_key == before:  # noqa: ASYNC110  there is no event for it
                await asyncio.sleep(0.005)
        await client.publish("shop", "after")
        await running
    assert heard == [("session.unset", "noSession"), "after"]


async def test_what_a_full_session_lost_is_an_event(transport: Any) -> None:
    heard: list[Any] = []
    async with run_bus("shop", msgstream={"session-packs-max": 4}) as bus:
        async with (
            polybus.connect(url_of("http", bus.tcp_port)) as client,
            make(client, transport) as events,
        ):
            events.on("session.overflow", lambda event: heard.append(event.data))
            events.on("shop", lambda event: heard.append(event.data))
            events.on("shop", lambda event: events.stop() if event.data == 9 else None)
            for number in range(10):
                await client.publish("shop", str(number), receipt=True)
            await run(events)
            epoch = bus.bus.log.bounds("shop").epoch
    notice, *numbers = heard
    assert notice == {"topic": "shop", "position": f"{epoch}:0", "count": numbers[0]}
    assert numbers == list(range(numbers[0], 10))


async def test_a_notice_that_nobody_handles_is_a_log_line(
    bus: Node, client: polybus.Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with make(client, "longpolling") as events:
        (session,) = bus.http.inboxes.sessions()
        bus.http.inboxes.end(session)
        running = asyncio.create_task(run(events))
        async with asyncio.timeout(10):
            while "session.unset" not in caplog.text:  # noqa: ASYNC110  there is no event for it
                await asyncio.sleep(0.005)
        events.stop()
        await running


async def test_a_session_goes_to_the_newest_websocket(client: polybus.Client) -> None:
    key = await client.sessions.create(["shop"])
    older = client.events(session_key=key, transport="websocket")
    newer = client.events(session_key=key, transport="websocket")
    older.on("shop", lambda event: None)
    reached = asyncio.Event()
    older.on("hello", lambda event: reached.set())
    await client.sessions.push(key, [["hello"]])
    running = asyncio.create_task(run(older))
    await reached.wait()
    newer.on("shop", lambda event: newer.stop())
    taking = asyncio.create_task(run(newer))
    with pytest.raises(PolybusError, match=r"session\.taken"):
        await running
    await client.publish("shop", "x")
    await taking


async def test_sessions_are_made_filled_and_ended(bus: Node, client: polybus.Client) -> None:
    sessions = client.sessions
    key = await sessions.create(["shop"], ttl_s=60)
    other = await sessions.create()
    assert await sessions.set_topics(other, ["SHOP"]) == ["shop"]
    assert await sessions.broadcast([("hello", {"to": "all"})]) == 2
    await held_packs(bus, 2)
    await sessions.delete(other)
    for call in (sessions.delete(other), sessions.push(other, [["x"]]), sessions.delete("a/../b")):
        with pytest.raises(PolybusError, match=r"session\.unknown|http\.not-found"):
            await call
    with pytest.raises(PolybusError, match=r"msgstream\.pack-invalid"):
        await sessions.push(key, [("type", 1, 2)])
    with pytest.raises(UsageError, match=r"topic\.unknown"):
        await sessions.create(["nowhere"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["longpolling", "shortpolling"])
async def test_a_session_does_not_expire_while_its_client_is_at_work(
    monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    monkeypatch.setattr(sources, "CONTACT_S", 0.05)
    heard: list[str] = []

    async def work(event: StreamEvent) -> None:
        heard.append(event.name)
        # Longer than the session lives, and than the bus takes to look for such.
        await asyncio.sleep(1.5)

    async with run_bus("shop", msgstream={"session-ttl-s": 0.2}) as bus:
        async with (
            polybus.connect(url_of("http", bus.tcp_port)) as client,
            make(client, transport) as events,
        ):
            await push(client, events, ["work"], ["end"])
            events.on("work", work)
            events.on("session", lambda event: heard.append(event.name))
            events.on("end", lambda event: events.stop())
            await run(events)
            await held_packs(bus, 0)
    assert heard == ["work"]
