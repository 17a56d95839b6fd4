"""What tests of tables share: the rows of a table by delta-rs, DuckDB, Polars, Spark and others.

DuckDB reads the files that delta-rs lists, because its own extension for Delta would have to be
downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from polybus.lake import duck
from polybus.lake.table import open_table
from polybus.spark.views import collect


def by_every_engine(
    spark: Any, data: Path, table: str, *, is_for_old_readers: bool = True
) -> dict[str, list[str]]:
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
    if is_for_old_readers:
        found["an old reader"] = by_an_old_reader(lake.path)
    return {name: _as_text(rows, schema) for name, rows in found.items()}


def reader_version(table: Path) -> int:
    """The version of Delta's protocol that a reader of the table needs."""
    return int(DeltaTable(table).protocol().min_reader_version)


def by_an_old_reader(table: Path) -> pa.Table:
    """What the first version of Delta's protocol reads, by its specification.

    The log by hand, and plain Parquet: nothing that later versions have added.
    """
    assert reader_version(table) == 1, f"{table}: an old reader may not read it"
    log, actions = table / "_delta_log", []
    version = -1
    for path in sorted(log.glob("*.checkpoint.parquet"))[-1:]:
        actions = pq.read_table(path).to_pylist(maps_as_pydicts="strict")
        version = int(path.name.partition(".")[0])
    for path in sorted(log.glob("*.json")):
        if int(path.stem) > version:
            actions += [json.loads(line) for line in path.read_text().splitlines()]
    files = {}
    for action in actions:
        if added := action.get("add"):
            files[added["path"]] = added["partitionValues"]
        if removed := action.get("remove"):
            files.pop(removed["path"], None)
    parts = []
    for path, values in files.items():
        part = pq.ParquetFile(table / unquote(path)).read()
        for name, value in values.items():
            part = part.append_column(name, pa.array([value] * part.num_rows, pa.string()))
        parts.append(part)
    return pa.concat_tables(parts, promote_options="default")


def _as_text(rows: pa.Table, schema: pa.Schema) -> list[str]:
    columns = [rows[name].combine_chunks().cast(schema.field(name).type) for name in schema.names]
    return sorted(map(repr, pa.table(columns, schema=schema).to_pylist()))


def check_same(spark: Any, data: Path, table: str, *, is_for_old_readers: bool = True) -> list[str]:
    """The rows of the table, which must be the same by every engine."""
    found = by_every_engine(spark, data, table, is_for_old_readers=is_for_old_readers)
    for name, rows in found.items():
        assert rows == found["delta-rs"], f"{table} by {name}"
    return found["delta-rs"]
