"""`spark.readStream.format("polybus")`: offsets come from the log and the checkpoint only.

The reader object keeps nothing that a restart would miss: an end that `availableNow` aims at, when
the last batch was, and which losses were told already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from polybus.spark.source.damage import HeldTopics
from polybus.spark.source.losses import Losses
from polybus.spark.source.offsets import (
    StreamOffset,
    TopicOffset,
    from_json,
    resumed,
    resumed_in,
    shares,
)
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.origin import Origin, open_origin
from polybus.spark.source.planning import partitions
from polybus.spark.source.positions import begin_of, matching
from polybus.spark.source.reading import Shape, read_partition


class PolybusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._shape = Shape.of(options)
        self._losses = Losses(fail=options.fail_on_data_loss)
        self._opened: Origin | None = None
        self._held: HeldTopics | None = None
        self._target: dict[str, Bounds] | None = None
        self._batch_at_s: float | None = None

    def initialOffset(self) -> dict[str, Any]:
        options, origin = self._options, self._origin
        topics = {}
        for topic, bounds in self._matching(strict=True).items():
            offset = begin_of(topic, bounds, options, origin, self._losses)
            topics[topic] = TopicOffset(bounds.epoch, offset)
        return StreamOffset(options.group, topics).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_per_trigger is not None:
            return ReadMaxRows(self._options.max_per_trigger)
        if self._options.min_per_trigger is not None:
            return ReadMinRows(self._options.min_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._matching()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        found = self._matching()
        before = from_json(start)
        left_out = self._left_out(found)
        begun = resumed(before, found, self._options, self._losses, left_out)
        available = {
            topic: max(0, self._stop_of(topic, place, found[topic]) - place.offset)
            for topic, place in begun.items()
        }
        if self._waits_for_more(sum(available.values()), limit):
            return start
        if isinstance(limit, ReadMaxRows):
            available = shares(available, limit.max_rows)
        if self._held is not None:
            for topic, count in available.items():
                if count:
                    first = begun[topic].offset
                    available[topic] = self._held.intact_stop(topic, first, first + count) - first
        topics = {
            topic: TopicOffset(place.epoch, place.offset + available[topic], place.begin)
            for topic, place in begun.items()
            # A topic that has nothing yet joins when it has.
            if available[topic] or topic in before.topics
        }
        # Topics that are left out keep their offsets.
        topics |= {
            topic: TopicOffset(place.epoch, place.offset)
            for topic, place in before.topics.items()
            if topic in left_out
        }
        if any(available.values()):
            self._batch_at_s = monotonic()
        damaged = {} if self._held is None else self._held.texts
        end = StreamOffset(self._options.group, topics, damaged)
        return start if end.is_at(before) else end.to_json()

    def _stop_of(self, topic: str, place: TopicOffset, bounds: Bounds) -> int:
        """Where the topic ends for now."""
        stop = bounds.stop
        if self._target is not None:
            target = self._target.get(topic)
            if target is None or target.epoch != place.epoch:
                return place.offset
            stop = min(target.stop, stop)
        return stop if self._held is None else self._held.stop(topic, stop)

    def _matching(self, *, strict: bool = False) -> dict[str, Bounds]:
        if self._held is None and not self._options.fail_on_damage:
            self._held = HeldTopics(self._origin)
        return matching(self._options, self._origin, strict=strict, held=self._held)

    def _left_out(self, found: Mapping[str, Bounds]) -> set[str]:
        """The topics that keep their offsets: by option, or as damage hides their bounds."""
        damaged = set() if self._held is None else set(self._held.texts) - set(found)
        return damaged | self._options.left_out

    def _waits_for_more(self, rows: int, limit: ReadLimit) -> bool:
        """Whether there are too few for a batch, and it is not yet time for one all the same."""
        lowest = self._options.min_per_trigger
        if lowest is None or isinstance(limit, ReadAllAvailable) or self._target is not None:
            return False
        if rows >= lowest or self._batch_at_s is None:
            return False
        return (monotonic() - self._batch_at_s) * 1000 < self._options.max_delay_ms

    def reportLatestOffset(self) -> dict[str, Any]:
        found = self._matching()
        topics = {topic: TopicOffset(one.epoch, one.stop) for topic, one in found.items()}
        return StreamOffset(self._options.group, topics).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begun, ended = from_json(start), from_json(end)
        plans = []
        for topic, place in ended.topics.items():
            before = begun.topics.get(topic)
            if place.begin is not None:
                first = place.begin
            elif before is not None and before.epoch == place.epoch:
                first = before.offset
            else:
                first = 0
            if first < place.offset:
                plan = self._plan(topic, place.epoch, first, place.offset)
                plans += [] if plan is None else [plan]
        options = self._options
        return list(
            partitions(
                options.where,
                plans,
                count_min=options.min_partitions,
                rows_max=options.max_records,
            )
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._shape)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: it comes a batch late. Positions are told by the session's listener."""

    def stop(self) -> None:
        self._opened = self._held = None

    @property
    def _origin(self) -> Origin:
        if self._opened is None:
            self._opened = open_origin(self._options.where)
        return self._opened

    def _plan(self, topic: str, epoch: int, first: int, stop: int) -> ReadPlan | None:
        """Where a batch's messages of a topic are; what of them is lost is noted."""
        bounds = self._origin.bounds([topic]).get(topic)
        place = resumed_in(topic, TopicOffset(epoch, first), bounds, self._losses)
        if place is None or bounds is None or place.epoch != epoch:
            return None
        if stop > bounds.stop:
            text = f"topic {topic!r}: a batch ends at offset {stop}, the log at {bounds.stop}"
            self._losses.note(text)
        stop = min(stop, bounds.stop)
        return self._origin.plan(topic, place.offset, stop) if place.offset < stop else None
