"""What a micro-batch is to hold, by the offsets that Spark wrote down for it.

Spark says what it will read before it reads it: `offsets/<batch>` in the checkpoint, three lines,
the last of which is our source's end offset; the batch before has the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from polybus.lake.files import sync_file
from polybus.log.disk import OsDisk
from polybus.log.topics import storage_error

EVENTS = "$events"


@dataclass(frozen=True)
class Plan:
    """How many messages a batch has; None where the checkpoint cannot tell."""

    messages: int | None
    events: int | None

    def is_below(self, rows: int) -> bool:
        return self.messages is not None and self.messages + (self.events or 0) < rows


UNKNOWN = Plan(None, None)


def read_plan(checkpoint: Path, batch_id: int) -> Plan:
    """The plan of a batch; UNKNOWN for the first batch, or if a topic was made anew."""
    start = _positions(checkpoint / "offsets" / str(batch_id - 1))
    end = _positions(checkpoint / "offsets" / str(batch_id))
    if not start or not end:
        return UNKNOWN
    rows = {}
    for topic, (epoch, offset) in end.items():
        before = start.get(topic)
        if before is None or before[0] != epoch or before[1] > offset:
            return UNKNOWN
        rows[topic] = offset - before[1]
    return Plan(sum(rows.values()) - rows.get(EVENTS, 0), rows.get(EVENTS, 0))


def _positions(path: Path) -> dict[str, tuple[int, int]]:
    try:
        offset = msgspec.json.decode(path.read_text().splitlines()[-1])
        topics = offset["topics"]
        return {name: (at["epoch"], at["offset"]) for name, at in topics.items()}
    except (OSError, IndexError, KeyError, TypeError, msgspec.DecodeError):
        return {}


def sync_plan(checkpoint: Path, batch_id: int) -> None:
    """Make sure that the batch has the same messages after a power cut: Spark itself does not.

    Raises:
        StorageError: `log.failed`, `log.full`; nothing of the batch is in any table.
    """
    plan = checkpoint / "offsets" / str(batch_id)
    try:
        sync_file(plan)
        OsDisk().sync_folder(plan.parent)
    except OSError as error:
        raise storage_error(error, f"cannot sync {plan}") from error
