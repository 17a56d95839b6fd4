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

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from polybus.errors import UsageError
from polybus.lake.compact import tidy
from polybus.lake.fields import (
    TableFields,
    arrow_schema,
    checked_fields,
    is_json,
    marked_as_json,
    merged_fields,
    parsed_fields,
)
from polybus.lake.files import NewFile, new_path, note_of, partition_values
from polybus.lake.table import Conflict, LakeTable, TableChange, unknown_table
from polybus.lake.table_state import TableState
from polybus.log.delta import STAGING
from polybus.spark.checkpoint import Checkpoint, calling_query
from polybus.spark.expectations import CheckedRows, check
from polybus.spark.internals import GLOB_OPTION

MERGE_ROWS_MAX = 5_000_000
"""A merge holds the table in memory. For larger tables, append and aggregate when reading."""
_ATTEMPTS_MAX = 20
_SETTINGS = {
    # INT96, the default, has no statistics: nothing could be skipped by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
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
    # Check the size of a row group after each row at first, not after 100: those may be 1.6 GB.
    "parquet.page.size.row.check.min": "1",
}


def append(
    df: DataFrame | CheckedRows,
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
        UsageError: `lake.schema` if a column has another type than in the table;
        `pipeline.expectation` if rows violate an expectation. Nothing changed. StorageError:
        `sink.checkpoint`, the checkpoint cannot be synced; `lake.storage`. Nothing of
            the batch is in the table.
    """
    if table.has_batch(writer, batch_id):
        return
    rows = df.rows if isinstance(df, CheckedRows) else df
    _sync_plan(rows, batch_id, checkpoint)
    notes = stage(rows, table, partition_by)
    if isinstance(df, CheckedRows):
        try:
            check(df.counts())
        except UsageError:
            discard(table, notes)
            raise
    commit_staged(table, notes, writer=writer, batch_id=batch_id)


def set_aside(df: DataFrame, table: LakeTable, *, reason: str, writer: str, batch_id: int) -> None:
    """Store the rows of a batch that the table refuses in `<table>.quarantine`, as JSON.

    The table then has the batch, without rows. Idempotent, as `append`, which must have failed.
    """
    quarantine(df, table, reason=reason, writer=writer, batch_id=batch_id)
    table.commit([], writer=writer, batch_id=batch_id)


def quarantine(df: DataFrame, table: LakeTable, *, reason: str, writer: str, batch_id: int) -> None:
    """Store rows of a batch in `<table>.quarantine`, as JSON; the table does not change."""
    refused = LakeTable(table.path.with_name(f"{table.path.name}.quarantine"))
    columns = [F.to_json(F.struct("*")).alias("row"), F.lit(reason).alias("reason")]
    rows = df.select(*columns, F.current_timestamp().alias("quarantined_at"))
    if not refused.has_batch(writer, batch_id):
        commit_staged(refused, stage(rows, refused, ()), writer=writer, batch_id=batch_id)


def commit_staged(
    table: LakeTable,
    notes: Sequence[NewFile],
    *,
    writer: str,
    batch_id: int,
    then: Callable[[], None] | None = None,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Make files part of the table; remove empty ones, and all if the table has the batch.

    `then` is called when the table has the batch, and before files are removed.
    """
    full = [note for note in notes if note.file.rows or not table.exists]
    try:
        if settings:
            is_added = table.change(TableChange(full, (), writer, batch_id, settings=settings))
        else:
            is_added = table.commit(full, writer=writer, batch_id=batch_id)
    except UsageError:
        discard(table, notes)
        raise
    if then is not None:
        then()
    discard(table, [note for note in notes if note not in full or not is_added])
    tidy(table)


def discard(table: LakeTable, notes: Sequence[NewFile]) -> None:
    """Remove files that are not part of the table."""
    for note in notes:
        (table.path / note.file.path).unlink(missing_ok=True)


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
    if table.has_batch(writer, batch_id):
        return
    _sync_plan(df, batch_id)
    frame, fields = stored_columns(df, table)
    fresh = _newest_last(frame.toArrow(), keys)

    def commit(state: TableState) -> None:
        if fresh.num_rows + sum(file.rows for file in state.files.values()) > MERGE_ROWS_MAX:
            text = f"table {table.name} would have over {MERGE_ROWS_MAX} rows"
            raise UsageError("lake.too-large", f"{text}; append, and aggregate when reading")
        merged = merged_fields(table.name, state.fields, [fields])
        known = [table.read()] if table.exists else []
        rows = pa.concat_tables([*known, fresh], promote_options="default")
        rows = rows.select([field["name"] for field in merged])
        note = table.write(_last_of_each(rows, keys), fields=merged)
        try:
            _replace_files(table, state, [note], writer, batch_id)
        except Conflict:
            (table.path / note.file.path).unlink(missing_ok=True)
            raise

    _until_committed(table, commit)


def read(
    spark: SparkSession,
    table: LakeTable,
    state: TableState | None = None,
    files: Sequence[str] | None = None,
) -> DataFrame:
    """A snapshot of a version, the newest without `state`, by Spark's own Parquet reader.

    With `files` only these, of the version or of an earlier one.

    Raises:
        UsageError: `lake.unknown`, the table has no version yet.
    """
    state = table.state if state is None else state
    paths = list(state.files if files is None else files)
    if state.version < 0:
        raise unknown_table(table.name)
    schema = stored_schema(state.fields)
    if not paths:
        rows = spark.createDataFrame([], schema)
    else:
        rows = read_files(spark, schema, table.path, [table.path / path for path in paths])
    return with_variants(rows, [field["name"] for field in state.fields if is_json(field)])


def stored_schema(fields: TableFields) -> T.StructType:
    """Columns as Spark reads them from the files: JSON is text."""
    plain = [field | {"metadata": {}} for field in fields]
    return T.StructType.fromJson({"type": "struct", "fields": plain})


def with_variants(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows with columns of JSON text as VARIANT."""
    if not columns:
        return rows
    return rows.withColumns({name: F.try_parse_json(F.col(f"`{name}`")) for name in columns})


def variants_in(schema: T.StructType) -> list[str]:
    return [field.name for field in schema if isinstance(field.dataType, T.VariantType)]


def stored_columns(
    df: DataFrame, table: LakeTable, json: Sequence[str] = ()
) -> tuple[DataFrame, TableFields]:
    """The rows as a table stores them, VARIANT as JSON text, and their columns.

    Columns in `json` are JSON text already.

    Raises:
        UsageError: `lake.schema`, a table cannot have such a column.
    """
    schema = df.schema
    fields = checked_fields(table.name, marked_as_json(parsed_fields(schema.json()), json))
    variants = {name: F.to_json(F.col(f"`{name}`")) for name in variants_in(schema)}
    return (df.withColumns(variants) if variants else df), fields


def read_files(
    spark: SparkSession, schema: T.StructType, base: Path, paths: list[Path]
) -> DataFrame:
    """Parquet files as one DataFrame, with the columns in the names of folders below `base`."""
    _prepare(spark)
    reader = spark.read.schema(schema).option("basePath", str(base))
    # Paths are not patterns: the name of a folder may have brackets.
    reader = reader.option(GLOB_OPTION, "false")
    # Our files have checksums in every page.
    reader = reader.option("parquet.page.verify-checksum.enabled", "true")
    return reader.parquet(*[str(path) for path in paths])


def stage(
    df: DataFrame, table: LakeTable, partition_by: Sequence[str], json: Sequence[str] = ()
) -> list[NewFile]:
    """Let Spark write the rows to files in the table's folder. They are not committed yet.

    Columns in `json` are JSON text, which is quicker than to let this convert VARIANT columns.
    """
    _prepare(df.sparkSession)
    frame, fields = stored_columns(df, table, json)
    staging = table.path / STAGING / uuid.uuid4().hex
    output = frame.write.options(**_WRITE_OPTIONS)
    if partition_by:
        output = output.partitionBy(*partition_by)
    try:
        output.parquet(str(staging))
        notes = []
        for source in sorted(staging.rglob("*.parquet")):
            path = new_path(partition_values(str(source.relative_to(staging))))
            table.disk.make_folder((table.path / path).parent)
            table.disk.rename(source, table.path / path)
            notes.append(note_of(table.path, path, fields))
        return notes
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def stage_small(
    df: DataFrame, table: LakeTable, partition_by: Sequence[str] = (), json: Sequence[str] = ()
) -> list[NewFile]:
    """As `stage`, for rows that fit in memory: Spark collects them, and one file has all of them.

    Spark's writer sets up a job for files, which takes longer than to decode a few messages.
    """
    assert not partition_by
    frame, fields = stored_columns(df, table, json)
    # Spark's columns may be declared as never null, and those of tables are not.
    return [table.write(frame.toArrow().cast(arrow_schema(fields)), fields=fields)]


def _prepare(spark: SparkSession) -> None:
    """Apply the settings that our tables need to a session, whoever created it."""
    for name, value in _SETTINGS.items():
        if spark.conf.get(name) != value:
            spark.conf.set(name, value)


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
    table: LakeTable, state: TableState, notes: list[NewFile], writer: str, batch_id: int | None
) -> None:
    table.commit(
        notes, remove=list(state.files), writer=writer, batch_id=batch_id, based_on=state.version
    )


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


def _last_of_each(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The last row of each key, in the order in which the keys first appear."""
    numbered = rows.select(list(keys)).append_column("__row", pa.array(np.arange(rows.num_rows)))
    grouped = numbered.group_by(list(keys), use_threads=False).aggregate([("__row", "max")])
    return rows.take(grouped.column("__row_max"))
