"""Subscribing over a stream protocol: positions, gaps and resuming.

Each subscription has its own connection, so a slow reader delays only itself. Each connect requests
the messages after the last one received, so no message is repeated or missed.
"""

import asyncio
import logging
from collections.abc import Callable

from polybus.client.connection import ClientConnection
from polybus.client.message import NO_HEADERS, Message, Position
from polybus.client.options import ClientOptions
from polybus.client.subscription import Arrived, Subscription, cost_bytes, mark_gap
from polybus.client.transports.base import (
    Delivery,
    Event,
    Refusal,
    Stored,
    Subscribed,
    Transport,
)
from polybus.client.urls import Address
from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")
# The default of a bus is 1,024.
TOPICS_PER_REQUEST_MAX = 256
# The codes about a subscription; all others concern the connection, which reconnects.
_REFUSALS = ("topic.", "subscription.", "position.", "log.", "account.", "goms.001")


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

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        starts: dict[str, str],
        on_closed: Callable[[Subscription], None],
    ) -> None:
        super().__init__(options, on_closed)
        self._trackers = {topic: Tracker(start) for topic, start in starts.items()}
        self._connection = ClientConnection(address, options, self)
        self._unconfirmed: set[str] = set()
        self._confirmed = asyncio.Event()
        self._paused = False

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

    def _drained(self) -> None:
        if self._paused and self._ready_bytes <= self._options.ready_bytes_max // 2:
            self._paused = False
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

    def received(self, event: Event) -> None:
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
            case Refusal(error):
                self._refused(error)
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

    def _refused(self, error: PolybusError) -> None:
        if error.code.startswith(_REFUSALS):
            self.failed(error)
        else:
            log.warning("%s: %s", self._options.name, error)

    def _deliver(self, delivered: Delivery) -> None:
        tracker = self._trackers.get(delivered.topic)
        if tracker is None:
            return
        gap = tracker.advance(len(delivered.values), delivered.position)
        messages = _messages(delivered)
        if gap:
            messages = mark_gap(messages)
        self._add(Arrived(messages, cost_bytes(delivered.values)))
        if self._ready_bytes > self._options.ready_bytes_max and not self._paused:
            self._paused = True
            if self._connection.link is not None:
                self._connection.link.pause()


def _messages(delivered: Delivery) -> list[Message]:
    topic, values = delivered.topic, delivered.values
    headers = delivered.headers or [None] * len(values)
    if delivered.position is None:
        return [
            Message(topic, value, header or NO_HEADERS)
            for value, header in zip(values, headers, strict=True)
        ]
    epoch, first = delivered.position
    return [
        Message(topic, value, header or NO_HEADERS, epoch, offset)
        for offset, (value, header) in enumerate(zip(values, headers, strict=True), first)
    ]
