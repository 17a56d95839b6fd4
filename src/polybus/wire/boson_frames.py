"""Boson frames: framed binary messages with a flag and a topic.

A frame is int32 content length, int8 flag, uint16 topic length, topic, content (big-endian).

Flags: 0 a whole message, or the end of a sequence of parts; 1 parts make one message; 2 each part
is a message, delivered when all have arrived; 3 each part is a message, delivered at once. The
first frame's flag and topic apply to the sequence, and an empty end frame adds nothing.

Plain frames are scanned by compiled code, thousands at a time, on both sides of a connection. This
module handles single frames only where the scan stops: control frames, parts, errors and the
incomplete end of a read.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.config import Limits
from polybus.errors import PeerError, UsageError
from polybus.scan.binary_py import HEADER, HEADER_BYTES, RECEIPT_MARK
from polybus.wire.boson import (
    FLAGS,
    JOINED,
    WHOLE,
    BadPublish,
    BosonCodec,
    Positioned,
    Receipt,
    ReceiptOwed,
    Refused,
    Subscribe,
    Unsubscribe,
)
from polybus.wire.codec import (
    STEPS_MAX,
    Bad,
    Deliver,
    Large,
    LoggedIn,
    Login,
    Publish,
    parse_login,
)
from polybus.wire.positions import Position, parse_lines, subscribe_lines

PROTOCOL = "boson-frames"
SUBSCRIBE = b"$subscribe"
UNSUBSCRIBE = b"$unsubscribe"
LOGIN = b"$login"
ERROR = b"$error"
RECEIPT = b"$receipt"
POSITION = b"$position"
TOPIC_BYTES_MAX = 65535

Event = Publish | Subscribe | Unsubscribe | Login | ReceiptOwed | Bad | Large
Reply = Deliver | Positioned | Receipt | LoggedIn | Refused | Bad
E = TypeVar("E")


class FrameStream(Generic[E]):
    """Cuts a stream into frames, for both sides of a connection."""

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._carry: bytearray | None = None
        # Wait for this many bytes before looking again: one-byte chunks stay linear.
        self._needed_bytes = HEADER_BYTES
        self._failed = False

    def receive(self, data: Buffer) -> list[E | Bad]:
        """The events that these bytes complete, in any chunking."""
        if self._failed:
            return []
        if self._carry:
            self._carry += data
            if len(self._carry) < self._needed_bytes:
                return []
            data, self._carry = self._carry, None
        events: list[E | Bad] = []
        try:
            start = self._read(data, events)
        except PeerError as error:
            self._failed = True
            events.append(Bad(error))
            return events
        if start < len(data):
            self._carry = bytearray(memoryview(data)[start:])
        return events

    def _read(self, data: Buffer, events: list[E | Bad]) -> int:
        """Append events and set `_needed_bytes`; return where the incomplete frame begins.

        Raises:
            PeerError: final.
        """
        raise NotImplementedError

    def _frame_bytes(self, data: Buffer, start: int, stop: int) -> int:
        """The size of the frame at `start`, as far as known. Raises PeerError, final."""
        if stop - start < HEADER_BYTES:
            return HEADER_BYTES
        length, flag, topic_bytes = HEADER.unpack_from(data, start)
        if flag not in FLAGS:
            raise PeerError("boson.flag-unknown", f"flag {flag & 0xFF} is not one of 0 to 3")
        if length < 0:
            raise PeerError("boson.length-negative", f"the content length is negative: {length}")
        if length > self._message_bytes_max:
            limit = self._message_bytes_max
            text = f"the content length is {length}, over {limit} (message-bytes-max)"
            raise PeerError("boson.message-too-large", text)
        return HEADER_BYTES + int(topic_bytes) + int(length)


def whole_of(batches: Sequence[Batch], data: Buffer, start: int, end: int) -> Buffer | None:
    """Batches whose frames are exactly `data[start:end]`, spelled canonically, for subscribers."""
    for batch in batches:
        if batch.receipt_ids is not None:
            # Subscribers never see a receipt request. One batch is encoded only on delivery.
            return scan.encode_frames(batches) if len(batches) > 1 else None
    whole = memoryview(data)[start:end]
    if len(batches) == 1:
        batches[0].carry_encoding(PROTOCOL, whole)
    return whole


class BosonFramesCodec(BosonCodec, FrameStream[Event]):
    """The server's side of one connection; wire/codec.py has the contract."""

    def __init__(self, limits: Limits, default_topic: str | None = None) -> None:
        BosonCodec.__init__(self, limits, default_topic)
        FrameStream.__init__(self, limits.message_bytes_max)
        self.backlog = False
        # What the current frame of a large message has left, and its flag.
        self._frame_left = 0
        self._frame_flag = WHOLE

    @property
    def unfinished_bytes(self) -> int:
        parts = self._parts
        if self._carry is None and not parts.open:
            return 1 if self._frame_left else 0
        carried = len(self._carry) if self._carry else 0
        return carried + parts.held_bytes + (self._large is not None)

    def receive(self, data: Buffer) -> list[Event]:
        if not self._frame_left or self._failed:
            return super().receive(data)
        piece = memoryview(data)[: self._frame_left]
        events: list[Event] = [*self._pieces(piece)]
        self._frame_left -= len(piece)
        if not self._frame_left:
            self._end_frame(events)
            if len(piece) < len(data):
                events += super().receive(memoryview(data)[len(piece) :])
        return events

    def _read(self, data: Buffer, events: list[Event]) -> int:
        self.backlog = False
        if self._topics:
            self._topics.clear()
        message_max, topic_max = self._inline_bytes_max, self._limits.topic_bytes_max
        start, stop = 0, len(data)
        for _ in range(STEPS_MAX):
            if not self._parts.open:
                end, batches, unnamed = scan.scan_frames(
                    data, start, stop, message_max, topic_max, _canonical, PROTOCOL
                )
                canonical = True
                if unnamed:
                    batches, canonical = self._name(batches, unnamed, events)
                if batches:
                    whole = whole_of(batches, data, start, end) if canonical else None
                    events.append(Publish(batches, whole))
                start = end
            if start == stop:
                self._needed_bytes = HEADER_BYTES
                return start
            size = self._frame_bytes(data, start, stop)
            if size > stop - start:
                return self._begin_frame(data, start, stop, size, events)
            self._one_frame(data, start, start + size, events)
            start += size
        self._needed_bytes = 0
        self.backlog = start < stop
        return start

    def _begin_frame(
        self, data: Buffer, start: int, stop: int, size: int, events: list[Event]
    ) -> int:
        """Handle the incomplete frame at `start`; pass on what has arrived of a large message."""
        self._needed_bytes = size
        if stop - start < HEADER_BYTES:
            return start
        length, flag, topic_bytes = HEADER.unpack_from(data, start)
        content_start = start + HEADER_BYTES + topic_bytes
        if length <= self._inline_bytes_max and self._large is None:
            return start
        if content_start > stop:
            self._needed_bytes = content_start - start
            return start
        topic = bytes(data[start + HEADER_BYTES : content_start])
        is_control = topic.startswith(b"$") and flag == WHOLE and not self._parts.open
        if is_control or not self._is_large(length):
            self._check_held(length)
            return start
        events += self._begin_piece(flag, *split_receipt(topic), length)
        events += self._pieces(memoryview(data)[content_start:stop])
        self._frame_left, self._frame_flag = length - (stop - content_start), flag
        self._needed_bytes = HEADER_BYTES
        return stop

    def _check_held(self, length: int) -> None:
        """Check a frame that is assembled in memory. Raises PeerError, final."""
        limit = self._limits.parts_bytes_max
        if length > limit:
            text = f"the content length is {length}, over {limit} (parts-bytes-max)"
            raise PeerError("boson.message-too-large", text)

    def _end_frame(self, events: list[Event]) -> None:
        for event in self._end_piece(self._frame_flag):
            self._take(event, events)

    def scan_plain(self, data: Buffer, start: int, stop: int) -> tuple[int, list[Batch]]:
        """Return where the plain frames from `start` end, and their batches; `receive` takes the
        rest.

        A frame with a topic that was not seen before is not plain, nor is one inside a sequence of
        parts.
        """
        if self._carry or self._failed or self._parts.open or self._frame_left or self.is_held:
            return start, []
        limits = self._limits
        end, batches, unnamed = scan.scan_frames(
            data,
            start,
            stop,
            self._inline_bytes_max,
            limits.topic_bytes_max,
            _canonical,
            PROTOCOL,
        )
        return (start, []) if unnamed else (end, batches)

    whole_of = staticmethod(whole_of)

    def take_carry(self) -> bytes:
        carry, self._carry = self._carry, None
        return bytes(carry) if carry else b""

    def close(self) -> list[Event]:
        """Drop an incomplete frame or sequence: its publisher has no receipt for it."""
        self._carry = None
        self._frame_left = 0
        self._large = None
        self._parts.close()
        return []

    def _name(
        self, batches: list[Batch], unnamed: list[tuple[Batch, bytes]], events: list[Event]
    ) -> tuple[list[Batch], bool]:
        """Name the batches of topics that are new or not spelled canonically.

        Returns the batches of valid topics, and whether all of them are spelled canonically.
        """
        canonical = True
        for batch, topic in unnamed:
            name, same_bytes = topic_name(topic)
            if name is None:
                self._complain(events, "topic.invalid", "a topic name must be printable UTF-8")
            batch.topic = name or ""
            canonical = canonical and same_bytes
        merged: dict[str, Batch] = {}
        for batch in batches:
            known = merged.setdefault(batch.topic, batch)
            if known is not batch:
                _merge(known, batch)
        merged.pop("", None)
        return list(merged.values()), canonical

    def _one_frame(self, data: Buffer, start: int, end: int, events: list[Event]) -> None:
        """Handle a complete frame that the scan does not: control, parts, unusual topics."""
        _, flag, topic_bytes = HEADER.unpack_from(data, start)
        content_start = start + HEADER_BYTES + topic_bytes
        topic = bytes(data[start + HEADER_BYTES : content_start])
        content = memoryview(data)[content_start:end]
        if topic.startswith(b"$") and flag == WHOLE and not self._parts.open:
            self._control(topic, content, events)
            return
        topic, receipt_id = split_receipt(topic)
        for event in self._add_part(flag, topic, content, receipt_id):
            self._take(event, events)

    def _take(self, event: Event, events: list[Event]) -> None:
        if isinstance(event, BadPublish):
            # A `$error` frame names no receipt.
            self._complain(events, event.error.code, event.error.text)
        else:
            events.append(event)

    def _control(self, topic: bytes, content: memoryview, events: list[Event]) -> None:
        if topic not in (SUBSCRIBE, UNSUBSCRIBE, LOGIN):
            shown = split_receipt(topic)[0][:40].decode("utf-8", "replace")
            self._complain(events, "topic.reserved", f"clients cannot publish to {shown}")
            return
        try:
            if topic == LOGIN:
                events.append(parse_login(bytes(content)))
                return
            lines = parse_lines(bytes(content), self._limits)
        except PeerError as error:
            events.append(Bad(error))
            return
        events.append(Subscribe(lines) if topic == SUBSCRIBE else Unsubscribe(lines))

    def _complain(self, events: list[Event], code: str, text: str) -> None:
        """Report each kind of error once per read, however many frames have it."""
        if not any(isinstance(event, Bad) and event.error.code == code for event in events):
            events.append(Bad(PeerError(code, text, final=False)))


def _merge(batch: Batch, other: Batch) -> None:
    """Add the messages of another spelling of the topic, in the order they were sent."""
    rows = []
    for spans, receipts in ((batch.spans, batch.receipt_ids), (other.spans, other.receipt_ids)):
        for index in range(0, len(spans), 2):
            # Without a request, an empty span.
            ids = (0, 0) if receipts is None else (receipts[index], receipts[index + 1])
            rows.append((spans[index], spans[index + 1], *ids))
    rows.sort()
    batch.spans = array("i", [offset for row in rows for offset in row[:2]])
    if batch.receipt_ids is not None or other.receipt_ids is not None:
        batch.receipt_ids = array("i", [offset for row in rows for offset in row[2:]])


_names: dict[bytes, tuple[str | None, bool]] = {}
# The names that are spelled canonically, for the scan.
_canonical: dict[bytes, str] = {}
_NAMES_MAX = 65536


def topic_name(topic: bytes) -> tuple[str | None, bool]:
    """The canonical name (None if invalid), and whether the topic is already spelled so."""
    known = _names.get(topic)
    if known is None:
        if len(_names) >= _NAMES_MAX:
            _names.clear()
            _canonical.clear()
        known = _names[topic] = _decode_name(topic)
        name, same_bytes = known
        if name is not None and same_bytes:
            _canonical[topic] = name
    return known


def _decode_name(topic: bytes) -> tuple[str | None, bool]:
    try:
        name = names.canonical(topic.decode())
    except (UnicodeDecodeError, UsageError):
        return None, False
    return name, name.encode() == topic


def split_receipt(topic: bytes) -> tuple[bytes, bytes]:
    """Split `topic?receipt=ID` into topic and ID; an empty ID requests no receipt."""
    base, mark, receipt_id = topic.partition(RECEIPT_MARK)
    return (base, receipt_id) if mark and receipt_id else (topic, b"")


class BosonFramesClientCodec(FrameStream[Reply]):
    """The client's side of one connection.

    Every `Bad` event is final: `boson.length-negative`, `boson.message-too-large`,
    `boson.flag-unknown` or `boson.answer-invalid`.
    """

    def __init__(self, message_bytes_max: int) -> None:
        super().__init__(message_bytes_max)
        # Known topics, for the scan.
        self._names: dict[bytes, str] = {}
        # What has arrived of a large message, which comes in parts.
        self._parts: bytearray | None = None

    def _read(self, data: Buffer, events: list[Reply]) -> int:
        start, stop = 0, len(data)
        while True:
            if self._parts is None:
                start, batches, unnamed = scan.scan_frames(
                    data, start, stop, self._message_bytes_max, TOPIC_BYTES_MAX, self._names, ""
                )
                for batch, topic in unnamed:
                    batch.topic = self._names[topic] = _text(topic)
                if batches:
                    events.append(Deliver(batches))
            size = self._frame_bytes(data, start, stop)
            if size > stop - start:
                self._needed_bytes = size
                return start
            flag = HEADER.unpack_from(data, start)[1]
            if flag == JOINED or self._parts is not None:
                self._part(data, start, start + size, events)
            else:
                events.append(_answer(data, start, start + size))
            start += size

    def _part(self, data: Buffer, start: int, end: int, events: list[Reply]) -> None:
        """Take a part of a large message; an end frame completes it. Raises PeerError, final."""
        _, flag, topic_bytes = HEADER.unpack_from(data, start)
        content_start = start + HEADER_BYTES + topic_bytes
        if self._parts is None:
            self._parts = bytearray()
        self._parts += memoryview(data)[content_start:end]
        if len(self._parts) > self._message_bytes_max:
            text = f"a message is over {self._message_bytes_max} bytes (message_bytes_max)"
            raise PeerError("boson.message-too-large", text)
        if flag == WHOLE:
            topic = _text(bytes(data[start + HEADER_BYTES : content_start]))
            value, self._parts = self._parts, None
            events.append(Deliver([Batch(topic, value, array("i", (0, len(value))))]))


def _answer(data: Buffer, start: int, end: int) -> Reply:
    """The event of a frame that the scan does not handle: an answer of the bus."""
    _, _, topic_bytes = HEADER.unpack_from(data, start)
    content_start = start + HEADER_BYTES + topic_bytes
    topic = bytes(data[start + HEADER_BYTES : content_start])
    content = bytes(data[content_start:end])
    text = content.decode("utf-8", "replace")
    try:
        if topic == LOGIN:
            return LoggedIn(text)
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
        return Deliver([Batch.of(_text(topic), [content])])
    raise PeerError("boson.answer-invalid", f"unexpected frame with topic {_text(topic[:40])!r}")


def _position(text: bytes) -> Position:
    epoch, _, offset = text.partition(b":")
    return Position(int(epoch), int(offset))


def _text(topic: bytes) -> str:
    return topic.decode("utf-8", "replace")


# Encoding


def encode(batch: Batch) -> Buffer:
    """The batch as frames with flag 0 and its topic."""
    return scan.encode_frames([batch])


def encode_frame(topic: bytes, content: bytes, flag: int = 0) -> bytes:
    return HEADER.pack(len(content), flag, len(topic)) + topic + content


def encode_receipts(*batches: Batch) -> bytes:
    """The receipts that durable batches requested."""
    return scan.encode_receipts(batches)


def encode_error(code: str, text: str) -> bytes:
    return encode_frame(ERROR, f"{code} {text}".encode())


def encode_login(content: str) -> bytes:
    """A client's login, or the server's answer: the name of the account."""
    return encode_frame(LOGIN, content.encode())


def encode_position(topic: str, epoch: int, offset: int) -> bytes:
    """The position of a subscription's next message, for clients that requested it."""
    return encode_frame(POSITION, f"{epoch}:{offset} {topic}".encode())


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
