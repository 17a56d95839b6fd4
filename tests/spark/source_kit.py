"""A log in this process for tests of the source: written as the bus does, read as Spark does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from log_kit import opened_log

from polybus.batch import Batch
from polybus.log.history.handover import hand_over
from polybus.spark.source.options import SourceOptions, parse

NOON_US = 1_728_043_200_000_000
"""12:00 UTC on 2024-10-04."""
SECOND_US = 1_000_000


class Clock:
    """The bus's clock, moved by the test."""

    def __init__(self) -> None:
        self.now_us = NOON_US

    def __call__(self) -> int:
        return self.now_us


class WrittenLog:
    """A data folder and the log that writes to it."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.clock = Clock()
        self.log = opened_log(data, self.clock)

    def create(self, *topics: str) -> None:
        for topic in topics:
            self.log.create_topic(topic)

    def append(
        self, topic: str, count: int, *, size: int = 0, headers: dict[str, bytes] | None = None
    ) -> None:
        """This many durable messages, each naming its topic and offset."""
        first = self.log.bounds(topic).stop
        numbers = range(first, first + count)
        values = [f"{topic}:{number}".encode().ljust(size, b".") for number in numbers]
        batch = Batch.of(topic, values, headers=None if headers is None else [headers] * count)
        batch.protocol, batch.sender = "goms", "127.0.0.1:1"
        self.log.append(batch)
        self.log.sync()

    def hand_over(self) -> None:
        """All that is in the journal becomes history."""
        self.log.seal()
        self.log.after_handover(hand_over(self.data, grace_s=0.0))

    def recreate(self, topic: str) -> None:
        self.clock.now_us += SECOND_US
        self.log.delete_topic(topic)
        self.log.create_topic(topic)


@contextlib.contextmanager
def written_log(data: Path) -> Iterator[WrittenLog]:
    written = WrittenLog(data)
    try:
        yield written
    finally:
        written.log.close()


def source_options(data: Path | str, *, streaming: bool = False, **given: Any) -> SourceOptions:
    place = {"url": data} if isinstance(data, str) else {"data": str(data)}
    return parse(place | {name: str(value) for name, value in given.items()}, streaming=streaming)


def rows_of(reader: Any, partitions: Sequence[Any]) -> pa.Table:
    """What tasks would read."""
    batches = [rows for one in partitions for rows in reader.read(one)]
    return pa.Table.from_batches(batches)


def offsets_of(reader: Any, partitions: Sequence[Any]) -> list[tuple[str, int]]:
    found = []
    for one in partitions:
        for rows in reader.read(one):
            topics = rows.column("topic").to_pylist()
            found += list(zip(topics, rows.column("offset").to_pylist(), strict=True))
    return found
