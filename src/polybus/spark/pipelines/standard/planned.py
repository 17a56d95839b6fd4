"""The size of a micro-batch before it is read: how many messages, and how large at most.

The plan of the batch is in the query's checkpoint. The index of the journal has the size of each
commit; the commits with messages of the batch are together at least as large as these messages.
"""

from dataclasses import dataclass
from pathlib import Path

from polybus.errors import PolybusError
from polybus.log.opening import open_reader
from polybus.log.reading.offset_reader import OffsetReader
from polybus.spark.checkpoint import Checkpoint

EVENTS = "$events"
SMALL_ROWS = 20_000
"""A smaller batch is one task, and one file."""
SMALL_BYTES = 4 << 20
"""The messages of a smaller batch pass through the memory of this process."""
_TOPICS_MAX = 50
"""A batch with messages of more topics is not small: each topic needs a read of the index."""


@dataclass(frozen=True)
class PlannedRows:
    """How many messages and events a batch has at most, and how large they are together at most.

    None if that is unknown. In the first batch, and if a topic is new or recreated, the plan may
    count messages that the log no longer has.
    """

    messages: int | None = None
    events: int | None = None
    bytes_max: int | None = None

    @property
    def is_one_task(self) -> bool:
        if self.messages is None or self.events is None:
            return False
        return self.messages + self.events < SMALL_ROWS

    @property
    def is_small(self) -> bool:
        return self.is_one_task and self.bytes_max is not None and self.bytes_max <= SMALL_BYTES


class BatchPlans:
    """The plans of a query's batches."""

    def __init__(self, data: Path, checkpoint: Checkpoint | None) -> None:
        self._data = data
        self._checkpoint = checkpoint
        self._reader: OffsetReader | None = None

    def synced(self, batch_id: int) -> PlannedRows:
        """The plan of a batch, durable from now on."""
        if self._checkpoint is None:
            return PlannedRows()
        self._checkpoint.sync_batch(batch_id)
        return self.of(batch_id)

    def of(self, batch_id: int) -> PlannedRows:
        """The size of a batch. Its start is determined as in the source (readers.py)."""
        assert self._checkpoint is not None
        start = self._checkpoint.planned_end(batch_id - 1)
        end = self._checkpoint.planned_end(batch_id)
        if end is None:
            return PlannedRows()
        known = {} if start is None else start.topics
        ranges = {}
        for topic, position in end.topics.items():
            before = known.get(topic)
            if position.begin is not None:
                first = position.begin
            elif before is not None and before.epoch == position.epoch:
                first = before.offset
            else:
                first = 0
            if first < position.offset:
                ranges[topic] = (first, position.offset)
        rows = {topic: stop - first for topic, (first, stop) in ranges.items()}
        events = sum(count for topic, count in rows.items() if is_events(topic))
        return PlannedRows(sum(rows.values()) - events, events, self._bytes_max(ranges))

    def _bytes_max(self, ranges: dict[str, tuple[int, int]]) -> int | None:
        if len(ranges) > _TOPICS_MAX:
            return None
        sizes: dict[tuple[Path, int], int] = {}
        try:
            reader = self._reader = self._reader or open_reader(self._data)
            for topic, (first, stop) in ranges.items():
                held = reader.bounds(topic)
                plan = reader.plan(topic, max(first, held.start), min(stop, held.stop))
                for piece in plan.pieces:
                    if not piece.commits:  # History is compressed, and Kafka does not report sizes.
                        return None
                    sizes |= {(one.segment, one.position): one.size for one in piece.commits}
        except PolybusError:
            return None  # Spark will report the error when it reads the batch.
        return sum(sizes.values())


def is_events(topic: str) -> bool:
    return topic == EVENTS or topic.endswith(f"/{EVENTS}")
