"""`polybus-table`: a lake table in a streaming query, joined with a stream or as the stream itself.

Everything else reads tables natively (tables.py). A table that is joined with a stream is read
completely for each batch, in its newest version: Spark's own reader lists files once, when the
stream starts.

A stream of a table has the rows that are added to it, each once (lake/following.py). Its offset in
the checkpoint is a position in the table's log, so a batch that runs again has the same files.
Tasks read the files. Spark's native reader cannot: as a stream it reads all files of a folder, also
uncommitted and merged ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from polybus.errors import StorageError, UsageError
from polybus.lake.files import partition_values
from polybus.lake.folders import table_folder
from polybus.lake.following import (
    FILES_MAX,
    BatchLimit,
    FileRows,
    FollowedTable,
    TablePosition,
    removed_error,
)
from polybus.lake.table import LakeTable
from polybus.spark import option_values as values
from polybus.spark.internals import arrow_schema_of
from polybus.spark.option_values import option
from polybus.spark.origin import BATCH_BYTES_MAX
from polybus.spark.origin import ROWS_MAX as BATCH_ROWS_MAX
from polybus.spark.source.planning import task_count
from polybus.structs import convert

TABLE_FORMAT = "polybus-table"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """The options of a stream of a table, with the names of Delta's own source."""

    table: str = option("table", str, "", internal=True)
    files_max: int = option("maxFilesPerTrigger", values.number, FILES_MAX)
    bytes_max: int | None = option("maxBytesPerTrigger", values.size, None)
    rows_max: int | None = option("maxRowsPerTrigger", values.number, None, internal=True)
    skips_changes: bool = option("skipChangeCommits", values.boolean, False)


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a stream's options, by the names of their fields. Raises UsageError."""
    options = values.given_options(TableOptions, {name: str(one) for name, one in given.items()})
    return values.checked_values(TableOptions, options)


class LakeTableSource(DataSource):
    """A batch has the option `path`, the table's folder, and a stream `data` and `table`.

    The schema is required.
    """

    @classmethod
    def name(cls) -> str:
        return TABLE_FORMAT

    def reader(self, schema: Any) -> DataSourceReader:
        return LakeTableReader(self.options["path"], arrow_schema_of(schema))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        options = TableOptions(**checked_options(self.options))
        folder = table_folder(Path(self.options["data"]), options.table)
        return LakeTableStreamReader(folder, options, arrow_schema_of(schema))


class LakeTableReader(DataSourceReader):
    """Reads the newest version in one task: tables that streams are joined with are small."""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The table's rows in exactly these columns; missing columns are null."""
        table = LakeTable(Path(self._path))
        if table.exists:
            yield from _shaped(table.read(), self._schema).to_batches()


@dataclass(frozen=True)
class FilesPartition(InputPartition):
    """What one task reads: rows of files below the table's folder."""

    files: tuple[FileRows, ...]


class LakeTableStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the rows that are added to a table."""

    def __init__(self, folder: Path, options: TableOptions, schema: pa.Schema) -> None:
        self._folder = folder
        self._options = options
        self._schema = schema
        self._until: int | None = None

    @cached_property
    def _table(self) -> FollowedTable:
        return FollowedTable(self._folder, skips_changes=self._options.skips_changes)

    def initialOffset(self) -> dict[str, Any]:
        # The start of the stream is decided with the end of its first batch, which the checkpoint
        # keeps: if that batch runs again, the table may have a newer version.
        return _to_json(TablePosition())

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._table.newest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        options = self._options
        most = BatchLimit(options.files_max, options.bytes_max, options.rows_max)
        return _to_json(self._table.end_of_batch(position_in(start), most, self._until))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        files = self._table.files(position_in(start), position_in(end))
        count = task_count(sum(one.rows for one in files), sum(one.bytes for one in files))
        shares = [files[index::count] for index in range(min(count, len(files)))]
        return [FilesPartition(tuple(share)) for share in shares]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, FilesPartition):  # Spark has its own when there is nothing to read
            for part in partition.files:
                constants = partition_values(part.path)
                try:
                    for rows in _rows_of(self._folder, part, self._schema.names):
                        yield from _shaped(rows, self._schema, constants).to_batches()
                except FileNotFoundError as error:
                    name = LakeTable(self._folder).name
                    raise removed_error(name, f"file {part.path}") from error

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: the position is in the checkpoint."""


def position_in(found: Any) -> TablePosition:
    """Raises UsageError `spark.checkpoint` if it is not an offset of a stream of a table."""
    try:
        return convert(found, TablePosition)
    except msgspec.ValidationError as error:
        text = f"the checkpoint has no position in a table, but {str(found)[:200]}"
        raise UsageError("spark.checkpoint", f"{text}; use another checkpointLocation") from error


def _to_json(position: TablePosition) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(position)
    return found


def _rows_of(folder: Path, part: FileRows, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Rows of a file in pieces of bounded size, with those of the columns that it has."""
    path = folder / part.path
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            stored = [name for name in file.schema_arrow.names if name in columns]
            stop = file.metadata.num_rows if part.stop is None else part.stop
            at = 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                if at >= stop or at + about.num_rows <= part.start:
                    at += about.num_rows
                    continue
                row_bytes = max(1, about.total_byte_size // max(1, about.num_rows))
                size = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES_MAX // row_bytes))
                for rows in file.iter_batches(size, row_groups=[group], columns=stored):
                    first, last = max(part.start - at, 0), min(stop - at, rows.num_rows)
                    at += rows.num_rows
                    if first < last:
                        yield pa.Table.from_batches([rows.slice(first, last - first)])
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise StorageError("lake.damaged", f"{path}: {error}") from error


def _shaped(
    rows: pa.Table, schema: pa.Schema, constants: Mapping[str, str | None] | None = None
) -> pa.Table:
    """Rows in exactly these columns; a missing one has a value of the partition, or is null."""
    columns = []
    for field in schema:
        constant = (constants or {}).get(field.name)
        if field.name in rows.column_names:
            columns.append(rows[field.name].cast(field.type))
        elif constant is None:
            columns.append(pa.nulls(rows.num_rows, field.type))
        else:
            columns.append(pa.repeat(_constant(constant, field.type), rows.num_rows))
    return pa.table(columns, schema=schema)


def _constant(text: str, kind: pa.DataType) -> pa.Scalar:
    """A value from the name of a folder, where Spark writes times in UTC without a zone."""
    value = pa.scalar(text)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        try:
            return value.cast(kind)
        except pa.ArrowInvalid:
            return value.cast(pa.timestamp(kind.unit)).cast(kind)
    return value.cast(kind)
