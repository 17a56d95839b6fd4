"""A data folder as another process sees it: topic.json, manifests and the journal's indexes.

Everything is cached until it changes: a stream asks for the bounds of its topics several times a
second, and a pattern may match a thousand.

Of the journal only indexed commits are visible. A commit is indexed after its fsync, so a reader
never sees a message that a crash could remove and whose offset would then be given to another
message.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from polybus import names
from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.columns import TopicKey
from polybus.log.history import manifest as manifests
from polybus.log.history.manifest import Manifest
from polybus.log.journal import floor as floors
from polybus.log.journal.segment import parse_index
from polybus.log.journal.topic_commits import SegmentCommits
from polybus.log.topics import TopicMetadata, has_lost_metadata, read_topic_metadata, unknown

T = TypeVar("T")
SETTLED_NS = 1_000_000_000
"""File systems have coarse timestamps: two changes within this time may have the same one."""
_TAIL_BYTES = 64

_Seen = tuple[int, int, int]


def _seen_in(status: os.stat_result) -> _Seen:
    """Attributes of a file that change when it is written or replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns


class _CachedFile(Generic[T]):
    """A small file, and its decoded content."""

    def __init__(self, folder: Path, name: str, load: Callable[[Path], T | None]) -> None:
        self._folder = folder
        self._path = str(folder / name)
        self._load = load
        self._seen: _Seen | None = None
        self._found: T | None = None

    def read(self) -> T | None:
        """The current content; None if the file is missing. Raises StorageError `log.damaged`."""
        try:
            seen = _seen_in(os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            self._seen = self._found = None
            return None
        if seen != self._seen:
            # If the file changes in between, `seen` is older than the content: it is loaded again.
            self._found = self._load(self._folder)
            self._seen = seen
        return self._found


class _TopicFiles(NamedTuple):
    folder: Path
    topic_json: _CachedFile[TopicMetadata]
    manifest: _CachedFile[Manifest]


class TopicNotes:
    """The current topic.json and manifest.json of all topics in a data folder."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._files: dict[Path, _TopicFiles] = {}
        """By folder."""
        self._by_topic: dict[str, _TopicFiles] = {}
        """Cached because building the path of a folder takes longer than the stat of its files."""
        self._listed: list[str] = []
        self._plain: list[str] = []
        """Topics that are not system topics."""
        self._listed_at: list[_Seen] | None = None

    def names(self, *, system: bool) -> list[str]:
        """All topics, sorted, including those with a damaged topic.json; reading one raises."""
        seen, is_settled = self.changes()
        if seen != self._listed_at:
            found = [self._name_in(folder) for folder in layout.topic_folders(self._data)]
            self._listed = sorted(name for name in found if name is not None)
            self._plain = [name for name in self._listed if not names.is_reserved(name)]
            self._listed_at = seen if is_settled and None not in found else None
        return list(self._listed if system else self._plain)

    def changes(self) -> tuple[list[_Seen], bool]:
        """A value that differs when a topic or an account is created or removed.

        Also whether the last change is so old that the next one certainly gives another value.
        """
        accounts = layout.accounts_folder(self._data)
        found = []
        for folder in (accounts, *(one / "topics" for one in layout.folders_in(accounts))):
            with suppress(FileNotFoundError):
                found.append(os.stat(folder))
        changed_ns = max((status.st_mtime_ns for status in found), default=0)
        is_settled = time.time_ns() - changed_ns > SETTLED_NS
        return [_seen_in(status) for status in found], is_settled

    def _name_in(self, folder: Path) -> str | None:
        try:
            note = self._of(folder).topic_json.read()
        except StorageError:
            return layout.topic_in(folder)
        if note is None and has_lost_metadata(folder):
            return layout.topic_in(folder)
        return None if note is None else note.name

    def manifest(self, topic: str) -> Manifest:
        """The topic's manifest, empty if it is of an older topic.

        Raises UsageError `topic.unknown`, StorageError `log.damaged`.
        """
        files = self._by_topic.get(topic)
        if files is None:
            files = self._by_topic[topic] = self._of(layout.topic_folder(self._data, topic))
        note = files.topic_json.read()
        if note is None and has_lost_metadata(files.folder):
            raise StorageError("log.damaged", f"{files.folder / 'topic.json'}: is missing")
        if note is None:
            raise unknown(topic)
        return manifests.of_epoch(files.folder, files.manifest.read(), note.epoch)

    def _of(self, folder: Path) -> _TopicFiles:
        found = self._files.get(folder)
        if found is None:
            found = self._files[folder] = _TopicFiles(
                folder,
                _CachedFile(folder, "topic.json", read_topic_metadata),
                _CachedFile(folder, manifests.NAME, manifests.load),
            )
        return found


class FollowedIndex:
    """One segment's index, read once, and then from where the last read ended.

    Recovery may replace it, and after a compaction the journal may begin again with the same names.
    So each read first compares the last bytes of the previous read; if they differ, the file is
    read again from the start.
    """

    def __init__(self, segment: Path) -> None:
        self.segment = segment
        self._path = layout.index_path(segment)
        self._forget()

    def _forget(self) -> None:
        self.topics: dict[TopicKey, SegmentCommits] = {}
        self._seen: _Seen | None = None
        self._end = 0
        self._tail = b""

    def refresh(self) -> set[TopicKey] | None:
        """Read what was added; return the topics that got commits, or None if others were lost.

        A missing index counts as empty.
        """
        is_lost = False
        try:
            with self._path.open("rb", buffering=0) as file:
                seen = _seen_in(os.fstat(file.fileno()))
                if seen == self._seen:
                    return set()
                tail_at = self._end - len(self._tail)
                if os.pread(file.fileno(), len(self._tail), tail_at) != self._tail:
                    self._forget()
                    is_lost = True
                added = os.pread(file.fileno(), seen[1] - self._end, self._end)
        except FileNotFoundError:
            is_lost = self._end > 0
            self._forget()
            return None if is_lost else set()
        index = parse_index(added)
        changed: set[TopicKey] = set()
        for entry in index.entries:
            for rows in entry.topics:
                key = (rows.topic, rows.epoch)
                changed.add(key)
                found = self.topics.get(key)
                if found is None:
                    found = self.topics[key] = SegmentCommits(self.segment)
                found.add(entry.position, entry.size, rows)
        self._end += index.intact_bytes
        self._tail = (self._tail + added[: index.intact_bytes])[-_TAIL_BYTES:]
        self._seen = seen
        return None if is_lost else changed


class JournalIndex:
    """All indexes of a journal. Only `refresh` and `floor` read the disk."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._indexes: dict[Path, FollowedIndex] = {}
        self._floor = _CachedFile(
            layout.journal_folder(data), floors.NAME, lambda folder: floors.load(folder.parent)
        )

    def refresh(self) -> set[TopicKey] | None:
        """Read what was added; return the topics that got commits, or None if a segment was
        removed.
        """
        changed: set[TopicKey] | None = set()
        # A segment is created only when the previous ones are complete, so the result has no gap
        # even if commits are added meanwhile.
        found = {}
        for segment in layout.segments(self._data):
            followed = self._indexes.get(segment) or FollowedIndex(segment)
            added = followed.refresh()
            changed = None if changed is None or added is None else changed | added
            found[segment] = followed
        is_kept = self._indexes.keys() <= found.keys()
        self._indexes = found
        return changed if is_kept else None

    def commits(self, key: TopicKey) -> Iterator[SegmentCommits]:
        """The topic's commits in each segment that has any, oldest first."""
        for index in self._indexes.values():
            commits = index.topics.get(key)
            if commits is not None:
                yield commits

    def floor(self) -> floors.Floor:
        """The floor of the journal; empty if damaged: the next start repairs the file."""
        try:
            return self._floor.read() or {}
        except StorageError:
            return {}

    def start(self, key: TopicKey) -> int | None:
        """The offset of the topic's first message in the journal; None if the journal has none."""
        return next((int(commits.entries[0]) for commits in self.commits(key)), None)

    def stop(self, key: TopicKey) -> int:
        """The offset after the topic's last message in the journal; 0 if the journal has none."""
        return max((commits.stop_offset() for commits in self.commits(key)), default=0)
