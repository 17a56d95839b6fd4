"""Publishing over HTTP.

One request at a time on one connection keeps the order. Messages that are published during a
request wait for the next one, which carries all messages of one topic. So many receipts cost one
fsync, although each request waits for its answer.
"""

import asyncio
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from polybus.batch import Headers
from polybus.client.http.connection import HttpConnection, Request
from polybus.client.message import Position
from polybus.client.options import ClientOptions
from polybus.client.receipts import (
    RECEIPT_UNKNOWN,
    ConnectionBrokenError,
    Outgoing,
    client_closed,
    no_receipt,
    refuse,
)
from polybus.client.retry import Backoff, retrying
from polybus.client.urls import Address
from polybus.errors import PolybusError

QUEUED_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = 1 << 20
REQUEST_LINES_MAX = 10_000
MESSAGE_COST_BYTES = 100


@dataclass(frozen=True, slots=True)
class PendingPublish:
    """One call of a publisher; `receipt` is None if it requested none."""

    topic: str
    headers: Headers | None
    receipt: asyncio.Future[Position] | None = None

    def refuse(self, error: PolybusError) -> None:
        if self.receipt is not None:
            refuse(self.receipt, error)


class RequestPart:
    """The values of a publish that fit into one request."""

    __slots__ = ("cost_bytes", "is_last", "publish", "values")

    def __init__(self, publish: PendingPublish, values: Sequence[bytes], *, is_last: bool) -> None:
        self.publish = publish
        self.values = values
        self.cost_bytes = sum(map(len, values)) + MESSAGE_COST_BYTES * len(values)
        self.is_last = is_last

    def stored(self, last: Position) -> None:
        receipt = self.publish.receipt
        if self.is_last and receipt is not None and not receipt.done():
            receipt.set_result(last)


class _Published(msgspec.Struct):
    epoch: int
    offsets: list[int]


class HttpPublisher(Outgoing):
    def __init__(self, address: Address, options: ClientOptions) -> None:
        super().__init__(options)
        self._http = HttpConnection(address, options)
        self._backoff = Backoff()
        self._queue: deque[RequestPart] = deque()
        self._queued_bytes = 0
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
        try:
            async with asyncio.timeout(self._options.close_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        if failure is None and self._queue:
            text = "the client was closed before the bus could be reached"
            self._drop_all(PolybusError("client.disconnected", text))
        self._http.close()

    async def publish(self, topic: str, values: Sequence[bytes], headers: Headers | None) -> None:
        await self._put(PendingPublish(topic, headers), values)

    async def _publish_once(
        self, topic: str, values: Sequence[bytes], headers: Headers | None
    ) -> Position:
        receipt: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        await self._put(PendingPublish(topic, headers, receipt), values)
        return await receipt

    async def flush(self) -> None:
        await self._idle.wait()
        if self._failure is not None:
            raise self._failure

    async def _put(self, publish: PendingPublish, values: Sequence[bytes]) -> None:
        while self._queued_bytes > QUEUED_BYTES_MAX and self._failure is None:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        for part in _parts(publish, values):
            self._queue.append(part)
            self._queued_bytes += part.cost_bytes
        self._idle.clear()
        self._work.set()

    # Sending, in a separate task

    async def _send_all(self) -> None:
        while self._failure is None or self._queue:
            if not self._queue:
                self._idle.set()
                self._work.clear()
                await self._work.wait()
                continue
            if not await self._connected():
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

    async def _connected(self) -> bool:
        """Connect if needed, before a request is taken; False if there is no reconnect."""
        try:
            await retrying(
                self._http.open,
                self._backoff,
                name=self._options.name,
                is_transient=lambda _: self._options.reconnect,
            )
        except PolybusError as error:
            self._disconnected(error)
            return False
        return True

    def _next_parts(self) -> list[RequestPart]:
        """The parts of the next request: consecutive parts of one topic."""
        parts: list[RequestPart] = []
        cost_bytes = count = 0
        while self._queue:
            part = self._queue[0]
            cost_bytes += part.cost_bytes
            count += len(part.values)
            if parts and (
                part.publish.topic != parts[0].publish.topic
                or cost_bytes > REQUEST_BYTES_MAX
                or count > REQUEST_LINES_MAX
            ):
                break
            parts.append(self._queue.popleft())
        self._queued_bytes -= sum(part.cost_bytes for part in parts)
        if self._queued_bytes <= QUEUED_BYTES_MAX:
            self._room.set()
        return parts

    async def _send(self, parts: list[RequestPart]) -> None:
        timeout_s = self._options.receipt_timeout_s
        answer = await self._http.request(_request(parts), timeout_s=timeout_s)
        published = answer.json(_Published)
        self._backoff.reset()
        count = 0
        for part in parts:
            count += len(part.values)
            if len(published.offsets) < count:
                raise PolybusError("client.answer-invalid", "the bus sent too few offsets")
            part.stored(Position(published.epoch, published.offsets[count - 1]))

    def _refused(self, parts: list[RequestPart], error: PolybusError) -> None:
        """A request was refused, or its result is unknown."""
        reported = error
        if error.code in ("client.disconnected", "client.answer-invalid"):
            reported = _unknown(error.text)
        elif error.code == "client.timeout":
            reported = no_receipt(self._options.receipt_timeout_s)
        without_receipt = 0
        for part in parts:
            part.publish.refuse(reported)
            without_receipt += part.publish.receipt is None
        if without_receipt:
            self._options.report(reported)
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
        parts = list(self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        for part in parts:
            part.publish.refuse(error)
        if any(part.publish.receipt is None for part in parts):
            self._options.report(error)


def _unknown(why: str) -> PolybusError:
    return ConnectionBrokenError(RECEIPT_UNKNOWN, f"the message may be stored or not: {why}")


def _parts(publish: PendingPublish, values: Sequence[bytes]) -> list[RequestPart]:
    """Split a publish so that each part fits into a request; a large message is one part."""
    bounds = [0]
    size = 0
    for index, value in enumerate(values):
        size += len(value) + MESSAGE_COST_BYTES
        first = bounds[-1]
        if index > first and (size > REQUEST_BYTES_MAX or index - first >= REQUEST_LINES_MAX):
            bounds.append(index)
            size = len(value) + MESSAGE_COST_BYTES
    stops = [*bounds[1:], len(values)]
    return [
        RequestPart(publish, values[start:stop], is_last=stop == len(values))
        for start, stop in zip(bounds, stops, strict=True)
    ]


def _request(parts: list[RequestPart]) -> Request:
    first = parts[0].publish
    target = f"/v1/topics/{quote(first.topic, safe='')}/messages"
    if all(part.publish.receipt is None for part in parts):
        target += "?receipt=memory"
    if len(parts) == 1 and len(parts[0].values) == 1 and not first.headers:
        return Request(
            method="POST",
            target=target,
            body=parts[0].values[0],
            content_type="application/octet-stream",
        )
    return Request(
        method="POST",
        target=target,
        body=b"".join(map(_lines, parts)),
        content_type="application/x-ndjson",
    )


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
