"""Boson frames: framed binary messages with a flag and a topic.

A frame is int32 content length, int8 flag, uint16 topic length, topic, content (big-endian).

Flags: 0 a whole message, or the end of a sequence of parts; 1 parts make one message; 2 each part
is a message, delivered once all have arrived; 3 each part is a message, delivered at once. The
first frame's flag and topic rule the sequence, and an empty end frame adds nothing.

Plain frames are scanned by compiled code, thousands at a time. This module looks at single frames
only where the scan stops: control frames, parts, errors, the unfinished end of a read.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.config import Limits
from polybus.errors import PeerError, UsageError
from polybus.scan.frames_py import (
    HEADER,
    HEADER_BYTES,
    RECEIPT_ID_BYTES_MAX,
    RECEIPT_MARK,
    Group,
)
from polybus.wire.codec import STEPS_MAX, Bad, Publish
from polybus.wire.parts import Finished, Parts
from polybus.wire.positions import SubscribeLine, parse_lines

PROTOCOL = "boson-frames"
SUBSCRIBE = b"$subscribe"
UNSUBSCRIBE = b"$unsubscribe"
ERROR = b"$error"
RECEIPT = b"$receipt"
POSITION = b"$position"
FLAG_MAX = 3
# Not printable, so no topic has this name: it stands for bytes that are no name at all.
IMPOSSIBLE = "\0"


@dataclass(frozen=True, slots=True)
class Subscribe:
    lines: list[SubscribeLine]


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """No lines means everything."""

    lines: list[SubscribeLine]


@dataclass(frozen=True, slots=True)
class ReceiptOwed:
    """A sequence of parts that were published one by one has ended: its receipt is due now."""

    receipt_id: bytes


Event = Publish | Subscribe | Unsubscribe | ReceiptOwed | Bad


class BosonFramesCodec:
    """The server's side of one connection; wire/codec.py has the contract."""

    def __init__(self, limits: Limits, default_topic: str | None = None) -> None:
        self._limits = limits
        self._default_topic = names.canonical(default_topic) if default_topic else ""
        self._parts = Parts(limits.parts_max, limits.parts_bytes_max)
        self._carry: bytearray | None = None
        # No point in looking before this many bytes are there: one-byte chunks stay linear.
        self._needed_bytes = HEADER_BYTES
        self._failed = False
        self.backlog = False

    @property
    def unfinished_bytes(self) -> int:
        parts = self._parts
        if self._carry is None and not parts.open:
            return 0
        return (len(self._carry) if self._carry else 0) + parts.held_bytes

    def receive(self, data: Buffer) -> list[Event]:
        if self._failed:
            return []
        self.backlog = False
        if self._carry:
            self._carry += data
            if len(self._carry) < self._needed_bytes:
                return []
            data, self._carry = self._carry, None
        events: list[Event] = []
        start, stop = 0, len(data)
        for _ in range(STEPS_MAX):
            if not self._parts.open:
                start = self._scan(data, start, stop, events)
            if start == stop:
                self._needed_bytes = HEADER_BYTES
                return events
            size = self._frame_bytes(data, start, stop, events)
            if self._failed:
                return events
            if size > stop - start:
                self._needed_bytes = size
                break
            self._one_frame(data, start, start + size, events)
            if self._failed:
                return events
            start += size
        else:
            self._needed_bytes = 0
            self.backlog = start < stop
        if start < stop:
            self._carry = bytearray(memoryview(data)[start:stop])
        return events

    def _scan(self, data: Buffer, start: int, stop: int, events: list[Event]) -> int:
        """Publish the plain frames that come next; return where they end."""
        message_max, topic_max = self._limits.message_bytes_max, self._limits.topic_bytes_max
        end, batches = scan.scan_batches(
            data, start, stop, message_max, topic_max, _canonical, PROTOCOL
        )
        if batches is None:
            end, groups = scan.scan_frames(data, start, stop, message_max, topic_max)
            self._publish(data, start, end, groups, events)
        elif batches:
            events.append(_published(batches, data, start, end))
        return end

    def take_carry(self) -> bytes:
        carry, self._carry = self._carry, None
        return bytes(carry) if carry else b""

    def close(self) -> list[Event]:
        """An unfinished frame or sequence is dropped: its publisher has no receipt for it."""
        self._carry = None
        self._parts.close()
        return []

    def _frame_bytes(self, data: Buffer, start: int, stop: int, events: list[Event]) -> int:
        """The size of the frame at `start`, as far as it is known; fails on an impossible one."""
        if stop - start < HEADER_BYTES:
            return HEADER_BYTES
        length, flag, topic_bytes = HEADER.unpack_from(data, start)
        if not 0 <= flag <= FLAG_MAX:
            self._fail(events, "boson.flag-unknown", f"flag {flag & 0xFF} is not one of 0 to 3")
        elif length < 0:
            self._fail(events, "boson.length-negative", f"the content length is {length}")
        elif length > self._limits.message_bytes_max:
            limit = self._limits.message_bytes_max
            text = f"the content length is {length}, over {limit} (message-bytes-max)"
            self._fail(events, "boson.message-too-large", text)
        return HEADER_BYTES + int(topic_bytes) + int(length)

    def _publish(
        self, data: Buffer, start: int, end: int, groups: list[Group], events: list[Event]
    ) -> None:
        """Turn frames of topics that are new, or spelled in another way, into batches."""
        batches: dict[str, Batch] = {}
        forwardable = True
        for group in groups:
            name, same_bytes = topic_name(group.topic)
            if name is None:
                self._complain(events, "topic.invalid", "a topic name is printable UTF-8")
                forwardable = False
                continue
            # Subscribers never see a receipt request, nor another spelling of the topic.
            forwardable = forwardable and same_bytes and group.receipts is None
            if name in batches:
                _merge(batches[name], group)
                continue
            batch = batches[name] = Batch(name, data, group.spans)
            batch.receipt_ids = group.receipts
        if not batches:
            return
        whole = memoryview(data)[start:end] if forwardable else None
        if whole is not None and len(batches) == 1:
            batch.carry_encoding(PROTOCOL, whole)
        events.append(Publish(list(batches.values()), whole))

    def _one_frame(self, data: Buffer, start: int, end: int, events: list[Event]) -> None:
        """Handle a single complete frame that the scan does not: control, parts, odd topics."""
        _, flag, topic_bytes = HEADER.unpack_from(data, start)
        content_start = start + HEADER_BYTES + topic_bytes
        topic = bytes(data[start + HEADER_BYTES : content_start])
        content = memoryview(data)[content_start:end]
        if topic.startswith(b"$") and not flag and not self._parts.open:
            self._control(topic, content, events)
            return
        topic, receipt_id = split_receipt(topic)
        if len(receipt_id) > RECEIPT_ID_BYTES_MAX:
            text = f"a receipt id has at most {RECEIPT_ID_BYTES_MAX} bytes"
            self._complain(events, "boson.receipt-id-invalid", text)
            if not flag and not self._parts.open:
                return
            topic, receipt_id = IMPOSSIBLE.encode(), b""
        try:
            finished = self._parts.add(flag, self._named(topic), content, receipt_id)
        except PeerError as error:
            self._failed = True
            events.append(Bad(error))
            return
        if finished is not None:
            self._finish(finished, events)

    def _named(self, topic: bytes) -> str:
        """The topic's name; empty for none, IMPOSSIBLE for bytes that are none."""
        if not topic:
            return self._default_topic
        name, _ = topic_name(topic)
        too_long = len(topic) > self._limits.topic_bytes_max
        return IMPOSSIBLE if name is None or too_long else name

    def _finish(self, finished: Finished, events: list[Event]) -> None:
        """Publish what a frame completed; a receipt is the last message's and covers all."""
        if not finished.topic:
            text = "the topic is empty and this connector has no default-topic"
            self._complain(events, "topic.empty", text)
        elif finished.topic == IMPOSSIBLE:
            self._complain(events, "topic.invalid", "a topic name is printable UTF-8")
        elif finished.spans:
            events.append(finished.publish())
        else:
            events.append(ReceiptOwed(finished.receipt_id))

    def _control(self, topic: bytes, content: memoryview, events: list[Event]) -> None:
        if topic not in (SUBSCRIBE, UNSUBSCRIBE):
            self._complain(events, "topic.reserved", f"{_shown(topic)} is not for clients to send")
            return
        try:
            lines = parse_lines(bytes(content), self._limits)
        except PeerError as error:
            events.append(Bad(error))
            return
        events.append(Subscribe(lines) if topic == SUBSCRIBE else Unsubscribe(lines))

    def _complain(self, events: list[Event], code: str, text: str) -> None:
        """Say so once per read, however many frames are wrong in the same way."""
        for event in events:
            if isinstance(event, Bad) and event.error.code == code:
                return
        events.append(Bad(PeerError(code, text, final=False)))

    def _fail(self, events: list[Event], code: str, text: str) -> None:
        self._failed = True
        self._carry = None
        events.append(Bad(PeerError(code, text)))


def _published(batches: list[Batch], data: Buffer, start: int, end: int) -> Publish:
    """What a scan found, when all topics are known; `data[start:end]` is exactly these frames."""
    for batch in batches:
        if batch.receipt_ids is not None:
            # Subscribers never see a receipt request. One batch is encoded only if there are any.
            return Publish(batches, scan.encode_frames_of(batches) if len(batches) > 1 else None)
    whole = memoryview(data)[start:end]
    if len(batches) == 1:
        batch.carry_encoding(PROTOCOL, whole)
    return Publish(batches, whole)


def _merge(batch: Batch, group: Group) -> None:
    """Add the messages of another spelling of the topic, all in the order they were sent in."""
    rows = []
    for spans, receipts in ((batch.spans, batch.receipt_ids), (group.spans, group.receipts)):
        ids = spans if receipts is None else receipts
        for index in range(0, len(spans), 2):
            receipt_start = ids[index] if receipts is not None else ids[index + 1]
            rows.append((spans[index], spans[index + 1], receipt_start, ids[index + 1]))
    rows.sort()
    batch.spans = array("i", [place for row in rows for place in row[:2]])
    if batch.receipt_ids is not None or group.receipts is not None:
        batch.receipt_ids = array("i", [place for row in rows for place in row[2:]])


_names: dict[bytes, tuple[str | None, bool]] = {}
# Those of them that are spelled as the topic is, for the scan.
_canonical: dict[bytes, str] = {}
_NAMES_MAX = 65536


def topic_name(topic: bytes) -> tuple[str | None, bool]:
    """The topic's canonical name (None if it is no name), and whether it is spelled so already."""
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
    """`topic?receipt=ID` → topic and ID; no ID where none is asked for."""
    base, mark, receipt_id = topic.partition(RECEIPT_MARK)
    return (base, receipt_id) if mark and receipt_id else (topic, b"")


def _shown(topic: bytes) -> str:
    return topic[:40].decode("utf-8", "replace")


# What we send


def encode(batch: Batch) -> Buffer:
    """The batch as frames with flag 0 and its topic."""
    return scan.encode_frames(batch.topic.encode(), batch.buffer, batch.spans)


def encode_frame(topic: bytes, content: bytes, flag: int = 0) -> bytes:
    return HEADER.pack(len(content), flag, len(topic)) + topic + content


def encode_receipts(*batches: Batch) -> bytes:
    """The receipts that durable batches owe."""
    return scan.encode_receipts_of(batches)


def encode_error(code: str, text: str) -> bytes:
    return encode_frame(ERROR, f"{code} {text}".encode())


def encode_position(topic: str, epoch: int, offset: int) -> bytes:
    """Where the next message of a subscription stands, for clients that asked to be told."""
    return encode_frame(POSITION, f"{epoch}:{offset} {topic}".encode())
