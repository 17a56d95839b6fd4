"""The offsets of our sources in a Spark checkpoint; log/spark_checkpoint.py has its layout.

The offset of our source is JSON. `offset` is the next one to read. `from` is the offset at which
the batch begins in a topic, if that is not the `offset` of the batch before: the topic joined, or
messages were lost. So a batch that runs again after a restart reads the same messages. With the
option `failOnDamage` false, `damaged` has the topics that are held in place and why; `stopped`
those that the standard pipeline has stopped, because of an expectation. `again` marks a topic that
is rewound to messages that an earlier batch left out.

    {"group": "", "topics": {"orders": {"epoch": 1767225600000, "offset": 42}},
     "damaged": {"orders": "…/history/….parquet: its checksum is wrong"}}

That of a stream of a lake table is a position in the table's log (lake/following.py).

Code that stores results of a batch outside the checkpoint calls `sync_batch` first: otherwise a
power cut could lose the plan but keep the results, and the batch number would return with other
messages. `calling_query` finds the checkpoint of a function for `foreachBatch`.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import msgspec

from polybus.errors import StorageError, UsageError
from polybus.log.spark_checkpoint import CheckpointFiles
from polybus.spark.internals import BATCH_ID, QUERY_ID, checkpoint_root, java_errors
from polybus.structs import convert, decode


class TopicOffset(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a batch ends in a topic; `begin` is the field `from`.

    `again`: an earlier batch left out messages, and this one begins with them.
    """

    epoch: int
    offset: int
    begin: int | None = msgspec.field(default=None, name="from")
    again: bool = False


class StreamOffset(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a batch ends in all topics, and why those that are damaged or stopped are held."""

    group: str
    topics: dict[str, TopicOffset]
    damaged: dict[str, str] = {}
    stopped: dict[str, str] = {}

    def to_json(self, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The offset for Spark; `others` are more topics, in JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        if others is not None:
            found["topics"] = {**others, **found["topics"]}
        return found

    def is_at(self, other: Self) -> bool:
        """Whether both have the same offsets and problems; their batches may begin anywhere."""
        own = (self._ends(), self.damaged, self.stopped)
        return own == (other._ends(), other.damaged, other.stopped)

    def _ends(self) -> dict[str, tuple[int, int]]:
        return {topic: (end.epoch, end.offset) for topic, end in self.topics.items()}


def from_json(found: Any, only: Collection[str] | None = None) -> StreamOffset:
    """The offset in Spark's JSON, with all topics or only some: each takes time to convert.

    Raises UsageError `spark.checkpoint` if it is not an offset of this source.
    """
    try:
        if only is not None and isinstance(found["topics"], dict):
            found = found | {"topics": {one: found["topics"][one] for one in only}}
        return convert({"group": ""} | found, StreamOffset)
    except (TypeError, KeyError, msgspec.ValidationError) as error:
        text = f"the checkpoint has no offset of format polybus, but {str(found)[:200]}"
        raise UsageError("spark.checkpoint", f"{text}; use another checkpointLocation") from error


def topics_in(found: Any) -> dict[str, Any]:
    """The topics of an offset in JSON, as they are there; none if it is not of this source."""
    topics = found.get("topics") if isinstance(found, dict) else None
    return topics if isinstance(topics, dict) else {}


def changed_topics(start: Any, end: Any) -> list[str]:
    """The topics in which a batch between two offsets in JSON may have messages."""
    old = topics_in(start)
    return [
        topic
        for topic, at in topics_in(end).items()
        if at != old.get(topic) or not isinstance(at, dict) or "from" in at
    ]


def our_offset(text: Any) -> StreamOffset | None:
    """The offset in a JSON text of Spark's; None if it is of a source of another format."""
    try:
        return decode(text, StreamOffset)
    except (TypeError, msgspec.DecodeError, UnicodeDecodeError):
        pass  # of another format, or without a group, as earlier versions wrote it
    try:
        return from_json(msgspec.json.decode(text))
    except (TypeError, msgspec.DecodeError, UnicodeDecodeError, UsageError):
        return None


class Checkpoint(CheckpointFiles):
    """The checkpoint of a query, with what its plans say about a source of format polybus."""

    __slots__ = ()

    def planned_end(self, batch_id: int) -> StreamOffset | None:
        """Where a batch ends, for a query with one source of format polybus; None if unknown."""
        try:
            return our_offset(self.plan(batch_id).read_text().splitlines()[-1])
        except (OSError, IndexError, UnicodeDecodeError):
            return None

    def sync_batch(self, batch_id: int) -> None:
        """Make the plan of a batch survive a power cut. Raises StorageError `sink.checkpoint`."""
        try:
            self.sync_plan(batch_id)
        except OSError as error:
            text = f"checkpointLocation {self.path}: cannot sync the plan of batch {batch_id}"
            raise StorageError("sink.checkpoint", f"{text}: {error}") from error


def local_checkpoint(location: str | None) -> Checkpoint | None:
    """The checkpoint at Spark's `checkpointLocation`; None if it is not on this machine's disk."""
    if not location:
        return None
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Checkpoint(Path(unquote(parts.path)))
    return None if parts.scheme else Checkpoint(Path(location))


def calling_query(df: Any, batch_id: int) -> tuple[str | None, Checkpoint | None]:
    """The id of the query in whose `foreachBatch` this runs, and its checkpoint.

    The checkpoint is None if it has no such batch, is on another disk, or with Spark Connect.
    """
    from pyspark.errors import PySparkException

    try:
        session = df.sparkSession
        query = session.sparkContext.getLocalProperty(QUERY_ID)
        batch = session.sparkContext.getLocalProperty(BATCH_ID)
    except PySparkException:
        # Spark Connect has no context.
        return None, None
    if not query or batch != str(batch_id):
        return query, None
    try:
        return query, local_checkpoint(checkpoint_root(session, query))
    except (java_errors(), AttributeError, TypeError):
        return query, None
