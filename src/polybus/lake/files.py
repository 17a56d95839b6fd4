"""The Parquet files of a lake table: the metadata of a file, and how one is written.

Row count and statistics come from the footer of a file.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.errors import StorageError
from polybus.lake.fields import TableFields
from polybus.log.history.parquet import xxh3_of

ROW_GROUP_ROWS = 128 << 10
_EMPTY_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_UNITS_US = {"milliseconds": (1000, 1), "microseconds": (1, 1), "nanoseconds": (1, 1000)}


@dataclass(frozen=True)
class TableFile:
    """A file of a table.

    Attributes:
        path: below the table's folder.
        uri: the path as in the log, percent-encoded.
        ranges: the smallest and the largest value of columns by which readers skip files:
            `offset`, and timestamps in microseconds since 1970.
        xxh3: of the whole file, if the commit that adds it has checksums.
    """

    path: str
    uri: str
    rows: int
    bytes: int
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    xxh3: str = ""

    @property
    def stats(self) -> str:
        """The statistics in Delta's form."""
        ends: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name, pair in self.ranges.items():
            written = pair if name == "offset" else tuple(map(_iso, pair))
            if None not in written:
                for values, value in zip(ends, written, strict=True):
                    values[name] = value
        return json.dumps({"numRecords": self.rows, "minValues": ends[0], "maxValues": ends[1]})

    def may_hold(self, ranges: Mapping[str, tuple[int | None, int | None]]) -> bool:
        """Whether the file may have a row within all of these bounds, which are included."""
        for column, (low, high) in ranges.items():
            first, last = self.ranges.get(column, (None, None))
            if first is None or last is None:
                continue
            if (low is not None and last < low) or (high is not None and first > high):
                return False
        return True


@dataclass(frozen=True)
class NewFile:
    """A file in the table's folder that is not yet part of the table, and its columns."""

    file: TableFile
    fields: TableFields


def note_of(folder: Path, path: str, fields: TableFields) -> NewFile:
    """Describe the file `folder/path` from its footer.

    `fields` are its columns, including those in the names of its folders (`topic=orders/`).

    Raises:
        StorageError: `lake.damaged`, it is not a complete Parquet file.
    """
    full = folder / path
    try:
        footer = pq.read_metadata(full)
        xxh3 = xxh3_of(full)
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError("lake.damaged", f"{full}: {error}") from error
    uri = quote(path, safe="/=$-._~")
    size = full.stat().st_size
    return NewFile(TableFile(path, uri, footer.num_rows, size, _ranges(footer), xxh3), fields)


def page_checked() -> Any:
    """The format of files for pyarrow.dataset: each page that is read is verified."""
    # Slow to import, and only needed here.
    import pyarrow.dataset as ds

    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    return ds.ParquetFileFormat(default_fragment_scan_options=options)


def partition_values(path: str) -> dict[str, str | None]:
    """The columns in the names of a file's folders: `date=2026-01-31/part.parquet`."""
    found: dict[str, str | None] = {}
    for part in Path(path).parent.parts:
        name, equals, value = part.partition("=")
        if equals:
            text = unquote(value)
            found[unquote(name)] = None if text == _EMPTY_PARTITION else text
    return found


def partition_folder(values: Mapping[str, object]) -> str:
    """The folders of a partition, as Spark names them: `topic=orders/date=2026-01-31`."""
    return "/".join(
        f"{quote(name, safe=' $-')}="
        + (_EMPTY_PARTITION if value is None else quote(str(value), safe=" $-"))
        for name, value in values.items()
    )


def parted(
    rows: pa.Table, partition_by: Sequence[str]
) -> Iterator[tuple[dict[str, object], pa.Table]]:
    """The rows by the values of some columns, which are then only in the folder names."""
    if not partition_by:
        yield {}, rows
        return
    unique = rows.select(partition_by).group_by(list(partition_by)).aggregate([])
    for values in unique.to_pylist():
        mask = None
        for name, value in values.items():
            column = rows.column(name)
            same = pc.is_null(column) if value is None else pc.equal(column, value)
            same = pc.fill_null(same, False)
            mask = same if mask is None else pc.and_(mask, same)
        yield values, rows.filter(mask).drop_columns(list(partition_by))


def new_path(values: Mapping[str, object] | None = None) -> str:
    """A unique path for a new file; names of later files are larger."""
    name = f"{time.time_ns():016x}-{uuid.uuid4().hex[:16]}.parquet"
    folder = partition_folder(values or {})
    return f"{folder}/{name}" if folder else name


def write_file(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a file with zstd compression; its folder must exist. The commit will fsync it.

    One row group is in memory at a time. A failure leaves no file.
    """
    held: list[pa.RecordBatch] = []
    held_rows = 0
    try:
        with pq.ParquetWriter(
            path, schema, compression="zstd", compression_level=3, write_page_checksum=True
        ) as writer:
            for batch in batches:
                held.append(batch)
                held_rows += batch.num_rows
                if held_rows >= ROW_GROUP_ROWS:
                    writer.write_table(pa.Table.from_batches(held, schema))
                    held, held_rows = [], 0
            if held:
                writer.write_table(pa.Table.from_batches(held, schema))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _iso(time_us: int) -> str | None:
    """A time as text; None if Python's datetime cannot hold it, as some times of Parquet."""
    try:
        moment = datetime(1970, 1, 1) + timedelta(microseconds=time_us)  # noqa: DTZ001
    except OverflowError:
        return None
    return f"{moment.isoformat(timespec='microseconds')}Z"


def _ranges(footer: Any) -> dict[str, tuple[int, int]]:
    """The ranges of `offset` and timestamp columns that have statistics in every row group."""
    found: dict[str, tuple[int, int]] = {}
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        unit = _unit_us(column)
        if unit is None:
            continue
        groups = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
        known = [one.statistics for one in groups if one.statistics and one.statistics.has_min_max]
        if groups and len(known) == len(groups):
            # As numbers: Parquet and Spark have times that Python's datetime cannot hold.
            low = min(int(one.min_raw) for one in known)
            high = max(int(one.max_raw) for one in known)
            times, divided = unit
            found[column.name] = (low * times // divided, high * times // divided)
    return found


def _unit_us(column: Any) -> tuple[int, int] | None:
    """The factor and divisor for the values of a column with a range; None for others."""
    if column.path != column.name:
        return None  # Part of a list, map or struct.
    if column.name == "offset":
        return (1, 1) if column.physical_type == "INT64" else None
    if column.logical_type.type != "TIMESTAMP":
        return None
    kind = json.loads(column.logical_type.to_json())
    return _UNITS_US[kind["timeUnit"]] if kind["isAdjustedToUTC"] else None
