"""The layout of a Spark checkpoint on a local disk: no other module knows it.

    CHECKPOINT/metadata     {"id": QUERY ID}, written once
    CHECKPOINT/offsets/N    the plan of batch N: a version, settings, then a line per source with
                            the offset at which the batch ends; batch N - 1 has where it starts
    CHECKPOINT/commits/N    batch N is done

The offset of our source is JSON. `offset` is the next one to read. `from` is the offset at which
the batch begins in a topic, if that is not the `offset` of the batch before: the topic joined, or
messages were lost. So a batch that runs again after a restart reads the same messages. With the
option `failOnDamage` false, `damaged` has the topics that are held in place and why.

    {"group": "", "topics": {"orders": {"epoch": 1767225600000, "offset": 42}},
     "damaged": {"orders": "…/history/….parquet: its checksum is wrong"}}

Spark writes `offsets/N` before it runs batch N and `commits/N` after it, and fsyncs neither. A
batch that has a plan and no commit runs again, over the same messages, when the query restarts.
Whoever stores results of a batch outside of the checkpoint calls `sync_batch` first: otherwise a
power cut could lose the plan but keep the results, and the batch number would return with other
messages. `calling_query` finds the checkpoint of a function for `foreachBatch`.

These functions never change or remove a file that Spark wrote.
"""

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import msgspec

from polybus.errors import StorageError, UsageError
from polybus.log.disk import Disk, sync_path


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
    except (TypeError, msgspec.DecodeError, UnicodeDecodeError, UsageError):
        return None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint in a folder, which may not exist yet."""

    path: Path

    def query_id(self) -> str:
        """The id of the query. A checkpoint that replaces this one has another id.

        Raises:
            FileNotFoundError: no query has started with the checkpoint.
            ValueError: the file is damaged.
        """
        path = self.path / "metadata"
        try:
            return str(json.loads(path.read_bytes())["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def create_query_id(self) -> str:
        """The id of the query; a checkpoint without one gets one, which Spark then uses."""
        try:
            return self.query_id()
        except FileNotFoundError:
            created = str(uuid.uuid4())
            Disk().make_folder(self.path)
            (self.path / "metadata").write_text(json.dumps({"id": created}))
            return created

    def has_batches(self) -> bool:
        """Whether a batch was ever planned."""
        return bool(self._numbers("offsets"))

    def unfinished_batch(self) -> int | None:
        """The batch that has a plan and no commit, if there is one."""
        last = max(self._numbers("offsets"), default=None)
        return None if last in self._numbers("commits") else last

    def _numbers(self, folder: str) -> set[int]:
        names = [path.name for path in (self.path / folder).glob("*")]
        return {int(name) for name in names if name.isdigit()}

    def planned_end(self, batch_id: int) -> StreamOffset | None:
        """Where a batch ends, for a query with one source of format polybus; None if unknown."""
        try:
            text = (self.path / "offsets" / str(batch_id)).read_text()
            return our_offset(text.splitlines()[-1])
        except (OSError, IndexError, UnicodeDecodeError):
            return None

    def sync_batch(self, batch_id: int) -> None:
        """Make the plan of a batch survive a power cut. Raises StorageError `sink.checkpoint`."""
        names = [f"offsets/{batch_id}", "offsets", *(["metadata", "."] if batch_id == 0 else [])]
        try:
            for name in names:
                sync_path(self.path / name)
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
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        session = df.sparkSession
        query = session.sparkContext.getLocalProperty("sql.streaming.queryId")
        batch = session.sparkContext.getLocalProperty("streaming.sql.batchId")
    except PySparkException:
        # Spark Connect has no context.
        return None, None
    if not query or batch != str(batch_id):
        return query, None
    try:
        # Spark's internals: it has no public way, least of all for a cloned session.
        number = session._jvm.java.util.UUID.fromString(query)  # noqa: SLF001
        active = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
        return query, local_checkpoint(active.get(number).resolvedCheckpointRoot())
    except (Py4JError, AttributeError, TypeError):
        return query, None
