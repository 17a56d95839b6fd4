"""`spark.readStream.format("polybus")`: which messages a micro-batch reads.

Offsets come from the log and the checkpoint only. The reader object keeps nothing that a restart
would miss: the target of `availableNow`, the time of the last batch, and what was already logged.
"""

from collections.abc import Iterator
from functools import cached_property
from time import monotonic
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from polybus.log.interface import Bounds
from polybus.log.reading.pieces import ReadPlan
from polybus.spark.checkpoint import StreamOffset, TopicOffset, from_json
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.planning import partitions, read_partition
from polybus.spark.source.positions import TopicPositions, shares


class PolybusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics while they grow."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._target: dict[str, Bounds] | None = None
        self._batch_at_s: float | None = None

    @cached_property
    def _positions(self) -> TopicPositions:
        # Spark sends the reader to tasks, so the log is opened on first use.
        return TopicPositions(self._options)

    def initialOffset(self) -> dict[str, Any]:
        topics = {
            topic: TopicOffset(bounds.epoch, self._positions.begin(topic, bounds))
            for topic, bounds in self._positions.matching(strict=True).items()
        }
        return StreamOffset(self._options.group, topics).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_per_trigger is not None:
            return ReadMaxRows(self._options.max_per_trigger)
        if self._options.min_per_trigger is not None:
            return ReadMinRows(self._options.min_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._positions.matching()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        positions, before = self._positions, from_json(start)
        held = positions.held
        found = held.complete(positions.matching(), before.topics)
        left_out = (held.texts.keys() - found.keys()) | self._options.left_out
        begun = positions.resumed(before, found, left_out)
        available = {
            topic: max(0, self._stop_of(topic, begin, found[topic]) - begin.offset)
            for topic, begin in begun.items()
        }
        if self._waits_for_more(sum(available.values()), limit):
            return start
        if isinstance(limit, ReadMaxRows):
            available = shares(available, limit.max_rows)
        for topic, count in available.items():
            first = begun[topic].offset
            available[topic] = held.intact_stop(topic, first, first + count) - first
        topics = {
            topic: TopicOffset(begin.epoch, begin.offset + available[topic], begin.begin)
            for topic, begin in begun.items()
            # A topic without messages joins when it has some.
            if available[topic] or topic in before.topics
        }
        # Topics that are left out keep their offsets.
        topics |= {
            topic: TopicOffset(end.epoch, end.offset)
            for topic, end in before.topics.items()
            if topic in left_out
        }
        if any(available.values()):
            self._batch_at_s = monotonic()
        end = StreamOffset(self._options.group, topics, held.texts)
        return start if end.is_at(before) else end.to_json()

    def _stop_of(self, topic: str, begin: TopicOffset, bounds: Bounds) -> int:
        """Where the topic ends for now."""
        stop = bounds.stop
        if self._target is not None:
            target = self._target.get(topic)
            if target is None or target.epoch != begin.epoch:
                return begin.offset
            stop = min(target.stop, stop)
        return self._positions.held.stop(topic, stop)

    def _waits_for_more(self, rows: int, limit: ReadLimit) -> bool:
        """Whether there are too few rows for a batch, and the longest delay is not over yet."""
        lowest = self._options.min_per_trigger
        if lowest is None or isinstance(limit, ReadAllAvailable) or self._target is not None:
            return False
        if rows >= lowest or self._batch_at_s is None:
            return False
        return (monotonic() - self._batch_at_s) * 1000 < self._options.max_delay_ms

    def reportLatestOffset(self) -> dict[str, Any]:
        topics = {
            topic: TopicOffset(bounds.epoch, bounds.stop)
            for topic, bounds in self._positions.matching().items()
        }
        return StreamOffset(self._options.group, topics).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begun, ended = from_json(start), from_json(end)
        plans = []
        for topic, stop in ended.topics.items():
            before = begun.topics.get(topic)
            if stop.begin is not None:
                first = stop.begin
            elif before is not None and before.epoch == stop.epoch:
                first = before.offset
            else:
                first = 0
            if first < stop.offset:
                plan = self._plan(topic, stop.epoch, first, stop.offset)
                plans += [] if plan is None else [plan]
        return list(partitions(plans, self._options.min_partitions, self._options.max_records))

    def _plan(self, topic: str, epoch: int, first: int, stop: int) -> ReadPlan | None:
        """Locate a batch's messages of a topic; missing ones are data loss."""
        positions = self._positions
        bounds = positions.origin.all_bounds([topic]).get(topic)
        if bounds is not None:
            positions.held.check_complete(topic, bounds, TopicOffset(epoch, stop))
        begin = positions.resumed_in(topic, TopicOffset(epoch, first), bounds)
        if begin is None or bounds is None or begin.epoch != epoch:
            return None
        if stop > bounds.stop:
            text = f"topic {topic!r}: a batch ends at offset {stop}, the log at {bounds.stop}"
            positions.loss.note(text)
        stop = min(stop, bounds.stop)
        return positions.origin.plan(topic, begin.offset, stop) if begin.offset < stop else None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: Spark calls it a batch late. The session's listener reports positions."""
