"""The journal as a reader in another process sees it: the indexes, followed while they grow.

Only what the index has is there: a commit is indexed after its fsync, so nothing that a crash could
take back, and whose offsets would then be given to other messages, is ever seen here.

An index is read once and then only on from where it ended. Recovery replaces it, and a journal that
was compacted away begins again with the same names: the last bytes read are compared each time, and
if they are not the same the file is read anew.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from polybus.log import layout
from polybus.log.columns import TopicRows
from polybus.log.journal.index import CommitEntry, parse_index

_TAIL_BYTES = 64

TopicKey = tuple[str, int]
"""A topic and its epoch."""


class CommitRows(NamedTuple):
    """A topic's rows in one commit, and where the commit is in its segment."""

    position: int
    size: int
    first_row: int
    first_offset: int
    row_count: int

    @property
    def stop_offset(self) -> int:
        return self.first_offset + self.row_count


class SegmentCommits:
    """A topic's commits in one segment, in offset order: flat arrays, as there are many."""

    __slots__ = ("counts", "firsts", "positions", "rows", "sizes", "times_max", "times_min")

    def __init__(self) -> None:
        self.firsts = array("q")
        self.counts = array("q")
        self.positions = array("q")
        self.sizes = array("q")
        self.rows = array("q")
        self.times_min = array("q")
        self.times_max = array("q")

    def add(self, entry: CommitEntry, rows: TopicRows) -> None:
        self.firsts.append(rows.first_offset)
        self.counts.append(rows.row_count)
        self.positions.append(entry.position)
        self.sizes.append(entry.size)
        self.rows.append(rows.first_row)
        self.times_min.append(rows.min_timestamp_us)
        self.times_max.append(rows.max_timestamp_us)

    @property
    def first(self) -> int:
        return self.firsts[0]

    @property
    def stop(self) -> int:
        return self.firsts[-1] + self.counts[-1]

    def within(self, start: int, stop: int) -> range:
        """The numbers of the commits with rows from `start` to `stop`."""
        low = max(0, bisect_right(self.firsts, start) - 1)
        if low < len(self.firsts) and self.firsts[low] + self.counts[low] <= start:
            low += 1
        return range(low, max(low, bisect_left(self.firsts, stop)))

    def commit(self, number: int) -> CommitRows:
        return CommitRows(
            self.positions[number],
            self.sizes[number],
            self.rows[number],
            self.firsts[number],
            self.counts[number],
        )


class FollowedIndex:
    """One segment's index, as far as it was read."""

    def __init__(self, segment: Path) -> None:
        self.segment = segment
        self.topics: dict[TopicKey, SegmentCommits] = {}
        self._path = layout.index_path(segment)
        self._seen: tuple[int, int, int] | None = None
        self._end = 0
        self._tail = b""

    def refresh(self) -> None:
        """Read what was added. An index that is not there has nothing."""
        try:
            with self._path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_size, status.st_mtime_ns)
                if seen == self._seen:
                    return
                if not self._goes_on(file.fileno()):
                    self._forget()
                added = os.pread(file.fileno(), status.st_size - self._end, self._end)
        except FileNotFoundError:
            self._forget()
            return
        index = parse_index(added)
        for entry in index.entries:
            for rows in entry.topics:
                key = (rows.topic, rows.epoch)
                found = self.topics.get(key)
                if found is None:
                    found = self.topics[key] = SegmentCommits()
                found.add(entry, rows)
        self._end += index.intact_bytes
        self._tail = (self._tail + added[: index.intact_bytes])[-_TAIL_BYTES:]
        self._seen = seen

    def _goes_on(self, file: int) -> bool:
        """Whether the file still has what was read of it."""
        return os.pread(file, len(self._tail), self._end - len(self._tail)) == self._tail

    def _forget(self) -> None:
        self.topics = {}
        self._seen = None
        self._end = 0
        self._tail = b""


class JournalIndex:
    """All indexes of a journal. `refresh` looks at the disk, everything else at what it found."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._indexes: dict[Path, FollowedIndex] = {}

    def refresh(self) -> None:
        # A segment is listed only when those before it are complete, so what is found has no gap
        # even if commits are added meanwhile.
        found = {}
        for segment in layout.segments(self._data):
            followed = self._indexes.get(segment) or FollowedIndex(segment)
            followed.refresh()
            found[segment] = followed
        self._indexes = found

    def commits(self, key: TopicKey) -> Iterator[tuple[Path, SegmentCommits]]:
        """The segments that have rows of a topic, oldest first."""
        for segment, index in self._indexes.items():
            commits = index.topics.get(key)
            if commits is not None:
                yield segment, commits

    def stop(self, key: TopicKey) -> int:
        """Where the topic's offsets in the journal end; 0 if it has none."""
        return max((commits.stop for _, commits in self.commits(key)), default=0)
