"""`$events` on a running bus: what sessions got and confirmed, who failed, who was too slow."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from http_kit import TIMEOUT_S, Http, http_bus, recv

from polybus.edges.node import Node


def told(node: Node) -> list[dict[str, Any]]:
    log = node.bus.log
    batches = log.read("$events", log.bounds("$events").start)
    messages = [json.loads(value) for batch in batches for value in batch.values()]
    return [event for message in messages for event in message["events"]]


async def until_told(http: Http, kind: str, count: int = 1) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        return [event for event in told(http.node) if event["kind"] == kind]

    await http.until(lambda: len(found()) >= count)
    return found()


async def test_a_sessions_life_is_told_and_its_key_is_not() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        async with http.websocket(key) as websocket:
            await http.publish("news", b"1", b"2")
            got: dict[str, Any] = {}
            while len(got) < 2:
                got |= await recv(websocket)
            await websocket.send("1,2")
            (confirmed,) = await until_told(http, "confirmed")
        delivered = await until_told(http, "delivered")
        assert sum(event["messages"] for event in delivered) == 2
        assert {event["topic"] for event in delivered} == {"news"}
        assert (confirmed["count"], confirmed["waiting"]) == (2, 0)
        assert 0 <= confirmed["wait-ms"] <= TIMEOUT_S * 1000
        await http.client.delete(f"/v1/sessions/{key}")
        (ended,) = await until_told(http, "session-ended")
        (opened,) = await until_told(http, "session-opened")
        assert opened["topics"] == ["news"] and ended["reason"] == "deleted"
        assert opened["session"] == ended["session"] == confirmed["session"]
        assert key not in json.dumps(told(http.node))


async def test_events_that_are_pending_when_the_bus_stops_are_written(tmp_path: Path) -> None:
    async with http_bus(data=str(tmp_path)) as http:
        await http.open_session()
    async with http_bus(data=str(tmp_path)) as http:
        assert [event["kind"] for event in told(http.node)] == ["session-opened"]


async def test_a_session_that_follows_events_does_not_make_more_of_them() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("$events")
        other = await http.open_session("news")
        async with http.websocket(key) as websocket:
            await recv(websocket)
            await websocket.send("1")
            await http.publish("news", b"1")
            await http.packs(other)
            await until_told(http, "delivered")
            await recv(websocket)
            await asyncio.sleep(0.5)  # a loop would write several times in this time
        kinds = Counter(event["kind"] for event in told(http.node))
        assert kinds == {"session-opened": 2, "delivered": 1}


async def test_events_can_be_turned_off() -> None:
    async with http_bus(system={"events": False}) as http:
        key = await http.open_session()
        await http.client.delete(f"/v1/sessions/{key}")
    assert http.node.bus.log.bounds("$events").stop == 0


async def test_a_subscriber_that_was_too_slow_is_told() -> None:
    async with http_bus("news") as http:
        http.node.bad_peers.record("10.0.0.1:5", "goms", "outbox.full", "too slow")
        (slow,) = await until_told(http, "subscriber-slow")
        assert (slow["peer"], slow["protocol"], slow["code"]) == (
            "10.0.0.1:5",
            "goms",
            "outbox.full",
        )


async def test_a_consumer_that_failed_is_told() -> None:
    async with http_bus("news") as http:
        await http.client.put("/v1/consumers/etl", json={"last-error": "no disk"})
        (failed,) = await until_told(http, "consumer-failed")
        assert (failed["group"], failed["error"]) == ("etl", "no disk")
