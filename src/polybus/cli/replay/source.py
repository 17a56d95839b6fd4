"""Where a replay reads: the files of a data folder (`LogReader`), or a bus over HTTP."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol
from urllib.parse import quote, urlencode

import pyarrow as pa

from polybus.client.http.blocking import opened, request_json
from polybus.client.urls import parse
from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.wire.positions import Earliest, Latest, Position, parse_start

COLUMNS = ("offset", "timestamp", "key", "value", "headers")
ROWS_PER_READ = 20_000
ARROW = "application/vnd.apache.arrow.stream"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ReplaySource(Protocol):
    """The stored messages of a bus; implemented by `LogReader` and `RemoteSource`."""

    def bounds(self, topic: str) -> Bounds:
        """Raises UsageError `topic.unknown`."""
        ...

    def offset_at(self, topic: str, timestamp_us: int) -> int: ...

    def read(
        self, topic: str, start: int, stop: int, *, columns: Sequence[str], rows_max: int
    ) -> Iterator[pa.RecordBatch]: ...


class RemoteSource:
    """A bus that answers HTTP."""

    def __init__(self, url: str) -> None:
        self._url = http_url(url)

    def bounds(self, topic: str) -> Bounds:
        found = request_json(self._url, "GET", _path(topic))
        return Bounds(found["epoch"], found["start"], found["stop"])

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        moment = (_EPOCH + timedelta(microseconds=timestamp_us)).isoformat()
        query = urlencode({"time": moment, "limit": 1})
        found = request_json(self._url, "GET", f"{_path(topic)}/messages?{query}")
        messages = found["messages"]
        return int(messages[0]["offset"] if messages else found["next"])

    def read(
        self, topic: str, start: int, stop: int, *, columns: Sequence[str], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        while start < stop:
            query = urlencode({"offset": start, "limit": min(rows_max, stop - start)})
            path = f"{_path(topic)}/messages?{query}"
            with opened(self._url, "GET", path, headers={"accept": ARROW}) as answer:
                batches = list(pa.ipc.open_stream(answer.read()))
            for batch in batches:
                yield batch.select(list(columns))
            read = sum(batch.num_rows for batch in batches)
            if not read:
                text = f"topic {topic!r} no longer holds offset {start}"
                raise UsageError("log.offset-unknown", text)
            start += read


def http_url(url: str) -> str:
    """The HTTP address of a bus: all protocols except queues share its port."""
    address = parse(url)
    if address.scheme == "queue":
        raise UsageError("client.unsupported", "a queue has no history to read; use http://")
    return f"{'https' if address.tls else 'http'}://{address.authority}"


def _path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `start` to `stop` (exclusive) of a topic."""

    topic: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, source: ReplaySource) -> Iterator[pa.RecordBatch]:
        return source.read(
            self.topic, self.start, self.stop, columns=COLUMNS, rows_max=ROWS_PER_READ
        )

    def duration_us(self, source: ReplaySource) -> int:
        """The time between the first message and the last."""
        times_us = [
            timestamps_us(rows)[0]
            for first in (self.start, self.stop - 1)
            if len(self)
            for rows in OffsetRange(self.topic, first, first + 1).read(source)
            if rows.num_rows
        ]
        return max(0, times_us[-1] - times_us[0]) if times_us else 0


def range_of(source: ReplaySource, topic: str, start: str, stop: str) -> OffsetRange:
    """Resolve offsets, `EPOCH:OFFSET`, times, `earliest` and `latest` to offsets.

    Raises:
        UsageError: `topic.unknown`; `log.offset-unknown`, the topic does not hold them.
        PeerError: `position.invalid`.
    """
    bounds = source.bounds(topic)
    first, last = (_resolved(source, topic, bounds, text) for text in (start, stop))
    if not bounds.start <= first <= bounds.stop or not bounds.start <= last <= bounds.stop:
        text = f"offsets {first} to {last} of {topic!r} are wanted; it holds"
        raise UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")
    return OffsetRange(topic, first, max(first, last))


def _resolved(source: ReplaySource, topic: str, bounds: Bounds, text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    position = parse_start(text)
    match position:
        case Earliest():
            return bounds.start
        case Latest():
            return bounds.stop
        case Position(epoch, offset):
            if epoch != bounds.epoch:
                problem = f"{text} is of another epoch of {topic!r}, which is now {bounds.epoch}"
                raise UsageError("log.offset-unknown", problem)
            return offset
    return max(bounds.start, source.offset_at(topic, position.timestamp_us))


def timestamps_us(rows: pa.RecordBatch) -> list[int]:
    found: list[int] = rows.column("timestamp").cast(pa.int64()).to_pylist()
    return found
