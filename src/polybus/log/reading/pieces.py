"""Pieces: which files hold a range of a topic, and reading one of them.

A piece is what a plan is made of: it says where rows were when the plan was made, is small and can
be sent to another process. Reading finds out whether they still are there.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polybus.log.history import parquet
from polybus.log.history.manifest import HistoryFile
from polybus.log.journal import commit as commits
from polybus.log.journal.commit import Damaged
from polybus.log.reading.index import CommitRows, TopicKey

WINDOW_BYTES = 4 << 20
"""So much of a segment is read at once, or one commit."""
_CHECKED_MAX = 4096


@dataclass(frozen=True, slots=True)
class Times:
    """Rows outside of these times, in microseconds, are not wanted; both ends are inside."""

    since_us: int = -(1 << 63)
    until_us: int = (1 << 63) - 1

    def meet(self, earliest_us: int, latest_us: int) -> bool:
        return earliest_us <= self.until_us and latest_us >= self.since_us


ALWAYS = Times()


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets `first` (inclusive) to `stop` (exclusive) of a topic, in one file.

    Attributes:
        bytes: about how much of the file that is.
        file: what the manifest says of a history file; None for a segment of the journal.
        commits: the commits of a segment that have the rows, in order.
    """

    path: Path
    first: int
    stop: int
    bytes: int
    file: HistoryFile | None = None
    commits: tuple[CommitRows, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> int:
        return self.stop - self.first

    def cut(self, first: int, stop: int) -> Piece:
        """The same with fewer rows."""
        first, stop = max(first, self.first), min(stop, self.stop)
        kept = self.commits
        if kept and (first, stop) != (self.first, self.stop):
            low = bisect_right(kept, first, key=lambda one: one.stop_offset)
            kept = kept[low : bisect_left(kept, stop, key=lambda one: one.first_offset)]
        size = self.bytes * (stop - first) // max(1, self.rows)
        return replace(self, first=first, stop=stop, bytes=size, commits=kept)


Rows = tuple[int, pa.RecordBatch]
"""Rows of a topic and the offset after them. Offsets before the rows may have been left out."""


def read_piece(
    piece: Piece,
    topic: TopicKey,
    columns: Sequence[str],
    *,
    rows_max: int,
    bytes_max: int,
    times: Times,
) -> Iterator[Rows]:
    """The piece's rows, checked, in order; what `times` excludes may be left out.

    Raises:
        FileNotFoundError: the file is gone: handed over, replaced or expired.
        Damaged: what is there is not what the plan says.
    """
    if piece.file is None:
        return _read_commits(piece, topic, columns)
    return _read_history(piece, piece.file, columns, (rows_max, bytes_max), times)


def _read_commits(piece: Piece, key: TopicKey, columns: Sequence[str]) -> Iterator[Rows]:
    epoch_is_known = False
    with piece.path.open("rb", buffering=0) as file:
        for window in _windows(piece.commits):
            position = window[0].position
            size = window[-1].position + window[-1].size - position
            try:
                content = memoryview(os.pread(file.fileno(), size, position))
            except OSError as error:
                raise Damaged(f"the disk cannot read it: {error.strerror}") from error
            for one in window:
                message = content[one.position - position : one.position - position + one.size]
                rows = _topic_rows(message, one, key[0])
                if not epoch_is_known:
                    # A journal that begins again may have a topic of the name at the same place.
                    # One look is enough: what follows is in the same file.
                    _check_epoch(message, one, key)
                    epoch_is_known = True
                low = max(0, piece.first - one.first_offset)
                high = min(one.row_count, piece.stop - one.first_offset)
                yield one.first_offset + high, rows.slice(low, high - low).select(list(columns))


def _windows(wanted: Sequence[CommitRows]) -> Iterator[list[CommitRows]]:
    """Commits that lie one after the other and are read at once."""
    window: list[CommitRows] = []
    for one in wanted:
        if window:
            end = window[-1].position + window[-1].size
            if one.position != end or end + one.size - window[0].position > WINDOW_BYTES:
                yield window
                window = []
        window.append(one)
    if window:
        yield window


def _topic_rows(message: memoryview, place: CommitRows, topic: str) -> pa.RecordBatch:
    """A topic's rows of a commit's bytes. Raises Damaged."""
    if len(message) < place.size:
        raise Damaged("the file ends before the commit does")
    commits.verify(message)
    try:
        rows = commits.rows_of(message).slice(place.first_row, place.row_count)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"its rows are unreadable: {error}") from error
    # A checksum says that the bytes are whole, not that they are the ones that were meant.
    if (
        rows.num_rows != place.row_count
        or rows.column(1)[0].as_py() != topic
        or rows.column(2)[0].as_py() != place.first_offset
    ):
        raise Damaged("the index and the segment do not agree")
    return rows


def _check_epoch(message: memoryview, place: CommitRows, key: TopicKey) -> None:
    for rows in commits.note_of(message).topics:
        if rows.first_row == place.first_row and (rows.topic, rows.epoch) == key:
            return
    raise Damaged("its messages are of another topic of the same name")


def _read_history(
    piece: Piece, file: HistoryFile, columns: Sequence[str], maxima: tuple[int, int], times: Times
) -> Iterator[Rows]:
    try:
        _check_file(piece.path, file)
        # Its bytes were just checked and are in the system's cache.
        opened = pq.ParquetFile(piece.path, memory_map=True)
        for first, groups in _group_runs(opened.metadata, piece, file, times):
            batch_rows = _batch_rows(opened.metadata, groups, *maxima)
            found = opened.iter_batches(
                batch_size=batch_rows, row_groups=groups, columns=list(columns), use_threads=False
            )
            yield from _cut_batches(found, piece, first, columns)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise Damaged(str(error)) from error


def _cut_batches(
    found: Iterator[pa.RecordBatch], piece: Piece, offset: int, columns: Sequence[str]
) -> Iterator[Rows]:
    """What of batches is the piece's; the first one begins at `offset`."""
    for rows in found:
        low = max(0, piece.first - offset)
        high = min(rows.num_rows, piece.stop - offset)
        offset += rows.num_rows
        if low < high:
            yield min(offset, piece.stop), rows.select(list(columns)).slice(low, high - low)
        if offset >= piece.stop:
            return


def _group_runs(
    metadata: Any, piece: Piece, file: HistoryFile, times: Times
) -> list[tuple[int, list[int]]]:
    """The row groups to read, in runs that follow each other, each with its first offset."""
    if metadata.num_rows != file.rows:
        raise Damaged(f"it has {metadata.num_rows} rows, the manifest says {file.rows}")
    runs: list[tuple[int, list[int]]] = []
    offset = file.first
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        first, offset = offset, offset + found.num_rows
        if first >= piece.stop or offset <= piece.first:
            continue
        if times != ALWAYS and not times.meet(*_times_of(found)):
            continue
        if runs and runs[-1][1][-1] == group - 1:
            runs[-1][1].append(group)
        else:
            runs.append((first, [group]))
    return runs


def row_group_starts(piece: Piece) -> list[int]:
    """The offsets of a history piece at which row groups begin; none if it cannot be told now."""
    if piece.file is None:
        return []
    try:
        metadata = pq.read_metadata(piece.path)
    except (OSError, pa.ArrowException):
        return []
    starts = [piece.file.first]
    for group in range(metadata.num_row_groups - 1):
        starts.append(starts[-1] + metadata.row_group(group).num_rows)
    return [start for start in starts if piece.first <= start < piece.stop]


def _times_of(group: Any) -> tuple[int, int]:
    """The earliest and the latest timestamp of a row group, from its statistics."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "timestamp" and column.statistics is not None:
            found = column.statistics
            return parquet.timestamp_us_of(found.min), parquet.timestamp_us_of(found.max)
    return ALWAYS.since_us, ALWAYS.until_us


def _batch_rows(metadata: Any, groups: list[int], rows_max: int, bytes_max: int) -> int:
    """How many rows a batch may have so that its bytes stay within about `bytes_max`."""
    found = [metadata.row_group(group) for group in groups]
    row_bytes = max(one.total_byte_size // max(1, one.num_rows) for one in found)
    return int(max(1, min(rows_max, bytes_max // (row_bytes + 1))))


_checked: dict[tuple[Path, str], tuple[int, int]] = {}


def _check_file(path: Path, file: HistoryFile) -> None:
    """Compare the checksum of a whole file, once for as long as it stays untouched.

    Raises:
        FileNotFoundError: it is gone.
        Damaged: it is another file, or not whole.
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
