"""From what recovery found to topics that can be read: their places, and which are damaged."""

from __future__ import annotations

from polybus import scan
from polybus.log.journal.recovery import Recovered
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
