"""A topic's history: its Parquet files, read by offset and by time, and checked.

A reader works on one immutable snapshot of the manifest. The hand-over may replace a small file by
a larger one at any time. A reader whose file is missing loads the manifest again and continues with
the file that holds the rows now.

The checksum of the whole file is checked before its first use, because page headers and the footer
have no checksums of their own. Parquet is decoded from the start of a row group, so a reader that
comes back for the next megabyte would decode everything before it again. A cache keeps recent
readers open at their positions.
"""

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.errors import StorageError, UsageError
from polybus.log.columns import SCHEMA, cut
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.manifest import HistoryFile, Manifest
from polybus.log.journal.cache import LruCache
from polybus.log.journal.commit import Damaged
from polybus.log.topics import storage_error

T = TypeVar("T")
_BATCH_BYTES_MIN = 256 << 10
_BATCH_BYTES_MAX = 1 << 20
_BATCH_ROWS_MAX = 64 << 10
_RETRIES_MAX = 5
_CURSORS_BYTES_MAX = 16 << 20
# An open file, its metadata and the buffers of its columns.
_CURSOR_OVERHEAD_BYTES = 512 << 10
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

    Raises FileNotFoundError if the file was replaced or removed; Damaged if its content is not what
    the manifest says.
    """
    columns = None if wanted.columns is None else list(wanted.columns)
    try:
        check_file(path, file)
        opened = pq.ParquetFile(path, memory_map=True) if mapped else parquet.open_file(path)
        if opened.metadata.num_rows != file.rows:
            found = opened.metadata.num_rows
            raise Damaged(f"it has {found} rows, the manifest says {file.rows}")
        for offset, group, batch_rows in _row_groups(opened.metadata, file.first, wanted):
            batches = opened.iter_batches(
                batch_size=batch_rows, row_groups=[group], columns=columns, use_threads=False
            )
            for rows in batches:
                first, offset = offset, offset + rows.num_rows
                if "offset" in rows.schema.names:
                    if parquet.offset_range(rows) != (first, offset - 1):
                        raise Damaged(f"its rows do not continue at offset {first}")
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
        # For example, too many open files do not mean damage.
        if isinstance(error, OSError) and error.errno not in (None, errno.EIO):
            raise storage_error(error, f"cannot read {path}") from error
        raise Damaged(str(error)) from error


def _row_groups(metadata: Any, offset: int, wanted: FileRange) -> Iterator[tuple[int, int, int]]:
    """The row groups to read: first offset, number, and how many rows have about `bytes_max`."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        first, offset = offset, offset + group.num_rows
        if first >= wanted.stop or offset <= wanted.first:
            continue
        if wanted.times == ALWAYS or wanted.times.overlaps(*_times_of(group)):
            row_bytes = 1 + group.total_byte_size // max(1, group.num_rows)
            yield first, number, max(1, min(wanted.rows_max, wanted.bytes_max // row_bytes))


def _times_of(group: Any) -> tuple[int, int]:
    """The earliest and the latest timestamp of a row group, from its statistics."""
    found = group.column(SCHEMA.names.index("timestamp")).statistics
    if found is None or not found.has_min_max:
        return ALWAYS.since_us, ALWAYS.until_us
    # As stored, in microseconds: for `min` and `max` pyarrow imports pandas.
    return found.min_raw, found.max_raw


_checked: LruCache[tuple[Path, str], tuple[int, int]] = LruCache(_CHECKED_MAX)


def check_file(path: Path, file: HistoryFile) -> None:
    """Compare the checksum of a whole file, once for as long as the file stays unchanged.

    Raises FileNotFoundError if the file is missing; Damaged if it differs or is incomplete.
    """
    status = path.stat()
    seen = (status.st_mtime_ns, status.st_ino)
    if _checked.get((path, file.xxh3)) != seen:
        if status.st_size != file.bytes or parquet.xxh3_of(path) != file.xxh3:
            raise Damaged("its checksum is wrong")
        _checked.put((path, file.xxh3), seen)


class Cursor:
    """A reader's position in one file; `offset` is the next one it returns."""

    def __init__(self, path: Path, file: HistoryFile, offset: int, *, bytes_max: int) -> None:
        self.offset = offset
        self.weight = _CURSOR_OVERHEAD_BYTES
        """Approximate memory that it holds, in bytes."""
        self._rest: pa.RecordBatch | None = None
        # Not smaller even for small reads: everything before the offset is decoded too.
        batch_bytes = max(_BATCH_BYTES_MIN, min(bytes_max, _BATCH_BYTES_MAX))
        wanted = FileRange(
            first=offset, stop=file.last + 1, rows_max=_BATCH_ROWS_MAX, bytes_max=batch_bytes
        )
        self._batches = read_file(path, file, wanted)

    def next(self, *, bytes_max: int) -> pa.RecordBatch:
        """The next rows, at least one, about `bytes_max` at most."""
        rows = self._rest
        if rows is None:
            _, rows = next(self._batches)
            # The rows, and the pages that contain them.
            self.weight = _CURSOR_OVERHEAD_BYTES + 2 * rows.get_total_buffer_size()
        found = cut(rows, bytes_max=bytes_max)
        self._rest = rows.slice(found.num_rows) if found.num_rows < rows.num_rows else None
        self.offset += found.num_rows
        return found


CursorKey = tuple[Path, str, int]
_cursors: LruCache[CursorKey, Cursor] = LruCache(_CURSORS_BYTES_MAX)
"""By path, checksum and offset. Each keeps a file open and some pages in memory, even if no reader
returns for it.
"""


class TopicHistory:
    """One topic's history. Any number of threads may read; each read sees one snapshot."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest in the topic's folder; a missing one means an empty history.

        Raises StorageError `log.damaged` if manifest.json or topic.json cannot be trusted.
        """
        self.folder = folder
        self.manifest = Manifest(epoch=0)
        self.reload()

    @property
    def start(self) -> int:
        """The first offset kept; equal to `handed_over` if the history is empty."""
        return self.manifest.start

    @property
    def handed_over(self) -> int:
        """The first offset that is not in history but in the journal."""
        return self.manifest.handed_over

    def reload(self) -> None:
        """Load the manifest again; on StorageError the snapshot stays unchanged."""
        self.manifest = manifests.load_current(self.folder) or Manifest(epoch=0)

    def check_files(self) -> None:
        """Raise StorageError `log.damaged` if a file is missing or has another size."""
        for _ in range(_RETRIES_MAX):
            manifest = self.manifest
            damage = next((found for found in map(self._missing, manifest.files) if found), None)
            if damage is None:
                return
            # A hand-over that outlived its bus may have replaced the file meanwhile.
            self.reload()
            if self.manifest == manifest:
                raise damage

    def _missing(self, file: HistoryFile) -> StorageError | None:
        try:
            size = os.stat(self.folder / file.path).st_size
        except OSError as error:
            return self._damage(file, error.strerror or "is missing")
        return None if size == file.bytes else self._damage(file, f"it has {size} bytes")

    def read(self, offset: int, *, bytes_max: int) -> pa.RecordBatch | None:
        """Rows from `offset` on, at least one, about `bytes_max`; None from `handed_over` on.

        Raises UsageError `log.offset-unknown` if the offset is below `start`; StorageError
        `log.damaged`, which names the file and its offsets.
        """
        return self._read_in(
            lambda: self._file_with(offset),
            lambda file: self._read_file(file, offset, bytes_max=bytes_max),
        )

    def offset_at(self, timestamp_us: int) -> int | None:
        """The first offset with a timestamp at or after the time, or None.

        Raises StorageError `log.damaged`.
        """
        return self._read_in(
            lambda: next(
                (file for file in self.manifest.files if file.max_timestamp_us >= timestamp_us),
                None,
            ),
            lambda file: self._offset_in(file, timestamp_us),
        )

    def _read_in(
        self, choose: Callable[[], HistoryFile | None], read: Callable[[HistoryFile], T]
    ) -> T | None:
        """Read in the chosen file, and choose again if it was replaced meanwhile."""
        for _ in range(_RETRIES_MAX):
            file = choose()
            if file is None:
                return None
            try:
                return read(file)
            except FileNotFoundError as error:
                self.reload()
                if file in self.manifest.files:
                    raise self._damage(file, "is missing") from error
            except Damaged as error:
                raise self._damage(file, str(error)) from error
        raise StorageError(
            "log.damaged", f"{self.folder}: history files disappear while they are read"
        )

    def _damage(self, file: HistoryFile, what: str) -> StorageError:
        path = self.folder / file.path
        text = f"history file {path}, offsets {file.first} to {file.last}: {what}"
        return StorageError("log.damaged", text)

    def _file_with(self, offset: int) -> HistoryFile | None:
        found = self.manifest
        if offset >= found.handed_over:
            return None
        if offset < found.start:
            text = f"offset {offset} was removed by retention; the log starts at {found.start}"
            raise UsageError("log.offset-unknown", text)
        return found.files[bisect_right(found.files, offset, key=lambda file: file.first) - 1]

    def _read_file(self, file: HistoryFile, offset: int, *, bytes_max: int) -> pa.RecordBatch:
        path = self.folder / file.path
        cursor = _cursors.take((path, file.xxh3, offset))
        if cursor is None:
            cursor = Cursor(path, file, offset, bytes_max=bytes_max)
        rows = cursor.next(bytes_max=bytes_max)
        if cursor.offset <= file.last:
            _cursors.put((path, file.xxh3, cursor.offset), cursor, cursor.weight)
        return rows

    def _offset_in(self, file: HistoryFile, timestamp_us: int) -> int:
        wanted = FileRange(
            first=file.first,
            stop=file.last + 1,
            rows_max=_BATCH_ROWS_MAX,
            bytes_max=_BATCH_BYTES_MAX,
            columns=("offset", "timestamp"),
            times=TimeRange(since_us=timestamp_us),
        )
        for _, rows in read_file(self.folder / file.path, file, wanted):
            found = offset_at(rows, timestamp_us)
            if found is not None:
                return found
        raise Damaged("its timestamps are not those of the manifest")


def offset_at(rows: pa.RecordBatch, timestamp_us: int) -> int | None:
    """The offset of the first row at or after a time; the columns are offset and timestamp."""
    late = pc.greater_equal(rows.column(1).cast(pa.int64()), timestamp_us)
    row = pc.index(late, True).as_py()
    return int(rows.column(0)[row].as_py()) if row >= 0 else None
