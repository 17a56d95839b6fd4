"""topic.json and polybus.json: which topics exist, and which were deleted.

Order of writes, each durable before the next:

create   topic.json of each topic that this call creates, in a folder DATA/trash/new/N; all of them
         are synced together; rename of each folder to the topic's. So a topic's folder without
         topic.json has lost it. A crash leaves some of the topics, each whole. The next start
         removes an unfinished one; earlier versions left a topic's folder with nothing but
         topic.json.tmp.
delete   polybus.json with the largest epoch so far, rename of the topic folder to DATA/trash/EPOCH,
         removal of everything in it but topic.json. The topic is gone from the rename on; the next
         start continues the removal.

A topic's epoch is larger than every epoch before it, and it is in topic.json before the journal has
a message of it. So files and journal rows of an older topic of the same name are recognised.

A topic.json in the trash is the proof that its topic was deleted (a tombstone). It stays until
nothing in the journal names the topic: no segment, no index, and not floor.json. Rows without a
topic and without a tombstone are never deleted: their topic.json was lost, and a frozen topic takes
its place, so that no other topic gets its name. Earlier versions left no tombstones: in their data
folders, recognised by a polybus.json without a checksum, the first start adds those of topics that
were deleted before.
"""

import datetime
import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from polybus import names
from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file, write_together
from polybus.log.interface import Bounds, ClusterLog, TopicSettings
from polybus.log.layout import (
    FORMAT,
    DataLock,
    exposed_folder,
    journal_folder,
    leftovers,
    owner_of,
    segments,
    tombstone_folder,
    topic_folder,
    topic_folders,
    topic_in,
    topics_folder,
    trash_folder,
    unfinished_copy_path,
)

logger = logging.getLogger("polybus.log")

_NOTE = "topic.json"
_NEW = "new"
WHAT_TO_DO = "restore the file from a backup, or run: polybus topics delete TOPIC --yes"


class TopicMetadata(msgspec.Struct, frozen=True):
    """The content of topic.json."""

    name: str
    epoch: int
    created: str
    settings: TopicSettings = TopicSettings()


class DataMetadata(msgspec.Struct, frozen=True, rename="kebab"):
    """The content of polybus.json: the format, and the largest epoch of any deleted topic."""

    format: int
    epoch_max: int = 0


class StoredTopic(Protocol):
    """The state that a log keeps for a topic."""

    epoch: int
    stop: int
    frozen: StorageError | None

    @property
    def start(self) -> int: ...


S = TypeVar("S", bound=StoredTopic)


class TopicStore(ABC, Generic[S]):
    """The topics of a log: on disk in `folder`, or only in memory without it.

    A topic's epoch is its creation time in milliseconds since 1970, or one more than the largest
    known epoch if the clock shows less.
    """

    def __init__(self, folder: Path | None, *, clock: Callable[[], int], disk: Disk) -> None:
        self._folder = folder
        self._clock = clock
        self._disk = disk
        self._notes: dict[str, TopicMetadata] = {}
        self._topics: dict[str, S] = {}
        self._owners: dict[str, str] = {}
        """The accounts of topics, without those of the default account."""
        self._epoch_max = 0
        self._damaged: dict[str, str] = {}
        """Topics whose topic.json is lost or damaged, with the reason."""
        self._strays: dict[str, list[int]] = {}
        """By topic, epochs of journal rows without a known topic or tombstone."""
        self._is_old = False
        """Whether an earlier version, without tombstones, wrote the folder."""

    @abstractmethod
    def _opened(self, note: TopicMetadata) -> S: ...

    def _load_notes(self, folder: Path) -> None:
        """Read the topics; a damaged one is recorded and frozen later.

        Raises StorageError `log.format` if a newer version wrote the data; `backup.incomplete`.
        """
        if unfinished_copy_path(folder).exists():
            text = f"{folder} is an unfinished copy; remove it and make it again"
            raise StorageError("backup.incomplete", text)
        self._disk.make_folder(topics_folder(folder))
        self._load_data_note(folder)
        for path in leftovers(folder):
            self._disk.unlink(path)
        self._tidy_trash(folder)
        for path in topic_folders(folder):
            if is_unfinished(path):
                self._disk.remove_folder(path)
            else:
                self._load_note(path)

    def _load_data_note(self, folder: Path) -> None:
        known = None
        try:
            known = read_data_metadata(folder)
            if known is None and (segments(folder) or topic_folders(folder)):
                raise StorageError("log.damaged", f"{folder / 'polybus.json'}: is missing")
        except StorageError as error:
            if error.code != "log.damaged":
                raise
            # It only has the largest epoch, and the clock is nearly always past that.
            self._epoch_max = self._clock() // 1000
            logger.error("%s: %s; the file is rewritten", error.code, error.text)
        if known is None:
            self._write_data_note(folder)
            return
        self._epoch_max = known.epoch_max
        self._is_old = not checked_json.is_checked((folder / "polybus.json").read_bytes())

    def _load_note(self, folder: Path) -> None:
        try:
            note = read_topic_metadata(folder)
            if note is None:
                raise StorageError("log.damaged", f"{folder / _NOTE}: is missing")
            if not checked_json.is_checked((folder / _NOTE).read_bytes()):
                replace_file(folder / _NOTE, checked_json.encode(note), self._disk)
        except StorageError as error:
            note = TopicMetadata(topic_in(folder), 0, "")
            self._damaged[note.name] = f"{error.text}; {WHAT_TO_DO}"
            logger.error("%s: topic %r is frozen: %s", error.code, note.name, error.text)
        self._notes[note.name] = note
        self._own(note.name)
        self._epoch_max = max(self._epoch_max, note.epoch)

    def _own(self, topic: str) -> None:
        owner = names.ACCOUNT if self._folder is None else owner_of(self._folder, topic)
        if owner != names.ACCOUNT:
            self._owners[topic] = owner

    def _open_topics(self) -> None:
        for topic, note in self._notes.items():
            log = self._topics[topic] = self._opened(note)
            if topic in self._damaged:
                log.frozen = frozen_error(topic, self._damaged[topic])

    arrives_late = False
    cluster: ClusterLog | None = None

    def admit(self, arrival: object) -> Sequence[Batch]:
        return ()

    def catch_up(self, topic: str, epoch: int = 0) -> None:
        return

    def topics(self) -> list[str]:
        return list(self._topics)

    @property
    def frozen(self) -> dict[str, StorageError]:
        found = {topic: log.frozen for topic, log in list(self._topics.items())}
        return {topic: error for topic, error in found.items() if error is not None}

    def freeze(self, topic: str, reason: str) -> None:
        log = self._log_of(topic)
        log.frozen = log.frozen or frozen_error(topic, reason)

    def settings(self, topic: str) -> TopicSettings:
        self._log_of(topic)
        return self._notes[topic].settings

    def change_settings(self, topic: str, settings: TopicSettings) -> None:
        frozen = self._log_of(topic).frozen
        if frozen is not None:
            raise frozen.copy()
        if self._folder is not None:
            folder = topic_folder(self._folder, topic)
            # From the file, because a log in memory gives its topics other epochs.
            note = read_topic_metadata(folder) or self._notes[topic]
            changed = msgspec.structs.replace(note, settings=settings)
            try:
                replace_file(folder / _NOTE, checked_json.encode(changed), self._disk)
            except OSError as error:
                raise storage_error(error, f"cannot change topic {topic!r}") from error
        self._notes[topic] = msgspec.structs.replace(self._notes[topic], settings=settings)

    def create_topic(self, topic: str, settings: TopicSettings | None = None) -> Bounds:
        self.create_topics({topic: settings or TopicSettings()})
        return Bounds(self._notes[topic].epoch, 0, 0)

    def create_topics(self, wanted: Mapping[str, TopicSettings]) -> None:
        now_us = self._clock()
        created = datetime.datetime.fromtimestamp(now_us / 1e6, datetime.UTC).isoformat()
        epoch = max(now_us // 1000, self._epoch_max + 1)
        notes: list[TopicMetadata] = []
        for topic, settings in wanted.items():
            if topic in self._notes:
                raise UsageError("topic.exists", f"topic {topic!r} already exists")
            notes.append(TopicMetadata(topic, epoch + len(notes), created, settings))
        if self._folder is not None and notes:
            try:
                self._make_folders(self._folder, notes)
            except OSError as error:
                what = f"topic {notes[0].name!r}" if len(notes) == 1 else f"{len(notes)} topics"
                raise storage_error(error, f"cannot create {what}") from error
        for note in notes:
            self._epoch_max = note.epoch
            self._notes[note.name] = note
            self._own(note.name)
            self._topics[note.name] = self._opened(note)

    def _make_folders(self, data: Path, notes: Sequence[TopicMetadata]) -> None:
        new = trash_folder(data) / _NEW
        self._disk.remove_folder(new)
        self._disk.make_folder(new)
        contents = {
            new / str(index) / _NOTE: checked_json.encode(note) for index, note in enumerate(notes)
        }
        write_together(new, contents, self._disk)
        targets = [topic_folder(data, note.name) for note in notes]
        for folder in {target.parent for target in targets}:
            self._disk.make_folder(folder)
        for path, target in zip(contents, targets, strict=True):
            if target.exists():  # Left by a failed creation: others belong to known topics.
                self._disk.remove_folder(target)
            self._disk.rename(path.parent, target)
        for changed in (new, *{target.parent for target in targets}):
            self._disk.sync_folder(changed)

    def delete_topic(self, topic: str) -> None:
        self._log_of(topic)
        if self._folder is not None:
            try:
                self._remove_folder(self._folder, topic)
            except OSError as error:
                if not topic_folder(self._folder, topic).exists():
                    # Messages accepted from here on would be lost at the next start.
                    self.freeze(topic, "its deletion was interrupted; delete it again")
                raise storage_error(error, f"cannot delete topic {topic!r}") from error
        del self._notes[topic]
        del self._topics[topic]
        self._owners.pop(topic, None)
        self._damaged.pop(topic, None)

    def _remove_folder(self, data: Path, topic: str) -> None:
        # The epoch first: a later topic of the same name must never get it again.
        self._write_data_note(data)
        folder = topic_folder(data, topic)
        self._disk.make_folder(trash_folder(data))
        # From the file, because a log in memory gives its topics other epochs.
        epoch = known = None
        with suppress(StorageError):
            epoch = epoch_of(folder)
        if epoch is None and topic not in self._damaged:
            # The disk fails now, or an earlier call was interrupted.
            known = self._notes[topic]
            epoch = known.epoch
        trashed = trash_folder(data) / ("damaged" if epoch is None else str(epoch))
        if folder.exists():
            self._disk.remove_folder(trashed)
            self._disk.rename(folder, trashed)
        if trashed.exists():
            for changed in (trash_folder(data), folder.parent):
                self._disk.sync_folder(changed)
            if epoch is None:
                self._disk.remove_folder(trashed)
            else:
                if known is not None:
                    replace_file(trashed / _NOTE, checked_json.encode(known), self._disk)
                self._strip(trashed)
                self._buried(topic, epoch)
        self._disk.remove_folder(exposed_folder(folder))
        for stray in self._strays.pop(topic, ()):
            self._bury(data, topic, stray)

    def _bury(self, data: Path, topic: str, epoch: int) -> None:
        """Add the tombstone of a topic without topic.json."""
        trashed = tombstone_folder(topic_folder(data, topic), epoch)
        self._disk.make_folder(trashed)
        replace_file(
            trashed / _NOTE, checked_json.encode(TopicMetadata(topic, epoch, "")), self._disk
        )
        self._buried(topic, epoch)

    def _buried(self, topic: str, epoch: int) -> None:
        """A tombstone was added. A log without a journal does not need it."""
        data = self._folder
        has_journal = data is not None and any(journal_folder(data).glob("*"))
        if data is not None and not has_journal:
            self._disk.remove_folder(trash_folder(data) / str(epoch))

    def _tidy_trash(self, data: Path) -> None:
        """Finish deletions that a crash interrupted."""
        for trashed in sorted(trash_folder(data).glob("*")):
            if trashed.name.isdigit() and (trashed / _NOTE).exists():
                self._strip(trashed)
                self._epoch_max = max(self._epoch_max, int(trashed.name))
            else:
                self._disk.remove_folder(trashed)

    def _strip(self, trashed: Path) -> None:
        for path in trashed.iterdir():
            if path.is_dir():
                self._disk.remove_folder(path)
            elif path.name != _NOTE:
                self._disk.unlink(path)

    def _write_data_note(self, data: Path) -> None:
        note = DataMetadata(format=FORMAT, epoch_max=self._epoch_max)
        content = msgspec.json.encode(note) if self._is_old else checked_json.encode(note)
        replace_file(data / "polybus.json", content, self._disk)

    def bounds(self, topic: str) -> Bounds:
        log = self._log_of(topic)
        if log.frozen is not None:
            raise log.frozen.copy()
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

    Raises StorageError, also for an OSError inside the block.
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


def read_data_metadata(data: Path) -> DataMetadata | None:
    """The content of polybus.json; None if the folder has none.

    Raises StorageError `log.format`, a newer version wrote the data; `log.damaged`.
    """
    path = data / "polybus.json"
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    note = checked_json.decode(content, DataMetadata, path, accept_unchecked=True)
    if note.format != FORMAT:
        text = f"{path} has format {note.format}; this version reads format {FORMAT}"
        raise StorageError("log.format", text)
    return note


def read_topic_metadata(folder: Path) -> TopicMetadata | None:
    """The content of topic.json; None if the topic was deleted or does not exist yet.

    Raises StorageError `log.damaged`.
    """
    note = _read_note(folder)
    if note is not None and topic_folder(folder.parents[3], note.name) != folder:
        text = f"{folder / _NOTE}: it names topic {note.name!r}, which belongs in another folder"
        raise StorageError("log.damaged", text)
    return note


def _read_note(folder: Path) -> TopicMetadata | None:
    return checked_json.read(folder / _NOTE, TopicMetadata, accept_unchecked=True)


def was_deleted(folder: Path, epoch: int) -> bool:
    """Whether the trash proves that the topic of a folder, with this epoch, was deleted."""
    try:
        note = _read_note(tombstone_folder(folder, epoch))
    except StorageError:
        return False
    if note is None or note.epoch != epoch:
        return False
    return topic_folder(folder.parents[3], note.name) == folder


def epoch_of(folder: Path) -> int | None:
    """The epoch in topic.json, as from `read_topic_metadata`."""
    note = read_topic_metadata(folder)
    return None if note is None else note.epoch


def is_unfinished(folder: Path) -> bool:
    """Whether a crash interrupted the creation of the topic in this folder."""
    return folder.is_dir() and [path.name for path in folder.iterdir()] == ["topic.json.tmp"]


def has_lost_metadata(folder: Path) -> bool:
    """Whether a topic's folder has lost its topic.json: both are created and removed together."""
    return folder.is_dir() and not is_unfinished(folder) and not (folder / _NOTE).exists()


def unknown(topic: str) -> UsageError:
    return UsageError("topic.unknown", f"there is no topic {topic[:40]!r}")


def frozen_error(topic: str, reason: str) -> StorageError:
    text = f"topic {topic!r} is damaged and cannot be written: {reason}"
    return StorageError("log.frozen", text)


def storage_error(error: OSError, what: str) -> StorageError:
    """The StorageError for an error of the disk: `log.full`, `log.denied` or `log.failed`."""
    code = "log.failed"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        code = "log.full"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        code = "log.denied"
    return StorageError(code, f"{what}: {error.strerror or error}")
