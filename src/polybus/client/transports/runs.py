"""Messages that came one by one, joined into runs of one topic."""

from __future__ import annotations

from collections.abc import Mapping

from polybus.client.events import Delivered, Event
from polybus.client.message import Position


class Runs:
    """Collects events in order; a delivery that goes on where the one before ended joins it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._values: list[bytes] = []
        self._headers: list[Mapping[str, bytes] | None] = []
        self._topic = ""
        self._next: Position | None = None

    def add_many(self, event: Event) -> None:
        """Take an event as it is."""
        self._topic = ""
        self.events.append(event)

    def add(self, event: Event) -> None:
        """Take an event; a delivery has exactly one message."""
        if not isinstance(event, Delivered):
            self.add_many(event)
            return
        headers = event.headers[0] if event.headers else None
        if event.topic == self._topic and event.position == self._next:
            self._values.append(event.values[0])
            self._headers.append(headers)
        else:
            self._topic = event.topic
            self._values = [event.values[0]]
            self._headers = [headers]
            self.events.append(Delivered(event.topic, self._values, self._headers, event.position))
        position = event.position
        self._next = None if position is None else Position(position.epoch, position.offset + 1)
