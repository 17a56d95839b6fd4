"""boson:// and boson+properties:// — both generations of Boson.

Frames carry neither headers nor positions: the bus sends the position of each subscription's start,
and again after every gap, and the transport counts from there. Properties carry both.
"""

from collections.abc import Iterable, Mapping, Sequence

from polybus.batch import Buffer, Headers
from polybus.client.message import Position
from polybus.client.transports.base import (
    TOO_LARGE,
    Delivery,
    Event,
    EventList,
    Refusal,
    Stored,
    Subscribed,
    Transport,
    refusal,
)
from polybus.config import Limits
from polybus.errors import UsageError
from polybus.wire import boson, boson_frames, boson_properties
from polybus.wire.codec import Bad, Deliver


class _BosonTransport(Transport):
    gzip = True

    def __init__(self) -> None:
        # By topic, the position of the next message whose frame has none.
        self._next: dict[str, Position] = {}

    def _events(
        self, received: Iterable[boson_frames.Reply | boson_properties.Reply]
    ) -> list[Event]:
        found = EventList()
        for event in received:
            match event:
                case Deliver(batches):
                    for batch in batches:
                        position = self._count(batch.topic, len(batch))
                        values = list(batch.values())
                        found.add(Delivery(batch.topic, values, position=position))
                case boson_properties.Delivered(topic, content, headers, position):
                    found.add_message(topic, content, headers, position)
                case boson.Positioned(topic, position):
                    self._next[topic] = position
                    found.add(Subscribed(topic, position))
                case boson.Receipt(receipt_id, position):
                    found.add(Stored(receipt_id.decode("ascii", "replace"), position))
                case boson.Refused(code, text, receipt_id):
                    asked = receipt_id.decode("ascii", "replace") or None
                    found.add(Refusal(refusal(code, text), asked, final=code.endswith(TOO_LARGE)))
                case Bad(error):
                    found.add(Refusal(error, final=True))
        return found.events

    def _count(self, topic: str, count: int) -> Position | None:
        position = self._next.get(topic)
        if position is not None:
            self._next[topic] = Position(position.epoch, position.offset + count)
        return position


class BosonFramesTransport(_BosonTransport):
    def __init__(self, message_bytes_max: int) -> None:
        super().__init__()
        self._codec = boson_frames.BosonFramesClientCodec(message_bytes_max)

    def publish(
        self,
        topic: str,
        values: Sequence[bytes],
        headers: Headers | None,
        receipt_id: str | None,
    ) -> Buffer:
        if headers:
            text = "Boson frames carry no headers; use boson+properties:// or goms://"
            raise UsageError("headers.invalid", text)
        return boson_frames.encode_publish(topic, values, receipt_id)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        return boson_frames.encode_subscribe(starts, tell=positions)

    def receive(self, data: Buffer) -> list[Event]:
        return self._events(self._codec.receive(data))


class BosonPropertiesTransport(_BosonTransport):
    def __init__(self, message_bytes_max: int) -> None:
        super().__init__()
        limits = Limits(message_bytes_max=message_bytes_max)
        self._codec = boson_properties.BosonPropertiesClientCodec(limits)

    def publish(
        self,
        topic: str,
        values: Sequence[bytes],
        headers: Headers | None,
        receipt_id: str | None,
    ) -> Buffer:
        encode = boson_properties.encode_publish
        messages = [encode(topic, value, headers) for value in values[:-1]]
        messages.append(encode(topic, values[-1], headers, (receipt_id or "").encode()))
        return b"".join(messages)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        return boson_properties.encode_subscribe(starts, tell=positions)

    def receive(self, data: Buffer) -> list[Event]:
        return self._events(self._codec.receive(data))
