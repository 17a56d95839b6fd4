"""The offset of a stream, as Spark stores it in the checkpoint.

    {"group": "", "topics": {"orders": {"epoch": 1767225600000, "offset": 42}}}

`offset` is the next one to read. `from` is the offset at which the batch begins in a topic, if that
is not the `offset` of the batch before: the topic joined, or messages were lost. So a batch that
runs again after a restart reads the same messages.

With the option `failOnDamage` false, `damaged` has the topics that are held in place and why:

    "damaged": {"orders": "…/history/….parquet: its checksum is wrong"}
"""

from dataclasses import dataclass, field
from typing import Any, Self

from polybus.errors import UsageError


@dataclass(frozen=True, slots=True)
class TopicOffset:
    """Where a batch ends in a topic; `begin` is the field `from`."""

    epoch: int
    offset: int
    begin: int | None = None


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """Where a batch ends in all topics, and what is wrong with those that are damaged."""

    group: str
    topics: dict[str, TopicOffset]
    damaged: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        topics: dict[str, Any] = {}
        for topic, end in sorted(self.topics.items()):
            begin = {} if end.begin is None else {"from": end.begin}
            topics[topic] = {"epoch": end.epoch, "offset": end.offset} | begin
        found = {"group": self.group, "topics": topics}
        return found | {"damaged": self.damaged} if self.damaged else found

    def is_at(self, other: Self) -> bool:
        """Whether both have the same offsets and damage, wherever their batches begin."""
        return (self._ends(), self.damaged) == (other._ends(), other.damaged)

    def _ends(self) -> dict[str, tuple[int, int]]:
        return {topic: (end.epoch, end.offset) for topic, end in self.topics.items()}


def from_json(found: Any) -> StreamOffset:
    """Raises UsageError `spark.checkpoint`: it is not an offset of this source."""
    try:
        topics = {
            str(topic): TopicOffset(int(end["epoch"]), int(end["offset"]), end.get("from"))
            for topic, end in found["topics"].items()
        }
        return StreamOffset(str(found.get("group", "")), topics, dict(found.get("damaged", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"the checkpoint has no offset of format polybus, but {str(found)[:200]}"
        raise UsageError("spark.checkpoint", f"{text}; use another checkpointLocation") from error
