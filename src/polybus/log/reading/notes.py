"""topic.json and manifest.json of all topics, cached until they are replaced.

A stream asks for the bounds of its topics several times a second, and a pattern may match a
thousand. So paths are computed once, and the folder of topics is listed only after a change.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from polybus import names
from polybus.log import layout
from polybus.log.history import manifest as manifests
from polybus.log.history.manifest import Manifest
from polybus.log.topics import TopicNote, read_topic_note, unknown

T = TypeVar("T")
SETTLED_NS = 1_000_000_000
"""File systems have coarse timestamps: two changes within this time may have the same one."""


class _CachedFile(Generic[T]):
    """A small file in a topic's folder, and its decoded content."""

    def __init__(self, folder: Path, name: str, load: Callable[[Path], T | None]) -> None:
        self._folder = folder
        self._path = str(folder / name)
        self._load = load
        self._seen: tuple[int, int, int] | None = None
        self._found: T | None = None

    def read(self) -> T | None:
        """The current content; None if the file is missing. Raises StorageError `log.damaged`."""
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._seen = self._found = None
            return None
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen != self._seen:
            # If the file changes in between, `seen` is older than the content: it is loaded again.
            self._found = self._load(self._folder)
            self._seen = seen
        return self._found


class TopicNotes:
    """The current topic.json and manifest.json of all topics in a data folder."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folders: dict[Path, tuple[_CachedFile[TopicNote], _CachedFile[Manifest]]] = {}
        self._by_topic: dict[str, tuple[_CachedFile[TopicNote], _CachedFile[Manifest]]] = {}
        self._listed: list[str] = []
        self._listed_at: tuple[int, int] | None = None

    def names(self, *, system: bool) -> list[str]:
        """All topics, sorted. Raises StorageError `log.damaged`."""
        folder = layout.topics_folder(self._data)
        try:
            status = os.stat(folder)
        except FileNotFoundError:
            return []
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._listed_at:
            complete = self._list(folder)
            settled = time.time_ns() - status.st_mtime_ns > SETTLED_NS
            self._listed_at = seen if complete and settled else None
        return [name for name in self._listed if system or not names.is_reserved(name)]

    def _list(self, folder: Path) -> bool:
        """List the folder; return whether every topic in it was complete."""
        with os.scandir(folder) as entries:
            paths = [Path(entry.path) for entry in entries if entry.is_dir()]
        notes = [self._files(path)[0].read() for path in paths]
        self._listed = sorted(note.name for note in notes if note is not None)
        return None not in notes

    def epoch(self, topic: str) -> int:
        """Raises UsageError `topic.unknown`, StorageError `log.damaged`."""
        note = self._of(topic)[0].read()
        if note is None:
            raise unknown(topic)
        return note.epoch

    def manifest(self, topic: str) -> Manifest:
        """The topic's manifest, empty if it is of an older topic. Raises as `epoch`."""
        epoch = self.epoch(topic)
        found = self._of(topic)[1].read()
        if found is None or found.epoch != epoch:
            return Manifest(epoch=epoch)
        return found

    def _of(self, topic: str) -> tuple[_CachedFile[TopicNote], _CachedFile[Manifest]]:
        found = self._by_topic.get(topic)
        if found is None:
            found = self._files(layout.topic_folder(self._data, topic))
            self._by_topic[topic] = found
        return found

    def _files(self, folder: Path) -> tuple[_CachedFile[TopicNote], _CachedFile[Manifest]]:
        found = self._folders.get(folder)
        if found is None:
            note = _CachedFile(folder, "topic.json", read_topic_note)
            found = self._folders[folder] = (
                note,
                _CachedFile(folder, manifests.NAME, manifests.load),
            )
        return found
