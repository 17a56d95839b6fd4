"""Every table has the same rows by delta-rs, DuckDB, Polars, Spark and an old reader of Delta.

The tables of auto CDC and materialized views are in test_auto_cdc.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from engines_kit import by_an_old_reader, check_same, reader_version
from pyspark.sql import functions as F
from standard_kit import Pipe, Topics
from topics_kit import hand_over, make_topic, publish

from polybus.config import DeclaredTopic
from polybus.lake.compact import checkpoint, compact
from polybus.lake.standard_tables import EXPECTATIONS, TABLES
from polybus.lake.table import open_table, table_names
from polybus.log.history.exposed import expose
from polybus.services.accounts.store import AccountStore
from polybus.spark import tables
from polybus.spark.pipelines.standard.watch import Alert, Watch

ORDERS = DeclaredTopic(
    name="orders",
    schema="a ARRAY<STRING>, b STRUCT<id: DOUBLE>",
    expect={"has an id": "b.id > 0"},
)
ALERT = Alert("spike", "orders", 1772366400000000, 500, 20.5, "é")
EVENTS = (
    '{"events": [{"kind": "delivered", "time": "2026-03-01T12:00:00Z", "session": "s", "count": 2,'
    ' "messages": 3, "waiting": 1}]}'
)


@pytest.mark.parametrize("is_small", [True, False])
def test_the_standard_tables_are_the_same_by_every_engine(
    spark: Any, tmp_path: Path, is_small: bool
) -> None:
    """Spark writes the files of a large batch, and we those of a small one."""
    publish(tmp_path, "orders", [b"{}"])
    pipe, topics, watch = Pipe(spark, tmp_path, ORDERS), Topics(), Watch(tmp_path)
    pipe.is_small = is_small
    for batch in range(3):
        watch._store([ALERT], ALERT.minute, batch)
        pipe.run(
            batch,
            [
                topics.message("orders", '{"b": {"id": 1.50}, "a": ["é", null]}'),
                topics.message("chat", "text", headers={"message-id": f"{batch}", "h": b"\xff"}),
                topics.message("raw", b"\xff\x00", after_s=90),
                topics.message("orders", "{broken"),
                topics.message("$events", EVENTS),
            ],
        )
    names = {*TABLES, EXPECTATIONS, "alerts", "silver_orders"}
    assert set(table_names(tmp_path)) == names
    rows = {name: check_same(spark, tmp_path, name) for name in names}
    # The others have a row for each minute.
    counts = {"silver": 9, "quarantine": 3, "recent_ids": 3, "silver_orders": 3, "alerts": 3}
    assert {name: len(rows[name]) for name in counts} == counts
    assert all(rows.values())
    for name in names:
        table = open_table(tmp_path, name)
        compact(table)
        checkpoint(table)
        assert check_same(spark, tmp_path, name) == rows[name]


# Times without a zone are a later feature of Delta, which an old reader refuses.
LOCAL_TIME = "TIMESTAMP_NTZ'2026-01-31 12:00:00.000001' AS local"


@pytest.mark.parametrize("partition_by", [[], ["day", "topic"]])
def test_a_table_of_every_type_is_the_same_by_every_engine(
    spark: Any, tmp_path: Path, partition_by: list[str]
) -> None:
    publish(tmp_path, "orders", [b"{}"])
    table = open_table(tmp_path, "shop.types")
    local = [] if partition_by else [F.expr(LOCAL_TIME)]
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
            *local,
        )
        if batch == 2:
            rows = rows.withColumn("late", F.lit(1))
        tables.append(rows, table, writer="w", batch_id=batch, partition_by=partition_by)
    is_old = not local
    assert (reader_version(table.path) == 1) == is_old
    before = check_same(spark, tmp_path, "shop.types", is_for_old_readers=is_old)
    assert len(before) == 12
    compact(table)
    checkpoint(table)
    assert check_same(spark, tmp_path, "shop.types", is_for_old_readers=is_old) == before


@pytest.mark.parametrize("topic", ["orders", "two words", "50%20", "größe", "a/b c", "shop/é"])
def test_an_exposed_topic_is_the_same_by_every_engine_as_it_grows(
    spark: Any, tmp_path: Path, topic: str
) -> None:
    """Spark and DuckDB read the files that delta-rs lists, without anything of Polybus."""
    if topic.startswith("shop/"):
        AccountStore(tmp_path).create("shop", None, [])
    values = make_topic(tmp_path, topic, count=12)
    folder = expose(tmp_path, topic)
    for count in (8, 12):
        table = DeltaTable(folder)
        files = table.file_uris()
        by_spark = spark.read.option("basePath", str(folder)).parquet(*files)
        found = {
            "delta-rs": table.to_pyarrow_table(),
            "DuckDB": duckdb.read_parquet(files, hive_partitioning=True).to_arrow_table(),
            "Polars": pl.read_delta(str(folder)).to_arrow(),
            "Spark": by_spark.toArrow(),
            "an old reader": by_an_old_reader(folder),
        }
        names = [name for name in found["delta-rs"].column_names if name != "headers"]
        for engine, rows in found.items():
            rows = rows.sort_by("offset")
            assert rows["value"].cast(pa.binary()).to_pylist() == values[:count], engine
            assert rows["date"].cast(pa.string()).to_pylist()[0] == "2026-01-31", engine
            assert set(names) <= set(rows.column_names), engine
            assert [len(one) for one in rows["headers"].to_pylist()] == [1] * count, engine
        hand_over(tmp_path)
