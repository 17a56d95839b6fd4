"""journal/floor.json: up to which offset each topic's rows were deleted from the journal.

Rows leave the journal because history has them. If a topic's history ends before its floor, the
folder mixes two moments, as a copy with a hand-over in between does, or its manifest was lost: rows
are missing, although no later row of the topic may tell.

Order of writes: manifests with the rows, the floor, then the deletion of segments. A crash before
the deletion leaves rows that both have. The file has a checksum; a damaged one is reported and
counts as missing, and the next deletion replaces it.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from polybus.errors import StorageError
from polybus.log import checked_json
from polybus.log.columns import TopicRows
from polybus.log.disk import Disk, replace_file
from polybus.log.layout import journal_folder, topic_folder

logger = logging.getLogger("polybus.log")
NAME = "floor.json"

Floor = dict[str, tuple[int, int]]
"""By topic: its epoch, and the offset after its last row that was deleted."""


class _FloorNote(msgspec.Struct, frozen=True):
    topics: Floor


def load(data: Path) -> Floor:
    """The floor of a data folder; empty if there is none, or a damaged one."""
    path = journal_folder(data) / NAME
    try:
        return checked_json.decode(path.read_bytes(), _FloorNote, path).topics
    except FileNotFoundError:
        return {}
    except (OSError, StorageError) as error:
        logger.warning("%s; the next hand-over replaces it", error)
        return {}


def lift(data: Path, deleted: Iterable[TopicRows], disk: Disk) -> None:
    """Record, durably, that these rows are about to be deleted from the journal."""
    before = load(data)
    floor = dict(before)
    for rows in deleted:
        floor[rows.topic] = max(floor.get(rows.topic, (0, 0)), (rows.epoch, rows.stop_offset))
    # Not those of deleted topics, or it would grow for ever.
    kept = {topic: at for topic, at in floor.items() if topic_folder(data, topic).is_dir()}
    if kept != before:
        content = checked_json.encode(_FloorNote(kept))
        replace_file(journal_folder(data) / NAME, content, disk)


def missing(topic: str, epoch: int, stop: int, floor: Floor) -> tuple[int, int] | None:
    """The first and last offset that a topic which ends at `stop` has lost; None if none."""
    floor_epoch, floor_stop = floor.get(topic, (epoch, 0))
    return (stop, floor_stop - 1) if floor_epoch == epoch and stop < floor_stop else None
