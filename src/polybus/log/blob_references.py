"""Finds in the log which messages refer to which blobs: the marks of blobs must agree with it.

It decodes only the headers of messages, a batch at a time, and touches no row without a reference
in Python.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus import references
from polybus.errors import PolybusError, UsageError
from polybus.log.reading.reader import LogReader

logger = logging.getLogger("polybus.blobs")


class FoundReferences:
    """The references in rows of topics."""

    def __init__(self) -> None:
        self.offsets: dict[tuple[str, str], tuple[int, int]] = {}
        """By topic and blob: the first and the last message that refers to it."""
        self.epochs: dict[str, int] = {}
        """The topics that were read to their end."""

    def take(self, topic: str, rows: pa.RecordBatch) -> None:
        """Record the references in rows of one topic, in order."""
        headers = rows.column("headers")
        if headers.null_count == len(headers):
            return
        # A slice has the keys of the whole, and so the positions in `starts`.
        at = pc.indices_nonzero(pc.equal(headers.keys, references.HEADER))
        if not len(at):
            return
        starts = headers.offsets.to_pylist()
        values = headers.items.take(at).to_pylist()
        for position, value in zip(at.to_pylist(), values, strict=True):
            if starts[0] <= position < starts[-1]:
                row = bisect_right(starts, position) - 1
                key = (topic, value.decode("ascii", "replace"))
                offset = rows.column("offset")[row].as_py()
                first, _ = self.offsets.get(key, (offset, offset))
                self.offsets[key] = (first, offset)


def find_references(
    data: Path, topics: Iterable[str], is_stopped: Callable[[], bool]
) -> FoundReferences:
    """All references in the durable messages of these topics, until `is_stopped`. May block.

    A topic that cannot be read to its end is not in `epochs`.
    """
    found = FoundReferences()
    reader = LogReader(data)
    for topic in topics:
        try:
            bounds = reader.bounds(topic)
            plan = reader.plan(topic, bounds.start, bounds.stop)
            # Messages that retention removes meanwhile no longer refer to anything.
            for rows in reader.read_plan(plan, columns=("offset", "headers"), lost=_ignore):
                if is_stopped():
                    return found
                found.take(topic, rows)
        except (PolybusError, OSError, pa.ArrowException) as error:
            logger.warning("blobs of topic %s are kept: %s", topic, error)
            continue
        found.epochs[topic] = plan.epoch
    return found


def _ignore(error: UsageError) -> None: ...
