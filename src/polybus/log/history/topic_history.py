"""A topic's history: reading its Parquet files by offset and by time.

A reader works on one immutable snapshot of the manifest. The hand-over may replace a small file by
a larger one at any time; a reader that finds a file gone loads the manifest again and goes on with
the file that has the rows now.

Parquet can only be decoded from the start of a row group, so a reader that comes back for the next
megabyte would decode all before it again. `Cursors` keeps the few last readers where they stopped.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import StorageError, UsageError
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.manifest import HistoryFile, Manifest

_BATCH_BYTES_MIN = 256 << 10
_BATCH_BYTES_MAX = 1 << 20
_BATCH_ROWS_MAX = 64 << 10
_ROW_OVERHEAD_BYTES = 64
_RETRIES_MAX = 5


class Cursor:
    """A reader's place in one file; `offset` is the next one it gives."""

    def __init__(self, path: Path, file: HistoryFile, offset: int, *, bytes_max: int) -> None:
        self.offset = offset
        self._last = file.last
        self._rest: pa.RecordBatch | None = None
        parquet_file = parquet.open_file(path)
        metadata = parquet_file.metadata
        if metadata.num_rows != file.rows:
            raise pa.ArrowInvalid(f"{metadata.num_rows} rows, the manifest says {file.rows}")
        group, group_first = _group_with(metadata, file.first, offset)
        row_bytes = metadata.row_group(group).total_byte_size // metadata.row_group(group).num_rows
        # Not smaller than this even for small reads: what is before the offset is decoded too.
        batch_bytes = max(_BATCH_BYTES_MIN, min(bytes_max, _BATCH_BYTES_MAX))
        batch_rows = max(1, min(_BATCH_ROWS_MAX, batch_bytes // (row_bytes + 1)))
        self._batches: Iterator[pa.RecordBatch] = parquet_file.iter_batches(
            batch_size=batch_rows,
            row_groups=list(range(group, metadata.num_row_groups)),
            use_threads=False,
        )
        self._skip = offset - group_first

    def next(self, *, bytes_max: int) -> pa.RecordBatch | None:
        """The next rows, at least one, about `bytes_max` at most; None at the end of the file."""
        rows = self._rest
        if rows is None:
            rows = self._decode()
        if rows is None:
            return None
        count = _rows_within(rows, bytes_max)
        self._rest = rows.slice(count) if count < rows.num_rows else None
        self.offset += count
        return rows.slice(0, count)

    def _decode(self) -> pa.RecordBatch | None:
        for rows in self._batches:
            if self._skip >= rows.num_rows:
                self._skip -= rows.num_rows
                continue
            rows = rows.slice(self._skip)
            self._skip = 0
            if parquet.offset_range(rows) != (self.offset, self.offset + rows.num_rows - 1):
                raise pa.ArrowInvalid(f"its rows do not go on at offset {self.offset}")
            return rows
        if self.offset != self._last + 1:
            raise pa.ArrowInvalid(f"its rows end before offset {self._last}")
        return None


class Cursors:
    """The places of the last readers, oldest dropped first. Each holds a file open and some pages.

    A cursor in use is not in here, so no two threads share one.
    """

    def __init__(self, cursors_max: int = 16) -> None:
        self._cursors_max = cursors_max
        self._cursors: OrderedDict[tuple[str, str, int], Cursor] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, path: Path, file: HistoryFile, offset: int) -> Cursor | None:
        with self._lock:
            return self._cursors.pop((str(path), file.xxh3, offset), None)

    def keep(self, path: Path, file: HistoryFile, cursor: Cursor) -> None:
        with self._lock:
            self._cursors[str(path), file.xxh3, cursor.offset] = cursor
            if len(self._cursors) > self._cursors_max:
                self._cursors.popitem(last=False)


_shared_cursors = Cursors()


class History:
    """One topic's history. Any number of threads may read; each read sees one snapshot."""

    def __init__(self, folder: Path, *, cursors: Cursors = _shared_cursors) -> None:
        """Read the manifest in the topic's folder; without one the history is empty.

        Raises:
            StorageError: `log.damaged`, manifest.json or topic.json cannot be trusted.
        """
        self.folder = folder
        self._cursors = cursors
        self._checked: dict[str, tuple[str, int, int]] = {}
        self._snapshot: tuple[Manifest, list[int]] = (Manifest(epoch=0), [])
        self.reload()

    @property
    def manifest(self) -> Manifest:
        """The snapshot that reads use now."""
        return self._snapshot[0]

    @property
    def start(self) -> int:
        """The first offset kept; equal to `handed_over` if the history is empty."""
        return self.manifest.start

    @property
    def handed_over(self) -> int:
        """The first offset that is not in history: the journal takes over here."""
        return self.manifest.handed_over

    def reload(self) -> None:
        """Take the manifest as it is now; on StorageError the snapshot stays as it was."""
        epoch = manifests.epoch_of(self.folder)
        if epoch is None:
            found = manifests.load(self.folder) or Manifest(epoch=0)
        else:
            found = manifests.load_for_epoch(self.folder, epoch)
        named = {file.path for file in found.files}
        for path in self._checked.keys() - named:
            self._checked.pop(path, None)
        self._snapshot = (found, [file.first for file in found.files])

    def read(self, offset: int, *, bytes_max: int) -> list[pa.RecordBatch]:
        """Rows from `offset` on, in order: at least one below `handed_over`, about `bytes_max`.

        Raises:
            UsageError: `log.offset-unknown`, the offset is below `start`.
            StorageError: `log.damaged`, naming the file and its offsets.
        """
        found: list[pa.RecordBatch] = []
        found_bytes = 0
        retries = 0
        while found_bytes < bytes_max:
            file = self._file_with(offset)
            if file is None:
                break
            try:
                rows = self._read_file(file, offset, bytes_max=bytes_max - found_bytes)
            except FileNotFoundError as error:
                retries += 1
                self.reload()
                if file in self.manifest.files or retries > _RETRIES_MAX:
                    raise _damage(self.folder, file, "is missing") from error
                continue
            except StorageError:
                if found:
                    # What is intact is served; the next read, at the damage, raises.
                    break
                raise
            found += rows
            found_bytes += sum(batch.nbytes for batch in rows)
            offset = parquet.offset_range(found[-1])[1] + 1
        return found

    def offset_at(self, timestamp_us: int) -> int | None:
        """The first offset with a timestamp at or after the time; None if history has none.

        Raises:
            StorageError: `log.damaged`.
        """
        for _ in range(_RETRIES_MAX):
            files = self.manifest.files
            file = next((file for file in files if file.max_timestamp_us >= timestamp_us), None)
            if file is None:
                return None
            try:
                return self._offset_in(file, timestamp_us)
            except FileNotFoundError as error:
                self.reload()
                if file in self.manifest.files:
                    raise _damage(self.folder, file, "is missing") from error
        raise StorageError("log.damaged", f"{self.folder}: history files vanish while being read")

    def _file_with(self, offset: int) -> HistoryFile | None:
        found, firsts = self._snapshot
        if offset >= found.handed_over:
            return None
        if offset < found.start:
            text = f"offset {offset} is not kept any more; the log starts at {found.start}"
            raise UsageError("log.offset-unknown", text)
        return found.files[bisect_right(firsts, offset) - 1]

    def _read_file(self, file: HistoryFile, offset: int, *, bytes_max: int) -> list[pa.RecordBatch]:
        path = self.folder / file.path
        rows: list[pa.RecordBatch] = []
        rows_bytes = 0
        try:
            cursor = self._cursors.take(path, file, offset)
            if cursor is None:
                self._check_file(path, file)
                cursor = Cursor(path, file, offset, bytes_max=bytes_max)
            while rows_bytes < bytes_max:
                batch = cursor.next(bytes_max=bytes_max - rows_bytes)
                if batch is None:
                    return rows
                rows.append(batch)
                rows_bytes += batch.nbytes
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise _damage(self.folder, file, str(error)) from error
        if cursor.offset <= file.last:
            self._cursors.keep(path, file, cursor)
        return rows

    def _offset_in(self, file: HistoryFile, timestamp_us: int) -> int:
        path = self.folder / file.path
        try:
            self._check_file(path, file)
            parquet_file = parquet.open_file(path)
            first = file.first
            for group in range(parquet_file.metadata.num_row_groups):
                metadata = parquet_file.metadata.row_group(group)
                if _latest_us(metadata) >= timestamp_us:
                    column = parquet_file.read_row_group(group, columns=["timestamp"]).column(0)
                    late = pc.greater_equal(column.cast(pa.int64()), timestamp_us)
                    return first + int(pc.index(late, True).as_py())
                first += metadata.num_rows
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise _damage(self.folder, file, str(error)) from error
        raise _damage(self.folder, file, "its timestamps are not those of the manifest")

    def _check_file(self, path: Path, file: HistoryFile) -> None:
        """Compare the checksum of the whole file, once for as long as it stays untouched.

        Pages have checksums of their own, but their headers and the footer do not.
        """
        status = path.stat()
        seen = (file.xxh3, status.st_mtime_ns, status.st_ino)
        if self._checked.get(file.path) == seen:
            return
        if status.st_size != file.bytes or parquet.xxh3_of(path) != file.xxh3:
            raise _damage(self.folder, file, "its checksum is wrong")
        self._checked[file.path] = seen


def _group_with(metadata: Any, first: int, offset: int) -> tuple[int, int]:
    """The row group that has the offset, and the group's first offset."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if offset < first + rows:
            return group, first
        first += rows
    raise pa.ArrowInvalid(f"it has no offset {offset}")


def _latest_us(metadata: Any) -> int:
    """The largest timestamp of a row group, from its statistics."""
    for index in range(metadata.num_columns):
        column = metadata.column(index)
        if column.path_in_schema == "timestamp":
            return parquet.timestamp_us_of(column.statistics.max)
    raise pa.ArrowInvalid("it has no column `timestamp`")


def _rows_within(rows: pa.RecordBatch, bytes_max: int) -> int:
    """How many of the rows, at least one, have about `bytes_max` together."""
    if rows.nbytes <= bytes_max:
        return int(rows.num_rows)
    sizes = pc.add(pc.binary_length(rows.column("value")).cast(pa.int64()), _ROW_OVERHEAD_BYTES)
    within = pc.less_equal(pc.cumulative_sum(pc.fill_null(sizes, 0)), bytes_max)
    return max(1, int(pc.sum(within).as_py() or 0))


def _damage(folder: Path, file: HistoryFile, what: str) -> StorageError:
    text = f"history file {folder / file.path}, offsets {file.first} to {file.last}: {what}"
    return StorageError("log.damaged", text)
