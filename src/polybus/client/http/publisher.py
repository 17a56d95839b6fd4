"""Publishing over HTTP.

One request at a time on one connection keeps the order. Messages that are published during a
request wait for the next one, which carries all messages of one topic. This way many receipts
cost one fsync, although each request waits for its answer.
"""

import asyncio
import bisect
import contextlib
import itertools
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from polybus.client.http.connection import HttpConnection, decode
from polybus.client.message import Position
from polybus.client.options import ClientOptions
from polybus.client.publisher import (
    RECEIPT_UNKNOWN,
    ConnectionBrokenError,
    Outgoing,
    client_closed,
    no_receipt,
    refuse,
)
from polybus.client.retry import Backoff, retrying
from polybus.client.transport import PendingPublish
from polybus.errors import PolybusError

QUEUED_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = 1 << 20
REQUEST_LINES_MAX = 10_000
MESSAGE_COST_BYTES = 100


class RequestPart(NamedTuple):
    """The values of a publish that fit into one request."""

    publish: PendingPublish
    values: Sequence[bytes]
    is_last: bool


class _Published(msgspec.Struct):
    epoch: int
    offsets: list[int]


class HttpPublisher(Outgoing):
    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self._http = HttpConnection(options)
        self._backoff = Backoff()
        self._queue: deque[PendingPublish] = deque()
        self._queued_bytes = 0
        # How many values of the first publish were taken from the queue.
        self._taken_count = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._room.set()
        self._idle.set()
        self._sending: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._http.open()
        self._sending = asyncio.create_task(self._send_all(), name=self._options.name)

    async def close(self) -> None:
        failure, self._failure = self._failure, self._failure or client_closed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.close_timeout_s):
                await self._idle.wait()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        if failure is None and self._queue:
            text = "the client was closed before the bus could be reached"
            self._drop_all(PolybusError("client.disconnected", text))
        self._http.close()

    async def publish(self, publish: PendingPublish) -> None:
        while self._queued_bytes > QUEUED_BYTES_MAX and self._failure is None:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        self._queue.append(publish)
        self._queued_bytes += sum(_costs(publish.values))
        self._idle.clear()
        self._work.set()

    async def _publish_once(self, publish: PendingPublish) -> Position:
        publish.receipt = asyncio.get_running_loop().create_future()
        await self.publish(publish)
        return await publish.receipt

    async def flush(self) -> None:
        await self._idle.wait()
        if self._failure is not None:
            raise self._failure

    # Sending, in a separate task

    async def _send_all(self) -> None:
        while self._failure is None or self._queue:
            if not self._queue:
                self._idle.set()
                self._work.clear()
                await self._work.wait()
                continue
            # Connect before a request is taken, so that it stays in the queue meanwhile.
            try:
                await retrying(
                    self._http.open,
                    self._backoff,
                    name=self._options.name,
                    is_transient=lambda _: self._options.reconnect,
                )
            except PolybusError as error:
                self._disconnected(error)
                return
            parts = self._next_parts()
            try:
                await self._send(parts)
            except PolybusError as error:
                self._refused(parts, error)
            except asyncio.CancelledError:
                self._refused(parts, _unknown("the client was closed"))
                raise
        self._idle.set()

    def _next_parts(self) -> list[RequestPart]:
        """The next request: as many values of one topic as fit; a large message is sent alone."""
        parts: list[RequestPart] = []
        topic = self._queue[0].topic
        count, cost_bytes = 0, 0
        while self._queue and self._queue[0].topic == topic:
            publish, start = self._queue[0], self._taken_count
            values = publish.values[start : start + REQUEST_LINES_MAX - count]
            costs = list(itertools.accumulate(_costs(values)))
            fitting = bisect.bisect_right(costs, REQUEST_BYTES_MAX - cost_bytes)
            if not parts:
                fitting = max(fitting, 1)
            if not fitting:
                break
            count += fitting
            cost_bytes += costs[fitting - 1]
            is_last = start + fitting == len(publish.values)
            parts.append(RequestPart(publish, values[:fitting], is_last))
            self._taken_count = 0 if is_last else start + fitting
            if not is_last:
                break
            self._queue.popleft()
        self._queued_bytes -= cost_bytes
        if self._queued_bytes <= QUEUED_BYTES_MAX:
            self._room.set()
        return parts

    async def _send(self, parts: list[RequestPart]) -> None:
        body = await self._http.request(
            "POST", *_request(parts), timeout_s=self._options.receipt_timeout_s
        )
        published = decode(body, _Published)
        self._backoff.reset()
        count = 0
        for part in parts:
            count += len(part.values)
            if len(published.offsets) < count:
                raise PolybusError("client.answer-invalid", "the bus sent too few offsets")
            receipt = part.publish.receipt
            if part.is_last and receipt is not None and not receipt.done():
                receipt.set_result(Position(published.epoch, published.offsets[count - 1]))

    def _refused(self, parts: list[RequestPart], error: PolybusError) -> None:
        """A request was refused, or its result is unknown."""
        reported = error
        if error.code in ("client.disconnected", "client.answer-invalid"):
            reported = _unknown(error.text)
        elif error.code == "client.timeout":
            reported = no_receipt(self._options.receipt_timeout_s)
        self._fail([part.publish for part in parts], reported)
        if error.code == "client.disconnected" and not self._options.reconnect:
            self._disconnected(error)

    def _disconnected(self, error: PolybusError) -> None:
        if self._failure is None:
            self._failure = PolybusError("client.disconnected", error.text)
        self._drop_all(self._failure)
        self._room.set()
        self._idle.set()

    def _drop_all(self, error: PolybusError) -> None:
        """Drop everything that waits to be sent."""
        publishes = list(self._queue)
        self._queue.clear()
        self._queued_bytes = self._taken_count = 0
        self._fail(publishes, error)

    def _fail(self, publishes: list[PendingPublish], error: PolybusError) -> None:
        for publish in publishes:
            refuse(publish.receipt, error)
        if any(publish.receipt is None for publish in publishes):
            self._options.report(error)


def _unknown(why: str) -> PolybusError:
    return ConnectionBrokenError(RECEIPT_UNKNOWN, f"the message may or may not be stored: {why}")


def _costs(values: Sequence[bytes]) -> list[int]:
    return [len(value) + MESSAGE_COST_BYTES for value in values]


def _request(parts: list[RequestPart]) -> tuple[str, bytes, str]:
    """The target of the request, its body and the type of that."""
    first = parts[0].publish
    target = f"/v1/topics/{quote(first.topic, safe='')}/messages"
    if all(part.publish.receipt is None for part in parts):
        target += "?receipt=memory"
    if len(parts) == 1 and len(parts[0].values) == 1 and not first.headers:
        return target, parts[0].values[0], "application/octet-stream"
    return target, b"".join(map(_lines, parts)), "application/x-ndjson"


def _lines(part: RequestPart) -> bytes:
    """One message per line, in base64 because a message may be any bytes."""
    tail = b'"}\n'
    if part.publish.headers:
        headers = {name: _text(value) for name, value in part.publish.headers.items()}
        tail = b'","headers":' + msgspec.json.encode(headers) + b"}\n"
    return b"".join([b'{"base64":"' + b64encode(value) + tail for value in part.values])


def _text(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}
