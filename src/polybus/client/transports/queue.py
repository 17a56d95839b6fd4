"""queue:// — a queue connector of the bus.

The wire carries only messages: the connector decides their topic. So the caller's topic is a label
for received messages and is never sent. Messages of two labels would go to one topic, so a
connection accepts only one.
"""

from collections.abc import Mapping, Sequence

from polybus.batch import Batch, Buffer, Headers
from polybus.client.transports.base import Delivery, Event, Refusal, Transport
from polybus.errors import UsageError
from polybus.wire import queue as wire


class QueueTransport(Transport):
    confirms = False
    tls = False

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
                text = f"a queue can only start at the latest message, not at {start}"
                raise UsageError("client.unsupported", text)
            self._use(topic)
        self._subscribed = True
        return b""

    def receive(self, data: Buffer) -> list[Event]:
        messages = self._reader.receive(data)
        events: list[Event] = []
        # A publisher receives the messages of others too, which it did not request.
        if messages and self._subscribed and self._topic is not None:
            events.append(Delivery(self._topic, messages))
        if self._reader.error is not None:
            events.append(Refusal(self._reader.error, final=True))
        return events

    def _use(self, topic: str) -> None:
        if self._topic is None:
            self._topic = topic
        elif topic != self._topic:
            text = f"a queue has one topic, here {self._topic!r}; {topic!r} needs another client"
            raise UsageError("client.unsupported", text)
