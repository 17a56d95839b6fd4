"""Where a reader's messages come from: a data folder, or a bus over HTTP, behind the same calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from polybus.log.history.file_reader import ALWAYS, TimeRange
from polybus.log.interface import Bounds
from polybus.log.reading.pieces import ReadPlan
from polybus.log.reading.reader import LogReader, Lost
from polybus.spark.where import Where

ROWS_MAX = 10_000
"""Rows in a batch: more are no faster, fewer are slower."""
BATCH_BYTES_MAX = 8 << 20


class Origin(Protocol):
    """A log that can be read by offset, its durable messages only."""

    def topics(self, *, system: bool) -> list[str]: ...

    def bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """What topics hold; those that do not exist are left out."""
        ...

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        """The first offset at or after a time, else the end."""
        ...

    def plan(self, topic: str, start: int, stop: int, *, times: TimeRange = ALWAYS) -> ReadPlan:
        """Where a range is. Raises UsageError `topic.unknown` or `log.offset-unknown`."""
        ...

    def read(
        self, plan: ReadPlan, columns: Sequence[str], lost: Lost | None
    ) -> Iterator[pa.RecordBatch]:
        """A plan's rows, each once; raises as LogReader.read_plan."""
        ...


class LocalOrigin:
    """A data folder that this machine can read."""

    def __init__(self, where: Where) -> None:
        assert where.data is not None
        self._log = LogReader(where.data)

    def topics(self, *, system: bool) -> list[str]:
        return self._log.topics(system=system)

    def bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        return self._log.all_bounds(topics)

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        return self._log.offset_at(topic, timestamp_us)

    def plan(self, topic: str, start: int, stop: int, *, times: TimeRange = ALWAYS) -> ReadPlan:
        return self._log.plan(topic, start, stop, times=times)

    def read(
        self, plan: ReadPlan, columns: Sequence[str], lost: Lost | None
    ) -> Iterator[pa.RecordBatch]:
        return self._log.read_plan(
            plan, columns=columns, rows_max=ROWS_MAX, bytes_max=BATCH_BYTES_MAX, lost=lost
        )


def open_origin(where: Where) -> Origin:
    """Raises UsageError `data.not-found`; a bus is first called when something is asked."""
    if where.data is not None:
        return LocalOrigin(where)
    from polybus.spark.source.remote import RemoteOrigin

    return RemoteOrigin(where)
