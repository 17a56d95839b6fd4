"""What the journal holds when a bus starts: its segments, where to go on, and what is damaged.

For each segment the index is read; where it lacks commits (a crash came before they were indexed,
or the index itself is lost or damaged) the segment's own bytes are looked at and the index is made
anew. At the end of the last segment, bytes that are no whole commit are a torn write: nobody was
told it was safe, so it is cut off. Anywhere else they are damage.

How a torn write is told from damage when whole commits follow it: every commit says up to which
number all was safe when it was written (`synced`). If that covers the bad one, it was safe once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from polybus.errors import StorageError
from polybus.log.disk import Disk, replace_file
from polybus.log.journal.commit import HEAD, TopicRows, head_of, new_mark
from polybus.log.journal.index import CommitEntry, Index, encode_entry, encode_seal, read_index
from polybus.log.journal.segment import Scan, damage_of, head_bytes
from polybus.log.layout import first_commit_of, index_path, segments

logger = logging.getLogger("polybus.log")


@dataclass(slots=True, kw_only=True)
class RecoveredSegment:
    """A segment as it was found.

    Attributes:
        end: where its last whole commit ends.
        index_bytes: the size of its index file, all of it good.
        holes: after how many entries bytes are damaged of which nobody knows whose they were.
    """

    path: Path
    entries: list[CommitEntry]
    sealed: bool
    end: int
    index_bytes: int
    holes: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Recovered:
    """The journal as it was found.

    Attributes:
        next_commit: the number of the first commit to come.
        live: the last segment, if commits may be appended to it.
        damage: rows that the index knows and the segment no longer has.
    """

    segments: list[RecoveredSegment]
    next_commit: int
    live: RecoveredSegment | None
    damage: list[tuple[TopicRows, StorageError]]


def recover(data: Path, disk: Disk) -> Recovered:
    """Read the journal, cut off a torn tail, make lost indexes anew."""
    paths = segments(data)
    damage: list[tuple[TopicRows, StorageError]] = []
    found = [_recover_segment(path, disk, damage, last=path is paths[-1]) for path in paths]
    next_commit = 1
    live = None
    if found:
        entries = [segment.entries[-1] for segment in found if segment.entries]
        next_commit = max(
            [first_commit_of(paths[-1]), *(entry.commit + 1 for entry in entries[-1:])]
        )
        last = found[-1]
        whole = last.end == _file_bytes(last.path) and not last.holes
        # A segment with damage is left as it is; the next commit begins another.
        if whole and not last.sealed and head_bytes(last.path) is not None:
            live = last
    return Recovered(segments=found, next_commit=next_commit, live=live, damage=damage)


def _recover_segment(
    path: Path, disk: Disk, damage: list[tuple[TopicRows, StorageError]], *, last: bool
) -> RecoveredSegment:
    index = read_index(index_path(path))
    file_bytes = _file_bytes(path)
    if file_bytes < index.end:
        for entry in index.entries:
            if entry.position + entry.size > file_bytes:
                error = damage_of(path, entry, "the file ends before the commit does")
                logger.error("%s", error.text)
                damage.extend((rows, error) for rows in entry.topics)
        # `end` past the file's end: nothing is appended here, the next commit begins a segment.
        return _segment(path, index, index.entries, sealed=index.sealed, end=index.end)
    if index.sealed:
        return _segment(path, index, index.entries, sealed=True, end=index.end)
    head = head_bytes(path)
    scan = Scan(path, index.end or head or len(HEAD))
    entries = index.entries + scan.entries
    segment = _segment(path, index, entries, sealed=scan.sealed, end=scan.end)
    if last and not entries and head is None:
        _begin_again(segment, disk)
    elif last and is_torn(scan, index):
        _cut(segment, scan, disk)
    elif scan.holes or scan.tail:
        _report(segment, scan)
    if scan.entries:
        # A crash came before they were synced, and whoever finds them in the index may rely on it.
        _sync(path, disk)
    complete = len(segment.entries) == len(index.entries) and not segment.sealed
    if not complete or index.file_bytes > index.intact_bytes:
        _write_index(segment, disk)
    return segment


def _segment(
    path: Path, index: Index, entries: list[CommitEntry], *, sealed: bool, end: int
) -> RecoveredSegment:
    return RecoveredSegment(
        path=path, entries=entries, sealed=sealed, end=end, index_bytes=index.intact_bytes
    )


def is_torn(scan: Scan, index: Index) -> bool:
    """Whether the first bytes that are no commit were never promised to anybody."""
    if not scan.holes:
        return bool(scan.tail)
    start = scan.holes[0][0]
    before = [entry.commit for entry in index.entries]
    before += [entry.commit for entry in scan.entries if entry.position < start]
    after = [note for note in scan.notes if not before or note.commit > before[-1]]
    bad = before[-1] + 1 if before else after[0].commit - 1 if after else 0
    return not scan.sealed and all(note.synced < bad for note in after)


def _cut(segment: RecoveredSegment, scan: Scan, disk: Disk) -> None:
    end = scan.holes[0][0] if scan.holes else scan.end
    kept = [entry for entry in segment.entries if entry.position < end]
    lost_bytes = _file_bytes(segment.path) - end
    logger.warning(
        "journal segment %s: the last %d bytes are a write that was never finished (%s); cut off",
        segment.path.name,
        lost_bytes,
        scan.holes[0][2] if scan.holes else scan.tail,
    )
    segment.entries = kept
    segment.end = end
    file = disk.open(segment.path)
    try:
        file.truncate(end)
        file.sync()
    finally:
        file.close()


def _sync(path: Path, disk: Disk) -> None:
    file = disk.open(path)
    try:
        file.sync()
    finally:
        file.close()


def _begin_again(segment: RecoveredSegment, disk: Disk) -> None:
    """The crash came before the segment had so much as a head."""
    file = disk.open(segment.path)
    try:
        file.truncate(0)
        file.append(head_of(new_mark()))
        file.sync()
    finally:
        file.close()
    segment.end = len(HEAD)


def _report(segment: RecoveredSegment, scan: Scan) -> None:
    holes = list(scan.holes)
    if scan.tail:
        holes.append((scan.end, _file_bytes(segment.path), scan.tail))
    for start, stop, reason in holes:
        text = f"journal segment {segment.path.name}, bytes {start} to {stop}: {reason}"
        logger.error("%s", text)
        whole = sum(1 for entry in segment.entries if entry.position < start)
        segment.holes.append((whole, text))


def _write_index(segment: RecoveredSegment, disk: Disk) -> None:
    # A segment with a hole keeps an index that stops before it, so that the next start, and
    # whoever reads the segment without us, meets the hole too.
    entries = segment.entries
    sealed = segment.sealed
    if segment.holes:
        entries = entries[: segment.holes[0][0]]
        sealed = False
    content = b"".join([encode_entry(entry) for entry in entries])
    if sealed:
        content += encode_seal(segment.end)
    replace_file(index_path(segment.path), content, disk)
    segment.index_bytes = len(content)


def _file_bytes(path: Path) -> int:
    return path.stat().st_size
