"""OffsetReader: topics by offset, for processes other than the bus, which may or may not run.

It takes no lock and writes nothing. Only durable messages are visible. Offsets ascend and may have
gaps.

Reading has two steps. `plan` says where a range of offsets is. A plan is small: Spark cuts it and
sends the parts to tasks in other processes. There `read_plan` reads it as Arrow, or reports what no
longer exists.

The log may be in files (reading/reader.py), in Kafka (kafka/reader.py) or behind a bus
(spark/origin.py). log/opening.py opens the first two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from polybus.errors import UsageError
from polybus.log.columns import SCHEMA
from polybus.log.history.manifest import Manifest
from polybus.log.history.topic_history import ALWAYS, NextAndRows, TimeRange
from polybus.log.interface import Bounds
from polybus.log.reading.pieces import Piece, ReadPlan

Lost = Callable[[UsageError], None]
"""Called when messages of a plan no longer exist."""

ROWS_MAX = 65_536
BATCH_BYTES_MAX = 32 << 20
ROW_BYTES = 200
"""The assumed size of a message when work is split and sizes are unknown."""
BOUNDS_AGE_S = 0.05
"""Spark asks for the end up to a hundred times a second; brokers and nodes are asked less often."""
LOSSES = ("log.offset-unknown", "topic.unknown", "topic.recreated")
"""The error codes which say that planned messages no longer exist."""


class OffsetReader(ABC):
    """The topics at a place. For one thread at a time."""

    place: object
    """Where they are, for errors."""

    @abstractmethod
    def topics(self, *, system: bool = False) -> list[str]:
        """The names of all topics, sorted; system topics (`$…`) only on request."""

    @abstractmethod
    def all_bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """The offsets of the durable messages of many topics; unknown topics are left out.

        Raises StorageError `log.damaged`; for a cluster also `log.unreachable`.
        """

    @abstractmethod
    def offset_at(self, topic: str, timestamp_us: int) -> int:
        """An offset at or before the first message at or after the time, else `stop`.

        No message is between the two. Raises as `bounds`.
        """

    @abstractmethod
    def _rows(
        self, plan: ReadPlan, columns: Sequence[str], *, rows_max: int, bytes_max: int
    ) -> Iterator[NextAndRows]:
        """The rows of a plan. Raises as `read_plan` does. Batches may have other sizes than
        requested.
        """

    def _look_again(self) -> None:
        """Forget bounds that may be old."""
        return

    def bounds(self, topic: str) -> Bounds:
        """Raises UsageError `topic.unknown`; StorageError as `all_bounds` does."""
        found = self.all_bounds([topic]).get(topic)
        if found is None:
            raise self._unknown(topic)
        return found

    def _unknown(self, topic: str) -> UsageError:
        return UsageError("topic.unknown", f"topic {topic!r} does not exist in {self.place}")

    def history(self, topic: str) -> Manifest:
        """The topic's messages in history files; none, unless the log is in files.

        Raises as `bounds` does.


        Files to which a pipeline has copied messages do not count.
        """
        bounds = self.bounds(topic)
        return Manifest(epoch=bounds.epoch, handed_over=bounds.start, start=bounds.start)

    def plan(self, topic: str, start: int, stop: int, *, times: TimeRange = ALWAYS) -> ReadPlan:
        """Where the offsets `start` to `stop` are, without messages known to be outside `times`.

        Raises as `bounds` does; UsageError `log.offset-unknown` if the range is outside the bounds.
        """
        bounds = self.bounds(topic)
        check_range(topic, start, stop, bounds)
        piece = Piece(Path(str(self.place)), start, stop, (stop - start) * ROW_BYTES)
        return ReadPlan(topic, bounds.epoch, start, stop, (piece,) if start < stop else (), times)

    def read(
        self,
        topic: str,
        start: int,
        stop: int,
        *,
        columns: Sequence[str] | None = None,
        rows_max: int = ROWS_MAX,
    ) -> Iterator[pa.RecordBatch]:
        """The rows at the offsets `start` to `stop`, each once and in order, with all or some
        columns.

        Batches have up to `rows_max` rows and about 32 MiB. The call raises as `plan` does, the
        iterator as `read_plan` does.
        """
        plan = self.plan(topic, start, stop)
        return self.read_plan(plan, columns=columns, rows_max=rows_max)

    def read_plan(
        self,
        plan: ReadPlan,
        *,
        columns: Sequence[str] | None = None,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BATCH_BYTES_MAX,
        lost: Lost | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a plan, which another process may have made some time ago.

        Raises:
            UsageError: `log.offset-unknown`, retention removed a part of it; `topic.unknown` or
                `topic.recreated`, the topic is not the one that was planned. With `lost`, `lost`
                is called with the error instead, and reading continues with what is left.
            StorageError: `log.damaged`, naming file, topic and offsets; `log.unreachable`.
        """
        wanted = SCHEMA.names if columns is None else list(columns)

        def found(rest: ReadPlan) -> Iterator[pa.RecordBatch]:
            while rest.start < rest.stop:
                offset = rest.start
                try:
                    parts = self._rows(rest, wanted, rows_max=rows_max, bytes_max=bytes_max)
                    for following, rows in parts:
                        offset = following
                        yield rows
                    return
                except UsageError as error:
                    if lost is None or error.code not in LOSSES:
                        raise
                    lost(error)
                    rest = rest.since(self._kept_from(rest, offset))

        return joined(found(plan), rows_max=rows_max, bytes_max=bytes_max)

    def _kept_from(self, plan: ReadPlan, offset: int) -> int:
        """The first offset of a plan that still exists after a loss; its end if there is none."""
        self._look_again()
        bounds = self.all_bounds([plan.topic]).get(plan.topic)
        if bounds is None or bounds.epoch != plan.epoch or bounds.start <= offset:
            return plan.stop
        return min(bounds.start, plan.stop)


def check_range(topic: str, start: int, stop: int, bounds: Bounds) -> None:
    """Raises `offsets_unknown` unless the log has all of the range."""
    if not bounds.start <= start <= stop <= bounds.stop:
        raise offsets_unknown(topic, start, stop, bounds)


def offsets_unknown(topic: str, start: int, stop: int, bounds: Bounds) -> UsageError:
    text = f"offsets {start} to {stop} of topic {topic!r} were requested; the log holds"
    return UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")


def recreated(topic: str) -> UsageError:
    text = f"topic {topic!r} was deleted or created again while it was read"
    return UsageError("topic.recreated", text)


def next_offset(rows: pa.RecordBatch) -> int:
    """The offset after rows of a topic. It is not computed from their number: offsets may have
    gaps.
    """
    return int(rows.column("offset")[rows.num_rows - 1].as_py()) + 1


def joined(
    batches: Iterable[pa.RecordBatch], *, rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of up to `rows_max` rows and about `bytes_max` bytes.

    Small batches are joined and large ones cut, but a row is never cut. Joining copies, so batches
    of a suitable size are passed on unchanged.
    """
    held: list[pa.RecordBatch] = []
    held_rows = held_bytes = 0
    for batch in batches:
        for part in _cut(batch, rows_max, bytes_max):
            size = part.nbytes
            if held and (held_rows + part.num_rows > rows_max or held_bytes + size > bytes_max):
                yield _one(held)
                held, held_rows, held_bytes = [], 0, 0
            held.append(part)
            held_rows += part.num_rows
            held_bytes += size
    if held:
        yield _one(held)


def _one(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    return held[0] if len(held) == 1 else pa.concat_batches(held)


def _cut(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= rows_max and (batch.num_rows <= 1 or batch.nbytes <= bytes_max):
        yield batch
        return
    half = min(rows_max, batch.num_rows // 2 or 1)
    for start in range(0, batch.num_rows, half):
        yield from _cut(batch.slice(start, half), rows_max, bytes_max)
