"""Recovery: what the journal contains when a bus starts, where it continues, what is damaged.

Order of writes of a commit: segment bytes, fsync, index record. Of a segment: head, fsync, fsync of
the folder; at its end the end marker, fsync, seal record of the index, fsync. Recovery accepts
every prefix:

- No head yet: the last segment begins again (`_begin_again`).
- Bytes at the end of the last segment that are not a whole commit: a torn write. No receipt was
  sent for it, so it is cut off (`_cut`). Anywhere else such bytes are damage.
- Whole commits without an index record, or a lost or damaged index: the commits are found in the
  segment, synced, and the index is replaced (`_write_index`).
- An end marker without a seal record: the index is replaced likewise.
- Rows that history already has (the hand-over replaced the manifest and a crash came before the
  segment was deleted): `restore` skips rows below the manifest's hand-over offset.
- An index without a segment: a segment that is handed over is deleted before its index. If history
  has all rows of the index, it is deleted; else the segment was lost, and its topics are frozen
  (`settle_orphans`).

Whole commits may follow a bad one, because several commits can be written before one fsync. Each
commit records up to which number all commits were synced when it was written (`synced`). If that
covers the bad one, it was durable once, and this is damage and not a torn write.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from polybus import scan as scanner
from polybus.errors import StorageError
from polybus.log.columns import TopicKey, TopicRows
from polybus.log.disk import Disk, replace_file
from polybus.log.journal.commit import HEAD, head_of, new_mark
from polybus.log.journal.segment import (
    Segment,
    SegmentScan,
    SegmentWriter,
    damage_of,
    encode_entry,
    encode_seal,
    read_index,
)
from polybus.log.journal.topics import JournalTopic
from polybus.log.layout import (
    first_commit_of,
    index_path,
    orphan_indexes,
    segments,
    topic_folder,
)
from polybus.log.topics import was_deleted

logger = logging.getLogger("polybus.log")


class RecoveredSegment(Segment):
    """A segment as recovery left it.

    Attributes:
        index_bytes: the size of its index file, without a bad record.
        holes: (number of entries before it, text) of damaged bytes whose topics are unknown.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.index_bytes = self.index.intact_bytes
        self.holes: list[tuple[int, str]] = []

    @property
    def is_open(self) -> bool:
        """Whether it is intact and not sealed, so that it can be appended to."""
        return not self.sealed and not self.holes and self.end == self.path.stat().st_size

    def writer(self, disk: Disk) -> SegmentWriter:
        count = len(self.entries)
        return SegmentWriter(self.path, disk, end=self.end, index_end=self.index_bytes, count=count)


class Recovered(NamedTuple):
    """The journal as recovery left it.

    `live` is the last segment, if commits can be appended to it. `damage` has the rows that the
    index lists and the segment no longer has.
    """

    segments: list[RecoveredSegment]
    next_commit: int
    live: RecoveredSegment | None
    damage: list[tuple[TopicRows, StorageError]]


def recover(data: Path, disk: Disk) -> Recovered:
    """Read the journal, cut off a torn write, replace incomplete indexes."""
    paths = segments(data)
    damage: list[tuple[TopicRows, StorageError]] = []
    found = [_recover_segment(path, disk, damage, last=path is paths[-1]) for path in paths]
    next_commit = 1
    live = None
    if found:
        commits = [segment.entries[-1].commit + 1 for segment in found if segment.entries]
        next_commit = max(first_commit_of(paths[-1]), *commits[-1:], 1)
        # A damaged segment stays as it is; the next commit begins another one.
        if found[-1].is_open and found[-1].head is not None:
            live = found[-1]
    for path in orphan_indexes(data):
        # A new segment must not take the name, and so the index, of one that is missing.
        lost = [entry.commit + 1 for entry in read_index(path).entries]
        next_commit = max([next_commit, *lost[-1:]])
    return Recovered(found, next_commit, live, damage)


def restore(topics: Mapping[str, JournalTopic], recovered: Recovered) -> set[TopicKey]:
    """Give each topic the positions of its messages in the journal; freeze topics that lack any.

    Return the topics and epochs of rows that belong to no known topic.
    """
    strays: set[TopicKey] = set()
    # Topics that may have messages in damaged bytes, until a later commit shows no gap.
    suspects: dict[str, str] = {}
    for segment in recovered.segments:
        holes = dict(segment.holes)
        for number, entry in enumerate(segment.entries):
            if number in holes:
                suspects |= dict.fromkeys(topics, holes[number])
            for rows in entry.topics:
                log = topics.get(rows.topic)
                if log is None or log.epoch != rows.epoch:
                    strays.add((rows.topic, rows.epoch))
                    continue
                end = rows.stop_offset
                if end <= log.handed_over:
                    continue
                if rows.first_offset > log.stop:
                    reason = suspects.get(rows.topic, "the journal does not have them")
                    log.freeze(f"offsets {log.stop} to {rows.first_offset - 1}: {reason}")
                scanner.add_places([rows], topics, segment.path, entry.position, entry.size)
                log.stop = end
                suspects.pop(rows.topic, None)
        if len(segment.entries) in holes:
            suspects |= dict.fromkeys(topics, holes[len(segment.entries)])
    for topic, reason in suspects.items():
        topics[topic].freeze(reason)
    for rows, error in recovered.damage:
        log = topics.get(rows.topic)
        if log is not None and log.epoch == rows.epoch:
            log.freeze(error.text)
    return strays


def orphan_keys(data: Path) -> set[TopicKey]:
    """The topics and epochs of rows whose segment is missing."""
    indexes = [read_index(path) for path in orphan_indexes(data)]
    return {(rows.topic, rows.epoch) for index in indexes for rows in index.rows()}


def settle_orphans(topics: Mapping[str, JournalTopic], data: Path, disk: Disk) -> None:
    """Delete indexes that a hand-over left; freeze the topics that lost rows with a segment."""
    for path in orphan_indexes(data):
        index = read_index(path)
        lost = False
        for rows in index.rows():
            log = topics.get(rows.topic)
            if log is None or log.epoch != rows.epoch:
                lost |= not was_deleted(topic_folder(data, rows.topic), rows.epoch)
                continue
            if rows.stop_offset > log.handed_over:
                lost = True
                log.freeze(f"offsets from {rows.first_offset} on: segment {path.stem} is missing")
        if not lost and index.is_complete:
            disk.unlink(path)


def _recover_segment(
    path: Path, disk: Disk, damage: list[tuple[TopicRows, StorageError]], *, last: bool
) -> RecoveredSegment:
    segment = RecoveredSegment(path)
    index, scan = segment.index, segment.scan
    if scan is None:
        # If the file is too short, `end` stays past it, so nothing is appended to this segment.
        for entry in index.entries:
            if entry.position + entry.size > segment.file_bytes:
                error = damage_of(path, entry, "the file ends before the commit does")
                logger.error("%s", error.text)
                damage.extend((rows, error) for rows in entry.topics)
        return segment
    torn_at = torn_from(segment) if last else None
    if last and not segment.entries and segment.head is None:
        _begin_again(segment, disk)
    elif torn_at is not None:
        _cut(segment, torn_at, scan, disk)
    else:
        _report_holes(segment, scan)
    if scan.entries:
        # The crash may have come before their fsync, and readers rely on what is in the index.
        _change(path, disk)
    complete = len(segment.entries) == len(index.entries) and not segment.sealed
    if not complete or index.file_bytes > index.intact_bytes:
        _write_index(segment, disk)
    return segment


def torn_from(segment: Segment) -> int | None:
    """Where a torn write begins: bytes for which no receipt was sent. None if there is no torn
    write.
    """
    scan = segment.scan
    if scan is None or not scan.holes:
        return scan.end if scan is not None and scan.tail else None
    start = scan.holes[0][0]
    before = [entry.commit for entry in segment.index.entries]
    before += [entry.commit for entry in scan.entries if entry.position < start]
    after = [note for note in scan.notes if not before or note.commit > before[-1]]
    bad = before[-1] + 1 if before else after[0].commit - 1 if after else 0
    torn = not scan.sealed and all(note.synced < bad for note in after)
    return start if torn else None


def _cut(segment: RecoveredSegment, end: int, scan: SegmentScan, disk: Disk) -> None:
    logger.warning(
        "journal segment %s: the last %d bytes are an unfinished write (%s); cut off",
        segment.path.name,
        segment.file_bytes - end,
        scan.holes[0][2] if scan.holes else scan.tail,
    )
    segment.entries = [entry for entry in segment.entries if entry.position < end]
    segment.end = end
    _change(segment.path, disk, truncate_to=end)


def _begin_again(segment: RecoveredSegment, disk: Disk) -> None:
    """The crash came before the segment had a head."""
    _change(segment.path, disk, truncate_to=0, append=head_of(new_mark()))
    segment.end = segment.head = len(HEAD)


def _change(path: Path, disk: Disk, *, truncate_to: int | None = None, append: bytes = b"") -> None:
    """Truncate a file and append to it, if requested; always sync it."""
    file = disk.open(path)
    try:
        if truncate_to is not None:
            file.truncate(truncate_to)
        if append:
            file.append(append)
        file.sync()
    finally:
        file.close()


def _report_holes(segment: RecoveredSegment, scan: SegmentScan) -> None:
    for start, stop, reason in scan.all_holes():
        text = f"journal segment {segment.path.name}, bytes {start} to {stop}: {reason}"
        logger.error("%s", text)
        whole = sum(1 for entry in segment.entries if entry.position < start)
        segment.holes.append((whole, text))


def _write_index(segment: RecoveredSegment, disk: Disk) -> None:
    # The index of a segment with a hole ends before the hole, so that the next start and readers
    # in other processes find the hole too.
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
