"""The offset of a stream, as Spark stores it in the checkpoint.

    {"group": "", "topics": {"orders": {"epoch": 1767225600000, "offset": 42}}}

`offset` is the next one to read. `from` is the offset at which the batch begins in a topic, if that
is not the `offset` of the batch before: the topic joined, or messages were lost. So a batch that
runs again after a restart reads the same messages.

With the option `failOnDamage` false, `damaged` has the topics that are held in place and why:

    "damaged": {"orders": "…/history/….parquet: its checksum is wrong"}
"""

from typing import Any, Self

import msgspec

from polybus.errors import UsageError


class TopicOffset(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a batch ends in a topic; `begin` is the field `from`."""

    epoch: int
    offset: int
    begin: int | None = msgspec.field(default=None, name="from")


class StreamOffset(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a batch ends in all topics, and what is wrong with those that are damaged."""

    group: str
    topics: dict[str, TopicOffset]
    damaged: dict[str, str] = {}

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        return found

    def is_at(self, other: Self) -> bool:
        """Whether both have the same offsets and damage, wherever their batches begin."""
        return (self._ends(), self.damaged) == (other._ends(), other.damaged)

    def _ends(self) -> dict[str, tuple[int, int]]:
        return {topic: (end.epoch, end.offset) for topic, end in self.topics.items()}


def from_json(found: Any) -> StreamOffset:
    """Raises UsageError `spark.checkpoint`: it is not an offset of this source."""
    try:
        return msgspec.convert({"group": ""} | found, StreamOffset)
    except (TypeError, msgspec.ValidationError) as error:
        text = f"the checkpoint has no offset of format polybus, but {str(found)[:200]}"
        raise UsageError("spark.checkpoint", f"{text}; use another checkpointLocation") from error


def our_offset(text: Any) -> StreamOffset | None:
    """The offset in a JSON text of Spark's; None if it is of a source of another format."""
    try:
        return from_json(msgspec.json.decode(text))
    except (TypeError, msgspec.DecodeError, UsageError):
        return None
