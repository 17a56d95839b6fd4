"""Lake tables from Spark: append, merge, replace and read, each batch exactly once.

For `foreachBatch`, whose batches come again after a failure:

    flow.writeStream.foreachBatch(
        lambda rows, batch_id: append(rows, table, writer="silver", batch_id=batch_id)
    )

Spark writes Parquet files into a folder of their own inside the table's, with its own committers;
one commit of the table (lake/table.py) then takes all of them in, or none.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from polybus.errors import UsageError
from polybus.lake.compact import tidy
from polybus.lake.files import FileNote, new_path, note_of, partition_values
from polybus.lake.schemas import merged_schema
from polybus.lake.table import STAGING, Conflict, LakeTable
from polybus.lake.versions import State
from polybus.spark.bronze import table
from polybus.spark.native import arrow_type, prepare, read
from polybus.spark.views import register_views

__all__ = ["append", "merge", "read", "register_views", "replace", "stage", "table"]

MERGE_ROWS_MAX = 5_000_000
"""A merge holds the table in memory: beyond this, append and aggregate when reading."""
_TRIES_MAX = 20
# Only what is complete counts, so the committer need not rename everything once more at the end.
_WRITE_OPTIONS = {
    "compression": "zstd",
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


def append(
    df: DataFrame,
    table: LakeTable,
    *,
    writer: str,
    batch_id: int,
    partition_by: Sequence[str] = (),
) -> None:
    """Add the rows of a batch; nothing happens if this writer's batch was added before.

    Raises:
        UsageError: `lake.schema`, a column has another type than in the table.
        StorageError: `log.full`, `log.failed`; nothing of the batch is in the table.
    """
    last = table.last_batch(writer)
    if last is not None and batch_id <= last:
        return
    notes = stage(df, table, partition_by)
    if table.exists:
        notes = [note for note in notes if note.file.rows]
    table.commit(notes, writer=writer, batch_id=batch_id)
    tidy(table)


def replace(df: DataFrame, table: LakeTable, *, writer: str) -> int:
    """Make these rows all the table has, and say how many. Its columns may change."""
    notes = stage(df, table, ())
    for _ in range(_TRIES_MAX):
        state = table.state
        try:
            table.commit(
                notes,
                remove=list(state.files),
                writer=writer,
                batch_id=None,
                based_on=state.version,
            )
        except Conflict:
            continue
        tidy(table)
        return sum(note.file.rows for note in notes)
    raise Conflict(table.name)


def merge(
    df: DataFrame, table: LakeTable, *, keys: Sequence[str], writer: str, batch_id: int
) -> None:
    """Put rows in the place of those with the same keys: for small tables, all in one file.

    Rows of the batch win over rows of the table. Of several rows in the batch with the same keys
    the one with the largest `timestamp` and `offset` wins, where it has these columns, then the
    one that is larger in its other columns: the same rows in another order give the same table.

    Raises:
        UsageError: `lake.too-large`, the table is over MERGE_ROWS_MAX rows; `lake.schema`.
    """
    last = table.last_batch(writer)
    if last is not None and batch_id <= last:
        return
    fresh = _newest_last(df.toArrow(), keys)
    for _ in range(_TRIES_MAX):
        state = table.state
        if fresh.num_rows + sum(file.rows for file in state.files.values()) > MERGE_ROWS_MAX:
            text = f"table {table.name} would have over {MERGE_ROWS_MAX} rows; merges are for less"
            raise UsageError("lake.too-large", text)
        rows = _joined(table, state, fresh)
        note = table.write(_last_of_each(rows, keys))
        try:
            table.commit(
                [note],
                remove=list(state.files),
                writer=writer,
                batch_id=batch_id,
                based_on=state.version,
            )
        except Conflict:
            (table.path / note.file.path).unlink(missing_ok=True)
            continue
        tidy(table)
        return
    raise Conflict(table.name)


def stage(df: DataFrame, table: LakeTable, partition_by: Sequence[str]) -> list[FileNote]:
    """Let Spark write the rows, and move the files into the table's folder, uncommitted."""
    prepare(df.sparkSession)
    staging = table.path / STAGING / uuid.uuid4().hex
    output = df.write.options(**_WRITE_OPTIONS)
    if partition_by:
        output = output.partitionBy(*partition_by)
    try:
        output.parquet(str(staging))
        types = {name: arrow_type(df.schema[name].dataType) for name in partition_by}
        notes = []
        for source in sorted(staging.rglob("*.parquet")):
            values = partition_values(str(source.relative_to(staging)))
            path = new_path(values)
            table.disk.make_folder((table.path / path).parent)
            table.disk.rename(source, table.path / path)
            notes.append(note_of(table.path, path, types))
        return notes
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _newest_last(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The rows in an order that depends on nothing but themselves, the newest last."""
    missing = [key for key in keys if key not in rows.column_names]
    if missing or not keys:
        text = (
            f"keys {', '.join(missing) or '(none)'}: the rows have {', '.join(rows.column_names)}"
        )
        raise UsageError("lake.keys", text)
    first = [name for name in ("timestamp", "offset") if name in rows.column_names]
    others = [
        field.name
        for field in rows.schema
        if field.name not in (*first, *keys) and _is_sortable(field.type)
    ]
    order = [(name, "ascending") for name in (*first, *others)]
    return rows.sort_by(order) if order and rows.num_rows > 1 else rows


def _is_sortable(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_null(kind))


def _joined(table: LakeTable, state: State, fresh: pa.Table) -> pa.Table:
    """The table's rows, then the fresh ones; columns that either lacks are null there."""
    if not state.files:
        return fresh
    old = table.read_version(state)
    schema = merged_schema(table.name, old.schema, [fresh.schema.remove_metadata()])
    assert schema is not None
    return pa.concat_tables([old, fresh], promote_options="default").select(schema.names)


def _last_of_each(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Of the rows with the same keys only the last, in the order of their first appearance."""
    numbered = rows.select(list(keys)).append_column("__row", pa.array(np.arange(rows.num_rows)))
    grouped = numbered.group_by(list(keys), use_threads=False).aggregate([("__row", "max")])
    return rows.take(grouped.column("__row_max"))
