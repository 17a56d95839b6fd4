"""queue:// — a queue connector of the bus.

The wire carries messages and nothing else: which topic they are of is the connector's own affair.
So the topic a caller names is a label, put on what comes and never sent; and since messages for two
labels would end in one topic, a connection takes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polybus.batch import Batch, Buffer, Headers
from polybus.client.events import Delivered, Event, Refused
from polybus.errors import UsageError
from polybus.wire import queue as wire


class QueueTransport:
    """One connection; client/transports/__init__.py has the contract."""

    registers = False
    confirms = False

    def __init__(self, message_bytes_max: int) -> None:
        self._reader = wire.QueueReader(message_bytes_max)
        self._topic: str | None = None
        self._subscribed = False

    def publish(
        self,
        topic: str,
        values: Sequence[bytes],
        headers: Headers | None,
        receipt_id: str | None,
    ) -> Buffer:
        if headers:
            text = "queues carry no headers; use boson+properties:// or goms://"
            raise UsageError("headers.invalid", text)
        if receipt_id is not None:
            raise UsageError("client.unsupported", "queues have no receipts")
        self._use(topic)
        return wire.encode(Batch.of(topic, values))

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        for topic, start in starts.items():
            if start != "latest":
                text = f"a queue begins with the latest messages, not {start}"
                raise UsageError("client.unsupported", text)
            self._use(topic)
        self._subscribed = True
        return b""

    def goodbye(self) -> bytes:
        return b""

    def receive(self, data: Buffer) -> list[Event]:
        messages = self._reader.receive(data)
        events: list[Event] = []
        # A publisher gets what others publish, too: nobody asked for it.
        if messages and self._subscribed and self._topic is not None:
            events.append(Delivered(self._topic, messages))
        if self._reader.error is not None:
            events.append(Refused(self._reader.error, final=True))
        return events

    def _use(self, topic: str) -> None:
        if self._topic is None:
            self._topic = topic
        elif topic != self._topic:
            text = f"a queue is one topic: it is {self._topic!r} here and cannot be {topic!r} too"
            raise UsageError("client.unsupported", text)
