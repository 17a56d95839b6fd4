"""`format("polybus")` over history: Spark's own Parquet reader reads it, and every row is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from source_kit import WrittenLog, written_log

from polybus.spark import history


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrittenLog]:
    """300 messages of `news` in two files of history, then 200 in the journal; 10 of `sport`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("polybus.log.history.manifest.SMALL_FILE_BYTES", 1)
        with written_log(tmp_path_factory.mktemp("history") / "data") as log:
            log.create("news", "sport")
            log.append("news", 200, headers={"a": b"1"})
            log.append("sport", 10)
            log.hand_over()
            log.clock.now_us += 3_600_000_000
            log.append("news", 100)
            log.hand_over()
            log.append("news", 200)
            yield log


def frame_of(spark: Any, written: WrittenLog, **given: Any) -> Any:
    options = {"data": str(written.data), "subscribe": "news"} | given
    return spark.read.format("polybus").options(**options).load()


def plan_of(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan())


def test_spark_reads_history_by_itself_and_the_rows_are_those_of_the_source(
    spark: Any, written: WrittenLog
) -> None:
    native = frame_of(spark, written)
    # The source alone takes this option.
    source = frame_of(spark, written, maxRecordsPerPartition=1000)
    assert "FileScan parquet" in plan_of(native)
    assert "FileScan parquet" not in plan_of(source)
    assert native.schema == source.schema
    rows = native.orderBy("offset").collect()
    assert rows == source.orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(500))


def test_a_dataframe_over_history_counts_and_filters_without_an_option_and_again(
    spark: Any, written: WrittenLog
) -> None:
    frame = frame_of(spark, written)
    few = frame.where("offset >= 90 AND offset < 95")
    assert "PushedFilters: [IsNotNull(offset), GreaterThanOrEqual(offset,90)" in plan_of(few)
    late = frame.where("timestamp >= timestamp'2024-10-04 12:30:00'")
    assert "GreaterThanOrEqual(timestamp,2024-10-04" in plan_of(late)
    assert [few.count(), frame.count(), late.count()] == [5, 500, 300]
    assert frame.where("offset < 3").union(frame.where("offset >= 495")).count() == 8


def test_a_condition_on_the_topic_leaves_no_file_of_another_topic_in_the_plan(
    spark: Any, written: WrittenLog
) -> None:
    frame = frame_of(spark, written, subscribe="news,sport")
    sport = frame.where("topic = 'sport'")
    assert plan_of(frame).count("FileScan parquet") == 2
    assert plan_of(sport).count("FileScan parquet") == 1
    assert [sport.count(), frame.count()] == [10, 510]


@pytest.mark.parametrize(
    ("given", "offsets"),
    [
        ({"startingOffsets": json.dumps({"news": 150})}, range(150, 500)),
        ({"endingOffsets": json.dumps({"news": 250})}, range(250)),
        ({"startingTimestamp": "2024-10-04T12:30:00Z"}, range(200, 500)),
        ({"endingTimestamp": "2024-10-04T12:30:00Z"}, range(200)),
        ({"startingOffsets": json.dumps({"news": 400})}, range(400, 500)),
        ({"subscribe": "", "subscribePattern": "ne.*", "columns": "offset"}, range(500)),
    ],
)
def test_ranges_and_patterns_hold_across_history_and_journal(
    spark: Any, written: WrittenLog, given: dict[str, str], offsets: range
) -> None:
    options = {"data": str(written.data), "subscribe": "news"} | given
    chosen = {name: value for name, value in options.items() if value}
    rows = spark.read.load(format="polybus", **chosen).select("offset").collect()
    assert sorted(row.offset for row in rows) == list(offsets)


def test_a_file_that_may_not_fit_in_memory_is_read_by_the_source(
    spark: Any, written: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "VALUE_BYTES_MAX", 100)
    history.largest_group.cache_clear()
    frame = frame_of(spark, written)
    assert "FileScan parquet" not in plan_of(frame)
    assert frame.count() == 500
