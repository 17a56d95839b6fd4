"""Boson frames, the client's side: publishes and subscriptions out, deliveries and answers in.

Runs of delivered messages are scanned by compiled code into one batch per topic; only frames whose
topic begins with `$` are handled one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.errors import PeerError
from polybus.scan.frames_py import HEADER, HEADER_BYTES
from polybus.wire.boson import Positioned, Receipt, Refused
from polybus.wire.boson_frames import (
    ERROR,
    POSITION,
    RECEIPT,
    SUBSCRIBE,
    FrameStream,
    encode_frame,
)
from polybus.wire.codec import Bad
from polybus.wire.positions import Position, subscribe_lines

TOPIC_BYTES_MAX = 65535


@dataclass(slots=True)
class Deliveries:
    """Messages, one batch per topic."""

    batches: list[Batch]


Event = Deliveries | Positioned | Receipt | Refused | Bad


def encode_publish(topic: str, values: Sequence[bytes], receipt_id: str | None = None) -> Buffer:
    """The values as frames; the last one requests the receipt, which covers all."""
    name = topic.encode()
    if receipt_id is None:
        if len(values) == 1:
            return encode_frame(name, values[0])
        return scan.encode_frames([Batch.of(topic, values)])
    last = encode_frame(name + b"?receipt=" + receipt_id.encode(), values[-1])
    if len(values) == 1:
        return last
    return bytes(encode_publish(topic, values[:-1])) + last


def encode_subscribe(starts: Mapping[str, str], *, tell: bool = True) -> bytes:
    """Subscribe to each topic from its start; `tell` requests the position of each."""
    return encode_frame(SUBSCRIBE, subscribe_lines(starts, tell=tell))


class BosonFramesClientCodec(FrameStream[Event]):
    """One connection's incoming stream.

    Every `Bad` event is final: `boson.length-negative`, `boson.message-too-large`,
    `boson.flag-unknown` or `boson.answer-invalid`.
    """

    def __init__(self, message_bytes_max: int) -> None:
        super().__init__(message_bytes_max)
        # Known topics, for the scan.
        self._names: dict[bytes, str] = {}

    def _read(self, data: Buffer, events: list[Event]) -> int:
        start, stop = 0, len(data)
        while True:
            start, batches, unnamed = scan.scan_frames(
                data, start, stop, self._message_bytes_max, TOPIC_BYTES_MAX, self._names, ""
            )
            for batch, topic in unnamed:
                batch.topic = self._names[topic] = _text(topic)
            if batches:
                events.append(Deliveries(batches))
            size = self._frame_bytes(data, start, stop)
            if size > stop - start:
                self._needed_bytes = size
                return start
            events.append(_answer(data, start, start + size))
            start += size


def _answer(data: Buffer, start: int, end: int) -> Event:
    """The event of a frame that the scan does not handle: an answer of the bus."""
    _, _, topic_bytes = HEADER.unpack_from(data, start)
    content_start = start + HEADER_BYTES + topic_bytes
    topic = bytes(data[start + HEADER_BYTES : content_start])
    content = bytes(data[content_start:end])
    text = content.decode("utf-8", "replace")
    try:
        if topic == RECEIPT:
            receipt_id, _, position = content.rpartition(b" ")
            return Receipt(receipt_id, _position(position))
        if topic == POSITION:
            position, _, name = content.partition(b" ")
            return Positioned(_text(name), _position(position))
    except ValueError as error:
        raise PeerError("boson.answer-invalid", f"{_text(topic)}: {text[:40]!r}") from error
    if topic == ERROR:
        code, _, said = text.partition(" ")
        return Refused(code, said)
    if _text(topic) in names.SYSTEM_TOPICS:
        return Deliveries([Batch.of(_text(topic), [content])])
    raise PeerError("boson.answer-invalid", f"unexpected frame with topic {_text(topic[:40])!r}")


def _position(text: bytes) -> Position:
    epoch, _, offset = text.partition(b":")
    return Position(int(epoch), int(offset))


def _text(topic: bytes) -> str:
    return topic.decode("utf-8", "replace")
