"""RemoteLog: the OffsetReader of a bus at a URL. `open_origin` opens the log of any location.

Rows arrive as Arrow streams, a page at a time. The bus answers with stop offsets that
are durable, so messages that Spark has planned still exist after a crash of the bus. While the bus
is unavailable, reading waits some seconds and then continues where it stopped.
"""

import contextlib
import http.client
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pyarrow as pa

from polybus.client.http import blocking as bus_http
from polybus.errors import PolybusError, StorageError
from polybus.log.blobs import BlobReader, accounts_with_blobs, blobs_folder, unknown_blob
from polybus.log.history.topic_history import NextAndRows
from polybus.log.interface import Bounds
from polybus.log.opening import open_reader
from polybus.log.reading.offset_reader import BOUNDS_AGE_S, OffsetReader, next_offset, recreated
from polybus.log.reading.pieces import ReadPlan
from polybus.names import is_reserved
from polybus.spark.location import BusLocation, Retry, retried

ROWS_MAX = 10_000
"""Rows in a record batch: more are not faster, fewer are slower."""
BATCH_BYTES_MAX = 8 << 20
BLOB_PIECE_BYTES = 1 << 20
ARROW = "application/vnd.apache.arrow.stream"
PAGE_ROWS = 100_000
"""The limit of one request, so that a single answer does not occupy the bus for long."""
AWAY_S = 10.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RemoteLog(OffsetReader):
    """The topics of a bus at a URL."""

    def __init__(self, location: BusLocation) -> None:
        self.place: BusLocation = location
        self._bounds: dict[str, Bounds] = {}
        self._damaged: dict[str, str] = {}
        self._asked_at_s = -BOUNDS_AGE_S

    def topics(self, *, system: bool = False) -> list[str]:
        self._ask()
        return sorted(topic for topic in self._bounds if system or not is_reserved(topic))

    def all_bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        self._ask()
        wanted = list(topics)
        for topic in wanted:
            if topic in self._damaged:
                raise StorageError("log.damaged", f"at {self.place}: {self._damaged[topic]}")
        return {topic: self._bounds[topic] for topic in wanted if topic in self._bounds}

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        moment = (_EPOCH + timedelta(microseconds=timestamp_us)).isoformat()
        query = {"time": moment, "limit": 1, "columns": "offset"}
        # The bus may know messages that are not durable yet, but then their offset is the end.
        others = self.place.others
        found = retried(lambda: list(self._fetch(topic, query)), patience_s=AWAY_S, others=others)
        for rows in found:
            return int(rows.column(0)[0].as_py())
        self._look_again()
        return self.bounds(topic).stop

    def _rows(
        self, plan: ReadPlan, columns: Sequence[str], *, rows_max: int, bytes_max: int
    ) -> Iterator[NextAndRows]:
        offset, retry = plan.start, Retry(AWAY_S, others=self.place.others)
        # Without their offsets, rows do not show where the next ones begin.
        asked = [*columns, *(() if "offset" in columns else ("offset",))]
        while offset < plan.stop:
            first, stop = offset, min(plan.stop, offset + PAGE_ROWS)
            query = {"offset": first, "stop": stop, "epoch": plan.epoch}
            try:
                for rows in self._fetch(plan.topic, query | {"columns": ",".join(asked)}):
                    if rows.num_rows:
                        offset = next_offset(rows)
                        yield offset, rows.select(columns)
                        retry.reset()
                if offset == first:
                    self._check_is_gap(plan, stop)
                    offset = stop
            except PolybusError as error:
                error.text = f"topic {plan.topic!r} at {self.place}, offset {offset}: {error.text}"
                retry.wait(error)

    def _check_is_gap(self, plan: ReadPlan, stop: int) -> None:
        """After an answer without rows: the topic must be the planned one, and continue after it.

        Raises UsageError `topic.unknown`, `topic.recreated`; PolybusError if the bus lags behind.
        """
        self._look_again()
        bounds = self.bounds(plan.topic)
        if bounds.epoch != plan.epoch:
            raise recreated(plan.topic)
        if bounds.stop < stop:
            raise PolybusError("client.disconnected", "the answer was empty")

    def _look_again(self) -> None:
        self._asked_at_s = -BOUNDS_AGE_S

    def _fetch(self, topic: str, query: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """One request. Raises the errors of the bus, or one of bus_http.GONE."""
        path = f"/v1/topics/{quote(topic, safe='')}/messages?{urlencode(query)}"
        url, token = self.place.address()
        headers = {"accept": ARROW}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        with (
            self.place.leaving(url),
            bus_http.opened(url, "GET", path, headers=headers) as answer,
        ):
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
        topics = self.place.call("GET", path, patience_s=AWAY_S)["topics"]
        self._bounds = {
            one["name"]: Bounds(one["epoch"], one["start"], one["stop"]) for one in topics
        }
        self._damaged = {one["name"]: one["damaged"] for one in topics if one.get("damaged")}
        self._asked_at_s = time.monotonic()


def open_origin(location: BusLocation) -> OffsetReader:
    """The log of a location. A remote bus is only called when it is needed.

    Raises UsageError `data.not-found`; for a cluster as `open_reader` does.
    """
    if location.is_local:
        return open_reader(location.cluster or location.data)
    return RemoteLog(location)


@contextlib.contextmanager
def opened_blob(location: BusLocation, blob_id: str) -> Iterator[tuple[int, Iterator[bytes]]]:
    """The size and the bytes of a large payload, piece by piece.

    Raises UsageError `blob.unknown`, StorageError `blob.damaged`; of a bus also one of
    bus_http.GONE.
    """
    if location.is_local:
        yield _stored_blob(location.data, blob_id)
        return
    url, token = location.address()
    head = {} if token is None else {"authorization": f"Bearer {token}"}
    with bus_http.opened(url, "GET", f"/v1/blobs/{blob_id}", headers=head) as answer:
        size = int(answer.headers.get("content-length") or 0)
        yield size, iter(lambda: answer.read(BLOB_PIECE_BYTES), b"")


def _stored_blob(data: Path, blob_id: str) -> tuple[int, Iterator[bytes]]:
    for account in accounts_with_blobs(data):
        folder = blobs_folder(data, account) / blob_id
        if folder.is_dir():
            reader = BlobReader(folder)
            starts = range(0, reader.size, BLOB_PIECE_BYTES)
            return reader.size, (reader.read(start, BLOB_PIECE_BYTES) for start in starts)
    raise unknown_blob()


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
