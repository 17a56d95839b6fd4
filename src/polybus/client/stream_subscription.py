"""Subscribing over one connection of a stream protocol.

One connection for each subscription, so a slow reader delays nobody but itself. Each time it is
made it asks for what follows the last message taken off the wire, so nothing comes twice and
nothing is missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from polybus.client.connection import Connection
from polybus.client.events import Delivered, Event, Refused, Stored, Subscribed
from polybus.client.message import NO_HEADERS, Message
from polybus.client.options import Options
from polybus.client.subscription import Arrived, Subscription, cost_bytes, mark_gap
from polybus.client.tracker import Tracker
from polybus.client.transports import Transport
from polybus.client.urls import Address
from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")
# A bus takes 1,024 unless it is told otherwise.
TOPICS_PER_REQUEST_MAX = 256
# What the bus says of a subscription; anything else concerns the connection, which is made again.
_REFUSALS = ("topic.", "subscription.", "position.", "log.", "account.", "goms.001")


class StreamSubscription(Subscription):
    """The Owner of its connection (client/connection.py)."""

    def __init__(
        self,
        address: Address,
        options: Options,
        starts: dict[str, str],
        on_closed: Callable[[Subscription], None],
    ) -> None:
        super().__init__(options, on_closed)
        self._trackers = {topic: Tracker(start) for topic, start in starts.items()}
        self._connection = Connection(address, options, self)
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
        self._fail(error)
        self._connection.abandon()
        self._confirmed.set()

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
        messages = _messages(delivered)
        if gap:
            messages = mark_gap(messages)
        self._add(Arrived(messages, cost_bytes(delivered.values)))
        if self._ready_bytes > self._options.ready_bytes_max and not self._paused:
            self._paused = True
            if self._connection.link is not None:
                self._connection.link.pause()


def _messages(delivered: Delivered) -> list[Message]:
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
