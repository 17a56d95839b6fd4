"""The batch reader without Spark: ranges, partitions, filters and columns."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import datasource as ds
from pyspark.sql.pandas.types import to_arrow_schema
from source_kit import SECOND_US, WrittenLog, offsets_of, rows_of, source_options, written_log

from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.history import parquet
from polybus.log.reading.reader import LogReader
from polybus.spark.source import planning
from polybus.spark.source.options import COLUMNS, spark_schema
from polybus.spark.source.planning import partitions
from polybus.spark.source.readers import FilteringReader, PolybusReader, batch_reader, narrow


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenLog]:
    with written_log(tmp_path) as log:
        log.create("news")
        yield log


def batch(written: WrittenLog, **given: Any) -> FilteringReader:
    if not {"subscribe", "subscribePattern"} & set(given):
        given["subscribe"] = "news"
    return FilteringReader(source_options(written.data, **given))


def read(written: WrittenLog, **given: Any) -> list[int]:
    reader = batch(written, **given)
    return [offset for _, offset in offsets_of(reader, reader.partitions())]


def test_record_batches_have_exactly_the_schema_that_spark_requires(written: WrittenLog) -> None:
    written.append("news", 3, headers={"a": b"1"})
    written.hand_over()
    written.append("news", 3)
    reader = batch(written)
    (part,) = reader.partitions()
    wanted = to_arrow_schema(spark_schema(), timezone="UTC")
    for rows in reader.read(part):
        assert rows.schema.equals(wanted, check_metadata=True)
    table = rows_of(reader, [part])
    bounds = written.log.bounds("news")
    assert table.column("value").to_pylist() == [f"news:{number}".encode() for number in range(6)]
    assert table.column("headers").to_pylist() == [[("a", b"1")]] * 3 + [None] * 3
    assert set(table.column("topic").to_pylist()) == {"news"}
    assert set(table.column("partition").to_pylist()) == {0}
    assert set(table.column("epoch").to_pylist()) == {bounds.epoch}
    assert set(table.column("sender").to_pylist()) == {"127.0.0.1:1"}


def test_headers_are_not_read_if_the_option_excludes_them(written: WrittenLog) -> None:
    written.append("news", 3, headers={"a": b"1"})
    reader = batch(written, includeHeaders="false")
    table = rows_of(reader, reader.partitions())
    assert table.column_names == list(COLUMNS)
    assert table.column("headers").null_count == 3


@pytest.mark.parametrize("names", ["value", "topic", "epoch,partition", "headers,offset", "sender"])
def test_only_requested_columns_are_in_the_schema(written: WrittenLog, names: str) -> None:
    written.append("news", 3)
    written.hand_over()
    written.append("news", 3)
    reader = batch(written, columns=names)
    table = rows_of(reader, reader.partitions())
    assert set(table.column_names) == set(names.split(","))
    assert table.schema.equals(to_arrow_schema(spark_schema(table.column_names), timezone="UTC"))
    assert table.num_rows == 6


def test_a_range_is_read_by_offsets(written: WrittenLog) -> None:
    written.append("news", 10)
    found = read(written, startingOffsets='{"news": {"0": 3}}', endingOffsets='{"news": 7}')
    assert found == [3, 4, 5, 6]


def test_a_range_is_read_by_times(written: WrittenLog) -> None:
    for _ in range(4):
        written.append("news", 2)
        written.clock.now_us += SECOND_US
    first_ms = written.clock.now_us // 1000 - 4000
    assert read(written, startingTimestamp=first_ms + 1000) == [2, 3, 4, 5, 6, 7]
    assert read(written, endingTimestamp=first_ms + 2000) == [0, 1, 2, 3]
    late = {"startingTimestamp": first_ms + 9000}
    with pytest.raises(UsageError) as caught:
        read(written, **late)
    assert caught.value.code == "spark.timestamp-unmatched"
    assert read(written, startingOffsetsByTimestampStrategy="latest", **late) == []


def test_offsets_outside_of_the_log_are_data_loss_that_names_the_option(
    written: WrittenLog,
) -> None:
    written.append("news", 5)
    with pytest.raises(UsageError) as caught:
        read(written, endingOffsets='{"news": 9}')
    assert caught.value.code == "spark.data-loss"
    assert "option endingOffsets: offset 9 of topic 'news'" in caught.value.text
    assert read(written, endingOffsets='{"news": 9}', failOnDataLoss="false") == [0, 1, 2, 3, 4]


def test_topics_of_a_pattern_are_read_and_system_topics_are_not(written: WrittenLog) -> None:
    written.create("nature", "sport", "$events")
    for topic in ("news", "nature", "sport", "$events"):
        written.append(topic, 1)
    reader = batch(written, subscribePattern="n.*|.events")
    assert offsets_of(reader, reader.partitions()) == [("nature", 0), ("news", 0)]
    reader = batch(written, subscribePattern=r"\$.*")
    assert offsets_of(reader, reader.partitions()) == [("$events", 0)]
    assert batch(written, subscribePattern="x.*").partitions() == []


def test_spark_s_own_partition_for_no_rows_reads_nothing(written: WrittenLog) -> None:
    assert list(batch(written).read(ds.InputPartition(None))) == []


def test_a_log_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    reader = PolybusReader(source_options(tmp_path / "nowhere", subscribe="news"))
    with pytest.raises(UsageError) as caught:
        reader.partitions()
    assert caught.value.code == "data.not-found"
    assert str(tmp_path / "nowhere") in caught.value.text


def test_a_damaged_segment_is_an_error_that_names_file_topic_and_offsets(
    written: WrittenLog,
) -> None:
    written.append("news", 5)
    segment = layout.segments(written.data)[-1]
    reader = batch(written)
    parts = reader.partitions()
    content = bytearray(segment.read_bytes())
    content[content.rindex(b"news:3")] ^= 1
    segment.write_bytes(content)
    with pytest.raises(StorageError) as caught:
        offsets_of(reader, parts)
    assert caught.value.code == "log.damaged"
    assert "topic 'news', offsets 0 to 4" in caught.value.text
    assert str(segment) in caught.value.text


def test_a_value_too_large_for_spark_is_refused_with_its_offset(
    written: WrittenLog,
) -> None:
    written.append("news", 2)
    written.append("news", 1, size=100_000_000)
    reader = batch(written)
    with pytest.raises(UsageError) as caught:
        rows_of(reader, reader.partitions())
    assert caught.value.code == "spark.value-too-large"
    assert "topic 'news', offset 2: a value of 100000000 bytes" in caught.value.text
    assert read(written, columns="topic,offset,timestamp") == [0, 1, 2]


def test_large_values_are_cut_if_the_option_says_so_and_their_size_is_told(
    written: WrittenLog,
) -> None:
    for size in (10, 3000, 2000, 100_000):
        written.append("news", 1, size=size)
    columns = "offset,value,value_bytes"
    reader = batch(written, columns=columns, maxValueBytes="2000", failOnLargeValue="false")
    table = rows_of(reader, reader.partitions())
    assert [len(value) for value in table["value"].to_pylist()] == [10, 1024, 2000, 1024]
    assert table["value_bytes"].to_pylist() == [10, 3000, 2000, 100_000]
    assert "value_bytes" not in COLUMNS
    reader = batch(written, columns="value_bytes", failOnLargeValue="false")
    assert rows_of(reader, reader.partitions()).to_pylist()[3] == {"value_bytes": 100_000}


def test_large_values_come_in_batches_of_bounded_size(written: WrittenLog) -> None:
    written.append("news", 20, size=1 << 20)
    reader = batch(written)
    sizes = [rows.nbytes for part in reader.partitions() for rows in reader.read(part)]
    assert max(sizes) <= 9 << 20


# Partitions.


def parts_of(written: WrittenLog, **limits: Any) -> list[list[tuple[str, int, int]]]:
    reader = LogReader(written.data)
    plans = [reader.plan(topic, 0, reader.bounds(topic).stop) for topic in reader.topics()]
    found = partitions(plans, **limits)
    return [[(one.topic, one.start, one.stop) for one in part.plans] for part in found]


def test_a_few_rows_of_many_topics_become_one_task(written: WrittenLog) -> None:
    names = [f"t{number}" for number in range(20)]
    written.create(*names)
    for name in names:
        written.append(name, 3)
    (part,) = parts_of(written)
    assert part == [(name, 0, 3) for name in sorted(names)]


@pytest.mark.parametrize("handed_over", [False, True])
def test_rows_are_split_among_the_cores(
    written: WrittenLog, handed_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "ROWS_MIN", 10)
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 16)
    for _ in range(10):
        written.append("news", 10)
    if handed_over:
        written.hand_over()
    parts = parts_of(written, cores=2)
    assert len(parts) == 2
    assert [one for part in parts for one in part][0][1] == 0
    assert parts[0][0][2] == parts[1][0][1]
    if handed_over:
        assert parts[1][0][1] % 16 == 0, "a file is cut between row groups"


def test_min_partitions_and_max_records_split_ranges_exactly(written: WrittenLog) -> None:
    written.create("sport")
    for topic in ("news", "sport"):
        written.append(topic, 50)
    assert len(parts_of(written, count_min=7)) >= 7
    parts = parts_of(written, rows_max=30)
    counts = [sum(stop - start for _, start, stop in part) for part in parts]
    assert sum(counts) == 100
    assert max(counts) <= 30
    assert len(parts_of(written, count_min=1000)) == 100
    reader = batch(written, subscribe="news,sport", minPartitions=9, maxRecordsPerPartition=4)
    rows = offsets_of(reader, reader.partitions())
    assert sorted(rows) == [(topic, n) for topic in ("news", "sport") for n in range(50)]


def test_large_rows_make_more_tasks(written: WrittenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "BYTES_MAX", 1 << 20)
    written.append("news", 8, size=1 << 20)
    assert len(parts_of(written)) == 8


def test_tasks_fill_whole_rounds_of_the_cores(
    written: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "ROWS_MAX", 40)
    written.append("news", 100)
    assert [len(parts_of(written, cores=cores)) for cores in (1, 2, 4)] == [3, 4, 3]


def test_a_partition_can_be_sent_to_a_task(written: WrittenLog) -> None:
    written.append("news", 5)
    reader = batch(written)
    sent = pickle.loads(pickle.dumps(reader.partitions()))
    assert offsets_of(pickle.loads(pickle.dumps(reader)), sent) == [("news", n) for n in range(5)]


def test_a_hand_over_between_planning_and_tasks_changes_nothing(written: WrittenLog) -> None:
    written.append("news", 30)
    reader = batch(written, minPartitions=3)
    parts = reader.partitions()
    written.hand_over()
    written.append("news", 30)
    written.hand_over()
    assert [offset for _, offset in offsets_of(reader, parts)] == list(range(30))


# Filters.

NOON = datetime(2024, 10, 4, 12, tzinfo=UTC)
OFFSET, TOPIC, TIME = ("offset",), ("topic",), ("timestamp",)


def filtered(written: WrittenLog, *filters: Any, **given: Any) -> list[int]:
    """What is read with filters handed down; Spark applies all of them again."""
    reader = batch(written, **given)
    assert reader.pushFilters(list(filters)) == list(filters)
    reader = pickle.loads(pickle.dumps(reader))
    return [offset for _, offset in offsets_of(reader, reader.partitions())]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([ds.GreaterThan(OFFSET, 6), ds.LessThanOrEqual(OFFSET, 8)], [7, 8]),
        ([ds.GreaterThanOrEqual(OFFSET, 8), ds.IsNotNull(OFFSET)], [8, 9]),
        ([ds.EqualTo(OFFSET, 4)], [4]),
        ([ds.EqualNullSafe(OFFSET, 4), ds.LessThan(OFFSET, 4)], []),
        ([ds.LessThan(OFFSET, -5)], []),
    ],
)
def test_filters_on_the_offset_skip_other_offsets(
    written: WrittenLog, filters: list[Any], expected: list[int]
) -> None:
    written.append("news", 5)
    written.hand_over()
    written.append("news", 5)
    assert filtered(written, *filters) == expected


def test_a_list_of_offsets_bounds_what_is_read(written: WrittenLog) -> None:
    written.append("news", 10)
    assert filtered(written, ds.In(OFFSET, (3, 5))) == [3, 4, 5]


def test_filters_on_the_topic_skip_other_topics(written: WrittenLog) -> None:
    written.create("sport")
    written.append("news", 2)
    written.append("sport", 3)
    both = {"subscribe": "news,sport"}
    assert filtered(written, ds.EqualTo(TOPIC, "news"), **both) == [0, 1]
    assert filtered(written, ds.In(TOPIC, ("news", "x")), **both) == [0, 1]
    assert filtered(written, ds.StringStartsWith(TOPIC, "spo"), **both) == [0, 1, 2]
    twice = [ds.EqualTo(TOPIC, "news"), ds.EqualTo(TOPIC, "sport")]
    assert filtered(written, *twice, **both) == []


@pytest.mark.parametrize("handed_over", [False, True])
def test_filters_on_time_skip_commits_and_files(written: WrittenLog, handed_over: bool) -> None:
    for _ in range(3):
        written.append("news", 2)
        if handed_over:
            written.hand_over()
        written.clock.now_us += 86_400 * SECOND_US
    later = ds.GreaterThan(TIME, NOON + timedelta(hours=1))
    sooner = ds.LessThan(TIME, NOON + timedelta(days=1, hours=1))
    assert filtered(written, later) == [2, 3, 4, 5]
    assert filtered(written, later, sooner) == [2, 3]
    assert filtered(written, ds.EqualTo(TIME, NOON)) == [0, 1]


def test_unsupported_filters_skip_nothing() -> None:
    filters = [
        ds.EqualTo(("value",), b"x"),
        ds.IsNull(OFFSET),
        ds.Not(ds.EqualTo(OFFSET, 3)),
        ds.EqualTo(("headers", "a"), b"1"),
        ds.GreaterThan(TIME, datetime(2024, 10, 4)),  # noqa: DTZ001 - that is the point
        ds.IsNotNull(("key",)),
    ]
    assert narrow(filters) == narrow([])


def test_filters_are_pushed_down_only_by_option_and_in_the_filter_worker(
    written: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = source_options(written.data, subscribe="news")
    wanted = source_options(written.data, subscribe="news", pushFilters="true")
    assert type(batch_reader(wanted)) is PolybusReader
    assert PolybusReader.pushFilters is ds.DataSourceReader.pushFilters
    monkeypatch.setitem(sys.modules, "pyspark.sql.worker.data_source_pushdown_filters", ds)
    assert type(batch_reader(wanted)) is FilteringReader
    assert type(batch_reader(plain)) is PolybusReader
