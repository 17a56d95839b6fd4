"""What the tests of LogReader share: a data folder, a log, and rows read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from log_kit import opened_log
from segments_kit import NOON_US, make_topic

from polybus.batch import Batch
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.reading.reader import LogReader


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "polybus.json").write_bytes(b'{"format":1,"epoch-max":0}')
    make_topic(tmp_path, "news")
    return tmp_path


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    opened = opened_log(tmp_path, lambda: NOON_US)
    yield opened
    opened.close()


def append(log: FileLog, topic: str, count: int, *, word: str = "") -> None:
    """This many messages as one durable commit, named by their offsets."""
    first = log.bounds(topic).stop
    values = [f"{word or topic}:{offset}".encode() for offset in range(first, first + count)]
    batch = Batch.of(topic, values)
    batch.protocol, batch.sender = "goms", "test"
    log.append(batch)
    log.sync()


def hand_over_all(log: FileLog) -> None:
    """What maintenance does: seal, hand over, forget and delete the segments."""
    log.seal()
    log.after_handover(hand_over(log.data, grace_s=0.0))


def offsets(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [offset for rows in batches for offset in rows.column("offset").to_pylist()]


def values(reader: LogReader, topic: str, start: int = 0, stop: int | None = None) -> list[Any]:
    stop = reader.bounds(topic).stop if stop is None else stop
    found = reader.read(topic, start, stop)
    return [value for rows in found for value in rows.column("value").to_pylist()]
