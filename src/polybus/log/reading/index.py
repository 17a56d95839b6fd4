"""The journal as a reader in another process sees it: its index files, followed while they grow.

Only indexed commits are visible. A commit is indexed after its fsync, so a reader never sees a
message that a crash could remove and whose offset would then be given to another message.

An index is read once, and then from where the last read ended. Recovery may replace it, and after
a compaction the journal may begin again with the same names. So each read first compares the last
bytes of the read before; if they differ, the file is read again from the start.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from polybus.log import layout
from polybus.log.journal.segment import parse_index
from polybus.log.journal.topic_commits import SegmentCommits

_TAIL_BYTES = 64

TopicKey = tuple[str, int]
"""A topic and its epoch."""


class FollowedIndex:
    """One segment's index, as far as it was read."""

    def __init__(self, segment: Path) -> None:
        self.segment = segment
        self._path = layout.index_path(segment)
        self._forget()

    def _forget(self) -> None:
        self.topics: dict[TopicKey, SegmentCommits] = {}
        self._seen: tuple[int, int, int] | None = None
        self._end = 0
        self._tail = b""

    def refresh(self) -> None:
        """Read what was added. A missing index counts as empty."""
        try:
            with self._path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_size, status.st_mtime_ns)
                if seen == self._seen:
                    return
                tail_at = self._end - len(self._tail)
                if os.pread(file.fileno(), len(self._tail), tail_at) != self._tail:
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
                    found = self.topics[key] = SegmentCommits(self.segment)
                found.add(entry.position, entry.size, rows)
        self._end += index.intact_bytes
        self._tail = (self._tail + added[: index.intact_bytes])[-_TAIL_BYTES:]
        self._seen = seen


class JournalIndex:
    """All indexes of a journal. Only `refresh` reads the disk."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._indexes: dict[Path, FollowedIndex] = {}

    def refresh(self) -> None:
        # A segment appears only when those before it are complete, so the result has no gap even
        # if commits are added meanwhile.
        found = {}
        for segment in layout.segments(self._data):
            followed = self._indexes.get(segment) or FollowedIndex(segment)
            followed.refresh()
            found[segment] = followed
        self._indexes = found

    def commits(self, key: TopicKey) -> Iterator[SegmentCommits]:
        """The topic's commits in each segment that has any, oldest first."""
        for index in self._indexes.values():
            commits = index.topics.get(key)
            if commits is not None:
                yield commits

    def stop(self, key: TopicKey) -> int:
        """The offset after the topic's last message in the journal; 0 if it has none there."""
        return max((commits.stop_offset() for commits in self.commits(key)), default=0)
