"""journal/floor.json: the low watermark of each topic in the journal.

Its rows below that offset were deleted from the journal.

Rows are deleted from the journal when history has them. If a topic's history ends before its floor,
rows are missing, even if no later row shows the gap: the manifest was lost, or the folder was
copied while a hand-over ran.

Order of writes: manifests with the rows, the floor, then the deletion of segments. A crash before
the deletion leaves rows that both have. A topic is removed from the file only with the proof of its
deletion (log/topics.py), which stays until then, also while the disk cannot read it. The file has a
checksum. If it is damaged or missing, it is written again from the manifests of all topics, by a
start, or by a running bus before it changes the file. A running bus does not replace a file that
the disk cannot read, because it may be intact: no segment is deleted until it can be read.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from polybus.errors import StorageError
from polybus.log import checked_json
from polybus.log.columns import TopicRows
from polybus.log.disk import Disk, replace_file
from polybus.log.layout import journal_folder, topic_folder, trash_folder
from polybus.log.topics import storage_error, was_deleted

logger = logging.getLogger("polybus.log")
NAME = "floor.json"

Floor = dict[str, tuple[int, int]]
"""By topic: its epoch, and the offset after its last deleted row."""
HandedOver = Callable[[], Floor]
"""Finds the epoch of each topic, and the offset up to which history has its rows."""


class _FloorContent(msgspec.Struct, frozen=True):
    topics: Floor


def load(data: Path) -> Floor | None:
    """The floor of a data folder, or None. Raises StorageError `log.damaged`."""
    note = checked_json.read(journal_folder(data) / NAME, _FloorContent)
    return None if note is None else note.topics


def load_or_make(data: Path, handed_over: Floor, disk: Disk) -> Floor:
    """The floor; if damaged or missing, it is rewritten from the topics' hand-over offsets."""
    found = None
    try:
        found = load(data)
    except StorageError as error:
        logger.error("%s: %s; the file is rewritten", error.code, error.text)
    if found is None and handed_over:
        _save(data, handed_over, disk)
    return handed_over if found is None else found


def current(data: Path, handed_over: HandedOver) -> Floor:
    """The floor to change: `handed_over`, if the file is damaged or missing.

    Raises StorageError if the disk cannot read the file: its content must not be replaced.
    """
    path = journal_folder(data) / NAME
    try:
        return checked_json.decode(path.read_bytes(), _FloorContent, path).topics
    except FileNotFoundError:
        return handed_over()
    except OSError as error:
        raise storage_error(error, f"cannot read {path}, so no segment is deleted") from error
    except StorageError as error:
        logger.error("%s: %s; the file is rewritten", error.code, error.text)
        return handed_over()


def lift(data: Path, deleted: Iterable[TopicRows], disk: Disk, handed_over: HandedOver) -> None:
    """Record, durably, that these rows are about to be deleted from the journal.

    Raises StorageError, as `current`.
    """
    floor = current(data, handed_over)
    for rows in deleted:
        floor[rows.topic] = max(floor.get(rows.topic, (0, 0)), (rows.epoch, rows.stop_offset))
    # Without deleted topics, or it would grow forever.
    save_without_deleted(data, floor, disk)


def save_without_deleted(data: Path, floor: Floor, disk: Disk) -> Floor:
    """Replace the floor, durably, without the topics whose tombstones prove their deletion.

    Return it: a topic whose tombstone cannot be read stays in it, and needs the tombstone later.
    """
    buried = {path.name for path in trash_folder(data).glob("*")}
    kept = {
        topic: (epoch, stop)
        for topic, (epoch, stop) in floor.items()
        if str(epoch) not in buried or not was_deleted(topic_folder(data, topic), epoch)
    }
    # Even if nothing changed: the fsync of an earlier call, or of a deletion, may have failed.
    _save(data, kept, disk)
    return kept


def _save(data: Path, floor: Floor, disk: Disk) -> None:
    replace_file(journal_folder(data) / NAME, checked_json.encode(_FloorContent(floor)), disk)


def missing(topic: str, epoch: int, stop: int, floor: Floor) -> tuple[int, int] | None:
    """The first and last offset that a topic ending at `stop` has lost; None if it lost none."""
    floor_epoch, floor_stop = floor.get(topic, (epoch, 0))
    return (stop, floor_stop - 1) if floor_epoch == epoch and stop < floor_stop else None
