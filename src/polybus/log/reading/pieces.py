"""Pieces: the files that held a range of a topic when it was planned, and how one is read.

A plan and its pieces are small and can be sent to another process. The files may be gone when it
reads them.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from polybus.errors import StorageError
from polybus.log.columns import TopicKey
from polybus.log.history.manifest import HistoryFile, Manifest
from polybus.log.history.topic_history import ALWAYS, FileRange, NextAndRows, TimeRange, read_file
from polybus.log.journal.commit import Damaged, note_of, verify
from polybus.log.journal.message import read_rows as rows_of
from polybus.log.journal.topic_commits import CommitRows, SegmentCommits
from polybus.log.reading.folder import JournalIndex

WINDOW_BYTES = 4 << 20
"""How much of a segment is read at once, unless one commit is larger."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets `first` (included) to `stop` (excluded) of a topic, in one file.

    Attributes:
        bytes: its approximate size in the file.
        file: the manifest's entry of a history file; None for a segment of the journal.
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

    def cut(self, first: int, stop: int) -> "Piece":
        """The part of the piece within these offsets."""
        first, stop = max(first, self.first), min(stop, self.stop)
        kept = self.commits
        if kept and (first, stop) != (self.first, self.stop):
            low = bisect_right(kept, first, key=lambda one: one.stop_offset)
            kept = kept[low : bisect_left(kept, stop, key=lambda one: one.first_offset)]
        size = self.bytes * (stop - first) // max(1, self.rows)
        return replace(self, first=first, stop=stop, bytes=size, commits=kept)

    def row_group_starts(self) -> list[int]:
        """The offsets of a history piece at which row groups begin; [] if they are unknown."""
        if self.file is None:
            return []
        try:
            metadata = pq.read_metadata(self.path)
        except (OSError, pa.ArrowException):
            return []
        groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        starts = accumulate(groups[:-1], initial=self.file.first)
        return [start for start in starts if self.first <= start < self.stop]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Where offsets `start` to `stop` of a topic are; the pieces are in offset order.

    Rows outside `times` may be missing from the pieces.
    """

    topic: str
    epoch: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    times: TimeRange = ALWAYS

    def since(self, offset: int) -> "ReadPlan":
        """The part of the plan from an offset on."""
        kept = tuple(one.cut(offset, one.stop) for one in self.pieces if one.stop > offset)
        return replace(self, start=offset, pieces=kept)


def history_pieces(
    folder: Path, manifest: Manifest, start: int, stop: int, times: TimeRange
) -> Iterator[Piece]:
    """The history files with offsets from `start` to `stop`, each cut to them."""
    files = manifest.files
    number = max(0, bisect_right(files, start, key=lambda file: file.first) - 1)
    for file in files[number:]:
        if file.first >= stop:
            return
        if file.last >= start and times.overlaps(file.min_timestamp_us, file.max_timestamp_us):
            whole = Piece(folder / file.path, file.first, file.last + 1, file.bytes, file)
            yield whole.cut(start, stop)


def journal_pieces(journal: JournalIndex, plan: ReadPlan, start: int) -> Iterator[Piece]:
    """The segments with the plan's offsets from `start` on.

    Raises StorageError `log.damaged`, naming offsets that are in no segment.
    """
    for found in journal.commits((plan.topic, plan.epoch)):
        if found.stop_offset() <= start or start >= plan.stop:
            continue
        if found.first_offset() > start:
            break
        stop = min(found.stop_offset(), plan.stop)
        for run in _runs(plan, found, start, stop):
            size = sum(one.size for one in run)
            first, last = run[0].first_offset, run[-1].stop_offset
            yield Piece(found.segment, first, last, size, None, tuple(run)).cut(start, stop)
        start = stop
    if start < plan.stop:
        text = f"topic {plan.topic!r}: offsets {start} to {plan.stop - 1} are missing from the log"
        raise StorageError("log.damaged", f"{text}; run polybus verify")


def _runs(
    plan: ReadPlan, found: SegmentCommits, start: int, stop: int
) -> Iterator[list[CommitRows]]:
    """The commits from `start` to `stop`, in runs, without those that the plan's times exclude.

    Raises StorageError `log.damaged` if the offsets of the commits have a gap.
    """
    numbers = found.within(start, stop)
    commits = [found.commit(number) for number in numbers]
    for before, commit in pairwise(commits):
        if commit.first_offset != before.stop_offset:
            text = f"{commit.segment.name}: topic {plan.topic!r} continues at offset"
            text = f"{text} {commit.first_offset}, not at {before.stop_offset}; run polybus verify"
            raise StorageError("log.damaged", text)
    for wanted, run in groupby(
        zip(numbers, commits, strict=True),
        lambda one: plan.times.overlaps(found.earliest[one[0]], found.latest_us(one[0])),
    ):
        if wanted:
            yield [commit for _, commit in run]


def read_piece(
    piece: Piece, plan: ReadPlan, columns: Sequence[str], *, rows_max: int, bytes_max: int
) -> Iterator[NextAndRows]:
    """The piece's rows in order, verified; rows outside the plan's times may be left out.

    Raises FileNotFoundError if the file was handed over, replaced or removed by retention; Damaged
    if its content is not what the plan says.
    """
    if piece.file is None:
        return _read_commits(piece, (plan.topic, plan.epoch), columns)
    wanted = FileRange(
        first=piece.first,
        stop=piece.stop,
        columns=columns,
        rows_max=rows_max,
        bytes_max=bytes_max,
        times=plan.times,
    )
    return read_file(piece.path, piece.file, wanted, mapped=True)


def _read_commits(piece: Piece, key: TopicKey, columns: Sequence[str]) -> Iterator[NextAndRows]:
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
                    # A journal that began again may have a topic of this name at the same position.
                    # One check is enough: the other commits are in the same file.
                    _check_epoch(message, one, key)
                    epoch_is_known = True
                low = max(0, piece.first - one.first_offset)
                high = min(one.row_count, piece.stop - one.first_offset)
                yield one.first_offset + high, rows.slice(low, high - low).select(list(columns))


def _windows(wanted: Sequence[CommitRows]) -> Iterator[list[CommitRows]]:
    """Groups of adjacent commits, each read at once."""
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
    verify(message)
    try:
        rows = rows_of(message)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"its rows cannot be decoded: {error}") from error
    part = place.part_of(rows, place.first_offset)
    # The checksum proves that the commit is intact, not that it is the planned one.
    if part.column(1)[0].as_py() != topic:
        raise Damaged("the index and the segment do not agree")
    return part


def _check_epoch(message: memoryview, place: CommitRows, key: TopicKey) -> None:
    for rows in note_of(message).topics:
        if rows.first_row == place.first_row and (rows.topic, rows.epoch) == key:
            return
    raise Damaged("its messages belong to an older topic of the same name")
