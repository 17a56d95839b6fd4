"""From what recovery found to topics that can be read: their places, and which are damaged.

A segment that is handed over is deleted before its index. So an index without a segment is what a
crash left of that, if history has all its rows; it is deleted. Else the segment was lost, and the
topics with rows in it are frozen.
"""

from __future__ import annotations

from pathlib import Path

from polybus import scan
from polybus.log.disk import Disk
from polybus.log.journal.commit import TopicRows
from polybus.log.journal.index import Index, read_index
from polybus.log.journal.recovery import Recovered
from polybus.log.layout import orphan_indexes
from polybus.log.topic_log import TopicLog


def restore(topics: dict[str, TopicLog], recovered: Recovered) -> None:
    """Give each topic its places in the journal; freeze those that miss any."""
    unproven: dict[str, str] = {}
    for segment in recovered.segments:
        holes = dict(segment.holes)
        for number, entry in enumerate(segment.entries):
            if number in holes:
                unproven |= dict.fromkeys(topics, holes[number])
            for rows in entry.topics:
                log = topics.get(rows.topic)
                if log is None or log.epoch != rows.epoch:
                    continue
                end = rows.first_offset + rows.row_count
                if end <= log.handed_over:
                    continue
                if rows.first_offset > log.stop:
                    reason = unproven.get(rows.topic, "the journal has lost them")
                    log.freeze(f"offsets {log.stop} to {rows.first_offset - 1}: {reason}")
                scan.add_places([rows], topics, segment.path, entry.position, entry.size)
                log.stop = end
                unproven.pop(rows.topic, None)
        if len(segment.entries) in holes:
            unproven |= dict.fromkeys(topics, holes[len(segment.entries)])
    # Damaged bytes that nobody can name, and nothing later shows that these topics had no part.
    for topic, reason in unproven.items():
        topics[topic].freeze(reason)
    for rows, error in recovered.damage:
        log = topics.get(rows.topic)
        if log is not None and log.epoch == rows.epoch:
            log.freeze(error.text)


def settle_orphans(topics: dict[str, TopicLog], data: Path, disk: Disk) -> None:
    """Delete indexes that a hand-over left; freeze the topics that lost rows with a segment."""
    for path in orphan_indexes(data):
        index = read_index(path)
        lost = []
        for rows in rows_in(index):
            log = topics.get(rows.topic)
            if log is None or log.epoch != rows.epoch:
                continue
            if rows.first_offset + rows.row_count > log.handed_over:
                lost.append(rows)
                log.freeze(f"offsets from {rows.first_offset} on: segment {path.stem} is missing")
        if not lost and is_whole(index):
            disk.unlink(path)


def rows_in(index: Index) -> list[TopicRows]:
    return [rows for entry in index.entries for rows in entry.topics]


def is_whole(index: Index) -> bool:
    """Whether the index lists everything that its segment had."""
    return index.sealed or not index.file_bytes
