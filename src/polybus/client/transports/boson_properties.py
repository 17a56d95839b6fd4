"""boson+properties:// — Boson properties. Every message carries its position and its headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polybus.batch import Buffer, Headers
from polybus.client.events import TOO_LARGE, Delivered, Event, Refused, Stored, Subscribed, refusal
from polybus.client.message import Position
from polybus.client.transports.runs import Runs
from polybus.config import Limits
from polybus.wire import boson_properties as wire
from polybus.wire.codec import Bad
from polybus.wire.positions import At, SubscribeLine


class BosonPropertiesTransport:
    """One connection; client/transports/__init__.py has the contract."""

    registers = False
    confirms = True

    def __init__(self, message_bytes_max: int) -> None:
        limits = Limits(message_bytes_max=message_bytes_max)
        self._codec = wire.BosonPropertiesClientCodec(limits)

    def publish(
        self,
        topic: str,
        values: Sequence[bytes],
        headers: Headers | None,
        receipt_id: str | None,
    ) -> Buffer:
        messages = [wire.encode_publish(topic, value, headers) for value in values[:-1]]
        asked = b"" if receipt_id is None else receipt_id.encode()
        messages.append(wire.encode_publish(topic, values[-1], headers, asked))
        return b"".join(messages)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        lines = [SubscribeLine(topic, start, tell=positions) for topic, start in starts.items()]
        return wire.encode_subscribe(lines)

    def goodbye(self) -> bytes:
        return b""

    def receive(self, data: Buffer) -> list[Event]:
        runs = Runs()
        for event in self._codec.receive(data):
            match event:
                case wire.Delivered(topic, content, headers, at):
                    position = None if at is None else _position(at)
                    runs.add(Delivered(topic, [content], [headers], position))
                case wire.Positioned(topic, at):
                    runs.add(Subscribed(topic, _position(at)))
                case wire.Receipt(_, receipt_id, at):
                    runs.add(Stored(receipt_id.decode("ascii", "replace"), _position(at)))
                case wire.Refused(code, text, receipt_id):
                    asked = receipt_id.decode("ascii", "replace") or None
                    final = code.endswith(TOO_LARGE)
                    runs.add(Refused(refusal(code, text), asked, final=final))
                case Bad(error):
                    runs.add(Refused(error, final=True))
        return runs.events


def _position(at: At) -> Position:
    return Position(at.epoch, at.offset)
