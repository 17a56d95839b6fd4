"""`format("polybus")` in Spark: batches, every trigger, restarts, and errors as users see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from source_kit import WrittenLog, written_log
from spark_kit import eventually, running_bus

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
Read = list[tuple[str, int]]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenLog]:
    with written_log(tmp_path / "data") as log:
        log.create("news")
        yield log


def batch(spark: Any, written: WrittenLog, **given: Any) -> Any:
    options = {"data": str(written.data), "subscribe": "news"} | given
    return spark.read.format("polybus").options(**options).load()


class Sink:
    """A stream into a list, with a checkpoint that outlives the query.

    Rows are kept per batch: a query that stops before it commits a batch repeats that batch.
    """

    def __init__(self, spark: Any, folder: Path, **given: Any) -> None:
        self._spark = spark
        self._checkpoint = folder / "checkpoint"
        self._given = {"startingOffsets": "earliest"} | given
        self._taken: dict[int, Read] = {}

    def start(self, **trigger: Any) -> Any:
        frame = self._spark.readStream.format("polybus").options(**self._given).load()
        writer = frame.select("topic", "offset").writeStream.foreachBatch(self._take)
        if trigger:
            writer = writer.trigger(**trigger)
        return writer.option("checkpointLocation", str(self._checkpoint)).start()

    def run(self, **trigger: Any) -> Any:
        """Start, and wait until there is no more to read."""
        query = self.start(**trigger)
        query.awaitTermination()
        return query

    def _take(self, frame: Any, number: int) -> None:
        self._taken[number] = [(row.topic, row.offset) for row in frame.collect()]

    @property
    def read(self) -> Read:
        return [row for number in sorted(self._taken) for row in self._taken[number]]

    @property
    def batches(self) -> int:
        """How many batches had rows."""
        return sum(bool(rows) for rows in self._taken.values())


def expected(topic: str, stop: int) -> Read:
    return [(topic, offset) for offset in range(stop)]


def test_a_topic_is_a_table_across_history_and_journal(spark: Any, written: WrittenLog) -> None:
    written.append("news", 300, headers={"a": b"1"})
    written.hand_over()
    written.append("news", 200)
    frame = batch(spark, written, minPartitions=3)
    assert frame.columns == [
        *("topic", "partition", "offset", "timestamp", "key", "value"),
        *("headers", "protocol", "sender", "epoch"),
    ]
    rows = frame.orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(500))
    first = rows[0]
    assert bytes(first.value) == b"news:0"
    assert {key: bytes(value) for key, value in first.headers.items()} == {"a": b"1"}
    assert (first.topic, first.partition, first.key) == ("news", 0, None)
    assert (first.protocol, first.sender) == ("goms", "127.0.0.1:1")
    assert first.epoch == written.log.bounds("news").epoch
    assert first.timestamp.isoformat() == "2024-10-04T12:00:00"
    assert rows[499].headers is None
    assert frame.rdd.getNumPartitions() >= 3


def test_columns_shrink_the_schema(spark: Any, written: WrittenLog) -> None:
    written.append("news", 5)
    frame = batch(spark, written, columns="value,offset")
    assert frame.columns == ["offset", "value"]
    assert frame.selectExpr("sum(offset)", "max(length(value))").first()[:] == (10, 6)


@pytest.mark.parametrize("setting", ["true", "false"])
def test_a_dataframe_can_be_used_again_with_other_filters_or_without(
    spark: Any, written: WrittenLog, setting: str
) -> None:
    written.append("news", 100)
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, setting)
    try:
        frame = batch(spark, written)
        assert frame.where("offset >= 90 and offset < 95").count() == 5
        assert frame.count() == 100
        assert frame.where("offset < 3").union(frame.where("offset >= 95")).count() == 8
    finally:
        spark.conf.set(PUSHDOWN, before)


def test_pushed_down_filters_return_the_right_rows(spark: Any, written: WrittenLog) -> None:
    written.create("sport")
    for topic in ("news", "sport"):
        written.append(topic, 100)
        written.clock.now_us += 3_600_000_000
    late = "timestamp > timestamp'2024-10-04 12:30:00' and topic in ('news', 'sport')"
    for where, count in (("offset >= 90 and offset < 95 and topic = 'news'", 5), (late, 100)):
        frame = batch(spark, written, subscribe="news,sport", pushFilters="true")
        assert frame.where(where).count() == count


def test_each_available_now_run_continues_where_the_last_one_stopped(
    spark: Any, written: WrittenLog, tmp_path: Path
) -> None:
    sink = Sink(spark, tmp_path, data=str(written.data), subscribe="news", maxOffsetsPerTrigger=40)
    written.append("news", 100)
    sink.run(availableNow=True)
    assert sink.read == expected("news", 100)
    assert sink.batches == 3
    written.hand_over()
    written.append("news", 50)
    sink.run(once=True)
    assert sink.read == expected("news", 150)
    assert sink.batches == 4, "trigger once takes all there is as one batch"
    query = sink.run(availableNow=True)
    assert sink.batches == 4
    assert query.exception() is None


def test_a_running_stream_reads_new_messages_and_topics_created_later(
    spark: Any, written: WrittenLog, tmp_path: Path
) -> None:
    sink = Sink(spark, tmp_path, data=str(written.data), subscribePattern="n.*", groupId="reports")
    written.append("news", 10)
    query = sink.start()
    try:
        eventually(lambda: len(sink.read) == 10)
        written.create("nature", "sport")
        written.append("nature", 5)
        written.append("sport", 5)
        eventually(lambda: len(sink.read) == 15)
        written.hand_over()
        written.append("news", 5)
        eventually(lambda: len(sink.read) == 20)
        end = json.loads(eventually(lambda: query.lastProgress)["sources"][0]["endOffset"])
    finally:
        query.stop()
    assert sorted(sink.read) == [*expected("nature", 5), *expected("news", 15)]
    assert end["group"] == "reports"
    assert end["topics"]["nature"]["offset"] == 5
    written.append("nature", 1)
    query = sink.start(processingTime="50 milliseconds")
    try:
        eventually(lambda: len(sink.read) == 21)
    finally:
        query.stop()
    assert sink.read[-1] == ("nature", 5)


def test_a_stream_over_http_reads_each_message_once(spark: Any, tmp_path: Path) -> None:
    with running_bus(tmp_path, ["news"]) as bus:
        sink = Sink(spark, tmp_path, url=bus.url, subscribe="news", minPartitions=2)
        bus.publish("news", [str(number) for number in range(50)])
        sink.run(availableNow=True)
        bus.publish("news", [str(number) for number in range(50)])
        sink.run(availableNow=True)
        assert sorted(sink.read) == expected("news", 100)


def test_a_recreated_topic_ends_a_stream_with_a_clear_error(
    spark: Any, written: WrittenLog, tmp_path: Path
) -> None:
    sink = Sink(spark, tmp_path, data=str(written.data), subscribe="news")
    written.append("news", 5)
    sink.run(availableNow=True)
    written.recreate("news")
    written.append("news", 9)
    with pytest.raises(Exception, match=r"spark\.data-loss: topic 'news' was deleted and created"):
        sink.run(availableNow=True)
    assert sink.read == expected("news", 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"startingOfsets": "earliest"}, "did you mean startingOffsets"),
        ({"subscribePattern": "n.*"}, "options subscribe and subscribePattern"),
        ({"subscribe": "nothing"}, "option subscribe: topic 'nothing' does not exist"),
        ({"data": "/nowhere/at/all"}, "data.not-found: /nowhere/at/all"),
    ],
)
def test_each_mistake_is_reported_in_one_sentence(
    spark: Any, written: WrittenLog, given: dict[str, str], said: str
) -> None:
    with pytest.raises(Exception) as caught:
        batch(spark, written, **given).count()
    assert said in str(caught.value)


def test_a_value_of_100_mb_is_refused_and_the_session_survives(
    spark: Any, written: WrittenLog
) -> None:
    written.append("news", 1, size=100_000_000)
    with pytest.raises(Exception, match="topic 'news', offset 0: a value of 100000000 bytes"):
        batch(spark, written).selectExpr("max(length(value))").collect()
    assert batch(spark, written, columns="offset").count() == 1
