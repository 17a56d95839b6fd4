"""`polybus-table` as a stream: which tasks read which rows of a lake table, without a JVM."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T
from pyspark.sql.streaming.datasource import ReadAllAvailable

from polybus.errors import StorageError, UsageError
from polybus.lake.table import LakeTable, open_table
from polybus.spark import lake_source
from polybus.spark.lake_source import LakeTableSource, LakeTableStreamReader, checked_options
from polybus.spark.source import planning

LIMIT = ReadAllAvailable()
SCHEMA = T.StructType(
    [
        T.StructField("n", T.LongType()),
        T.StructField("day", T.DateType()),
        T.StructField("tags", T.MapType(T.StringType(), T.StringType())),
        T.StructField("late", T.StringType()),
    ]
)


def add(table: LakeTable, *numbers: int) -> None:
    rows = pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "day": pa.array([datetime.date(2026, 3, 1 + n % 2) for n in numbers]),
            "tags": pa.array([[("n", str(n))] for n in numbers], pa.map_(pa.string(), pa.string())),
        }
    )
    table.append(rows, writer="w", batch_id=None, partition_by=["day"])


def reader(data: Path, **options: Any) -> LakeTableStreamReader:
    given = {"data": str(data), "table": "shop.orders", **options}
    found = LakeTableSource(given).streamReader(SCHEMA)
    assert isinstance(found, LakeTableStreamReader)
    return found


def rows(one: LakeTableStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
    tasks = one.partitions(start, end)
    return sorted(
        (row["n"], row["day"].day, dict(row["tags"]), row["late"])
        for task in tasks
        for batch in one.read(task)
        for row in batch.to_pylist()
    )


def test_rows_have_exactly_the_columns_of_the_stream(tmp_path: Path) -> None:
    table = open_table(tmp_path, "shop.orders")
    add(table, 1, 2)
    one = reader(tmp_path)
    start = one.initialOffset()
    end = one.latestOffset(start, LIMIT)
    identity = table.state.identity["id"]  # type: ignore[index]
    assert end == {"table": identity, "version": 1, "file": 0, "first": 0, "row": 0}
    assert rows(one, start, end) == [(1, 2, {"n": "1"}, None), (2, 1, {"n": "2"}, None)]
    assert one.latestOffset(end, LIMIT) == end
    assert one.partitions(end, end) == []
    one.commit(end)


def test_available_now_ends_at_the_version_of_its_start(tmp_path: Path) -> None:
    table = open_table(tmp_path, "shop.orders")
    add(table, 1)
    one = reader(tmp_path)
    one.prepareForTriggerAvailableNow()
    add(table, 2)
    start = one.initialOffset()
    end = one.latestOffset(start, LIMIT)
    assert [row[0] for row in rows(one, start, end)] == [1]
    assert one.latestOffset(end, LIMIT) == end
    later = reader(tmp_path).latestOffset(end, LIMIT)
    assert [row[0] for row in rows(one, end, later)] == [2]


def test_options_limit_a_batch_and_mistakes_are_named(tmp_path: Path) -> None:
    table = open_table(tmp_path, "shop.orders")
    for number in range(4):
        add(table, number)
    one = reader(tmp_path, maxFilesPerTrigger="3")
    assert one.latestOffset(one.initialOffset(), LIMIT)["file"] == 3
    one = reader(tmp_path, maxBytesPerTrigger="1k")
    assert one.latestOffset(one.initialOffset(), LIMIT)["file"] == 1
    with pytest.raises(UsageError, match="did you mean maxFilesPerTrigger"):
        checked_options({"maxFilePerTrigger": 3})
    with pytest.raises(UsageError, match="maxBytesPerTrigger: 'much' is not a size like"):
        checked_options({"maxBytesPerTrigger": "much"})


def test_files_are_shared_among_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_table(tmp_path, "shop.orders")
    for number in range(5):
        add(table, number)
    one = reader(tmp_path)
    start = one.initialOffset()
    end = one.latestOffset(start, LIMIT)
    assert len(one.partitions(start, end)) == 1
    monkeypatch.setattr(lake_source, "task_count", lambda rows, size: 3)
    assert [len(task.files) for task in one.partitions(start, end)] == [2, 2, 1]
    assert [row[0] for row in rows(one, start, end)] == [0, 1, 2, 3, 4]


def test_wide_rows_come_in_small_batches(tmp_path: Path) -> None:
    table = open_table(tmp_path, "shop.orders")
    wide = ["x" * (1 << 20) + str(n) for n in range(20)]
    table.append(pa.table({"late": wide}), writer="w", batch_id=None)
    one = reader(tmp_path)
    start = one.initialOffset()
    (task,) = one.partitions(start, one.latestOffset(start, LIMIT))
    sizes = [batch.num_rows for batch in one.read(task)]
    assert sum(sizes) == 20 and max(sizes) <= 8


def test_a_batch_ends_within_a_file_and_its_row_groups(tmp_path: Path) -> None:
    table = open_table(tmp_path, "shop.orders")
    note = table.write(pa.table({"late": [str(n) for n in range(10)]}))
    path = table.path / note.file.path
    pq.write_table(pq.read_table(path), path, row_group_size=3)
    table.commit([note], writer="w", batch_id=None)
    one = reader(tmp_path, maxRowsPerTrigger="4")
    found, start = [], one.initialOffset()
    while (end := one.latestOffset(start, LIMIT)) != start:
        (task,) = one.partitions(start, end)
        found.append([late for part in one.read(task) for late in part["late"].to_pylist()])
        start = end
    assert found == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_damage_and_foreign_offsets_are_clear_errors(tmp_path: Path) -> None:
    table = open_table(tmp_path, "shop.orders")
    add(table, 1)
    one = reader(tmp_path)
    start = one.initialOffset()
    (task,) = one.partitions(start, one.latestOffset(start, LIMIT))
    (path,) = table.files()
    content = path.read_bytes()
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(StorageError, match=str(path)):
        list(one.read(task))
    path.unlink()
    with pytest.raises(UsageError, match="was removed before it was read; start the flow over"):
        list(one.read(task))
    path.write_bytes(content)
    assert sum(batch.num_rows for batch in one.read(task)) == 1
    with pytest.raises(UsageError, match="no position in a table"):
        one.latestOffset({"group": "", "topics": {}}, LIMIT)


def test_times_in_the_names_of_folders_are_in_utc(tmp_path: Path) -> None:
    """Spark writes them without a zone."""
    table = open_table(tmp_path, "shop.orders")
    noon = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
    written = pa.table({"n": [1], "ts": pa.array([noon], pa.timestamp("us", "UTC"))})
    table.append(written, writer="w", batch_id=None, partition_by=["ts"])
    schema = T.StructType([SCHEMA["n"], T.StructField("ts", T.TimestampType())])
    one = LakeTableSource({"data": str(tmp_path), "table": "shop.orders"}).streamReader(schema)
    assert isinstance(one, LakeTableStreamReader)
    start = one.initialOffset()
    end = one.latestOffset(start, LIMIT)
    for task in one.partitions(start, end):
        assert [row["ts"] for batch in one.read(task) for row in batch.to_pylist()] == [noon]
    for name in ("2026-03-01 12:00:00", "2026-03-01 12:00:00.0", "2026-03-01T12:00:00Z"):
        assert lake_source._constant(name, pa.timestamp("us", "UTC")).as_py() == noon


def test_the_number_of_tasks_depends_on_rows_and_bytes() -> None:
    assert planning.task_count(10, 10, cores=2) == 1
    assert planning.task_count(planning.ROWS_MIN * 2, 10, cores=2) == 2
    assert planning.task_count(10, planning.BYTES_MAX * 3, cores=2) == 4
