"""Messages that one who subscribed did not get: listed with the reason, and published again."""

from __future__ import annotations

import asyncio
from typing import Any

from http_kit import Http, http_bus
from test_backpressure import CHUNK, SUBSCRIBE, read_to_end, stalled
from test_redrives import finished

from polybus.testing import ScriptedPeer


async def undelivered(http: Http, **params: Any) -> list[dict[str, Any]]:
    """What is listed, when there is something."""
    found: list[dict[str, Any]] = []
    await http.until(lambda: http.node.bus.log.bounds("$events").stop > 0)
    while not found:
        http.node.context.events.write()
        answer = await http.client.get("/v1/undelivered", params=params)
        assert answer.status_code == 200, answer.text
        found = answer.json()["undelivered"]
    return found


async def test_what_a_slow_subscriber_did_not_get_is_listed_and_published_again() -> None:
    async with http_bus("news", limits={"outbox-bytes-max": 1 << 16}) as http:
        async with (
            stalled(http.node, SUBSCRIBE["boson-frames"]) as slow,
            ScriptedPeer(http.node.tcp_port) as publisher,
        ):
            while not http.node.bad_peers.counts["outbox.full"]:
                await publisher.send(CHUNK)
                await asyncio.sleep(0)
            await read_to_end(slow)
        [one] = await undelivered(http, topic="news")
        bounds = http.node.bus.log.bounds("news")
        assert (one["topic"], one["epoch"], one["reason"]) == ("news", bounds.epoch, "outbox.full")
        assert one["protocol"] == "boson-frames" and one["to"].startswith("127.0.0.1:")
        assert bounds.start <= one["first"] < one["stop"] <= bounds.stop
        for found in ({"reason": "FULL"}, {"text": one["to"]}, {"topic": "news", "text": "EW"}):
            assert await undelivered(http, **found) == [one]
        for other in ({"reason": "expired"}, {"text": "nobody"}):
            answer = await http.client.get("/v1/undelivered", params=other)
            assert answer.json()["undelivered"] == []
        where = {name: one[name] for name in ("topic", "epoch", "first")}
        # Two who missed the same: it is published again once.
        ranges = [where | {"stop": one["first"] + 2}, where | {"stop": one["first"] + 1}]

        planned = (
            await http.client.post(
                "/v1/undelivered/replay", json={"ranges": ranges, "dry-run": True}
            )
        ).json()
        assert (planned["messages"], http.node.bus.log.bounds("news")) == (2, bounds)
        begun = (await http.client.post("/v1/undelivered/replay", json={"ranges": ranges})).json()
        ended = await finished(http, begun["id"])
        assert (ended["state"], ended["published"]) == ("done", 2), ended
        assert http.node.bus.log.bounds("news").stop == bounds.stop + 2
        gone = [ranges[0] | {"epoch": 1}]
        refused = await http.client.post("/v1/undelivered/replay", json={"ranges": gone})
        assert refused.json()["code"] == "log.offset-unknown"


async def test_what_an_expired_session_did_not_confirm_is_listed() -> None:
    async with http_bus("news", "olds") as http:
        key = await http.open_session("news", "olds")
        await http.publish("news", b"1", b"2", b"3")
        packs = await http.packs(key)
        assert packs
        for session in list(http.node.services.inboxes.sessions()):
            http.node.services.inboxes.end(session, "expired")
        [one] = await undelivered(http)
        assert (one["topic"], one["first"], one["stop"]) == ("news", 0, 3)
        assert (one["reason"], one["protocol"]) == ("session-expired", "msgstream")


async def test_what_a_full_session_dropped_is_listed() -> None:
    async with http_bus("news", msgstream={"session-packs-max": 1}) as http:
        key = await http.open_session("news")
        await http.publish("news", b"1")
        await http.packs(key)
        await http.publish("news", b"2", b"3")
        await http.packs(key)
        [one] = await undelivered(http)
        assert (one["topic"], one["reason"]) == ("news", "session-full")


async def test_statements_are_in_the_audit_before_they_run() -> None:
    async with http_bus("news") as http:
        await http.client.post("/v1/sql", json={"query": "SELECT 'no end"})
        [entry] = (await http.client.get("/v1/topics/$audit/messages")).json()["messages"]
        assert entry["value"]["action"] == "sql-run"
        assert entry["value"]["detail"] == {"query": "SELECT 'no end"}
