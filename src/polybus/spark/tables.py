"""Lake tables in Spark: append, merge, replace and read. Each batch is committed exactly once.

For `foreachBatch`, whose batches are repeated after a failure:

    flow.writeStream.foreachBatch(
        lambda rows, batch_id: append(rows, table, writer="silver", batch_id=batch_id)
    )

Spark writes Parquet files to a staging folder inside of the table's folder. Then one commit of the
table (lake/table.py) adds all of them or none.

Order of writes: the plan of the batch in the query's checkpoint is synced, then the commit. Without
the first, a power cut could leave the table with batch N and the checkpoint without it: the next N
has other messages, and the table would ignore them.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from polybus.errors import UsageError
from polybus.lake.compact import tidy
from polybus.lake.files import SPARK_TYPE, FileNote, new_path, note_of, partition_values
from polybus.lake.table import STAGING, Conflict, LakeTable, unknown_table
from polybus.lake.versions import TableState, decode_schema, merged_schema
from polybus.spark.checkpoint import Checkpoint, calling_query

MERGE_ROWS_MAX = 5_000_000
"""A merge holds the table in memory. For larger tables, append and aggregate when reading."""
_ATTEMPTS_MAX = 20
_SETTINGS = {
    # INT96, the default, has no statistics: nothing could be skipped by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Shredding gives a VARIANT column another type in each file, and only Spark understands it.
    "spark.sql.variant.writeShredding.enabled": "false",
    # We name every file: a job that lists them would cost more than the query.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # The table defines the types of columns in folder names.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}
# A commit decides which files count, so Spark's committer need not rename all of them at the end.
_WRITE_OPTIONS = {
    "compression": "zstd",
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # Look at the size of a row group after each row at first, not after 100: those may be 1.6 GB.
    "parquet.page.size.row.check.min": "1",
}


def append(
    df: DataFrame,
    table: LakeTable,
    *,
    writer: str,
    batch_id: int,
    partition_by: Sequence[str] = (),
    checkpoint: Checkpoint | None = None,
) -> None:
    """Add the rows of a batch. Idempotent: nothing happens if the table has this writer's batch.

    `checkpoint` is that of the query; if it is None, it is found, except with Spark Connect.

    Raises:
        UsageError: `lake.schema`, a column has another type than in the table.
        StorageError: `sink.checkpoint`, the checkpoint cannot be synced; `lake.storage`. Nothing of
            the batch is in the table.
    """
    if _has_batch(table, writer, batch_id):
        return
    _sync_plan(df, batch_id, checkpoint)
    commit_staged(table, stage(df, table, partition_by), writer=writer, batch_id=batch_id)


def commit_staged(
    table: LakeTable, notes: Sequence[FileNote], *, writer: str, batch_id: int
) -> None:
    """Make files part of the table; remove empty ones, and all if the table has the batch."""
    full = [note for note in notes if note.file.rows or not table.exists]
    if not table.commit(full, writer=writer, batch_id=batch_id):
        full = []
    for note in notes:
        if note not in full:
            (table.path / note.file.path).unlink(missing_ok=True)
    tidy(table)


def replace(df: DataFrame, table: LakeTable, *, writer: str) -> int:
    """Replace all rows of the table; return the number of new rows. The columns may change."""
    notes = stage(df, table, ())
    _until_committed(table, lambda state: _replace_files(table, state, notes, writer, None))
    return sum(note.file.rows for note in notes)


def merge(
    df: DataFrame, table: LakeTable, *, keys: Sequence[str], writer: str, batch_id: int
) -> None:
    """Replace the rows with the same keys and add the others: for small tables, kept in one file.

    Rows of the batch win over rows of the table. Of several rows in the batch with the same keys,
    the one with the largest `timestamp` and `offset` wins, if it has these columns, then the one
    with the larger other columns. So the order of the rows does not change the result. Idempotent.

    Raises:
        UsageError: `lake.too-large`, the table is over MERGE_ROWS_MAX rows; `lake.keys`;
            `lake.schema`.
        StorageError: as `append`.
    """
    if _has_batch(table, writer, batch_id):
        return
    _sync_plan(df, batch_id)
    fresh = _newest_last(df.toArrow(), keys)

    def commit(state: TableState) -> None:
        if fresh.num_rows + sum(file.rows for file in state.files.values()) > MERGE_ROWS_MAX:
            text = f"table {table.name} would have over {MERGE_ROWS_MAX} rows"
            raise UsageError("lake.too-large", f"{text}; append, and aggregate when reading")
        note = table.write(_last_of_each(_concatenated(table, state, fresh), keys))
        try:
            _replace_files(table, state, [note], writer, batch_id)
        except Conflict:
            (table.path / note.file.path).unlink(missing_ok=True)
            raise

    _until_committed(table, commit)


def read(spark: SparkSession, table: LakeTable) -> DataFrame:
    """A snapshot of the newest version of the table, by Spark's own Parquet reader.

    Raises:
        UsageError: `lake.unknown`, the table has no version yet.
    """
    state = table.state
    if state.schema is None:
        raise unknown_table(table.name)
    fields = [
        T.StructField(field.name, _spark_type(field), True) for field in decode_schema(state.schema)
    ]
    schema = T.StructType(fields)
    if not state.files:
        return spark.createDataFrame([], schema)
    return read_files(spark, schema, table.path, [table.path / path for path in state.files])


def read_files(
    spark: SparkSession, schema: T.StructType, base: Path, paths: list[Path]
) -> DataFrame:
    """Parquet files as one DataFrame, with the columns in the names of folders below `base`."""
    _prepare(spark)
    reader = spark.read.schema(schema).option("basePath", str(base))
    # Paths are not patterns: the name of a folder may have brackets.
    reader = reader.option("__globPaths__", "false")
    # Our files have checksums in every page.
    reader = reader.option("parquet.page.verify-checksum.enabled", "true")
    return reader.parquet(*[str(path) for path in paths])


def stage(df: DataFrame, table: LakeTable, partition_by: Sequence[str]) -> list[FileNote]:
    """Let Spark write the rows to files in the table's folder. They are not committed yet."""
    _prepare(df.sparkSession)
    staging = table.path / STAGING / uuid.uuid4().hex
    output = df.write.options(**_WRITE_OPTIONS)
    if partition_by:
        output = output.partitionBy(*partition_by)
    try:
        output.parquet(str(staging))
        types = {name: _partition_type(df.schema[name].dataType) for name in partition_by}
        notes = []
        for source in sorted(staging.rglob("*.parquet")):
            path = new_path(partition_values(str(source.relative_to(staging))))
            table.disk.make_folder((table.path / path).parent)
            table.disk.rename(source, table.path / path)
            notes.append(note_of(table.path, path, types))
        return notes
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _prepare(spark: SparkSession) -> None:
    """Set what our tables need in a session, whoever created it."""
    for name, value in _SETTINGS.items():
        if spark.conf.get(name) != value:
            spark.conf.set(name, value)


def _has_batch(table: LakeTable, writer: str, batch_id: int) -> bool:
    last = table.last_batch(writer)
    return last is not None and batch_id <= last


def _sync_plan(df: DataFrame, batch_id: int, checkpoint: Checkpoint | None = None) -> None:
    found = checkpoint or calling_query(df, batch_id)[1]
    if found is not None:
        found.sync_batch(batch_id)


def _until_committed(table: LakeTable, commit: Callable[[TableState], None]) -> None:
    """Repeat a commit that is based on a version until no other writer interferes."""
    for _ in range(_ATTEMPTS_MAX):
        try:
            commit(table.state)
        except Conflict:
            continue
        tidy(table)
        return
    raise Conflict(table.name)


def _replace_files(
    table: LakeTable, state: TableState, notes: list[FileNote], writer: str, batch_id: int | None
) -> None:
    table.commit(
        notes, remove=list(state.files), writer=writer, batch_id=batch_id, based_on=state.version
    )


def _spark_type(field: Any) -> T.DataType:
    named = (field.metadata or {}).get(SPARK_TYPE)
    if named is None:
        return from_arrow_type(field.type)
    parsed = {"name": field.name, "type": json.loads(named), "nullable": True, "metadata": {}}
    return T.StructField.fromJson(parsed).dataType


def _partition_type(kind: T.DataType) -> pa.DataType:
    """The type of a partition column in a table: text, unless it is one of these."""
    known: dict[type[T.DataType], pa.DataType] = {
        T.DateType: pa.date32(),
        T.IntegerType: pa.int32(),
        T.LongType: pa.int64(),
    }
    return known.get(type(kind), pa.string())


def _newest_last(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The rows in an order that depends only on their values, the newest last."""
    missing = [key for key in keys if key not in rows.column_names]
    if missing or not keys:
        problem = f"keys names {', '.join(missing)}" if missing else "keys is empty"
        raise UsageError("lake.keys", f"{problem}; the columns are {', '.join(rows.column_names)}")
    first = [name for name in ("timestamp", "offset") if name in rows.column_names]
    others = [
        field.name
        for field in rows.schema
        if field.name not in (*first, *keys)
        and not (pa.types.is_nested(field.type) or pa.types.is_null(field.type))
    ]
    order = [(name, "ascending") for name in (*first, *others)]
    return rows.sort_by(order) if order and rows.num_rows > 1 else rows


def _concatenated(table: LakeTable, state: TableState, fresh: pa.Table) -> pa.Table:
    """The table's rows, then the fresh ones; missing columns are null."""
    if not state.files:
        return fresh
    old = table.read_version(state)
    schema = merged_schema(table.name, old.schema, [fresh.schema.remove_metadata()])
    assert schema is not None
    return pa.concat_tables([old, fresh], promote_options="default").select(schema.names)


def _last_of_each(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The last row of each key, in the order in which the keys first appear."""
    numbered = rows.select(list(keys)).append_column("__row", pa.array(np.arange(rows.num_rows)))
    grouped = numbered.group_by(list(keys), use_threads=False).aggregate([("__row", "max")])
    return rows.take(grouped.column("__row_max"))
