"""A topic's history: its Parquet files, read by offset and by time.

A reader works on one immutable snapshot of the manifest. The hand-over may replace a small file by
a larger one at any time. A reader whose file is missing loads the manifest again and continues with
the file that holds the rows now.

Parquet is decoded from the start of a row group, so a reader that comes back for the next megabyte
would decode everything before it again. `Cursors` keeps the last readers open where they stopped.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import StorageError, UsageError
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.file_reader import FileRange, TimeRange, read_file
from polybus.log.history.manifest import HistoryFile, Manifest
from polybus.log.journal.commit import Damaged

_BATCH_BYTES_MIN = 256 << 10
_BATCH_BYTES_MAX = 1 << 20
_BATCH_ROWS_MAX = 64 << 10
_ROW_OVERHEAD_BYTES = 64
_RETRIES_MAX = 5


class Cursor:
    """A reader's position in one file; `offset` is the next one it returns."""

    def __init__(self, path: Path, file: HistoryFile, offset: int, *, bytes_max: int) -> None:
        self.offset = offset
        self._rest: pa.RecordBatch | None = None
        # Not smaller even for small reads: everything before the offset is decoded too.
        batch_bytes = max(_BATCH_BYTES_MIN, min(bytes_max, _BATCH_BYTES_MAX))
        wanted = FileRange(
            first=offset, stop=file.last + 1, rows_max=_BATCH_ROWS_MAX, bytes_max=batch_bytes
        )
        self._batches = read_file(path, file, wanted)

    def next(self, *, bytes_max: int) -> pa.RecordBatch | None:
        """The next rows, at least one, about `bytes_max` at most; None at the end of the file."""
        rows = self._rest
        if rows is None:
            _, rows = next(self._batches, (0, None))
        if rows is None:
            return None
        count = _rows_within(rows, bytes_max)
        self._rest = rows.slice(count) if count < rows.num_rows else None
        self.offset += count
        return rows.slice(0, count)


class Cursors:
    """The cursors of the last readers, an LRU cache. Each holds a file open and some pages.

    A cursor in use is not in the cache, so no two threads share one.
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


class TopicHistory:
    """One topic's history. Any number of threads may read; each read sees one snapshot."""

    def __init__(self, folder: Path, *, cursors: Cursors = _shared_cursors) -> None:
        """Read the manifest in the topic's folder; a missing one means an empty history.

        Raises:
            StorageError: `log.damaged`, manifest.json or topic.json cannot be trusted.
        """
        self.folder = folder
        self._cursors = cursors
        self._snapshot: tuple[Manifest, list[int]] = (Manifest(epoch=0), [])
        self.reload()

    @property
    def manifest(self) -> Manifest:
        """The snapshot that reads use."""
        return self._snapshot[0]

    @property
    def start(self) -> int:
        """The first offset kept; equal to `handed_over` if the history is empty."""
        return self.manifest.start

    @property
    def handed_over(self) -> int:
        """The first offset that is not in history but in the journal."""
        return self.manifest.handed_over

    def reload(self) -> None:
        """Load the manifest again; on StorageError the snapshot stays as it was."""
        found = manifests.load_current(self.folder) or Manifest(epoch=0)
        self._snapshot = (found, [file.first for file in found.files])

    def read(self, offset: int, *, bytes_max: int) -> list[pa.RecordBatch]:
        """Rows from `offset` on: at least one if it is below `handed_over`, about `bytes_max`.

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
                    # Serve what is intact. The next read begins at the damage and raises.
                    break
                raise
            found += rows
            found_bytes += sum(batch.nbytes for batch in rows)
            offset = parquet.offset_range(found[-1])[1] + 1
        return found

    def offset_at(self, timestamp_us: int) -> int | None:
        """The first offset with a timestamp at or after the time, or None.

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
        raise StorageError(
            "log.damaged", f"{self.folder}: history files disappear while they are read"
        )

    def _file_with(self, offset: int) -> HistoryFile | None:
        found, firsts = self._snapshot
        if offset >= found.handed_over:
            return None
        if offset < found.start:
            text = f"offset {offset} was removed by retention; the log starts at {found.start}"
            raise UsageError("log.offset-unknown", text)
        return found.files[bisect_right(firsts, offset) - 1]

    def _read_file(self, file: HistoryFile, offset: int, *, bytes_max: int) -> list[pa.RecordBatch]:
        path = self.folder / file.path
        rows: list[pa.RecordBatch] = []
        rows_bytes = 0
        try:
            cursor = self._cursors.take(path, file, offset)
            if cursor is None:
                cursor = Cursor(path, file, offset, bytes_max=bytes_max)
            while rows_bytes < bytes_max:
                batch = cursor.next(bytes_max=bytes_max - rows_bytes)
                if batch is None:
                    return rows
                rows.append(batch)
                rows_bytes += batch.nbytes
        except Damaged as error:
            raise _damage(self.folder, file, str(error)) from error
        if cursor.offset <= file.last:
            self._cursors.keep(path, file, cursor)
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
        try:
            for _, rows in read_file(self.folder / file.path, file, wanted):
                found = offset_at(rows, timestamp_us)
                if found is not None:
                    return found
        except Damaged as error:
            raise _damage(self.folder, file, str(error)) from error
        raise _damage(self.folder, file, "its timestamps are not those of the manifest")


def offset_at(rows: pa.RecordBatch, timestamp_us: int) -> int | None:
    """The offset of the first row at or after a time; the columns are offset and timestamp."""
    late = pc.greater_equal(rows.column(1).cast(pa.int64()), timestamp_us)
    row = pc.index(late, True).as_py()
    return int(rows.column(0)[row].as_py()) if row >= 0 else None


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
