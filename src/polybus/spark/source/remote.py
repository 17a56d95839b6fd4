"""RemoteOrigin: a log read over HTTP from a running bus, as Arrow streams, a page at a time.

Topics' ends are asked for so that the bus answers when they are durable: what Spark has seen once
is there after a crash of the bus too. A bus that goes away, to restart perhaps, is waited for some
seconds; reading then goes on at the message where it stopped.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pyarrow as pa

from polybus.client.http import blocking as bus_http
from polybus.errors import BusyError, PolybusError, StorageError, UsageError
from polybus.log.history.file_reader import ALWAYS, TimeRange
from polybus.log.interface import Bounds
from polybus.log.reading.pieces import Piece, ReadPlan
from polybus.log.reading.reader import Lost, joined
from polybus.spark.source.origin import BATCH_BYTES_MAX, ROWS_MAX
from polybus.spark.where import Where

ARROW = "application/vnd.apache.arrow.stream"
PAGE_ROWS = 100_000
"""One request asks for so much at most, so that a bus is never long at one answer."""
ROW_BYTES = 200
"""What a row is taken for when work is split: the bus does not say how large its topics are."""
AWAY_S = 10.0
ATTEMPTS_MAX = 6
PAUSE_FIRST_S = 0.1
BOUNDS_AGE_S = 0.05
"""Spark asks for the end up to a hundred times a second; the bus is asked less often."""
LOSSES = ("log.offset-unknown", "topic.unknown", "topic.recreated")
"""How a bus says that what was planned is not there any more."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RemoteOrigin:
    """The log of a bus at an address. `pieces` of its plans have no file."""

    def __init__(self, where: Where) -> None:
        assert where.url is not None
        self._url = where.url
        self._token = where.token
        self._known: dict[str, Bounds] = {}
        self._damaged: dict[str, str] = {}
        self._known_at_s = -BOUNDS_AGE_S

    def topics(self, *, system: bool) -> list[str]:
        self._ask()
        return sorted(topic for topic in self._known if system or not topic.startswith("$"))

    def bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """Raises StorageError `log.damaged` if one of them is."""
        self._ask()
        wanted = list(topics)
        for topic in wanted:
            if topic in self._damaged:
                raise StorageError("log.damaged", f"at {self._url}: {self._damaged[topic]}")
        return {topic: self._known[topic] for topic in wanted if topic in self._known}

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        moment = (_EPOCH + timedelta(microseconds=timestamp_us)).isoformat()
        query = {"time": moment, "limit": 1, "columns": "offset"}
        # The bus may know messages that are not durable yet, but then their offset is the end.
        for rows in bus_http.persist(lambda: list(self._fetch(topic, query)), timeout_s=AWAY_S):
            return int(rows.column(0)[0].as_py())
        self._known_at_s = -BOUNDS_AGE_S
        return self._bounds_of(topic).stop

    def plan(self, topic: str, start: int, stop: int, *, times: TimeRange = ALWAYS) -> ReadPlan:
        bounds = self._bounds_of(topic)
        if start < bounds.start or stop > bounds.stop or start > stop:
            text = f"offsets {start} to {stop} of topic {topic!r} are wanted; the log holds"
            raise UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")
        piece = Piece(Path(self._url), start, stop, (stop - start) * ROW_BYTES)
        return ReadPlan(topic, bounds.epoch, start, stop, (piece,) if start < stop else (), times)

    def read(
        self, plan: ReadPlan, columns: Sequence[str], lost: Lost | None
    ) -> Iterator[pa.RecordBatch]:
        found = self._rows(plan, columns, lost)
        return joined(found, rows_max=ROWS_MAX, bytes_max=BATCH_BYTES_MAX)

    def _rows(
        self, plan: ReadPlan, columns: Sequence[str], lost: Lost | None
    ) -> Iterator[pa.RecordBatch]:
        offset, failures = plan.start, 0
        while offset < plan.stop:
            stop = min(plan.stop, offset + PAGE_ROWS)
            query = {"offset": offset, "stop": stop, "epoch": plan.epoch}
            before = offset
            try:
                for rows in self._fetch(plan.topic, query | {"columns": ",".join(columns)}):
                    yield rows
                    offset, failures = offset + rows.num_rows, 0
                if offset > before:
                    continue
                error: PolybusError = PolybusError("client.disconnected", "the answer was empty")
            except UsageError as gone:
                if lost is None or gone.code not in LOSSES:
                    raise
                lost(gone)
                offset = self._after_loss(plan, offset)
                continue
            except PolybusError as one:
                if one.code not in bus_http.GONE and not isinstance(one, BusyError):
                    raise
                error = one
            failures += 1
            if failures >= ATTEMPTS_MAX:
                text = f"topic {plan.topic!r} at {self._url}: reading stopped at offset {offset}"
                raise PolybusError(error.code, f"{text}, tried {failures} times: {error.text}")
            time.sleep(PAUSE_FIRST_S * 2 ** (failures - 1))

    def _after_loss(self, plan: ReadPlan, offset: int) -> int:
        """Where there is something of the plan again; its end if nowhere."""
        self._known_at_s = -BOUNDS_AGE_S
        bounds = self.bounds([plan.topic]).get(plan.topic)
        if bounds is None or bounds.epoch != plan.epoch or bounds.start <= offset:
            return plan.stop
        return min(bounds.start, plan.stop)

    def _fetch(self, topic: str, query: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """One request. Raises the bus's own errors, or one of bus_http.GONE."""
        path = f"/v1/topics/{quote(topic, safe='')}/messages?{urlencode(query)}"
        headers = {"accept": ARROW}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        with bus_http.opened(self._url, "GET", path, headers=headers) as answer:
            try:
                yield from pa.ipc.open_stream(_Body(answer))
            except (OSError, http.client.HTTPException, pa.ArrowException) as error:
                text = f"the bus at {self._url} went away during an answer: {error}"
                raise PolybusError("client.disconnected", text) from error

    def _bounds_of(self, topic: str) -> Bounds:
        found = self.bounds([topic]).get(topic)
        if found is None:
            raise UsageError("topic.unknown", f"there is no topic {topic!r} at {self._url}")
        return found

    def _ask(self) -> None:
        """Take the topics as they are now, or were just now."""
        if time.monotonic() - self._known_at_s < BOUNDS_AGE_S:
            return
        path = "/v1/topics?system=true&durable=true"
        answer = bus_http.persist(
            lambda: bus_http.request_json(self._url, "GET", path, token=self._token),
            timeout_s=AWAY_S,
        )
        self._known = {
            one["name"]: Bounds(one["epoch"], one["start"], one["stop"]) for one in answer["topics"]
        }
        self._damaged = {
            one["name"]: one["damaged"] for one in answer["topics"] if one.get("damaged")
        }
        self._known_at_s = time.monotonic()


class _Body:
    """An answer's body as pyarrow reads it: HTTPResponse closes itself at its end."""

    closed = False

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def read(self, size: int = -1) -> bytes:
        return self._answer.read(None if size < 0 else size)

    def readable(self) -> bool:
        return True

    def close(self) -> None: ...
