"""Subscribing: one connection for each subscription, so a slow reader delays nobody but itself.

A subscription survives its connections. Each time one is made it asks for what follows the last
message taken off the wire, so nothing comes twice and nothing is missed; what the bus can no longer
give is marked on the next message (`Message.gap`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from types import TracebackType

from polybus.client.connection import Connection
from polybus.client.events import Delivered, Event, Refused, Stored, Subscribed
from polybus.client.message import NO_HEADERS, Message
from polybus.client.options import Options
from polybus.client.tracker import Tracker
from polybus.client.transports import Transport
from polybus.client.urls import Address
from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")
MESSAGE_COST_BYTES = 200
# A bus takes 1,024 unless it is told otherwise.
TOPICS_PER_REQUEST_MAX = 256
# What the bus says of a subscription; anything else concerns the connection, which is made again.
_REFUSALS = ("topic.", "subscription.", "position.", "log.", "account.", "goms.001")


class Subscription:
    """Messages of some topics, in order per topic: `async for message in subscription`.

    It begins with the first message asked for, with `async with`, or with `await subscription`;
    from then on the bus has confirmed it, and no message is missed.
    """

    def __init__(
        self,
        address: Address,
        options: Options,
        starts: dict[str, str],
        on_closed: Callable[[Subscription], None],
    ) -> None:
        self._options = options
        self._on_closed = on_closed
        self._trackers = {topic: Tracker(start) for topic, start in starts.items()}
        self._connection = Connection(address, options, self)
        self._unconfirmed: set[str] = set()
        self._confirmed = asyncio.Event()
        self._ready: deque[tuple[list[Message], int]] = deque()
        self._ready_bytes = 0
        self._paused = False
        self._news = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._error: PolybusError | None = None
        self._closed = False
        self._current: Iterator[Message] = iter(())

    async def open(self) -> None:
        """Subscribe, and return once the bus has confirmed it.

        Raises:
            PolybusError: `client.unreachable`, `client.timeout`, or the bus's refusal.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=self._options.name)
        await asyncio.shield(self._opening)

    async def aclose(self) -> None:
        """End the subscription; iterating over it ends too. May be called twice."""
        self._closed = True
        self._news.set()
        self._confirmed.set()
        self._on_closed(self)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._connection.close(politely=False)

    async def batches(self) -> AsyncIterator[list[Message]]:
        """The messages as lists, as many at a time as have arrived: faster than one by one."""
        while True:
            batch = await self._next_batch()
            if batch is None:
                return
            yield batch

    def __await__(self) -> Generator[object, None, Subscription]:
        yield from self.open().__await__()
        return self

    async def __aenter__(self) -> Subscription:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        while True:
            for message in self._current:
                return message
            batch = await self._next_batch()
            if batch is None:
                raise StopAsyncIteration
            self._current = iter(batch)

    async def _open(self) -> None:
        try:
            await self._connection.open()
            async with asyncio.timeout(self._options.connect_timeout_s):
                await self._confirmed.wait()
        except TimeoutError:
            text = f"the bus did not confirm {', '.join(sorted(self._unconfirmed))[:80]}"
            self.failed(PolybusError("client.timeout", text))
        except PolybusError as error:
            self.failed(error)
        if self._error is not None:
            raise self._error

    async def _next_batch(self) -> list[Message] | None:
        """The next messages; None when the subscription is closed."""
        if self._opening is None or not self._opening.done():
            if self._closed:
                return None
            await self.open()
        while not self._ready:
            if self._closed:
                return None
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        batch, cost_bytes = self._ready.popleft()
        self._ready_bytes -= cost_bytes
        if self._paused and self._ready_bytes <= self._options.ready_bytes_max // 2:
            self._paused = False
            if self._connection.link is not None:
                self._connection.link.resume()
        return batch

    # The connection calls these

    def opened(self, transport: Transport) -> None:
        self._unconfirmed = set(self._trackers)
        starts = [(topic, tracker.resume()) for topic, tracker in self._trackers.items()]
        for first in range(0, len(starts), TOPICS_PER_REQUEST_MAX):
            some = dict(starts[first : first + TOPICS_PER_REQUEST_MAX])
            self._connection.write(transport.subscribe(some, positions=True))
        if not transport.confirms:
            for topic in self._trackers:
                self.received(Subscribed(topic))

    def received(self, event: Event) -> None:
        match event:
            case Delivered():
                self._deliver(event)
            case Subscribed(topic, position):
                tracker = self._trackers.get(topic)
                if tracker is not None and position is not None:
                    tracker.told(position)
                self._unconfirmed.discard(topic)
                if not self._unconfirmed:
                    self._confirmed.set()
            case Refused(error):
                self._refused(error)
            case Stored():
                pass  # nothing is published here

    def lost(self) -> None:
        self._paused = False
        for tracker in self._trackers.values():
            tracker.lost()

    def failed(self, error: PolybusError) -> None:
        if self._error is None:
            self._error = error
        self._connection.abandon()
        self._confirmed.set()
        self._news.set()

    def _refused(self, error: PolybusError) -> None:
        if error.code.startswith(_REFUSALS):
            self.failed(error)
        else:
            log.warning("%s: %s", self._options.name, error)

    def _deliver(self, delivered: Delivered) -> None:
        tracker = self._trackers.get(delivered.topic)
        if tracker is None:
            return
        gap = tracker.took(len(delivered.values), delivered.position)
        messages = _messages(delivered, gap)
        cost_bytes = _cost_bytes(delivered.values)
        self._ready.append((messages, cost_bytes))
        self._ready_bytes += cost_bytes
        self._news.set()
        if self._ready_bytes > self._options.ready_bytes_max and not self._paused:
            self._paused = True
            if self._connection.link is not None:
                self._connection.link.pause()


def _messages(delivered: Delivered, gap: bool) -> list[Message]:
    topic, values = delivered.topic, delivered.values
    headers = delivered.headers or [None] * len(values)
    if delivered.position is None:
        messages = [
            Message(topic, value, header or NO_HEADERS)
            for value, header in zip(values, headers, strict=True)
        ]
    else:
        epoch, first = delivered.position
        messages = [
            Message(topic, value, header or NO_HEADERS, epoch, offset)
            for offset, (value, header) in enumerate(zip(values, headers, strict=True), first)
        ]
    if gap:
        first_one = messages[0]
        messages[0] = Message(
            topic, first_one.value, first_one.headers, first_one.epoch, first_one.offset, gap=True
        )
    return messages


def _cost_bytes(values: Sequence[bytes]) -> int:
    return sum(map(len, values)) + MESSAGE_COST_BYTES * len(values)
