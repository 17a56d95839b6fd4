"""boson:// — Boson frames.

Frames carry no positions. The bus says where each subscription starts, and again after every gap;
in between this counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polybus.batch import Buffer, Headers
from polybus.client.events import TOO_LARGE, Delivered, Event, Refused, Stored, Subscribed, refusal
from polybus.client.message import Position
from polybus.errors import UsageError
from polybus.wire import boson_frames_client as wire
from polybus.wire.codec import Bad


class BosonFramesTransport:
    """One connection; client/transports/__init__.py has the contract."""

    registers = False
    confirms = True

    def __init__(self, message_bytes_max: int) -> None:
        self._codec = wire.BosonFramesClientCodec(message_bytes_max)
        self._next: dict[str, Position] = {}

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
        return wire.encode_publish(topic, values, receipt_id)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        return wire.encode_subscribe(starts, tell=positions)

    def goodbye(self) -> bytes:
        return b""

    def receive(self, data: Buffer) -> list[Event]:
        events: list[Event] = []
        for event in self._codec.receive(data):
            match event:
                case wire.Deliveries(batches):
                    for batch in batches:
                        position = self._count(batch.topic, len(batch))
                        events.append(
                            Delivered(batch.topic, list(batch.values()), position=position)
                        )
                case wire.PositionTold(topic, epoch, offset):
                    self._next[topic] = Position(epoch, offset)
                    events.append(Subscribed(topic, Position(epoch, offset)))
                case wire.Receipt(receipt_id, epoch, offset):
                    events.append(Stored(receipt_id, Position(epoch, offset)))
                case wire.ErrorTold(code, text):
                    final = code.endswith(TOO_LARGE)
                    events.append(Refused(refusal(code, text), final=final))
                case Bad(error):
                    events.append(Refused(error, final=True))
        return events

    def _count(self, topic: str, count: int) -> Position | None:
        position = self._next.get(topic)
        if position is not None:
            self._next[topic] = Position(position.epoch, position.offset + count)
        return position
