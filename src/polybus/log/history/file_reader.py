"""Rows of one history file, by offset and time, checked.

The checksum of the whole file is compared before its first use, because page headers and the footer
have no checksums of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polybus.log.history import parquet
from polybus.log.history.manifest import HistoryFile
from polybus.log.journal.commit import Damaged

_CHECKED_MAX = 16384


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Timestamps in microseconds, both ends included."""

    since_us: int = -(1 << 63)
    until_us: int = (1 << 63) - 1

    def overlaps(self, earliest_us: int, latest_us: int) -> bool:
        return earliest_us <= self.until_us and latest_us >= self.since_us


ALWAYS = TimeRange()

NextAndRows = tuple[int, pa.RecordBatch]
"""Rows of a topic, preceded by the offset after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """What to read of a file: offsets `first` (included) to `stop` (excluded).

    Row groups outside `times` are skipped. Batches have up to `rows_max` rows and about
    `bytes_max` bytes.
    """

    first: int
    stop: int
    rows_max: int
    bytes_max: int
    columns: Sequence[str] | None = None
    times: TimeRange = ALWAYS


def read_file(
    path: Path, file: HistoryFile, wanted: FileRange, *, mapped: bool = False
) -> Iterator[NextAndRows]:
    """The wanted rows in order. `mapped` reads through a memory map: faster, for other processes.

    Raises:
        FileNotFoundError: the file was replaced or removed.
        Damaged: its content is not what the manifest says.
    """
    columns = None if wanted.columns is None else list(wanted.columns)
    try:
        check_file(path, file)
        opened = pq.ParquetFile(path, memory_map=True) if mapped else parquet.open_file(path)
        if opened.metadata.num_rows != file.rows:
            found = opened.metadata.num_rows
            raise Damaged(f"it has {found} rows, the manifest says {file.rows}")
        for offset, groups in _group_runs(opened.metadata, file.first, wanted):
            batches = opened.iter_batches(
                batch_size=_batch_rows(opened.metadata, groups, wanted),
                row_groups=groups,
                columns=columns,
                use_threads=False,
            )
            for rows in batches:
                first, offset = offset, offset + rows.num_rows
                _check_offsets(rows, first)
                low = max(0, wanted.first - first)
                high = min(rows.num_rows, wanted.stop - first)
                if low < high:
                    chosen = rows if columns is None else rows.select(columns)
                    yield first + high, chosen.slice(low, high - low)
                if offset >= wanted.stop:
                    break
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise Damaged(str(error)) from error


def row_group_starts(path: Path, file: HistoryFile) -> list[int]:
    """The offsets at which the row groups of a file begin; [] if the file cannot be read."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return []
    starts = [file.first]
    for group in range(metadata.num_row_groups - 1):
        starts.append(starts[-1] + metadata.row_group(group).num_rows)
    return starts


def _group_runs(metadata: Any, offset: int, wanted: FileRange) -> list[tuple[int, list[int]]]:
    """The row groups to read, in runs of adjacent ones, each with its first offset."""
    runs: list[tuple[int, list[int]]] = []
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        first, offset = offset, offset + found.num_rows
        if first >= wanted.stop or offset <= wanted.first:
            continue
        if wanted.times != ALWAYS and not wanted.times.overlaps(*_times_of(found)):
            continue
        if runs and runs[-1][1][-1] == group - 1:
            runs[-1][1].append(group)
        else:
            runs.append((first, [group]))
    return runs


def _times_of(group: Any) -> tuple[int, int]:
    """The earliest and the latest timestamp of a row group, from its statistics."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "timestamp" and column.statistics is not None:
            found = column.statistics
            return parquet.timestamp_us_of(found.min), parquet.timestamp_us_of(found.max)
    return ALWAYS.since_us, ALWAYS.until_us


def _batch_rows(metadata: Any, groups: list[int], wanted: FileRange) -> int:
    """How many rows have about `bytes_max` bytes, judged by the widest row group."""
    found = [metadata.row_group(group) for group in groups]
    row_bytes = max(one.total_byte_size // max(1, one.num_rows) for one in found)
    return int(max(1, min(wanted.rows_max, wanted.bytes_max // (row_bytes + 1))))


def _check_offsets(rows: pa.RecordBatch, first: int) -> None:
    if "offset" in rows.schema.names and rows.num_rows:
        if parquet.offset_range(rows) != (first, first + rows.num_rows - 1):
            raise Damaged(f"its rows do not continue at offset {first}")


_checked: dict[tuple[Path, str], tuple[int, int]] = {}


def check_file(path: Path, file: HistoryFile) -> None:
    """Compare the checksum of a whole file, once for as long as the file stays unchanged.

    Raises:
        FileNotFoundError: the file is missing.
        Damaged: it is another file, or incomplete.
    """
    status = path.stat()
    seen = (status.st_mtime_ns, status.st_ino)
    if _checked.get((path, file.xxh3)) == seen:
        return
    if status.st_size != file.bytes or parquet.xxh3_of(path) != file.xxh3:
        raise Damaged("its checksum is wrong")
    if len(_checked) >= _CHECKED_MAX:
        _checked.clear()
    _checked[path, file.xxh3] = seen
