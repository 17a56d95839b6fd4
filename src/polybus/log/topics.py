"""topic.json: which topics there are, with epoch and settings; shared by all local logs.

Order of writes, and what a start makes of each prefix:

- Create: the folder, `topic.json.tmp`, its rename to `topic.json`. The topic exists from the rename
  on. A folder without anything but the temporary file is removed.
- Delete: polybus.json with the largest epoch so far, then a rename of the folder into the trash.
  The topic is gone from that rename on, and the trash is emptied. So a topic of the same name gets
  a larger epoch, and what the journal still has of the deleted one belongs to nobody.

An epoch is in topic.json before any message of it is in the journal.
"""

from __future__ import annotations

import datetime
import errno
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from polybus.errors import StorageError, UsageError
from polybus.log.disk import Disk, OsDisk, replace_file
from polybus.log.interface import TopicSettings
from polybus.log.layout import FORMAT, topic_folder, topics_folder, trash_folder

logger = logging.getLogger("polybus.log")


class SettingsNote(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """The settings as topic.json has them."""

    retention_age_s: float | None = None
    retention_bytes: int | None = None


class TopicNote(msgspec.Struct, frozen=True):
    """What topic.json says."""

    name: str
    epoch: int
    created: str
    settings: SettingsNote = SettingsNote()


class DataNote(msgspec.Struct, frozen=True, rename="kebab"):
    """What polybus.json says: the format, and the largest epoch of any topic deleted so far."""

    format: int
    epoch_max: int = 0


class TopicStore:
    """The topics of a data directory, on disk; or of nothing but memory, without one.

    A topic's epoch is the time it was created, in milliseconds since 1970, or one more than the
    largest epoch ever seen here, should the clock say less.
    """

    def __init__(
        self, data: Path | None, *, clock: Callable[[], int], disk: Disk | None = None
    ) -> None:
        """Read what is there.

        Raises:
            StorageError: `log.format`, a newer version wrote the data; `log.damaged`, a topic.json
                cannot be read.
        """
        self._data = data
        self._clock = clock
        self._disk = disk or OsDisk()
        self._topics: dict[str, tuple[int, TopicSettings]] = {}
        self._epoch_max = 0
        if data is not None:
            self._read_format(data)
            self._disk.make_folder(topics_folder(data))
            self._disk.remove_folder(trash_folder(data))
            for folder in topics_folder(data).iterdir():
                if is_unfinished(folder):
                    self._disk.remove_folder(folder)
            for path in sorted(topics_folder(data).glob("*/topic.json")):
                self._read_topic(path)

    def names(self) -> list[str]:
        return list(self._topics)

    def epoch(self, topic: str) -> int:
        return self._topics[topic][0]

    def settings(self, topic: str) -> TopicSettings:
        found = self._topics.get(topic)
        if found is None:
            raise unknown(topic)
        return found[1]

    def create(self, topic: str, settings: TopicSettings | None) -> int:
        """Create a topic and return its epoch. Raises UsageError `topic.exists`, StorageError."""
        if topic in self._topics:
            raise UsageError("topic.exists", f"topic {topic!r} exists")
        settings = settings or TopicSettings()
        now_us = self._clock()
        epoch = max(now_us // 1000, self._epoch_max + 1)
        if self._data is not None:
            created = datetime.datetime.fromtimestamp(now_us / 1e6, datetime.UTC).isoformat()
            own = SettingsNote(
                retention_age_s=settings.retention_age_s, retention_bytes=settings.retention_bytes
            )
            note = TopicNote(name=topic, epoch=epoch, created=created, settings=own)
            folder = topic_folder(self._data, topic)
            try:
                self._disk.make_folder(folder)
                replace_file(folder / "topic.json", msgspec.json.encode(note), self._disk)
            except OSError as error:
                raise storage_error(error, f"cannot create topic {topic!r}") from error
        self._epoch_max = epoch
        self._topics[topic] = (epoch, settings)
        return epoch

    def renew_epochs(self) -> None:
        """Give every topic a new epoch, for as long as this store is used. Raises OSError.

        topic.json keeps the old one: it is that of the messages on disk, if there are any.
        """
        epoch = max(self._clock() // 1000, self._epoch_max + 1)
        if self._topics and self._data is not None:
            self._epoch_max = epoch
            self._write_format(self._data)
        self._topics = {topic: (epoch, found[1]) for topic, found in self._topics.items()}

    def delete(self, topic: str) -> None:
        """Remove a topic and its folder. Raises UsageError `topic.unknown`, StorageError."""
        found = self._topics.get(topic)
        if found is None:
            raise unknown(topic)
        if self._data is not None:
            try:
                self._remove_folder(self._data, topic, found[0])
            except OSError as error:
                raise storage_error(error, f"cannot delete topic {topic!r}") from error
        del self._topics[topic]

    def _remove_folder(self, data: Path, topic: str, epoch: int) -> None:
        # The epoch is remembered first: a topic of the same name must never get it again.
        self._write_format(data)
        trash = trash_folder(data)
        self._disk.make_folder(trash)
        aside = trash / str(epoch)
        self._disk.rename(topic_folder(data, topic), aside)
        self._disk.sync_folder(topics_folder(data))
        self._disk.remove_folder(aside)

    def _read_format(self, data: Path) -> None:
        self._disk.make_folder(data)
        note = read_data_note(data)
        if note is None:
            self._write_format(data)
        else:
            self._epoch_max = note.epoch_max

    def _write_format(self, data: Path) -> None:
        note = DataNote(format=FORMAT, epoch_max=self._epoch_max)
        replace_file(data / "polybus.json", msgspec.json.encode(note), self._disk)

    def _read_topic(self, path: Path) -> None:
        try:
            note = msgspec.json.decode(path.read_bytes(), type=TopicNote)
        except msgspec.DecodeError as error:
            raise StorageError("log.damaged", f"{path}: {error}") from error
        settings = TopicSettings(
            retention_age_s=note.settings.retention_age_s,
            retention_bytes=note.settings.retention_bytes,
        )
        self._topics[note.name] = (note.epoch, settings)
        self._epoch_max = max(self._epoch_max, note.epoch)


def read_data_note(data: Path) -> DataNote | None:
    """What polybus.json says; None if the folder has none.

    Raises:
        StorageError: `log.format`, a newer version wrote the data; `log.damaged`.
    """
    path = data / "polybus.json"
    try:
        note = msgspec.json.decode(path.read_bytes(), type=DataNote)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError as error:
        raise StorageError("log.damaged", f"{path}: {error}") from error
    if note.format != FORMAT:
        text = f"{path} has format {note.format}; this version reads format {FORMAT}"
        raise StorageError("log.format", text)
    return note


def is_unfinished(folder: Path) -> bool:
    """Whether this is the folder of a topic whose creation was cut short."""
    return folder.is_dir() and all(path.name == "topic.json.tmp" for path in folder.iterdir())


def unknown(topic: str) -> UsageError:
    return UsageError("topic.unknown", f"there is no topic {topic[:40]!r}")


def storage_error(error: OSError, what: str) -> StorageError:
    """The StorageError of a disk's error: `log.full` or `log.failed`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StorageError("log.full" if full else "log.failed", f"{what}: {error.strerror}")
