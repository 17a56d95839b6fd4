"""Spark's queries as consumers of the bus."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spark_kit import RunningBus, eventually, running_bus

from polybus.client.http.blocking import request_json
from polybus.spark.listener import (
    WAITING_MAX,
    ConsumerListener,
    Reporter,
    install,
    positions_by_group,
)


def source(group: str, **topics: int) -> SimpleNamespace:
    places = {topic: {"epoch": 7, "offset": offset} for topic, offset in topics.items()}
    return SimpleNamespace(endOffset=json.dumps({"group": group, "topics": places}))


def progress(*sources: Any, name: str | None = None, rate: float = 5.0) -> SimpleNamespace:
    return SimpleNamespace(
        progress=SimpleNamespace(
            id="the-query",
            runId="the-run",
            name=name,
            sources=sources,
            processedRowsPerSecond=rate,
            batchDuration=120,
        )
    )


def ended(error: str | None) -> SimpleNamespace:
    return SimpleNamespace(id="the-query", runId="the-run", exception=error)


class Notes(Reporter):
    """A reporter that keeps what it is given."""

    def __init__(self) -> None:
        self.put_reports: list[tuple[str, dict[str, Any]]] = []

    def put(self, group: str, report: dict[str, Any]) -> None:
        self.put_reports.append((group, report))


@pytest.fixture
def news(tmp_path: Path) -> Iterator[RunningBus]:
    with running_bus(tmp_path, ["news"]) as bus:
        yield bus


def consumers(bus: RunningBus) -> dict[str, Any]:
    found = request_json(bus.url, "GET", "/v1/consumers")["consumers"]
    return {one["group"]: one for one in found}


def test_a_source_without_a_group_is_known_by_its_querys_name() -> None:
    found = positions_by_group([source("", news=4), source("etl", sport=2)], "my query")
    assert found == {
        "my query": {"news": {"epoch": 7, "offset": 4}},
        "etl": {"sport": {"epoch": 7, "offset": 2}},
    }


def test_the_lower_offset_of_two_sources_of_one_topic_counts() -> None:
    found = positions_by_group([source("etl", news=4), source("etl", news=3)], "q")
    assert found["etl"]["news"]["offset"] == 3


@pytest.mark.parametrize("offset", [None, "17", '{"logOffset": 5}', "not json"])
def test_sources_of_other_formats_are_ignored(offset: str | None) -> None:
    assert positions_by_group([SimpleNamespace(endOffset=offset)], "q") == {}


def test_a_progress_becomes_a_report() -> None:
    notes = Notes()
    ConsumerListener(notes).onQueryProgress(progress(source("etl", news=4), rate=float("nan")))
    assert notes.put_reports == [
        (
            "etl",
            {
                "kind": "spark",
                "query-id": "the-query",
                "run-id": "the-run",
                "positions": {"news": {"epoch": 7, "offset": 4}},
                "rows-per-s": 0.0,
                "batch-ms": 120.0,
                "stopped": {},
            },
        )
    ]


def test_an_idle_query_is_seen_and_a_failed_one_leaves_its_error() -> None:
    notes = Notes()
    listener = ConsumerListener(notes)
    listener.onQueryProgress(progress(source("etl", news=4)))
    listener.onQueryIdle(SimpleNamespace(id="the-query", runId="the-run"))
    listener.onQueryTerminated(
        ended(
            "Traceback (most recent call last):\n  x\npolybus.errors.UsageError: log.x: no\n at JVM"
        )
    )
    _, (idle_group, idle), (group, failed) = notes.put_reports
    assert idle_group == group == "etl"
    assert "positions" not in idle and "last-error" not in idle
    assert failed["last-error"] == "log.x: no"


def test_a_query_that_fails_before_its_first_batch_is_named_if_the_reason_is_ours() -> None:
    notes = Notes()
    listener = ConsumerListener(notes)
    listener.onQueryStarted(SimpleNamespace(id="the-query", name="early"))
    trace = "Traceback (most recent call last):\n  x\npolybus.errors.UsageError: data.not-found: no"
    listener.onQueryTerminated(ended(trace))
    listener.onQueryTerminated(ended("java.lang.IllegalStateException"))
    ((group, report),) = notes.put_reports
    assert (group, report["last-error"]) == ("early", "data.not-found: no")


def test_an_invalid_progress_does_not_fail_the_query() -> None:
    ConsumerListener(Notes()).onQueryProgress(SimpleNamespace(progress=None))


def test_reports_wait_for_a_bus_that_is_away_and_only_the_newest_is_sent(news: RunningBus) -> None:
    news.stop()
    reporter = Reporter(data=news.data)
    for number in range(3):
        reporter.put("etl", {"rows-per-s": number, "kind": "spark"})
    assert not reporter.flush(0.2)
    news.start()
    assert reporter.flush(20)
    assert consumers(news)["etl"]["rows-per-s"] == 2
    reporter.close()


def test_a_refused_report_is_not_sent_again(news: RunningBus) -> None:
    reporter = Reporter(url=news.url)
    reporter.put("x" * 300, {"kind": "spark"})
    assert reporter.flush(20)
    assert consumers(news) == {}
    reporter.close()


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_report_that_the_bus_has_is_not_sent_again_with_the_next_one(
    is_settled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[dict[str, Any]] = []
    begun, answered = threading.Event(), threading.Event()

    def send(_: Reporter, group: str, report: dict[str, Any]) -> bool:
        sent.append(report)
        begun.set()
        return answered.wait(10) and (is_settled or len(sent) > 1)

    monkeypatch.setattr(Reporter, "_send", send)
    monkeypatch.setattr("polybus.spark.listener.RETRY_S", 0.01)
    reporter = Reporter(data=tmp_path)
    reporter.put("etl", {"last-error": "broken"})
    assert begun.wait(10)
    reporter.put("etl", {"rows-per-s": 5.0})
    answered.set()
    assert reporter.flush(10)
    reporter.close()

    repeated = {} if is_settled else {"last-error": "broken"}
    assert sent == [{"last-error": "broken"}, {**repeated, "rows-per-s": 5.0}]


def test_the_oldest_reports_are_dropped_when_too_many_wait(tmp_path: Path) -> None:
    reporter = Reporter(data=tmp_path)
    for number in range(WAITING_MAX + 5):
        reporter.put(str(number), {})
    assert reporter.dropped >= 4
    reporter.close(0)


def test_a_spark_query_is_listed_with_its_position_and_its_error(
    spark: Any, news: RunningBus, tmp_path: Path
) -> None:
    listener = install(spark, data=news.data)
    news.publish("news", [b"1", b"2", b"3"])

    def fail(_: Any, batch_id: int) -> None:
        if batch_id:
            raise ValueError("no more of this")

    stream = spark.readStream.format("polybus").option("data", str(news.data))
    stream = stream.option("subscribe", "news").option("startingOffsets", "earliest")
    writer = stream.option("groupId", "etl").load().writeStream.foreachBatch(fail)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        found = eventually(lambda: consumers(news).get("etl"), timeout_s=90)
        assert (found["kind"], found["query-id"], found["lag"]) == ("spark", str(query.id), 0)
        assert found["topics"][0]["offset"] == 3
        news.publish("news", [b"4"])
        failed = eventually(lambda: consumers(news)["etl"]["failed"] and consumers(news)["etl"])
        assert "no more of this" in failed["last-error"]
        assert failed["lag"] == 1
    finally:
        query.stop()
        spark.streams.removeListener(listener)
        listener.reporter.close()
