"""Events of a session: by dotted names, in order, confirmed once they are handled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client_kit import Proxy, held_packs, url_of
from events_kit import bus, client, make, push, run, transport

import polybus
from polybus.client.msgstream import Failure, StreamEvent
from polybus.edges.node import Node
from polybus.errors import UsageError
from polybus.testing import run_bus

__all__ = ["bus", "client", "transport"]


async def test_handlers_are_called_from_the_most_to_the_least_relevant(
    client: polybus.Client, transport: Any
) -> None:
    heard: list[tuple[str, str, Any]] = []
    async with make(client, transport) as events:
        # Neither the order of `on` nor other names matter.
        for name in ("shop", "shop.purchase", "shop.purchase.late", "purchase", "sho"):
            events.on(name, lambda event, name=name: heard.append((name, event.name, event.data)))  # type: ignore[misc]
        events.on("end", lambda event: events.stop())
        await push(client, events, ["shop.purchase", {"item": "boots"}], ["shop"], ["end"])
        await run(events)
    assert heard == [
        ("shop.purchase", "shop.purchase", {"item": "boots"}),
        ("shop", "shop.purchase", {"item": "boots"}),
        ("shop", "shop", None),
    ]


async def test_pushed_events_and_messages_come_in_one_order(
    client: polybus.Client, transport: Any
) -> None:
    heard: list[tuple[int, bytes]] = []
    async with make(client, transport) as events:
        events.on("shop", lambda event: heard.append((event.pack_id, event.value)))
        events.on("shop.end", lambda event: events.stop())
        for number in range(5):
            await push(client, events, ["shop.news", number * 10])
            await client.publish("shop", f"message {number}", receipt=True)
        await push(client, events, ["shop.end", "end"])
        await run(events)
    expected = [one for n in range(5) for one in (b"%d" % (n * 10), b"message %d" % n)]
    assert heard == list(enumerate([*expected, b"end"], 1))


async def test_a_pack_is_confirmed_when_its_handlers_have_returned(
    bus: Node, client: polybus.Client, transport: Any
) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(event: StreamEvent) -> None:
        entered.set()
        await leave.wait()

    async with make(client, transport) as events:
        events.on("work", handle)
        running = asyncio.create_task(run(events))
        await push(client, events, ["work"], ["work"])
        await entered.wait()
        await held_packs(bus, 1)
        leave.set()
        await held_packs(bus, 0)
        events.stop()
        await running


async def test_a_handler_that_fails_ends_the_run_and_its_pack_comes_again(
    bus: Node, client: polybus.Client, transport: Any
) -> None:
    heard: list[Any] = []

    def handle(event: StreamEvent) -> None:
        heard.append(event.data)
        if heard.count(2) == 1 and event.data == 2:
            raise RuntimeError("no")

    async with make(client, transport) as events:
        events.on("work", handle)
        events.on("end", lambda event: events.stop())
        await push(client, events, ["work", 0])
        await push(client, events, ["work", 1], ["work", 2])
        await push(client, events, ["work", 3], ["end"])
        with pytest.raises(RuntimeError, match="no"):
            await run(events)
        await held_packs(bus, 2)
        await run(events)
        await held_packs(bus, 0)
    assert heard == [0, 1, 2, 1, 2, 3]


@pytest.mark.parametrize(("decision", "calls"), [("retry", [0, 1, 1, 1, 2]), ("skip", [0, 1, 2])])
async def test_who_is_told_of_a_failure_says_what_to_do(
    bus: Node, client: polybus.Client, transport: Any, decision: Failure, calls: list[int]
) -> None:
    heard: list[Any] = []
    failures: list[tuple[Any, str]] = []

    def handle(event: StreamEvent) -> None:
        heard.append(event.data)
        if event.data == 1 and heard.count(1) < 3:
            raise RuntimeError("no")

    def on_failure(event: StreamEvent, error: Exception) -> Failure:
        failures.append((event.data, str(error)))
        return decision

    async with make(client, transport, on_failure=on_failure) as events:
        events.on("work", handle)
        events.on("end", lambda event: events.stop())
        await push(client, events, ["work", 0], ["work", 1], ["work", 2], ["end"])
        await run(events)
        await held_packs(bus, 0)
    assert heard == calls
    assert failures == [(1, "no")] * (2 if decision == "retry" else 1)


async def test_a_pack_in_work_when_the_connection_breaks_is_handled_once(transport: Any) -> None:
    heard: list[Any] = []
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(event: StreamEvent) -> None:
        heard.append(event.data)
        entered.set()
        await leave.wait()

    async with run_bus("shop") as bus, Proxy(bus.tcp_port) as proxy:
        async with (
            polybus.connect(url_of("http", bus.tcp_port)) as direct,
            polybus.connect(url_of("http", proxy.port)) as through,
            make(through, transport) as events,
        ):
            events.on("work", handle)
            running = asyncio.create_task(run(events))
            await push(direct, events, ["work", 1])
            await entered.wait()
            proxy.cut()
            await push(direct, events, ["work", 2])
            proxy.restore()
            leave.set()
            await held_packs(bus, 0)
            events.stop()
            await running
    assert heard == [1, 2]


async def test_a_stream_that_is_closed_waits_for_its_handler(
    bus: Node, client: polybus.Client, transport: Any
) -> None:
    entered = asyncio.Event()
    done: list[bool] = []

    async def handle(event: StreamEvent) -> None:
        entered.set()
        await asyncio.sleep(0.05)
        done.append(True)

    events = make(client, transport)
    await events.open()
    events.on("work", handle)
    running = asyncio.create_task(run(events))
    await push(client, events, ["work"])
    await entered.wait()
    await events.aclose()
    await running
    assert done == [True]
    assert len(bus.http.inboxes) == 0
    await events.aclose()


async def test_a_run_that_is_cancelled_confirms_nothing_unfinished(
    bus: Node, client: polybus.Client, transport: Any
) -> None:
    entered = asyncio.Event()

    async def handle(event: StreamEvent) -> None:
        entered.set()
        await asyncio.Event().wait()

    async with make(client, transport) as events:
        events.on("work", handle)
        running = asyncio.create_task(run(events))
        await push(client, events, ["work"])
        await entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await held_packs(bus, 1)


async def test_a_handler_can_be_taken_back(client: polybus.Client) -> None:
    heard: list[str] = []

    def handle(event: StreamEvent) -> None:
        heard.append(event.name)

    async with make(client, "longpolling") as events:
        events.on("work", handle)
        events.on("other", handle)
        events.on("end", lambda event: events.stop())
        events.off("work", handle)
        events.off("never", handle)
        await push(client, events, ["work"], ["other"], ["end"])
        await run(events)
    assert heard == ["other"]


async def test_a_stream_runs_once_at_a_time(client: polybus.Client) -> None:
    async with make(client, "longpolling") as events:
        running = asyncio.create_task(run(events))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match=r"client\.running"):
            await run(events)
        events.stop()
        await running


async def test_topics_and_a_given_session_do_not_go_together(client: polybus.Client) -> None:
    with pytest.raises(UsageError, match=r"client\.unsupported"):
        client.events(["shop"], session_key="k")


async def test_a_client_that_closes_ends_its_streams(bus: Node, transport: Any) -> None:
    async with polybus.connect(url_of("ws", bus.tcp_port)) as client:
        events = make(client, transport)
        await events.open()
        running = asyncio.create_task(run(events))
        await asyncio.sleep(0)
    await running
    assert len(bus.http.inboxes) == 0
