"""VARIANT columns that pyarrow wrote are VARIANT to others."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polybus.lake import files
from polybus.lake.files import SPARK_TYPE, write_file

BODY = pa.struct([pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False)])
ONE = {"value": b"\x02\x01\x00\x00\x02\x0c\x01", "metadata": b"\x01\x01\x00\x01a"}  # {"a": 1}


def test_columns_with_sparks_type_are_written_as_variant(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("nested", pa.struct([("body", pa.list_(pa.int32()))])),
            pa.field("body", BODY, metadata={SPARK_TYPE: b'"variant"'}),
            pa.field("headers", pa.map_(pa.string(), pa.binary())),
            pa.field("plain", BODY),
        ]
    )
    row = {"nested": {"body": [1]}, "body": ONE, "headers": [("k", b"v")], "plain": ONE}
    table = pa.Table.from_pylist([row, row | {"body": None}], schema)
    write_file(tmp_path / "x.parquet", schema, table.to_batches())
    sql = "SELECT typeof(body), body.a, typeof(plain), headers, nested FROM read_parquet(?)"
    found = duckdb.connect().execute(sql, [str(tmp_path / "x.parquet")]).fetchall()
    assert [row[:2] for row in found] == [("VARIANT", 1), ("VARIANT", None)]
    assert found[0][2].startswith("STRUCT")
    assert found[0][3:] == ({"k": b"v"}, {"body": [1]})
    assert pq.read_table(tmp_path / "x.parquet").column("body").to_pylist() == [ONE, None]


@pytest.mark.parametrize("columns", [1, 14, 15, 200])
def test_any_number_of_columns_can_stand_around_it(tmp_path: Path, columns: int) -> None:
    names = [f"c{number}" for number in range(columns)]
    fields = [pa.field(name, pa.int64()) for name in names]
    schema = pa.schema([*fields, pa.field("v", BODY, metadata={SPARK_TYPE: b'"variant"'})])
    table = pa.Table.from_pylist([dict.fromkeys(names, 1) | {"v": ONE}], schema)
    path = tmp_path / "x.parquet"
    write_file(path, schema, table.to_batches())
    assert str(pq.read_metadata(path).schema).count("Variant(1)") == 1
    assert pq.read_table(path) == table


def test_values_and_nested_columns_that_look_like_the_mark_are_kept(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("a", pa.binary()),
            pa.field("nested", pa.struct([("v", BODY)])),
            pa.field("v", BODY, metadata={SPARK_TYPE: b'"variant"'}),
        ]
    )
    row = {"a": files._MARK, "nested": {"v": ONE}, "v": ONE}
    table = pa.Table.from_pylist([row], schema)
    path = tmp_path / "x.parquet"
    write_file(path, schema, table.to_batches())
    assert pq.read_table(path) == table
    sql = "SELECT a, typeof(nested.v), typeof(v) FROM read_parquet(?)"
    found = duckdb.connect().execute(sql, [str(path)]).fetchone()
    assert found is not None
    assert (found[0], found[1][:6], found[2]) == (files._MARK, "STRUCT", "VARIANT")
