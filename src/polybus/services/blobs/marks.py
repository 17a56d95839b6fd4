"""Marks of blobs: pending ones that messages share, and whether a mark's message exists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polybus import references
from polybus.errors import PolybusError, UsageError
from polybus.log import blobs as files
from polybus.log.blobs import BlobMark
from polybus.log.interface import Log


@dataclass(slots=True)
class _PendingMark:
    """A pending mark on the disk, which several messages may share: the last one settles it."""

    holds: int = 0
    mark: BlobMark | None = None
    """The mark of the last of these messages that is durable."""
    older: list[BlobMark] = field(default_factory=list)


class PendingMarks:
    """The pending marks of messages that are being published."""

    def __init__(self, later: Callable[..., None]) -> None:
        """`later` changes files, one after the other."""
        self._later = later
        self._marks: dict[tuple[Path, str], _PendingMark] = {}
        """By blob and name."""

    def hold(self, blob: Path, pending: BlobMark) -> None:
        self._marks.setdefault((blob, pending.name), _PendingMark()).holds += 1

    def settle(
        self,
        path: Path,
        pending: BlobMark,
        mark: BlobMark | None = None,
        older: Sequence[BlobMark] = (),
    ) -> None:
        """The message of a pending mark is durable or, if `mark` is None, was not published."""
        shared = self._marks[path, pending.name]
        shared.holds -= 1
        shared.older += older
        if mark is not None and (shared.mark is None or shared.mark.offset < mark.offset):
            shared.mark = mark
        if shared.holds:
            return  # Until then the pending mark keeps the blob for all of them.
        del self._marks[path, pending.name]
        if shared.mark is None:
            self._later(files.drop_marks, path, [pending])
        else:
            self._later(files.settle_mark, path, pending, shared.mark, shared.older)


def exists(log: Log, topic: str) -> bool:
    """Whether such a topic exists, damaged or not."""
    try:
        log.bounds(topic)
    except UsageError:
        return False
    except PolybusError:
        pass  # Damaged.
    return True


def is_gone(log: Log, known: dict[str, tuple[int, int] | None], topic: str, mark: BlobMark) -> bool:
    """Whether the message of a mark was deleted or has expired."""
    if topic not in known:
        try:
            bounds = log.bounds(topic)
            known[topic] = (bounds.epoch, bounds.start)
        except UsageError:
            known[topic] = (-1, 0)
        except PolybusError:
            known[topic] = None  # Damaged: the bounds are unknown.
    found = known[topic]
    return found is not None and (found[0] != mark.epoch or found[1] > mark.offset)


def find_message(log: Log, topic: str, pending: BlobMark, blob_id: str) -> int | None:
    """The last message of a topic that refers to a blob, from a mark's offset on. May block.

    Raises StorageError if the topic is damaged.
    """
    bounds = log.bounds(topic)
    offset = max(pending.offset, bounds.start)
    found = None
    while offset < bounds.stop:
        for batch in log.read(topic, offset):
            for index, headers in enumerate(batch.headers or ()):
                if headers and headers.get(references.HEADER) == blob_id.encode():
                    found = batch.first_offset + index
            offset = batch.last_offset + 1
    return found
