"""Boson frames, the client's side: publishes and subscriptions out, deliveries and answers in.

Runs of delivered messages are scanned by compiled code into one batch per topic; only the frames
whose topic begins with `$` are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.errors import PeerError
from polybus.scan.frames_py import HEADER, HEADER_BYTES
from polybus.wire.boson_frames import (
    ERROR,
    FLAG_MAX,
    POSITION,
    RECEIPT,
    SUBSCRIBE,
    encode_frame,
)
from polybus.wire.codec import Bad
from polybus.wire.positions import SubscribeLine

TOPIC_BYTES_MAX = 65535


@dataclass(slots=True)
class Deliveries:
    """Messages, one batch per topic."""

    batches: list[Batch]


@dataclass(frozen=True, slots=True)
class PositionTold:
    """The next message of `topic` stands at `epoch`:`offset`."""

    topic: str
    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class Receipt:
    receipt_id: str
    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class ErrorTold:
    """The bus refused something."""

    code: str
    text: str


Event = Deliveries | PositionTold | Receipt | ErrorTold | Bad


def encode_publish(topic: str, values: Sequence[bytes], receipt_id: str | None = None) -> Buffer:
    """The values as frames; the last one asks for the receipt, which then covers all."""
    name = topic.encode()
    if receipt_id is None:
        if len(values) == 1:
            return encode_frame(name, values[0])
        batch = Batch.of(topic, values)
        return scan.encode_frames(name, batch.buffer, batch.spans)
    last = encode_frame(name + b"?receipt=" + receipt_id.encode(), values[-1])
    if len(values) == 1:
        return last
    return bytes(encode_publish(topic, values[:-1])) + last


def encode_subscribe(starts: Mapping[str, str], *, tell: bool = True) -> bytes:
    """Subscribe to each topic from its start; `tell` asks to be told where each stands."""
    lines = [SubscribeLine(topic, start, tell=tell) for topic, start in starts.items()]
    return encode_frame(SUBSCRIBE, "\n".join(map(str, lines)).encode())


class BosonFramesClientCodec:
    """One connection's incoming stream.

    What cannot be understood comes as `Bad`, always final: `boson.length-negative`,
    `boson.message-too-large`, `boson.flag-unknown` or `boson.answer-invalid`.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._carry = bytearray()
        # No point in looking before this many bytes are there: one-byte chunks stay linear.
        self._needed_bytes = HEADER_BYTES
        self._failed = False

    def receive(self, data: Buffer) -> list[Event]:
        """The events these bytes complete, in any chunking."""
        if self._failed:
            return []
        if self._carry:
            self._carry += data
            if len(self._carry) < self._needed_bytes:
                return []
            data, self._carry = self._carry, bytearray()
        events: list[Event] = []
        try:
            self._read(data, events)
        except PeerError as error:
            self._failed = True
            events.append(Bad(error))
        return events

    def _read(self, data: Buffer, events: list[Event]) -> None:
        start, stop = 0, len(data)
        while True:
            start, groups = scan.scan_frames(
                data, start, stop, self._message_bytes_max, TOPIC_BYTES_MAX
            )
            if groups:
                batches = [Batch(_text(group.topic), data, group.spans) for group in groups]
                events.append(Deliveries(batches))
            size = self._frame_bytes(data, start, stop)
            if size > stop - start:
                break
            events.append(_answer(data, start, start + size))
            start += size
        self._needed_bytes = size
        if start < stop:
            self._carry = bytearray(memoryview(data)[start:stop])

    def _frame_bytes(self, data: Buffer, start: int, stop: int) -> int:
        if stop - start < HEADER_BYTES:
            return HEADER_BYTES
        length, flag, topic_bytes = HEADER.unpack_from(data, start)
        if not 0 <= flag <= FLAG_MAX:
            raise PeerError("boson.flag-unknown", f"flag {flag & 0xFF} is not one of 0 to 3")
        if length < 0:
            raise PeerError("boson.length-negative", f"the content length is {length}")
        if length > self._message_bytes_max:
            text = f"the content length is {length}, over {self._message_bytes_max}"
            raise PeerError("boson.message-too-large", text)
        return HEADER_BYTES + int(topic_bytes) + int(length)


def _answer(data: Buffer, start: int, end: int) -> Event:
    """A single frame that the scan left: an answer of the bus."""
    _, _, topic_bytes = HEADER.unpack_from(data, start)
    content_start = start + HEADER_BYTES + topic_bytes
    topic = bytes(data[start + HEADER_BYTES : content_start])
    text = bytes(data[content_start:end]).decode("utf-8", "replace")
    try:
        if topic == RECEIPT:
            receipt_id, _, position = text.rpartition(" ")
            return Receipt(receipt_id, *_position(position))
        if topic == POSITION:
            position, _, name = text.partition(" ")
            return PositionTold(name, *_position(position))
    except ValueError as error:
        raise PeerError("boson.answer-invalid", f"{_text(topic)}: {text[:40]!r}") from error
    if topic == ERROR:
        code, _, said = text.partition(" ")
        return ErrorTold(code, said)
    if _text(topic) in names.SYSTEM_TOPICS:
        return Deliveries([Batch.of(_text(topic), [bytes(data[content_start:end])])])
    shown = topic[:40].decode("utf-8", "replace")
    raise PeerError("boson.answer-invalid", f"a frame with topic {shown!r} and no meaning")


def _position(text: str) -> tuple[int, int]:
    epoch, _, offset = text.partition(":")
    return int(epoch), int(offset)


def _text(topic: bytes) -> str:
    return topic.decode("utf-8", "replace")
