"""Every lake table has the same rows by delta-rs, DuckDB, Polars and Spark.

DuckDB reads the files that delta-rs lists, because its own extension for Delta would have to be
downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F
from standard_kit import Pipe, Topics
from topics_kit import publish

from polybus.lake import duck
from polybus.lake.compact import checkpoint, compact
from polybus.lake.table import open_table, table_names
from polybus.spark import tables
from polybus.spark.pipelines.standard.batches import TABLES
from polybus.spark.views import collect

EVENTS = (
    '{"events": [{"kind": "delivered", "time": "2026-03-01T12:00:00Z", "session": "s", "count": 2,'
    ' "messages": 3, "waiting": 1}]}'
)


def by_every_engine(spark: Any, data: Path, table: str) -> dict[str, list[str]]:
    """The rows as each engine gives them, as text, in an order of their own."""
    lake = open_table(data, table)
    schema = lake.schema
    with duck.Engine(data) as engine:
        _, batches = engine.stream(f'SELECT * FROM "{table}"')
        duck_rows = pa.Table.from_batches(list(batches))
    found = {
        "delta-rs": DeltaTable(lake.path).to_pyarrow_table(),
        "DuckDB": duck_rows,
        "Polars": pl.read_delta(str(lake.path)).to_arrow(),
        "Spark": collect(spark, f"SELECT * FROM `{table}`", data, rows_max=10_000),
        "Polybus": lake.read(),
    }
    return {name: _as_text(rows, schema) for name, rows in found.items()}


def _as_text(rows: pa.Table, schema: pa.Schema) -> list[str]:
    columns = [rows[name].combine_chunks().cast(schema.field(name).type) for name in schema.names]
    return sorted(map(repr, pa.table(columns, schema=schema).to_pylist()))


def check_same(spark: Any, data: Path, table: str) -> list[str]:
    found = by_every_engine(spark, data, table)
    for name, rows in found.items():
        assert rows == found["delta-rs"], f"{table} by {name}"
    return found["delta-rs"]


def test_the_standard_tables_are_the_same_by_every_engine(spark: Any, tmp_path: Path) -> None:
    publish(tmp_path, "orders", [b"{}"])
    pipe, topics = Pipe(spark, tmp_path), Topics()
    for batch in range(3):
        pipe.run(
            batch,
            [
                topics.message("orders", '{"b": {"id": 1.50}, "a": ["é", null]}'),
                topics.message("orders", "text", headers={"message-id": f"{batch}", "h": b"\xff"}),
                topics.message("raw", b"\xff\x00", after_s=90),
                topics.message("orders", "{broken"),
                topics.message("$events", EVENTS),
            ],
        )
    assert set(table_names(tmp_path)) == set(TABLES)
    counts = {name: len(check_same(spark, tmp_path, name)) for name in TABLES}
    assert (counts["silver"], counts["quarantine"], counts["recent_ids"]) == (9, 3, 3)
    for name in TABLES:
        table = open_table(tmp_path, name)
        before = check_same(spark, tmp_path, name)
        compact(table)
        checkpoint(table)
        assert check_same(spark, tmp_path, name) == before


@pytest.mark.parametrize("partition_by", [[], ["day", "topic"]])
def test_a_table_of_every_type_is_the_same_by_every_engine(
    spark: Any, tmp_path: Path, partition_by: list[str]
) -> None:
    publish(tmp_path, "orders", [b"{}"])
    table = open_table(tmp_path, "shop.types")
    for batch in range(3):
        rows = spark.range(batch * 4, batch * 4 + 4, 1, 2).select(
            F.col("id"),
            F.expr("IF(id % 3 = 0, NULL, CONCAT('a/b c=%20', id % 2))").alias("topic"),
            F.expr("DATE'2026-01-31' + CAST(id % 2 AS INT)").alias("day"),
            F.expr("TIMESTAMP_MICROS(id * 1000001)").alias("at"),
            F.expr("CAST(id AS DECIMAL(12, 2)) / 4").cast("decimal(12,2)").alias("price"),
            F.expr("CAST(id AS FLOAT) / 3").alias("ratio"),
            F.expr("CAST(id AS SMALLINT)").alias("short"),
            F.expr("id % 2 = 0").alias("even"),
            F.expr("CAST(CAST(id AS STRING) AS BINARY)").alias("bytes"),
            F.expr("ARRAY(id, NULL)").alias("list"),
            F.expr("MAP('k', id)").alias("map"),
            F.expr("NAMED_STRUCT('x', id, 'y', ARRAY('z'))").alias("struct"),
            F.expr("TIMESTAMP_NTZ'2026-01-31 12:00:00.000001'").alias("local"),
        )
        if batch == 2:
            rows = rows.withColumn("late", F.lit(1))
        tables.append(rows, table, writer="w", batch_id=batch, partition_by=partition_by)
    before = check_same(spark, tmp_path, "shop.types")
    assert len(before) == 12
    compact(table)
    checkpoint(table)
    assert check_same(spark, tmp_path, "shop.types") == before
