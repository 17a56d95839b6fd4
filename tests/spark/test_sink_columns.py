"""What the sink accepts and what it stages, without a JVM."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types

from polybus.batch import Batch
from polybus.config import Limits
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.services.transactions.staging import BATCH_BYTES, parts
from polybus.spark import sink
from polybus.spark.location import BusLocation
from polybus.spark.sink import staging
from polybus.spark.sink.staging import SinkColumns, sink_columns
from polybus.spark.source.options import COLUMNS, spark_schema

LIMITS = Limits(
    message_bytes_max=64 << 20,
    transaction_bytes_max=1 << 30,
    transaction_part_bytes=1 << 30,
    properties_max=99,
)
VALUE = SinkColumns("out", False, False)
HEADERS = pa.map_(pa.string(), pa.binary())


TEXT, BYTES, INT = types.StringType(), types.BinaryType(), types.IntegerType()
ROW = types.StructType([types.StructField("a", INT)])


def schema_of(**columns: types.DataType) -> types.StructType:
    return types.StructType([types.StructField(name, kind) for name, kind in columns.items()])


ONE_VALUE = schema_of(value=TEXT)


@pytest.mark.parametrize(
    ("columns", "topic", "says"),
    [
        ({"key": TEXT, "amount": INT}, "out", "column value is missing among key, amount"),
        ({"value": INT}, "out", "column value is int; it must be string or binary"),
        ({"value": ROW}, "out", "column value is struct<a:int>"),
        ({"value": TEXT, "key": INT}, "out", "column key is int"),
        ({"value": TEXT, "headers": types.MapType(TEXT, INT)}, "out", "column headers is map<"),
        ({"value": TEXT, "headers": types.ArrayType(ROW)}, "out", "column headers is array<"),
        ({"value": TEXT, "headers": TEXT}, "out", "column headers is string"),
        ({"value": TEXT}, None, "column topic is missing among value"),
        ({"value": TEXT, "topic": INT}, None, "column topic is int"),
        ({"value": TEXT, "customer": TEXT}, "out", "column customer is not one of topic, key"),
    ],
)
def test_a_column_that_cannot_be_written_is_named(
    columns: dict[str, types.DataType], topic: str | None, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        sink_columns(schema_of(**columns), topic)
    assert caught.value.code == "sink.column"
    assert says in caught.value.text


def test_the_columns_of_the_source_may_be_written_as_they_are() -> None:
    assert sink_columns(spark_schema(COLUMNS), None) == SinkColumns(None, True, True)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"tpoic": "x"}, "spark.option-unknown", "did you mean topic?"),
        ({"topic": ""}, "spark.option-invalid", "option topic"),
        ({"producer": "a/b"}, "spark.option-invalid", "option producer"),
        ({"takeOver": "perhaps"}, "spark.option-invalid", "option takeOver"),
        ({"url": "http://127.0.0.1:1"}, "spark.option-conflict", "data and url"),
    ],
)
def test_an_invalid_sink_option_is_named(options: dict[str, str], code: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        sink.parse({"data": "/nowhere", **options})
    assert caught.value.code == code
    assert says in caught.value.text


def test_overwriting_a_topic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        sink.PolybusWriter({"data": str(tmp_path), "topic": "out"}, ONE_VALUE, True)
    assert caught.value.code == "sink.mode"


def test_an_unreachable_bus_is_reported_before_a_batch_write_begins(tmp_path: Path) -> None:
    for options in ({"data": str(tmp_path)}, {"url": "http://127.0.0.1:9"}):
        with pytest.raises(PolybusError) as caught:
            sink.PolybusWriter({"topic": "out", **options}, ONE_VALUE, False)
        assert caught.value.code == "client.unreachable"


def read(columns: SinkColumns, rows: pa.RecordBatch) -> list[dict[str, Any]]:
    return [row for part in columns.staged(rows) for row in part.to_pylist()]


def test_rows_are_grouped_by_topic_and_keep_their_order() -> None:
    topics = ["b", "a", "B", "a", "b"]
    rows = pa.record_batch({"topic": topics, "value": ["0", "1", "2", "3", "4"]})
    parts = list(SinkColumns(None, False, False).staged(rows))
    found = [(part["topic"][0].as_py(), part["value"].to_pylist()) for part in parts]
    assert found == [("b", [b"0", b"4"]), ("a", [b"1", b"3"]), ("b", [b"2"])]


def test_text_becomes_bytes_and_headers_come_in_both_shapes() -> None:
    wanted = [("a", b"1"), ("b", b"\xff")]
    as_map = pa.array([wanted, None, []], pa.map_(pa.string(), pa.binary()))
    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    listed = [{"key": key, "value": value} for key, value in wanted]
    as_list = pa.array([listed, None, []], pa.list_(pair))
    for headers in (as_map, as_list, as_map.slice(0), as_list.slice(0)):
        rows = pa.record_batch(
            {"value": pa.array(["é", "", "x"]), "key": ["k", None, ""], "headers": headers}
        )
        found = read(SinkColumns("t", True, True), rows)
        assert [row["value"] for row in found] == ["é".encode(), b"", b"x"]
        assert [row["key"] for row in found] == [b"k", None, b""]
        assert [row["headers"] for row in found] == [wanted, None, []]


def test_a_slice_of_rows_with_headers_keeps_each_rows_own() -> None:
    kind = pa.map_(pa.string(), pa.string())
    headers = pa.array([[("n", str(n))] if n % 3 else None for n in range(10)], kind)
    whole = pa.record_batch({"value": [str(n) for n in range(10)], "headers": headers})
    found = read(SinkColumns("t", False, True), whole.slice(4, 3))
    assert [(row["value"], row["headers"]) for row in found] == [
        (b"4", [("n", b"4")]), (b"5", [("n", b"5")]), (b"6", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "rows", "says"),
    [
        (VALUE, {"value": pa.array(["a", None])}, "column value is null"),
        (
            SinkColumns(None, False, False),
            {"value": pa.array(["a", "b"]), "topic": pa.array(["t", None])},
            "column topic is null",
        ),
    ],
)
def test_a_null_in_a_required_column_is_named(
    columns: SinkColumns, rows: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(columns, pa.record_batch(rows))
    assert caught.value.code == "sink.column"
    assert says in caught.value.text


def test_large_rows_are_staged_in_pieces_that_a_reader_can_hold() -> None:
    sizes = [BATCH_BYTES // 4] * 10 + [3 * BATCH_BYTES] + [10] * 1000
    rows = pa.record_batch({"value": [b"x" * size for size in sizes]})
    parts = list(VALUE.staged(rows))
    assert sum(part.num_rows for part in parts) == len(sizes)
    for part in parts:
        held = sum(len(value) for value in part["value"].to_pylist())
        assert held <= BATCH_BYTES or part.num_rows == 1


def test_rows_with_many_headers_are_staged_in_pieces_that_the_bus_accepts(data: Path) -> None:
    headers = pa.array([[(f"name-{n}", b"x" * 50) for n in range(20)]] * 10_000, HEADERS)
    rows = pa.record_batch({"value": ["1"] * 10_000, "headers": headers})
    columns = SinkColumns("out", False, True)
    name = staging.stage(iter([rows]), columns, BusLocation(data=data), ("p", "q"), 0).name
    assert name is not None
    assert sum(len(one) for one in staged(data, name)) == 10_000


def test_rows_with_unequal_headers_are_staged_in_pieces_that_the_bus_accepts(data: Path) -> None:
    large, small = [("name", b"x" * 400_000)], [("name", b"x")]
    headers = pa.array([large if n < 20 else small for n in range(9000)], HEADERS)
    rows = pa.record_batch({"value": ["1"] * 9000, "headers": headers})
    columns = SinkColumns("out", False, True)
    name = staging.stage(iter([rows]), columns, BusLocation(data=data), ("p", "q"), 0).name
    assert name is not None
    assert sum(len(one) for one in staged(data, name)) == 9000


def staged(data: Path, name: str) -> list[Batch]:
    found = parts([data / "staging" / "p" / name], LIMITS)
    return [batch for part, _ in found for batch in part]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "polybus.json").write_text("{}")
    return tmp_path


def some(*more: Any) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"value": ["1", "2"]})
    for one in more:
        if isinstance(one, BaseException):
            raise one
        yield one


def left(data: Path) -> list[Path]:
    return [path for path in data.glob("staging/**/*") if path.is_file()]


def test_what_is_staged_is_what_the_bus_reads(data: Path) -> None:
    name = staging.stage(some(), VALUE, BusLocation(data=data), ("p", "q"), 7).name
    assert name is not None
    assert name.partition("-")[0] == "7"
    assert [(one.topic, len(one)) for one in staged(data, name)] == [("out", 2)]
    assert staging.stage(iter(()), VALUE, BusLocation(data=data), ("p", "q"), 7).name is None
    assert len(left(data)) == 1


def test_a_task_that_fails_leaves_nothing_behind(data: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        staging.stage(some(ZeroDivisionError()), VALUE, BusLocation(data=data), ("p", "q"), 0)
    assert left(data) == []


def test_a_full_disk_is_reported_with_the_file_and_leaves_nothing_behind(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError) as caught:
        staging.stage(some(), VALUE, BusLocation(data=data), ("p", "q"), 0)
    assert caught.value.code == "log.full"
    assert "staging/p/0-" in caught.value.text
    assert left(data) == []


def test_a_task_refuses_a_folder_that_is_not_a_data_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        staging.stage(some(), VALUE, BusLocation(data=tmp_path / "elsewhere"), ("p", "q"), 0)
    assert caught.value.code == "data.not-found"
    assert "option url" in caught.value.text


def test_nothing_is_committed_unless_the_checkpoint_has_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "PATIENCE_S", 0.0)
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text("{}")
    options = sink.parse({"url": "http://127.0.0.1:9", "checkpointLocation": str(tmp_path)})
    with pytest.raises(StorageError) as caught:
        sink.commit(options, "p", "q", 0, [])
    assert caught.value.code == "sink.checkpoint"
    assert "checkpointLocation" in caught.value.text
    (tmp_path / "offsets" / "0").write_text("v1")
    with pytest.raises(PolybusError, match="client.unreachable"):
        sink.commit(options, "p", "q", 0, [])
