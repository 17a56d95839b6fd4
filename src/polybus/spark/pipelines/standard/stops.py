"""Which topics a batch of the standard pipeline leaves out, and how long that is recorded.

lake/stopped.py has the reasons, and the order of writes.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from polybus.lake import stopped
from polybus.lake.settings import PipelineSettings
from polybus.lake.stopped import StoppedTopic
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.declared_fields import literal
from polybus.spark.expectations import ExpectationCount
from polybus.spark.location import BusLocation
from polybus.spark.origin import open_origin
from polybus.spark.source.positions import HeldTopics


class Stops:
    """The stopped topics, for the writer of silver."""

    def __init__(self, data: Path, writer: str) -> None:
        self._data = data
        self._writer = writer

    def forget_others(self) -> None:
        """Forget stops by batches of another checkpoint: a new one reads everything."""
        found = stopped.read(self._data)
        own = {name: one for name, one in found.items() if one.writer == self._writer}
        if own != found:
            stopped.write(self._data, own)

    def of_batch(self, batch_id: int) -> list[str]:
        """The topics that a batch left out in its first run."""
        found = stopped.read(self._data)
        return [name for name, one in found.items() if one.batch == batch_id]

    def add(
        self,
        rows: DataFrame,
        reasons: Mapping[str, str],
        settings: PipelineSettings,
        batch_id: int,
    ) -> None:
        """Stop topics at their first messages in a batch."""
        conditions = {one.name: one.expect_or_fail for one in settings.topics}
        first = rows.where(among(reasons)).groupBy("topic", "epoch").agg(F.min("offset"))
        added = {
            topic: StoppedTopic(
                epoch, offset, reasons[topic], conditions[topic], self._writer, batch_id
            )
            for topic, epoch, offset in first.collect()
        }
        stopped.write(self._data, stopped.read(self._data) | added)

    def add_damaged(self, bus: BusLocation, checkpoint: Checkpoint, batch_id: int) -> None:
        """Stop the topics of a planned batch that cannot be read as far as the plan says."""
        end, start = checkpoint.planned_end(batch_id), checkpoint.planned_end(batch_id - 1)
        if end is None:
            return
        held, found = HeldTopics(open_origin(bus), fail=False), stopped.read(self._data)
        bounds = held.bounds(end.topics)
        for topic, stop in end.topics.items():
            at = bounds.get(topic)
            if (at is None and topic not in held.texts) or (at and at.epoch != stop.epoch):
                continue  # It was deleted.
            before = None if start is None else start.topics.get(topic)
            first = before.offset if before is not None else at.start if at is not None else 0
            first = first if stop.begin is None else stop.begin
            if at is None or not held.has_all(topic, at, first, stop):
                reason = f"log.damaged: {held.texts.get(topic, 'messages are missing')}"
                note = StoppedTopic(stop.epoch, first, reason, {}, self._writer, batch_id)
                found.setdefault(topic, note)
        if found:
            stopped.write(self._data, found)

    def remove(self, topics: Collection[str], batch_id: int) -> None:
        """Forget topics whose messages a later batch has stored, or that were damaged before."""
        found = stopped.read(self._data)
        kept = {
            name: one
            for name, one in found.items()
            if one.batch == batch_id or (one.conditions and name not in topics)
        }
        if kept != found:
            stopped.write(self._data, kept)


def among(topics: Iterable[str]) -> str:
    """The condition that a message is of one of these topics."""
    return f"topic IN ({', '.join(map(literal, topics))})"


def broken(counts: Iterable[ExpectationCount]) -> dict[str, str]:
    """The topics with forbidden messages, each with the reason."""
    found: dict[str, str] = {}
    for one in counts:
        if one.consequence == "expect_or_fail" and one.failed:
            rows = f"{one.failed} of {one.failed + one.passed} messages of the batch"
            text = f"pipeline.expectation: {rows} do not meet the expectation {one.name!r}"
            found.setdefault(one.topic, text)
    return found
