"""Publishing over HTTP.

One request at a time, on one connection: that keeps the order. What is published while a request is
on its way waits for the next one, and goes out in it together if it is for one topic. So many
receipts at once cost one fsync, though each request waits for its answer.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from polybus.batch import Headers
from polybus.client.backoff import Backoff
from polybus.client.http.connection import HttpConnection, Request
from polybus.client.message import Position
from polybus.client.options import Options
from polybus.client.receipts import RECEIPT_UNKNOWN, no_receipt
from polybus.client.urls import Address
from polybus.errors import PolybusError, UsageError

log = logging.getLogger("polybus.client")
QUEUED_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = 1 << 20
REQUEST_LINES_MAX = 10_000
MESSAGE_COST_BYTES = 100


class _Broken(PolybusError):
    """`client.receipt-unknown` because the connection broke: only then does a retry help."""


class Publish:
    """One call of a publisher; `receipt` is None when nobody waits for one."""

    def __init__(self, topic: str, headers: Headers | None, *, wants_receipt: bool) -> None:
        self.topic = topic
        self.headers = headers
        self.receipt: asyncio.Future[Position] | None = None
        if wants_receipt:
            self.receipt = asyncio.get_running_loop().create_future()

    def refuse(self, error: PolybusError) -> None:
        if self.receipt is not None and not self.receipt.done():
            self.receipt.set_exception(error)
            # Whoever waited may have been cancelled meanwhile; that is no news for the log.
            self.receipt.exception()


class Part:
    """As much of a publish as goes into one request."""

    __slots__ = ("cost_bytes", "is_last", "publish", "values")

    def __init__(self, publish: Publish, values: Sequence[bytes], *, is_last: bool) -> None:
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


class HttpPublisher:
    """A client's outgoing side; client/client.py has its contract (Outgoing)."""

    def __init__(self, address: Address, options: Options) -> None:
        self._options = options
        self._http = HttpConnection(address, options)
        self._backoff = Backoff()
        self._queue: deque[Part] = deque()
        self._queued_bytes = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._room.set()
        self._idle.set()
        self._failure: PolybusError | None = None
        self._sending: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._http.open()
        self._sending = asyncio.create_task(self._send_all(), name=self._options.name)

    async def close(self) -> None:
        closed = UsageError("client.closed", "the client is closed")
        failure, self._failure = self._failure, self._failure or closed
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
        """Send without a receipt; returns at once unless too much waits to be sent."""
        await self._put(Publish(topic, headers, wants_receipt=False), values)

    async def publish_safely(
        self, topic: str, values: Sequence[bytes], headers: Headers | None, *, retry: bool
    ) -> Position:
        """Send and wait for the receipt; as client/publisher.py."""
        while True:
            publish = Publish(topic, headers, wants_receipt=True)
            assert publish.receipt is not None
            await self._put(publish, values)
            try:
                return await publish.receipt
            except _Broken:
                if not retry:
                    raise

    async def flush(self) -> None:
        """Wait until the bus has answered everything published so far.

        Raises:
            PolybusError: `client.disconnected`, the connection ended and no other is made.
        """
        await self._idle.wait()
        if self._failure is not None:
            raise self._failure

    async def _put(self, publish: Publish, values: Sequence[bytes]) -> None:
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

    # Sending, in a task of its own

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
        """Connect if need be, before a request is at stake; False when there is no going on."""
        while True:
            try:
                await self._http.open()
            except PolybusError as error:
                if not self._options.reconnect:
                    self._disconnected(error)
                    return False
                await asyncio.sleep(self._backoff.next_s())
            else:
                return True

    def _next_parts(self) -> list[Part]:
        """What goes out together: parts of one topic, as they were published."""
        parts: list[Part] = []
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

    async def _send(self, parts: list[Part]) -> None:
        timeout_s = self._options.receipt_timeout_s
        answer = await self._http.request(_request(parts), timeout_s=timeout_s)
        published = answer.json(_Published)
        self._backoff.reset()
        count = 0
        for part in parts:
            count += len(part.values)
            if len(published.offsets) < count:
                raise PolybusError("client.answer-invalid", "the bus told too few offsets")
            part.stored(Position(published.epoch, published.offsets[count - 1]))

    def _refused(self, parts: list[Part], error: PolybusError) -> None:
        """A request was refused, or nobody knows what became of it."""
        told = error
        if error.code in ("client.disconnected", "client.answer-invalid"):
            told = _unknown(error.text)
        elif error.code == "client.timeout":
            told = no_receipt(self._options.receipt_timeout_s)
        unasked = 0
        for part in parts:
            part.publish.refuse(told)
            unasked += part.publish.receipt is None
        if unasked:
            self._report(told)
        if error.code == "client.disconnected" and not self._options.reconnect:
            self._disconnected(error)

    def _disconnected(self, error: PolybusError) -> None:
        if self._failure is None:
            self._failure = PolybusError("client.disconnected", error.text)
        self._drop_all(self._failure)
        self._room.set()
        self._idle.set()

    def _drop_all(self, error: PolybusError) -> None:
        """Nothing that still waits will be sent."""
        parts = list(self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        for part in parts:
            part.publish.refuse(error)
        if any(part.publish.receipt is None for part in parts):
            self._report(error)

    def _report(self, error: PolybusError) -> None:
        if self._options.on_error is not None:
            self._options.on_error(error)
        else:
            log.warning("%s: %s", self._options.name, error)


def _unknown(why: str) -> PolybusError:
    return _Broken(RECEIPT_UNKNOWN, f"the message may be stored or not: {why}")


def _parts(publish: Publish, values: Sequence[bytes]) -> list[Part]:
    """Cut a publish so that each part fits into a request; a large message is a part alone."""
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
        Part(publish, values[start:stop], is_last=stop == len(values))
        for start, stop in zip(bounds, stops, strict=True)
    ]


def _request(parts: list[Part]) -> Request:
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


def _lines(part: Part) -> bytes:
    """The messages, one a line; in base64, as any bytes may be a message."""
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
