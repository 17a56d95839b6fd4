"""Where a replay reads: the log's files, or a bus over HTTP; both give Arrow batches of a topic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import pyarrow as pa

from polybus.client.http.blocking import opened, request_json
from polybus.client.urls import parse
from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.log.reading.reader import LogReader
from polybus.wire.positions import At, Earliest, Latest, parse_start

COLUMNS = ("offset", "timestamp", "key", "value", "headers")
ROWS_PER_CALL = 20_000
ARROW = "application/vnd.apache.arrow.stream"


class History(Protocol):
    """A bus's stored messages."""

    def bounds(self, topic: str) -> Bounds:
        """Raises UsageError `topic.unknown`."""
        ...

    def offset_at(self, topic: str, timestamp_us: int) -> int: ...

    def read(self, topic: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The messages of these offsets in order, with COLUMNS."""
        ...


class LocalHistory:
    """The files of a data folder, whether its bus runs or not."""

    def __init__(self, data: Path) -> None:
        """Raises UsageError `data.not-found`."""
        self._log = LogReader(data)

    def bounds(self, topic: str) -> Bounds:
        return self._log.bounds(topic)

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        return self._log.offset_at(topic, timestamp_us)

    def read(self, topic: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        return self._log.read(topic, start, stop, columns=COLUMNS, rows_max=ROWS_PER_CALL)


class RemoteHistory:
    """A bus that answers HTTP."""

    def __init__(self, url: str) -> None:
        self._url = http_url(url)

    def bounds(self, topic: str) -> Bounds:
        found = request_json(self._url, "GET", _path(topic))
        return Bounds(found["epoch"], found["start"], found["stop"])

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        time = datetime.fromtimestamp(timestamp_us // 1_000_000, UTC)
        micros = timestamp_us % 1_000_000
        query = f"time={time:%Y-%m-%dT%H:%M:%S}.{micros:06d}Z&limit=1"
        found = request_json(self._url, "GET", f"{_path(topic)}/messages?{query}")
        messages = found["messages"]
        return int(messages[0]["offset"] if messages else found["next"])

    def read(self, topic: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            query = f"offset={start}&limit={min(ROWS_PER_CALL, stop - start)}"
            path = f"{_path(topic)}/messages?{query}"
            with opened(self._url, "GET", path, headers={"accept": ARROW}) as answer:
                batches = list(pa.ipc.open_stream(answer.read()))
            for batch in batches:
                yield batch.select(list(COLUMNS))
            read = sum(batch.num_rows for batch in batches)
            if not read:
                text = f"topic {topic!r} has nothing at offset {start} any more"
                raise UsageError("log.offset-unknown", text)
            start += read


def http_url(url: str) -> str:
    """The HTTP address of a bus, whatever protocol the URL names: they share their port."""
    address = parse(url)
    if address.scheme == "queue":
        raise UsageError("client.unsupported", "a queue has no past to read; use http://")
    return f"{'https' if address.tls else 'http'}://{address.authority}"


def _path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


@dataclass(frozen=True, slots=True)
class Span:
    """What is to be replayed: offsets `start` to `stop` (exclusive) of an epoch."""

    topic: str
    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def span_of(history: History, topic: str, start: str, stop: str) -> Span:
    """Offsets, `EPOCH:OFFSET`, times, `earliest` and `latest` as offsets of the topic now.

    Raises:
        UsageError: `topic.unknown`; `log.offset-unknown`, the topic does not hold them.
        PeerError: `position.invalid`.
    """
    bounds = history.bounds(topic)
    first, last = _resolved(history, topic, bounds, start), _resolved(history, topic, bounds, stop)
    if not bounds.start <= first <= bounds.stop or not bounds.start <= last <= bounds.stop:
        text = f"offsets {first} to {last} of {topic!r} are wanted; it holds"
        raise UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")
    return Span(topic, bounds.epoch, first, max(first, last))


def _resolved(history: History, topic: str, bounds: Bounds, text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    position = parse_start(text)
    match position:
        case Earliest():
            return bounds.start
        case Latest():
            return bounds.stop
        case At(epoch, offset):
            if epoch != bounds.epoch:
                said = f"{text} is of another epoch of {topic!r}, which is now {bounds.epoch}"
                raise UsageError("log.offset-unknown", said)
            return offset
    return max(bounds.start, history.offset_at(topic, position.timestamp_us))


def timestamps_us(rows: pa.RecordBatch) -> list[int]:
    found: list[int] = rows.column("timestamp").cast(pa.int64()).to_pylist()
    return found


def sample_time_us(history: History, span: Span, offset: int) -> int | None:
    """When a message was stored, for a forecast; None if the span has none there."""
    if not span.start <= offset < span.stop:
        return None
    for rows in history.read(span.topic, offset, offset + 1):
        if rows.num_rows:
            return timestamps_us(rows)[0]
    return None
