"""One Parquet file of a topic's history: how it is written and opened.

A file holds a contiguous range of offsets of one UTC day. It is written in the topic's `scratch`
folder and, when complete and fsynced, moved to `history/date=YYYY-MM-DD/`. So a query over
`history/**/*.parquet` never reads a partial file.
"""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from polybus.log.disk import Disk
from polybus.log.history.manifest import HISTORY, HistoryFile

ROW_GROUP_ROWS = 128 << 10
ROW_GROUP_BYTES = 32 << 20
_GROUP_BATCHES_MAX = 16
PAGE_BYTES = 256 << 10
"""About the size of a page, unless a message is larger: a reader holds one page of each column."""
_PAGE_CHECK_ROWS_MAX = 1024
FILE_BYTES_MAX = 64 << 20
"""A file of this size is closed. A reader verifies a whole file before it serves a row, so this
bounds the cost of reading one message."""
SCRATCH = "scratch"
_DAY_US = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def day_of(timestamp_us: int) -> str:
    """The UTC day of a time, as in the folder names: `2026-01-31`."""
    return (_EPOCH + timedelta(days=timestamp_us // _DAY_US)).date().isoformat()


def time_of(timestamp_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=timestamp_us)


def timestamp_us_of(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def file_path(day: str, first: int, last: int) -> str:
    """The path of a file relative to the topic's folder."""
    return f"{HISTORY}/date={day}/{first:020d}-{last:020d}.parquet"


def day_in(path: str) -> str:
    """The day in the path of a history file."""
    return path.split("/")[1].removeprefix("date=")


def split_by_day(rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows in runs of one UTC day each; a clock that was set back makes more runs."""
    days = rows.column("timestamp").cast(pa.date32())
    start = 0
    runs = pc.run_end_encode(days)
    for stop, day in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
        yield day.isoformat(), rows.slice(start, stop - start)
        start = stop


def timestamp_range_us(rows: pa.RecordBatch) -> tuple[int, int]:
    """The smallest and the largest timestamp of the rows."""
    ends = pc.min_max(rows.column("timestamp").cast(pa.int64()))
    return ends["min"].as_py(), ends["max"].as_py()


def offset_range(rows: pa.RecordBatch) -> tuple[int, int]:
    """The offsets of the first and the last row."""
    offsets = rows.column("offset")
    return offsets[0].as_py(), offsets[len(offsets) - 1].as_py()


def contiguous(offsets: pa.Array, first: int) -> bool:
    """Whether the offsets are `first`, `first + 1` and so on."""
    if len(offsets) == 0 or offsets.null_count or offsets[0].as_py() != first:
        return len(offsets) == 0
    steps = pc.subtract(offsets.slice(1), offsets.slice(0, len(offsets) - 1))
    return bool(pc.all(pc.equal(steps, 1), min_count=0).as_py())


def xxh3_of(path: Path) -> str:
    """The checksum of a whole file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def open_file(path: Path) -> Any:
    """A pyarrow ParquetFile that verifies every page and buffers few of them.

    With `pre_buffer`, the default of newer pyarrow, it would read whole row groups first.
    """
    return pq.ParquetFile(
        path, page_checksum_verification=True, buffer_size=64 << 10, pre_buffer=False
    )


class FileWriter:
    """Writes one history file: `add` rows, then `finish` or `abandon`.

    At most one row group is in memory. `topic_folder` must exist; if the topic is deleted
    meanwhile, the next call that writes raises FileNotFoundError.
    """

    def __init__(self, topic_folder: Path, day: str, schema: pa.Schema) -> None:
        self.day = day
        self.buffered_bytes = 0
        self._folder = topic_folder
        self._schema = schema
        self._first = -1
        self._last = -1
        self._min_us = 0
        self._max_us = 0
        self._group: list[pa.RecordBatch] = []
        self._group_rows = 0
        self._file: BinaryIO | None = None
        self._writer: Any = None

    @property
    def written_bytes(self) -> int:
        return 0 if self._file is None else self._file.tell()

    def add(self, rows: pa.RecordBatch) -> None:
        """Append the next rows, of the same day."""
        first, last = offset_range(rows)
        low, high = timestamp_range_us(rows)
        if self._first < 0:
            self._first, self._min_us, self._max_us = first, low, high
        assert self._last < 0 or first == self._last + 1, "history rows must be contiguous"
        self._last = last
        self._min_us, self._max_us = min(self._min_us, low), max(self._max_us, high)
        # A copy: a slice of a few rows would keep its whole commit in memory.
        rows = pa.concat_batches([rows])
        self._group.append(rows)
        if len(self._group) >= _GROUP_BATCHES_MAX and self._group_rows < ROW_GROUP_ROWS // 8:
            # Many small batches cost more than their rows.
            self._group = [pa.concat_batches(self._group)]
        self._group_rows += rows.num_rows
        self.buffered_bytes += rows.nbytes
        if self._group_rows >= ROW_GROUP_ROWS or self.buffered_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as a row group."""
        if not self._group:
            return
        table = pa.Table.from_batches(self._group, schema=self._schema)
        if self._writer is None:
            self._open(page_rows=max(1, PAGE_BYTES * table.num_rows // (1 + table.nbytes)))
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._group.clear()
        self._group_rows = self.buffered_bytes = 0

    def finish(self) -> HistoryFile:
        """Complete the file durably and move it into `history/`."""
        self.flush()
        assert self._file is not None, "a history file has rows"
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        scratch = Path(self._file.name)
        relative = file_path(self.day, self._first, self._last)
        path = self._folder / relative
        if not path.parent.is_dir():
            _make_folder(path.parent.parent)
        _make_folder(path.parent)
        entry = HistoryFile(
            path=relative,
            first=self._first,
            last=self._last,
            min_timestamp_us=self._min_us,
            max_timestamp_us=self._max_us,
            rows=self._last - self._first + 1,
            bytes=scratch.stat().st_size,
            xxh3=xxh3_of(scratch),
        )
        scratch.replace(path)
        Disk().sync_folder(path.parent)
        return entry

    def abandon(self) -> None:
        """Remove the file."""
        self._group.clear()
        if self._file is not None and not self._file.closed:
            self._writer.close()
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)

    def _open(self, *, page_rows: int) -> None:
        scratch = self._folder / SCRATCH
        scratch.mkdir(exist_ok=True)
        self._file = (scratch / f"{self._first:020d}.writing").open("wb")
        self._writer = pq.ParquetWriter(
            self._file,
            self._schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=["account", "topic", "key", "protocol", "sender"],
            column_encoding={
                "offset": "DELTA_BINARY_PACKED",
                "timestamp": "DELTA_BINARY_PACKED",
            },
            write_page_checksum=True,
            data_page_size=PAGE_BYTES,
            # The writer looks at the size of a page after this number of rows.
            write_batch_size=min(page_rows, _PAGE_CHECK_ROWS_MAX),
        )


def _make_folder(folder: Path) -> None:
    """Create a folder durably. Raises FileNotFoundError if its topic was removed.

    A hand-over that was killed, or failed, may have created an existing one without making it
    durable.
    """
    folder.mkdir(exist_ok=True)
    Disk().sync_folder(folder.parent)
