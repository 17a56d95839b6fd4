"""Subscriptions: an iterator over the messages of topics, for every transport.

A subscription survives its connections: no message is repeated, and messages that the bus no longer
has are marked as a gap on the next one (`Message.gap`). Each one has a connection of its own, so a
slow reader delays only itself. `StreamSubscription` is for stream protocols: each connect requests
the messages after the last one received. client/http/sessions.py has the one for HTTP.
"""

import abc
import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import msgspec

from polybus.client.connection import ClientConnection
from polybus.client.message import NO_HEADERS, Message, Position
from polybus.client.options import ClientOptions
from polybus.client.transport import (
    Delivery,
    Refusal,
    Stored,
    Subscribed,
    Transport,
    TransportEvent,
)
from polybus.errors import PolybusError

MESSAGE_COST_BYTES = 200
# The default of a bus is 1,024.
TOPICS_PER_REQUEST_MAX = 256
# The codes about a subscription; all others concern the connection, which reconnects.
_REFUSALS = ("topic.", "subscription.", "position.", "log.", "account.", "goms.001")
log = logging.getLogger("polybus.client")
OnClosed = Callable[["Subscription"], None]


class Subscription(abc.ABC):
    """Messages of some topics, in order per topic: `async for message in subscription`.

    It starts with the first message requested, with `async with`, or with `await subscription`.
    From then on the bus has confirmed it, and no message is missed.
    """

    def __init__(self, options: ClientOptions, on_closed: OnClosed) -> None:
        self._options = options
        self._on_closed = on_closed
        # Messages that arrived together, their cost, and what to call when they are handled.
        self._ready: deque[tuple[list[Message], int, Callable[[], None] | None]] = deque()
        self._ready_bytes = 0
        self._paused = False
        self._on_handled: Callable[[], None] | None = None
        self._news = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._error: PolybusError | None = None
        self._closed = False
        self._current: Iterator[Message] = iter(())

    # Implemented by each kind of subscription

    @abc.abstractmethod
    async def _open(self) -> None:
        """Subscribe and wait for the confirmation. Raises PolybusError."""

    @abc.abstractmethod
    async def _close(self) -> None:
        """Close every connection. Idempotent."""

    @abc.abstractmethod
    def _pause(self) -> None:
        """Receive no more messages for now: too many are ready."""

    @abc.abstractmethod
    def _resume(self) -> None:
        """The reader took messages, so there is room again."""

    # For readers

    async def open(self) -> None:
        """Subscribe and wait until the bus has confirmed it.

        Raises:
            PolybusError: `client.unreachable`, `client.timeout`, or the bus's refusal.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=self._options.name)
        await asyncio.shield(self._opening)

    async def aclose(self) -> None:
        """End the subscription and its iteration. Idempotent."""
        self._closed = True
        self._news.set()
        self._on_closed(self)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._close()

    async def batches(self) -> AsyncIterator[list[Message]]:
        """The messages in lists of all that have arrived: faster than one by one."""
        while (batch := await self._next_batch()) is not None:
            yield batch

    def __await__(self) -> "Generator[object, None, Subscription]":
        yield from self.open().__await__()
        return self

    async def __aenter__(self) -> "Subscription":
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> "Subscription":
        return self

    async def __anext__(self) -> Message:
        while True:
            for message in self._current:
                return message
            batch = await self._next_batch()
            if batch is None:
                raise StopAsyncIteration
            self._current = iter(batch)

    async def _next_batch(self) -> list[Message] | None:
        """The next messages; None if the subscription is closed."""
        # A reader that requests more has handled the previous messages.
        on_handled, self._on_handled = self._on_handled, None
        if on_handled is not None:
            on_handled()
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
        batch, cost_bytes, self._on_handled = self._ready.popleft()
        self._ready_bytes -= cost_bytes
        if self._paused and self._ready_bytes <= self._options.ready_bytes_max // 2:
            self._paused = False
            self._resume()
        return batch

    # For implementations

    def _add(
        self,
        messages: list[Message],
        value_bytes: int,
        on_handled: Callable[[], None] | None = None,
    ) -> None:
        """Messages arrived; `on_handled` is called when the reader requests the next."""
        cost_bytes = value_bytes + MESSAGE_COST_BYTES * len(messages)
        self._ready.append((messages, cost_bytes, on_handled))
        self._ready_bytes += cost_bytes
        self._news.set()
        if self._ready_bytes > self._options.ready_bytes_max and not self._paused:
            self._paused = True
            self._pause()

    def _fail(self, error: PolybusError) -> None:
        """Raise this error after the messages that are ready."""
        if self._error is None:
            self._error = error
        self._news.set()


class Tracker:
    """The position of one topic of a subscription, over all its connections.

    The bus starts a subscription where it was requested, or sends another position. So every
    message follows the previous one, and anything else is a gap. A position *before* the expected
    one is a gap too: the bus lost its newest messages in a crash and reuses their offsets.
    """

    __slots__ = ("_expected", "_gap", "_start")

    def __init__(self, start: str) -> None:
        self._start = start
        self._expected: Position | None = None
        self._gap = False

    def resume(self) -> str:
        """Where to subscribe from now, as the bus reads it."""
        return str(self._expected) if self._expected is not None else self._start

    def expect(self, position: Position) -> None:
        """The bus sent the position of the next message."""
        if self._expected is not None and position != self._expected:
            self._gap = True
        self._expected = position

    def advance(self, count: int, position: Position | None) -> bool:
        """Count received messages, the first at `position`; return whether a gap precedes it."""
        if position is not None:
            self.expect(position)
        if self._expected is not None:
            epoch, offset = self._expected
            self._expected = Position(epoch, offset + count)
        gap, self._gap = self._gap, False
        return gap

    def lost(self) -> None:
        """The connection broke.

        A subscription to the latest messages without a known position cannot request what it misses
        now, so it reports a gap.
        """
        if self._expected is None and self._start == "latest":
            self._gap = True


class StreamSubscription(Subscription):
    """The Owner of its connection (client/connection.py)."""

    def __init__(self, options: ClientOptions, starts: dict[str, str], on_closed: OnClosed) -> None:
        super().__init__(options, on_closed)
        self._trackers = {topic: Tracker(start) for topic, start in starts.items()}
        self._connection = ClientConnection(options, self)
        self._unconfirmed: set[str] = set()
        self._confirmed = asyncio.Event()

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

    async def _close(self) -> None:
        await self._connection.close(politely=False)

    def _pause(self) -> None:
        if self._connection.link is not None:
            self._connection.link.pause()

    def _resume(self) -> None:
        if self._connection.link is not None:
            self._connection.link.resume()

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

    def received(self, event: TransportEvent) -> None:
        match event:
            case Delivery():
                self._deliver(event)
            case Subscribed(topic, position):
                tracker = self._trackers.get(topic)
                if tracker is not None and position is not None:
                    tracker.expect(position)
                self._unconfirmed.discard(topic)
                if not self._unconfirmed:
                    self._confirmed.set()
            case Refusal(error) if error.code.startswith(_REFUSALS):
                self.failed(error)
            case Refusal(error):
                log.warning("%s: %s", self._options.name, error)
            case Stored():
                pass  # a subscription publishes nothing

    def lost(self) -> None:
        self._paused = False
        for tracker in self._trackers.values():
            tracker.lost()

    def failed(self, error: PolybusError) -> None:
        self._fail(error)
        self._connection.abandon()
        self._confirmed.set()

    def _deliver(self, delivered: Delivery) -> None:
        tracker = self._trackers.get(delivered.topic)
        if tracker is None:
            return
        gap = tracker.advance(len(delivered.values), delivered.position)
        messages = _messages(delivered)
        if gap:
            messages[0] = msgspec.structs.replace(messages[0], gap=True)
        self._add(messages, sum(map(len, delivered.values)))


def _messages(delivered: Delivery) -> list[Message]:
    topic, values = delivered.topic, delivered.values
    headers = delivered.headers or itertools.repeat(None)
    epoch = 0
    offsets: Iterator[int] = itertools.repeat(-1)
    if delivered.position is not None:
        epoch, offsets = delivered.position.epoch, itertools.count(delivered.position.offset)
    return [
        Message(topic, value, header or NO_HEADERS, epoch, offset)
        for value, header, offset in zip(values, headers, offsets, strict=False)
    ]
