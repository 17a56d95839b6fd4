"""Damaged topics: which they are, and how the flow `decode` goes on without them.

A batch that has messages of a damaged file fails as a whole, for all topics. Nothing of it is in
any table then, so its plan may be forgotten: Spark plans it again, and the source leaves the
damaged topics out and keeps their places (option `leaveOut`). Nobody writes down which they are:
the next start of the pipeline reads from these places, or finds the damage again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polybus.errors import PolybusError
from polybus.lake.table import open_table
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.source.options import parse
from polybus.spark.source.origin import open_origin
from polybus.spark.source.stream_reader import PolybusStreamReader

DAMAGED = ("log.damaged", "log.frozen")
SHOWN_MAX = 5
logger = logging.getLogger("polybus.spark")


def is_damage(error: BaseException) -> bool:
    """Whether a query failed because of damage; Spark hands errors on as text."""
    return any(f"{code}: " in str(error) for code in DAMAGED)


def damaged_topics(options: Mapping[str, str], checkpoint: Path) -> dict[str, str]:
    """Topics that cannot be planned, or not be read as far as the batch that failed; and why.

    `options` are those of the source. All of the batch is read again.
    """
    parsed = parse(options, streaming=True)
    origin, reader = open_origin(parsed.where), PolybusStreamReader(parsed)
    begun = Checkpoint(checkpoint).unfinished_batch()
    end = {} if begun is None else planned(checkpoint, begun)
    start = {} if begun is None else planned(checkpoint, begun - 1)
    found = {}
    for topic in origin.topics(system=True):
        if not parsed.matches(topic) or topic in parsed.left_out:
            continue
        try:
            origin.bounds([topic])
            if topic in end:
                for part in reader.partitions(_only(start, topic), _only(end, topic)):
                    for _ in reader.read(part):
                        pass
        except PolybusError as error:
            if error.code not in DAMAGED:
                raise
            found[topic] = error.text
    return found


def planned(checkpoint: Path, batch_id: int) -> dict[str, Any]:
    """What Spark wrote down as the end of a batch: topic → place; {} for none."""
    end = Checkpoint(checkpoint).planned_end(batch_id)
    return {} if end is None else dict(end.to_json()["topics"])


def _only(topics: Mapping[str, Any], topic: str) -> dict[str, Any]:
    return {"group": "", "topics": {topic: topics[topic]} if topic in topics else {}}


def has_any(checkpoint: Path, topics: Iterable[str]) -> bool:
    """Whether the batch that failed has messages of one of the topics."""
    begun = Checkpoint(checkpoint).unfinished_batch()
    if begun is None:
        return False
    start, end = planned(checkpoint, begun - 1), planned(checkpoint, begun)
    return any(topic in end and _is_read(start.get(topic), end[topic]) for topic in topics)


def _is_read(before: Mapping[str, int] | None, after: Mapping[str, int]) -> bool:
    if before is None or "from" in after:
        return after["offset"] > after.get("from", 0)
    return (before["epoch"], before["offset"]) != (after["epoch"], after["offset"])


def forget_batch(data: Path, checkpoint: Path, tables: Iterable[str], writer: str) -> bool:
    """Let Spark plan the batch that failed again; False if a table has some of it already."""
    begun = Checkpoint(checkpoint).unfinished_batch()
    if begun is None:
        return True
    for name in tables:
        last = open_table(data, name).last_batch(writer)
        if last is not None and last >= begun:
            return False
    # Its checksum first, where the file system keeps one: a plan cannot be written beside it.
    (checkpoint / "offsets" / f".{begun}.crc").unlink(missing_ok=True)
    (checkpoint / "offsets" / str(begun)).unlink()
    return True


def warning(damaged: Mapping[str, str]) -> str:
    """What is left out, which file it is, and what to do; each topic is in the log too."""
    for topic, text in damaged.items():
        logger.warning("topic %r is left out: log.damaged: %s", topic, text)
    shown = [f"topic {topic!r} is left out: {text}" for topic, text in damaged.items()]
    more = f" (and {len(shown) - SHOWN_MAX} topics more)" if len(shown) > SHOWN_MAX else ""
    advice = "restore the file and restart the pipeline, which goes on where it was"
    return f"log.damaged: {'; '.join(shown[:SHOWN_MAX])}{more}; {advice}"
