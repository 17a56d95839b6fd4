"""Boson properties for clients: what a server sends, as deliveries, receipts and errors.

A large message comes in parts (hbff), which become one delivery. An error of one message is an
event; one after which nothing can be understood ends the stream.
"""

from dataclasses import dataclass

from polybus.batch import Buffer
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.wire.boson import WHOLE, Positioned, Receipt, Refused
from polybus.wire.boson_properties import (
    ERROR,
    LOGIN,
    OFFSET,
    PART,
    POSITION,
    RECEIPT,
    part_flag,
)
from polybus.wire.boson_properties_format import Framer, Properties, decode
from polybus.wire.codec import Bad, LoggedIn
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


Reply = Delivered | Receipt | Positioned | LoggedIn | Refused | Bad


class BosonPropertiesClientCodec:
    """The client's side of one connection; wire/codec.py has the contract."""

    def __init__(self, limits: Limits) -> None:
        self._framer = Framer(limits.message_bytes_max + _ROOM_BYTES, _PROPERTIES_MAX)
        self._message_bytes_max = limits.message_bytes_max
        self._failed = False
        # The first part of a large message, and what has arrived of it.
        self._parts: tuple[Delivered, bytearray] | None = None

    @property
    def unfinished_bytes(self) -> int:
        return self._framer.held_bytes

    def receive(self, data: Buffer) -> list[Reply]:
        if self._failed:
            return []
        events: list[Reply] = []
        try:
            for buffer, offsets, _ in self._framer.feed(data):
                assert offsets is not None, "only a server's codec passes on pieces"
                try:
                    message = decode(buffer, offsets)
                    self._take(_event(buffer, message), buffer, message, events)
                except PeerError as problem:
                    if problem.final:
                        raise
                    events.append(Bad(problem))
        except PeerError as error:
            self._failed = True
            events.append(Bad(error))
        return events

    def _take(self, event: Reply, buffer: Buffer, message: Properties, events: list[Reply]) -> None:
        """Take an event, or a part of a large message. Raises PeerError, final."""
        flag = part_flag(buffer, message.flags.get(PART))
        if not isinstance(event, Delivered) or (flag == WHOLE and self._parts is None):
            events.append(event)
            return
        if self._parts is None:
            self._parts = (event, bytearray())
        first, content = self._parts
        content += event.content
        if len(content) > self._message_bytes_max:
            text = f"a message is over {self._message_bytes_max} bytes (message_bytes_max)"
            raise PeerError("boson.message-too-large", text)
        if flag == WHOLE:
            self._parts = None
            whole = Delivered(first.topic, bytes(content), first.headers, first.position)
            events.append(whole)

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
    if LOGIN in flags:
        return LoggedIn(flags[LOGIN].decode("utf-8", "replace"))
    if RECEIPT in flags:
        return Receipt(flags[RECEIPT], _read_position(flags.get(OFFSET, b"")))
    if POSITION in flags:
        return Positioned(topic, _read_position(flags[POSITION]))
    start, end = message.content
    position = _read_position(flags[OFFSET]) if OFFSET in flags else None
    return Delivered(topic, bytes(buffer[start:end]), message.headers, position)


def _read_position(value: bytes) -> Position:
    position = parse_start(value.decode("ascii", "replace"))
    if not isinstance(position, Position):
        raise PeerError("position.invalid", "a position must be EPOCH:OFFSET", final=False)
    return position
