"""The client's side: messages of a server to events."""

from dataclasses import dataclass

from polybus.batch import Buffer
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.wire.boson import Positioned, Receipt, Refused
from polybus.wire.boson_properties.codec import ERROR, OFFSET, POSITION, RECEIPT
from polybus.wire.boson_properties.framing import Framer
from polybus.wire.boson_properties.versions import Properties, decode
from polybus.wire.codec import Bad
from polybus.wire.positions import Position, parse_start

# A delivery has more properties than its publish, and headers may come from other protocols.
_PROPERTIES_MAX = 1 << 16
_ROOM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message of a subscription; `position` is None if the server did not send it."""

    topic: str
    content: bytes
    headers: dict[str, bytes]
    position: Position | None


Reply = Delivered | Receipt | Positioned | Refused | Bad


class BosonPropertiesClientCodec:
    """The client's side of one connection; wire/codec.py has the contract."""

    def __init__(self, limits: Limits) -> None:
        self._framer = Framer(limits.message_bytes_max + _ROOM_BYTES, _PROPERTIES_MAX)
        self._failed = False

    @property
    def unfinished_bytes(self) -> int:
        return self._framer.held_bytes

    def receive(self, data: Buffer) -> list[Reply]:
        if self._failed:
            return []
        events: list[Reply] = []
        try:
            for buffer, offsets, _ in self._framer.feed(data):
                try:
                    events.append(_event(buffer, decode(buffer, offsets)))
                except PeerError as problem:
                    events.append(Bad(problem))
        except PeerError as error:
            self._failed = True
            events.append(Bad(error))
        return events

    def take_carry(self) -> bytes:
        return self._framer.take_carry()

    def close(self) -> list[Reply]:
        """Drop an unfinished message."""
        self._framer.drop()
        return []


def _event(buffer: Buffer, message: Properties) -> Reply:
    flags = {flag: bytes(buffer[start:end]) for flag, (start, end) in message.flags.items()}
    topic = message.topic.decode("utf-8", "replace")
    if ERROR in flags:
        code, _, text = flags[ERROR].decode("utf-8", "replace").partition(" ")
        return Refused(code, text, flags.get(RECEIPT, b""))
    if RECEIPT in flags:
        return Receipt(flags[RECEIPT], _position(flags.get(OFFSET, b"")))
    if POSITION in flags:
        return Positioned(topic, _position(flags[POSITION]))
    start, end = message.content
    position = _position(flags[OFFSET]) if OFFSET in flags else None
    return Delivered(topic, bytes(buffer[start:end]), message.headers, position)


def _position(value: bytes) -> Position:
    position = parse_start(value.decode("ascii", "replace"))
    if not isinstance(position, Position):
        raise PeerError("position.invalid", "a position must be EPOCH:OFFSET", final=False)
    return position
