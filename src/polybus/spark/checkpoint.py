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
messages.

These functions never change or remove a file that Spark wrote.
"""

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import msgspec

from polybus.errors import UsageError
from polybus.log.disk import sync_path


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint in a folder, which may not exist yet."""

    path: Path

    @property
    def _metadata(self) -> Path:
        return self.path / "metadata"

    @property
    def _offsets(self) -> Path:
        return self.path / "offsets"

    def query_id(self) -> str:
        """The id of the query. A checkpoint that replaces this one has another id.

        Raises:
            FileNotFoundError: no query has started with the checkpoint.
            ValueError: the file is damaged.
        """
        try:
            return str(json.loads(self._metadata.read_bytes())["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._metadata} is damaged: {error}") from error

    def create_query_id(self) -> str:
        """The id of the query; a checkpoint without one gets one, which Spark then uses.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            return self.query_id()
        except FileNotFoundError:
            created = str(uuid.uuid4())
            self.path.mkdir(parents=True, exist_ok=True)
            self._metadata.write_text(json.dumps({"id": created}))
            return created

    def has_batches(self) -> bool:
        """Whether a batch was ever planned."""
        return bool(_numbers(self._offsets))

    def unfinished_batch(self) -> int | None:
        """The batch that has a plan and no commit, if there is one."""
        last = max(_numbers(self._offsets), default=None)
        return None if last in _numbers(self.path / "commits") else last

    def planned_end(self, batch_id: int) -> StreamOffset | None:
        """Where a batch ends, for a query with one source of format polybus; None if unknown."""
        try:
            return our_offset((self._offsets / str(batch_id)).read_text().splitlines()[-1])
        except (OSError, IndexError, UnicodeDecodeError):
            return None

    def sync_batch(self, batch_id: int) -> None:
        """Make the plan of a batch survive a power cut. Raises OSError."""
        paths = [self._offsets / str(batch_id), self._offsets]
        if batch_id == 0:
            paths += [self._metadata, self.path]
        for path in paths:
            sync_path(path)


def local_checkpoint(location: str | None) -> Checkpoint | None:
    """The checkpoint at Spark's `checkpointLocation`; None if it is not on this machine's disk."""
    if not location:
        return None
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Checkpoint(Path(unquote(parts.path)))
    return None if parts.scheme else Checkpoint(Path(location))


def _numbers(folder: Path) -> set[int]:
    if not folder.is_dir():
        return set()
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}
