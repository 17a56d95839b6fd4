"""Where messages are read from: a data folder (LogReader), or a bus over HTTP (RemoteLog).

Over HTTP, rows arrive as Arrow streams, a page at a time. The bus answers with stop offsets that
are durable, so what Spark has planned once is still there after a crash of the bus. While the bus
is away, reading waits some seconds and then continues at the message where it stopped.
"""

import http.client
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pyarrow as pa

from polybus.client.http import blocking as bus_http
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.history.topic_history import ALWAYS, TimeRange
from polybus.log.interface import Bounds
from polybus.log.reading.pieces import Piece, ReadPlan
from polybus.log.reading.reader import LogReader, Lost, joined
from polybus.spark.location import BusLocation, Retry, retried

ROWS_MAX = 10_000
"""Rows in a record batch: more are not faster, fewer are slower."""
BATCH_BYTES_MAX = 8 << 20
ARROW = "application/vnd.apache.arrow.stream"
PAGE_ROWS = 100_000
"""How much one request asks for, so that a single answer does not occupy the bus for long."""
ROW_BYTES = 200
"""The assumed size of a row when work is split: the bus does not report sizes."""
AWAY_S = 10.0
BOUNDS_AGE_S = 0.05
"""Spark asks for the end up to a hundred times a second; the bus is asked less often."""
LOSSES = ("log.offset-unknown", "topic.unknown", "topic.recreated")
"""The codes with which a bus says that planned messages no longer exist."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RemoteLog:
    """The log of a bus at a URL, with the methods of LogReader that readers use.

    The pieces of its plans have no file.
    """

    def __init__(self, location: BusLocation) -> None:
        self._location = location
        self._bounds: dict[str, Bounds] = {}
        self._damaged: dict[str, str] = {}
        self._asked_at_s = -BOUNDS_AGE_S

    def topics(self, *, system: bool) -> list[str]:
        self._ask()
        return sorted(topic for topic in self._bounds if system or not topic.startswith("$"))

    def all_bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        self._ask()
        wanted = list(topics)
        for topic in wanted:
            if topic in self._damaged:
                raise StorageError("log.damaged", f"at {self._location}: {self._damaged[topic]}")
        return {topic: self._bounds[topic] for topic in wanted if topic in self._bounds}

    def bounds(self, topic: str) -> Bounds:
        found = self.all_bounds([topic]).get(topic)
        if found is None:
            raise UsageError("topic.unknown", f"topic {topic!r} does not exist at {self._location}")
        return found

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        moment = (_EPOCH + timedelta(microseconds=timestamp_us)).isoformat()
        query = {"time": moment, "limit": 1, "columns": "offset"}
        # The bus may know messages that are not durable yet, but then their offset is the end.
        for rows in retried(lambda: list(self._fetch(topic, query)), patience_s=AWAY_S):
            return int(rows.column(0)[0].as_py())
        self._asked_at_s = -BOUNDS_AGE_S
        return self.bounds(topic).stop

    def plan(self, topic: str, start: int, stop: int, *, times: TimeRange = ALWAYS) -> ReadPlan:
        bounds = self.bounds(topic)
        if start < bounds.start or stop > bounds.stop or start > stop:
            text = f"offsets {start} to {stop} of topic {topic!r} are not all in the log, which has"
            raise UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")
        piece = Piece(Path(str(self._location)), start, stop, (stop - start) * ROW_BYTES)
        return ReadPlan(topic, bounds.epoch, start, stop, (piece,) if start < stop else (), times)

    def read_plan(
        self,
        plan: ReadPlan,
        *,
        columns: Sequence[str],
        rows_max: int,
        bytes_max: int,
        lost: Lost | None = None,
    ) -> Iterator[pa.RecordBatch]:
        return joined(self._rows(plan, columns, lost), rows_max=rows_max, bytes_max=bytes_max)

    def _rows(
        self, plan: ReadPlan, columns: Sequence[str], lost: Lost | None
    ) -> Iterator[pa.RecordBatch]:
        offset, retry = plan.start, Retry(AWAY_S)
        while offset < plan.stop:
            first, stop = offset, min(plan.stop, offset + PAGE_ROWS)
            query = {"offset": first, "stop": stop, "epoch": plan.epoch}
            try:
                for rows in self._fetch(plan.topic, query | {"columns": ",".join(columns)}):
                    yield rows
                    offset += rows.num_rows
                    retry.reset()
                if offset == first:
                    raise PolybusError("client.disconnected", "the answer was empty")
            except PolybusError as error:
                if lost is not None and error.code in LOSSES and isinstance(error, UsageError):
                    lost(error)
                    offset = self._after_loss(plan, offset)
                    continue
                error.text = (
                    f"topic {plan.topic!r} at {self._location}, offset {offset}: {error.text}"
                )
                retry.wait(error)

    def _after_loss(self, plan: ReadPlan, offset: int) -> int:
        """The offset at which messages of the plan exist again; its end if there are none."""
        self._asked_at_s = -BOUNDS_AGE_S
        bounds = self.all_bounds([plan.topic]).get(plan.topic)
        if bounds is None or bounds.epoch != plan.epoch or bounds.start <= offset:
            return plan.stop
        return min(bounds.start, plan.stop)

    def _fetch(self, topic: str, query: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """One request. Raises the errors of the bus, or one of bus_http.GONE."""
        path = f"/v1/topics/{quote(topic, safe='')}/messages?{urlencode(query)}"
        url, token = self._location.address()
        headers = {"accept": ARROW}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        with bus_http.opened(url, "GET", path, headers=headers) as answer:
            try:
                yield from pa.ipc.open_stream(_ArrowBody(answer))
            except (OSError, http.client.HTTPException, pa.ArrowException) as error:
                text = f"the bus at {url} disconnected during an answer: {error}"
                raise PolybusError("client.disconnected", text) from error

    def _ask(self) -> None:
        """Fetch the bounds of all topics, unless they are recent."""
        if time.monotonic() - self._asked_at_s < BOUNDS_AGE_S:
            return
        path = "/v1/topics?system=true&durable=true"
        topics = self._location.call("GET", path, patience_s=AWAY_S)["topics"]
        self._bounds = {
            one["name"]: Bounds(one["epoch"], one["start"], one["stop"]) for one in topics
        }
        self._damaged = {one["name"]: one["damaged"] for one in topics if one.get("damaged")}
        self._asked_at_s = time.monotonic()


Origin = LogReader | RemoteLog
"""A log that is read by offset. Only durable messages are visible."""


def open_origin(location: BusLocation) -> Origin:
    """Raises UsageError `data.not-found`. A remote bus is only called when it is needed."""
    return LogReader(location.data) if location.url is None else RemoteLog(location)


class _ArrowBody:
    """The body of an answer as pyarrow reads it: HTTPResponse closes itself at its end."""

    closed = False

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def read(self, size: int = -1) -> bytes:
        return self._answer.read(None if size < 0 else size)

    def readable(self) -> bool:
        return True

    def close(self) -> None: ...
