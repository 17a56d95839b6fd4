"""Consumers on a running bus: over HTTP, in the figures, over a restart, and before retention."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from http_kit import Http, http_bus

from polybus.edges.node import clock_us
from polybus.log.files import FileLog
from polybus.log.history.maintenance import Maintenance
from polybus.services.consumers import ConsumerPosition, Report


async def report(http: Http, group: str, offset: int, **fields: Any) -> None:
    epoch = http.node.bus.log.bounds("news").epoch
    body = {"kind": "spark", "positions": {"news": {"epoch": epoch, "offset": offset}}, **fields}
    answer = await http.client.put(f"/v1/consumers/{group}", json=body)
    assert answer.status_code == 204, answer.text


async def listed(http: Http) -> list[dict[str, Any]]:
    answer = await http.client.get("/v1/consumers")
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["consumers"]
    return found


async def test_a_consumer_is_listed_with_the_lag_the_bus_computes() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1", b"2", b"3")
        await report(http, "etl", 1, **{"rows-per-s": 12.5, "batch-ms": 40, "query-id": "q"})
        (consumer,) = await listed(http)
        assert (consumer["group"], consumer["kind"], consumer["query-id"]) == ("etl", "spark", "q")
        assert (consumer["rows-per-s"], consumer["batch-ms"]) == (12.5, 40)
        assert (consumer["lag"], consumer["data-loss"]) == (2, False)
        assert consumer["topics"][0]["topic"] == "news" and consumer["topics"][0]["lag"] == 2
        assert 0 <= consumer["seen-s-ago"] < 60
        await http.publish("news", b"4")
        assert (await listed(http))[0]["lag"] == 3
        topic = (await http.client.get("/v1/topics/news")).json()
        assert [(one["group"], one["lag"]) for one in topic["consumers"]] == [("etl", 3)]


async def test_the_figures_show_each_consumers_lag() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1", b"2")
        await report(http, "etl", 0)
        text = (await http.client.get("/metrics")).text
        assert 'polybus_consumer_lag{group="etl",topic="news"} 2' in text
        assert 'polybus_consumer_failed{group="etl"} 0' in text
        assert 'polybus_consumer_data_loss{group="etl"} 0' in text


async def test_a_topic_that_a_consumer_does_not_read_is_named_until_it_does() -> None:
    async with http_bus("news") as http:
        await report(http, "etl", 0, stopped={"news": "stopped: correct it"})
        assert (await listed(http))[0]["stopped"] == {"news": "stopped: correct it"}
        health = (await http.client.get("/readyz")).text
        assert health == "ok\nconsumer etl: topic news is stopped: correct it\n"
        text = (await http.client.get("/metrics")).text
        assert 'polybus_consumer_stopped_topics{group="etl"} 1' in text
        await report(http, "etl", 0, stopped={})
        assert (await http.client.get("/readyz")).text == "ok\n"


async def test_consumers_are_there_again_after_a_restart(tmp_path: Path) -> None:
    async with http_bus("news", data=str(tmp_path)) as http:
        await http.publish("news", b"1", b"2")
        await report(http, "etl", 1, **{"last-error": "boom"})
        await report(http, "gone", 1)
        assert (await http.client.delete("/v1/consumers/gone")).status_code == 204
    async with http_bus("news", data=str(tmp_path)) as http:
        (consumer,) = await listed(http)
        assert (consumer["group"], consumer["lag"], consumer["last-error"]) == ("etl", 1, "boom")
        assert consumer["failed"]


async def test_a_topic_that_was_created_anew_is_data_loss() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1", b"2")
        await report(http, "etl", 2)
        await http.client.delete("/v1/topics/news")
        (consumer,) = await listed(http)
        assert consumer["topics"][0]["data-loss"] == "topic"
        await http.client.post("/v1/topics", json={"name": "news"})
        (consumer,) = await listed(http)
        assert consumer["data-loss"] and consumer["topics"][0]["data-loss"] == "epoch"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"positions": {"news": {"epoch": 1, "offset": -1}}}, 400, "http.body-invalid"),
        ({"colour": "red"}, 400, "http.body-invalid"),
        ({"rows-per-s": -1}, 400, "http.body-invalid"),
        ({"positions": {"x" * 300: {"epoch": 1, "offset": 1}}}, 400, "consumer.invalid"),
    ],
)
async def test_a_report_that_makes_no_sense_is_refused(body: Any, status: int, code: str) -> None:
    async with http_bus("news") as http:
        answer = await http.client.put("/v1/consumers/etl", json=body)
        assert answer.status_code == status
        assert answer.json()["code"].startswith(code)
        assert await listed(http) == []


async def test_one_consumer_too_many_is_refused_and_can_be_made_room_for() -> None:
    async with http_bus("news", limits={"consumers-max": 1}) as http:
        await report(http, "one", 0)
        answer = await http.client.put("/v1/consumers/two", json={})
        assert (answer.status_code, answer.json()["code"]) == (409, "consumer.too-many")
        await http.client.delete("/v1/consumers/one")
        await report(http, "two", 0)
        answer = await http.client.delete("/v1/consumers/one")
        assert (answer.status_code, answer.json()["code"]) == (404, "consumer.unknown")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, True),
        ({"hold-for-consumers": False}, False),
        ({"hold-age-s": 0.001}, False),
        ({"hold-age-s": 1.7e308}, True),
    ],
)
async def test_retention_waits_for_consumers_unless_told_otherwise(
    settings: dict[str, Any], kept: bool
) -> None:
    async with http_bus("news", retention={"age-s": 0.001, **settings}) as http:
        await http.publish("news", b"1", b"2")
        await report(http, "etl", 1)
        log = http.node.bus.log
        assert isinstance(log, FileLog)
        await asyncio.to_thread(log.seal)
        await http.until(
            lambda: len(log.sealed_segments()) == 1 or log.describe("news")["history-files"]
        )
        await asyncio.to_thread(Maintenance(log, interval_s=60).run_once)
        assert log.describe("news")["handed-over"] == 2
        log.apply_retention(time.time_ns() // 1000 + 1_000_000)
        assert (log.bounds("news").start == 0) is kept


async def test_a_clock_that_jumps_does_not_end_what_a_consumer_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("news") as http:
        book = http.node.services.consumers
        epoch = http.node.bus.log.bounds("news").epoch
        book.report("reader", Report(positions={"news": ConsumerPosition(epoch, 0)}))
        years_us = 10 * 365 * 86_400_000_000
        for jump_us in (years_us, -years_us, 0):
            monkeypatch.setattr(book, "_clock_us", lambda jump=jump_us: clock_us() + jump)
            assert book.held_from("news") == 0
