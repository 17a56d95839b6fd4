"""topic.json and polybus.json: which topics exist, with epoch and settings.

Order of writes, each durable before the next:

create   topic folder, topic.json.tmp, rename to topic.json. The topic exists from the rename on.
         The next start removes a folder with nothing but the temporary file.
delete   polybus.json with the largest epoch so far, rename of the topic folder to DATA/trash,
         removal. The topic is gone from the rename on; the next start empties the trash.

A topic's epoch is larger than every epoch before it, and it is in topic.json before the journal has
a message of it. So files and journal rows of an older topic of the same name are recognised and
ignored.
"""

import datetime
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from polybus.errors import StorageError, UsageError
from polybus.log.disk import Disk, replace_file
from polybus.log.interface import Bounds, TopicSettings
from polybus.log.layout import FORMAT, DataLock, topic_folder, topics_folder, trash_folder


class TopicNote(msgspec.Struct, frozen=True):
    """The content of topic.json."""

    name: str
    epoch: int
    created: str
    settings: TopicSettings = TopicSettings()


class DataNote(msgspec.Struct, frozen=True, rename="kebab"):
    """The content of polybus.json: the format, and the largest epoch of any deleted topic."""

    format: int
    epoch_max: int = 0


class StoredTopic(Protocol):
    """What a log keeps of a topic."""

    epoch: int
    stop: int
    frozen: StorageError | None

    @property
    def start(self) -> int: ...


S = TypeVar("S", bound=StoredTopic)


class LogOfTopics(ABC, Generic[S]):
    """The part of a log that knows its topics: on disk in `folder`, or in memory only without it.

    A topic's epoch is its creation time in milliseconds since 1970, or one more than the largest
    known epoch if the clock shows less.
    """

    def __init__(self, folder: Path | None, *, clock: Callable[[], int], disk: Disk) -> None:
        self._folder = folder
        self._clock = clock
        self._disk = disk
        self._notes: dict[str, TopicNote] = {}
        self._topics: dict[str, S] = {}
        self._epoch_max = 0

    @abstractmethod
    def _opened(self, note: TopicNote) -> S: ...

    def _load_notes(self, folder: Path) -> None:
        """Read which topics there are.

        Raises StorageError `log.format`, a newer version wrote the data; `log.damaged`, a
        topic.json cannot be read.
        """
        known = read_data_note(folder)
        if known is None:
            self._write_data_note(folder)
        else:
            self._epoch_max = known.epoch_max
        topics = topics_folder(folder)
        self._disk.make_folder(topics)
        self._disk.remove_folder(trash_folder(folder))
        for path in topics.iterdir():
            if is_unfinished(path):
                self._disk.remove_folder(path)
        for path in sorted(topics.glob("*/topic.json")):
            note = read_topic_note(path.parent)
            if note is not None:
                self._notes[note.name] = note
                self._epoch_max = max(self._epoch_max, note.epoch)

    def _open_topics(self) -> None:
        for topic, note in self._notes.items():
            self._topics[topic] = self._opened(note)

    def topics(self) -> list[str]:
        return list(self._topics)

    def settings(self, topic: str) -> TopicSettings:
        self._log_of(topic)
        return self._notes[topic].settings

    def create_topic(self, topic: str, settings: TopicSettings | None = None) -> Bounds:
        if topic in self._notes:
            raise UsageError("topic.exists", f"topic {topic!r} exists")
        now_us = self._clock()
        epoch = max(now_us // 1000, self._epoch_max + 1)
        created = datetime.datetime.fromtimestamp(now_us / 1e6, datetime.UTC).isoformat()
        note = TopicNote(topic, epoch, created, settings or TopicSettings())
        if self._folder is not None:
            folder = topic_folder(self._folder, topic)
            try:
                self._disk.make_folder(folder)
                replace_file(folder / "topic.json", msgspec.json.encode(note), self._disk)
            except OSError as error:
                raise storage_error(error, f"cannot create topic {topic!r}") from error
        self._epoch_max = epoch
        self._notes[topic] = note
        self._topics[topic] = self._opened(note)
        return Bounds(epoch, 0, 0)

    def delete_topic(self, topic: str) -> None:
        epoch = self._log_of(topic).epoch
        if self._folder is not None:
            try:
                self._remove_folder(self._folder, topic, epoch)
            except OSError as error:
                raise storage_error(error, f"cannot delete topic {topic!r}") from error
        del self._notes[topic]
        del self._topics[topic]

    def _remove_folder(self, data: Path, topic: str, epoch: int) -> None:
        # The epoch first: a later topic of the same name must never get it again.
        self._write_data_note(data)
        trash = trash_folder(data)
        self._disk.make_folder(trash)
        aside = trash / str(epoch)
        self._disk.rename(topic_folder(data, topic), aside)
        self._disk.sync_folder(topics_folder(data))
        self._disk.remove_folder(aside)

    def _write_data_note(self, data: Path) -> None:
        note = DataNote(format=FORMAT, epoch_max=self._epoch_max)
        replace_file(data / "polybus.json", msgspec.json.encode(note), self._disk)

    def bounds(self, topic: str) -> Bounds:
        log = self._log_of(topic)
        if log.frozen is not None:
            raise log.frozen.again()
        # `start` first: it never passes a `stop` that is read later.
        start = log.start
        return Bounds(log.epoch, start, log.stop)

    def _log_of(self, topic: str) -> S:
        log = self._topics.get(topic)
        if log is None:
            raise unknown(topic)
        return log


@contextmanager
def opened_data(data: Path, disk: Disk) -> Iterator[DataLock]:
    """Create and lock the folder, to open a log in it; unlock it if that fails.

    Raises StorageError, also for an OSError within.
    """
    try:
        disk.make_folder(data)
        lock = DataLock(data)
        try:
            yield lock
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise storage_error(error, f"cannot open {data}") from error


def read_data_note(data: Path) -> DataNote | None:
    """The content of polybus.json; None if the folder has none.

    Raises StorageError `log.format`, a newer version wrote the data; `log.damaged`.
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


def read_topic_note(folder: Path) -> TopicNote | None:
    """The content of topic.json; None if the topic was deleted or not created yet.

    Raises StorageError `log.damaged`.
    """
    path = folder / "topic.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=TopicNote)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError("log.damaged", f"{path}: {error}") from error


def epoch_of(folder: Path) -> int | None:
    """The epoch in topic.json; as `read_topic_note`."""
    note = read_topic_note(folder)
    return None if note is None else note.epoch


def is_unfinished(folder: Path) -> bool:
    """Whether a crash interrupted the creation of the topic in this folder."""
    return folder.is_dir() and all(path.name == "topic.json.tmp" for path in folder.iterdir())


def unknown(topic: str) -> UsageError:
    return UsageError("topic.unknown", f"there is no topic {topic[:40]!r}")


def storage_error(error: OSError, what: str) -> StorageError:
    """The StorageError for an error of the disk: `log.full` or `log.failed`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StorageError("log.full" if full else "log.failed", f"{what}: {error.strerror}")
