"""Where a topic's messages are in the journal, in memory: which commit holds which offsets.

A busy journal holds hundreds of thousands of commits, so an entry is six integers in a flat array
and not an object. The bus fills the array with `scan.add_places`; a reader in another process
fills it from the index files (log/reading/folder.py).
"""

from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from polybus.log.columns import TopicRows
from polybus.log.journal.commit import Damaged

FIELDS = 6


class CommitRows(NamedTuple):
    """A topic's rows in one commit, and where the commit is."""

    segment: Path
    position: int
    size: int
    first_row: int
    first_offset: int
    row_count: int

    @property
    def stop_offset(self) -> int:
        return self.first_offset + self.row_count

    def part_of(self, commit: pa.RecordBatch, offset: int) -> pa.RecordBatch:
        """The topic's rows of a whole commit, from an offset on. Raises Damaged if it differs."""
        skipped = offset - self.first_offset
        part = commit.slice(self.first_row + skipped, self.row_count - skipped)
        if part.num_rows != self.row_count - skipped or part.column(2)[0].as_py() != offset:
            raise Damaged("the index and the segment do not agree")
        return part


class SegmentCommits:
    """A topic's commits in one segment, in offset order.

    Attributes:
        entries: for each commit its first offset, row count, position, size, first row, and the
            largest timestamp up to and including it.
        earliest: the smallest timestamp of each commit; only for commits that `add` entered.
    """

    __slots__ = ("earliest", "entries", "segment")

    def __init__(self, segment: Path) -> None:
        self.segment = segment
        self.entries = array("q")
        self.earliest = array("q")

    def __len__(self) -> int:
        return len(self.entries) // FIELDS

    def add(self, position: int, size: int, rows: TopicRows) -> None:
        # The clock may be set back, so the latest time is the largest so far.
        latest = max(rows.max_timestamp_us, self.entries[-1] if self.entries else 0)
        fields = (rows.first_offset, rows.row_count, position, size, rows.first_row, latest)
        self.entries.extend(fields)
        self.earliest.append(rows.min_timestamp_us)

    def commit(self, index: int) -> CommitRows:
        at = index * FIELDS
        first, count, position, size, row = self.entries[at : at + FIELDS - 1]
        return CommitRows(self.segment, position, size, row, first, count)

    def first_offset(self) -> int:
        return self.entries[0]

    def stop_offset(self, index: int = -1) -> int:
        """The offset after a commit, by default after the last."""
        at = index % len(self) * FIELDS
        return self.entries[at] + self.entries[at + 1]

    def latest_us(self, index: int) -> int:
        return self.entries[index * FIELDS + FIELDS - 1]

    def at_offset(self, offset: int) -> int:
        """The index of the last commit that begins at or before an offset, or -1."""
        return bisect_right(memoryview(self.entries)[::FIELDS], offset) - 1

    def at_time(self, timestamp_us: int) -> int:
        """The index of the first commit with a message at or after a time, or the length."""
        return bisect_left(memoryview(self.entries)[FIELDS - 1 :: FIELDS], timestamp_us)

    def within(self, start: int, stop: int) -> range:
        """The indexes of the commits with offsets from `start` to `stop`."""
        low = max(0, self.at_offset(start))
        if low < len(self) and self.stop_offset(low) <= start:
            low += 1
        return range(low, max(low, self.at_offset(stop - 1) + 1))


class TopicCommits:
    """A topic's commits in all segments, in offset order. The log's lock guards it."""

    def __init__(self) -> None:
        self._segments: list[SegmentCommits] = []

    @property
    def start(self) -> int | None:
        """The first offset in the journal; None if the journal has no message of the topic."""
        return self._segments[0].first_offset() if self._segments else None

    def in_segment(self, segment: Path) -> SegmentCommits:
        """The commits of the last segment, or of a new one after it."""
        last = self._segments[-1] if self._segments else None
        # Nearly always the same object, and comparing paths takes longer than everything else.
        if last is None or (last.segment is not segment and last.segment != segment):
            last = SegmentCommits(segment)
            self._segments.append(last)
        return last

    def find(self, offset: int) -> CommitRows | None:
        """The commit that holds the offset."""
        for part in reversed(self._segments):
            if part.first_offset() <= offset:
                commit = part.commit(part.at_offset(offset))
                return commit if offset < commit.stop_offset else None
        return None

    def find_time(self, timestamp_us: int, *, offset_min: int) -> CommitRows | None:
        """The first commit with a message at or after both the time and the offset."""
        for part in self._segments:
            index = max(part.at_time(timestamp_us), part.at_offset(offset_min), 0)
            if index < len(part) and part.stop_offset(index) > offset_min:
                return part.commit(index)
        return None

    def last_commits(self) -> list[CommitRows]:
        """The last commit in each segment."""
        return [part.commit(len(part) - 1) for part in self._segments]

    def stop_in(self, segment: Path) -> int | None:
        """The offset after the topic's last message in a segment; None if it has none there."""
        return next(
            (part.stop_offset() for part in self._segments if part.segment == segment), None
        )

    def forget(self, segment: Path) -> None:
        self._segments = [part for part in self._segments if part.segment != segment]
