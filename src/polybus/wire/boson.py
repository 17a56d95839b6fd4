"""The rules that both Boson generations share: parts, topics, and the events of either side.

A message may be sent in parts. The flag and the topic of the first part apply to the sequence:

    flag 1   one message of all parts, when the sequence has ended
    flag 2   each part is a message, delivered when the sequence has ended
    flag 3   each part is a message, delivered at once
    flag 0   outside a sequence a whole message, inside one its end

An end with content is the last part; an empty end adds nothing. The number and the size of the
parts of a sequence are limited, including parts that are already delivered (flag 3).

A message over `inline-bytes-max`, or a sequence that grows past it, is passed on in pieces as it
arrives: with flag 3 each large part by itself, with flag 2 all parts together, with their
positions.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from polybus import names
from polybus.batch import Batch, Buffer, Headers
from polybus.config import Limits
from polybus.errors import PeerError, UsageError
from polybus.wire.codec import (
    Bad,
    Large,
    LargeBegin,
    LargeEnd,
    LargePiece,
    Publish,
    PublishPart,
)
from polybus.wire.positions import Position, SubscribeLine

WHOLE, JOINED, SPLIT, AT_ONCE = range(4)
FLAGS = range(4)
RECEIPT_ID_BYTES_MAX = 255

# Memory of a header beside its bytes, so that tiny headers count too.
_HEADER_COST_BYTES = 256
# Spans are C ints.
_SPAN_MAX = (1 << 31) - 1


# Events of the server's side


@dataclass(frozen=True, slots=True)
class Subscribe:
    lines: list[SubscribeLine]


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """No lines means all topics."""

    lines: list[SubscribeLine]


@dataclass(frozen=True, slots=True)
class ReceiptOwed:
    """A sequence of parts that were published at once has ended: its receipt is due now."""

    topic: str
    receipt_id: bytes


@dataclass(slots=True)
class BadPublish(Bad):
    """A publish is refused; an empty `receipt_id` means that it requested no receipt."""

    receipt_id: bytes


# Events of the client's side


@dataclass(frozen=True, slots=True)
class Receipt:
    """The message that requested this receipt is durable at `position`."""

    receipt_id: bytes
    position: Position


@dataclass(frozen=True, slots=True)
class Positioned:
    """The position of the next message of a subscription."""

    topic: str
    position: Position


@dataclass(frozen=True, slots=True)
class Refused:
    """An error of the server; `receipt_id` is that of the refused message, if known."""

    code: str
    text: str
    receipt_id: bytes = b""


class Parts:
    """The sequence of parts of one connection, at most one at a time.

    Attributes:
        open: whether a sequence has begun and not ended.
    """

    def __init__(self, parts_max: int, parts_bytes_max: int) -> None:
        self._parts_max = parts_max
        self._parts_bytes_max = min(parts_bytes_max, _SPAN_MAX)
        self.open = False
        self._flag = WHOLE
        self._topic = ""
        self._receipt_id = b""
        self._parts_count = 0
        self._parts_bytes = 0
        self._spilled_bytes = 0
        self._handed_bytes = 0

    def _clear(self) -> None:
        self._buffer = bytearray()
        self._spans: array[int] = array("i")
        self._headers: list[Headers | None] = []
        self._joined_headers: dict[str, bytes] = {}

    @property
    def first(self) -> tuple[str, bytes, dict[str, bytes]]:
        """The topic, the receipt id and the headers of the open sequence."""
        own = {} if self._flag == AT_ONCE else self._joined_headers
        return self._topic, self._receipt_id, own

    @property
    def flag(self) -> int:
        """The flag of the open sequence; WHOLE if there is none."""
        return self._flag if self.open else WHOLE

    @property
    def count_so_far(self) -> int:
        """How many parts the sequence has had."""
        return self._parts_count

    def fits(self, size: int, bytes_max: int) -> bool:
        """Whether a part is small enough to be kept here."""
        kept = len(self._buffer) if self.open and self._flag != AT_ONCE else 0
        return kept + size <= bytes_max

    def spill(self, flag: int, topic: str = "", receipt_id: bytes = b"") -> bytearray:
        """Return what has arrived of a multi-part message, which is passed on in pieces from now
        on.

        If its first part has not arrived yet, the sequence begins here.
        """
        if not self.open:
            self._start(flag, topic, receipt_id)
        held, self._buffer = self._buffer, bytearray()
        self._spilled_bytes = self._parts_bytes
        self._handed_bytes = len(held)
        return held

    def count(self, size: int, *, is_part: bool) -> None:
        """Count bytes, or a part, that are not kept here. Raises as `add` does."""
        self._parts_count += is_part
        self._parts_bytes += size
        self._spilled_bytes += size
        self._check()
        if self._flag == SPLIT and is_part:
            self._spans.extend((self._handed_bytes, self._handed_bytes + size))
            self._handed_bytes += size

    def keep_last_headers(self, headers: Headers | None) -> None:
        """Keep the headers of the last part, if it is a message whose bytes were passed on."""
        if headers:
            self._parts_bytes += _cost_bytes(headers)
            self._check()
        if 2 * len(self._headers) < len(self._spans):
            self._headers.append(headers or None)

    def places(self) -> tuple[array[int], list[Headers | None]]:
        """Where the parts of flag 2 are in the bytes that were passed on, and their headers."""
        return self._spans, self._headers

    @property
    def held_bytes(self) -> int:
        """The approximate memory of parts that wait for the end of their sequence."""
        if not self.open or self._flag == AT_ONCE:
            return 0
        held = self._parts_bytes - self._spilled_bytes
        return held + self._spans.itemsize * len(self._spans)

    def add(
        self,
        flag: int,
        topic: str,
        content: Buffer,
        receipt_id: bytes = b"",
        headers: Headers | None = None,
    ) -> Publish | ReceiptOwed | None:
        """Add a part and return the event that it completes, if any.

        The receipt that the first part requested covers all messages of the sequence, so the last
        one has it. It is owed if a sequence of flag 3 has ended with an empty part, because all its
        messages were delivered before.

        Only the first part's `topic` and `receipt_id` count. Joined parts merge their headers, and
        the first value of a name wins; a part that is a message keeps its own headers.

        Raises:
            PeerError: final, `boson.parts-too-many` or `boson.parts-too-large`; all parts are
                dropped.
        """
        if not self.open:
            if flag == WHOLE:
                spans = array("i", (0, len(content)))
                return Publish([_batch(topic, bytearray(content), spans, [headers], receipt_id)])
            self._start(flag, topic, receipt_id)
        if flag != WHOLE or content:
            self._append(content, headers)
        if flag == WHOLE:
            self.open = False
            return self._end()
        if self._flag == AT_ONCE:
            return self._finish(b"")
        return None

    def _start(self, flag: int, topic: str, receipt_id: bytes) -> None:
        self.open = True
        self._flag = flag
        self._topic = topic
        self._receipt_id = receipt_id
        self._parts_count = 0
        self._parts_bytes = 0
        self._spilled_bytes = 0
        # Not before: most connections never send a part.
        self._clear()

    def close(self) -> None:
        """Drop an unfinished sequence."""
        self.open = False
        self._clear()

    def _append(self, content: Buffer, headers: Headers | None) -> None:
        self._parts_count += 1
        self._parts_bytes += len(content)
        if headers:
            self._parts_bytes += _cost_bytes(headers)
        self._check()
        start = len(self._buffer)
        self._buffer += content
        if self._flag == JOINED:
            for name, value in headers.items() if headers else ():
                self._joined_headers.setdefault(name, value)
            return
        self._spans.extend((start, len(self._buffer)))
        self._headers.append(headers or None)

    def _check(self) -> None:
        if self._parts_count > self._parts_max:
            self.close()
            text = f"more than {self._parts_max} parts (parts-max)"
            raise PeerError("boson.parts-too-many", text)
        if self._parts_bytes > self._parts_bytes_max:
            self.close()
            text = f"the parts are over {self._parts_bytes_max} bytes (parts-bytes-max)"
            raise PeerError("boson.parts-too-large", text)

    def _end(self) -> Publish | ReceiptOwed | None:
        if self._flag == JOINED:
            self._spans.extend((0, len(self._buffer)))
            self._headers.append(self._joined_headers or None)
        if self._spans:
            return self._finish(self._receipt_id)
        return ReceiptOwed(self._topic, self._receipt_id) if self._receipt_id else None

    def _finish(self, receipt_id: bytes) -> Publish:
        batch = _batch(self._topic, self._buffer, self._spans, self._headers, receipt_id)
        self._clear()
        if self._flag == AT_ONCE:
            return PublishPart([batch], is_first=self._parts_count == 1)
        return Publish([batch])


def _batch(
    topic: str,
    buffer: bytearray,
    spans: array[int],
    headers: list[Headers | None],
    receipt_id: bytes,
) -> Batch:
    """A batch whose last message requests a receipt, unless the id is empty."""
    batch = Batch(topic, buffer, spans)
    batch.headers = headers if any(headers) else None
    if receipt_id:
        start = len(buffer)
        buffer += receipt_id
        batch.receipt_ids = array("i", bytes(spans.itemsize * len(spans)))
        batch.receipt_ids[-2:] = array("i", (start, len(buffer)))
    return batch


def requested(event: Publish | ReceiptOwed) -> bytes:
    """The id of the receipt that the event's last message requests; empty if it requests none."""
    if isinstance(event, ReceiptOwed):
        return event.receipt_id
    batch = event.batches[-1]
    return b"" if batch.receipt_ids is None else bytes(batch.buffer[slice(*batch.receipt_ids[-2:])])


def _cost_bytes(headers: Headers) -> int:
    return sum(_HEADER_COST_BYTES + len(name) + len(value) for name, value in headers.items())


@dataclass(slots=True)
class OpenLarge:
    """A large message whose pieces are passed on; `refused` says why they are not."""

    topic: str
    receipt_id: bytes
    refused: PeerError | None = None
    headers: dict[str, bytes] = field(default_factory=dict)


class BosonCodec:
    """What the server's side of both generations shares."""

    is_held: bool = False
    """Whether the translator is busy, so that plain messages must wait."""

    def __init__(self, limits: Limits, default_topic: str | None = None) -> None:
        self._limits = limits
        self._default_topic = default_topic or ""
        self._parts = Parts(limits.parts_max, limits.parts_bytes_max)
        self._parts_refused: PeerError | None = None
        self._inline_bytes_max = min(limits.inline_bytes_max, limits.message_bytes_max)
        self._large: OpenLarge | None = None
        # Valid for one read only: a peer can send any number of topics.
        self._topics: dict[bytes, str] = {}

    def _topic(self, raw: bytes) -> str:
        """The canonical name of a topic. Raises PeerError, not final."""
        topic = self._topics.get(raw)
        if topic is None:
            if not raw and not self._default_topic:
                text = "the topic is empty and this connector has no default-topic"
                raise PeerError("topic.empty", text, final=False)
            try:
                text = raw.decode() or self._default_topic
                topic = names.canonical(text, topic_bytes_max=self._limits.topic_bytes_max)
            except UnicodeDecodeError as error:
                raise PeerError("topic.invalid", "the topic is not UTF-8", final=False) from error
            except UsageError as error:
                raise PeerError(error.code, error.text, final=False) from error
            self._topics[raw] = topic
        return topic

    def _add_part(
        self,
        flag: int,
        raw_topic: bytes,
        content: Buffer,
        receipt_id: bytes,
        headers: Headers | None = None,
    ) -> list[Publish | ReceiptOwed | BadPublish | Large]:
        """Add a part, or a whole message, and return the events that it completes.

        The first part sets the topic and the receipt of its sequence. If they are invalid, the
        sequence is still read to its end, because its other parts are not messages, and then
        refused.

        Raises:
            PeerError: final, as from `Parts.add`.
        """
        if self._is_large(len(content)):
            events = self._begin_piece(flag, raw_topic, receipt_id, len(content))
            events += self._pieces(content)
            return [*events, *self._end_piece(flag, headers)]
        topic = ""
        if not self._parts.open:
            topic, receipt_id = self._named(raw_topic, receipt_id)
        event = self._parts.add(flag, topic, content, receipt_id, headers)
        if event is not None and self._parts_refused is not None:
            return [BadPublish(self._parts_refused, requested(event))]
        return [] if event is None else [event]

    def _named(self, raw_topic: bytes, receipt_id: bytes) -> tuple[str, bytes]:
        """The topic of a message or sequence that begins; `_parts_refused` if it cannot be one."""
        self._parts_refused = None
        try:
            if receipt_id:
                check_receipt_id(receipt_id)
            return self._topics.get(raw_topic) or self._topic(raw_topic), receipt_id
        except PeerError as error:
            self._parts_refused = error.without_traceback()
            return "", b"" if len(receipt_id) > RECEIPT_ID_BYTES_MAX else receipt_id

    # Large messages

    def _is_large(self, content_bytes: int) -> bool:
        """Whether a part with this content is passed on in pieces."""
        if self._large is not None:
            return True
        return not self._parts.fits(content_bytes, self._inline_bytes_max)

    def _begin_piece(
        self, flag: int, raw_topic: bytes, receipt_id: bytes, content_bytes: int
    ) -> list[Publish | ReceiptOwed | BadPublish | Large]:
        """A part of a large message begins. Raises PeerError, final, as `Parts.add` does."""
        events: list[Publish | ReceiptOwed | BadPublish | Large] = []
        if self._large is None:
            if self._parts.open:
                topic, receipt_id, headers = self._parts.first
            else:
                headers = {}
                topic, receipt_id = self._named(raw_topic, receipt_id)
            self._large = OpenLarge(topic, receipt_id, self._parts_refused, headers)
            if self._parts_refused is None:
                events.append(LargeBegin(topic))
            if self._parts.open or flag != WHOLE:
                events += self._pieces(self._parts.spill(flag, topic, receipt_id))
        if self._parts.open:
            self._parts.count(content_bytes, is_part=flag != WHOLE or content_bytes > 0)
        return events

    def _pieces(self, content: Buffer) -> list[LargePiece]:
        assert self._large is not None
        return [LargePiece(content)] if len(content) and self._large.refused is None else []

    def _end_piece(self, flag: int, headers: Headers | None = None) -> list[LargeEnd | BadPublish]:
        """A part of a large message has ended, and with it perhaps the message."""
        large, parts = self._large, self._parts
        assert large is not None
        sequence, part_number = parts.flag, parts.count_so_far
        if sequence == SPLIT:
            parts.keep_last_headers(headers)
        else:
            for name, value in headers.items() if headers else ():
                large.headers.setdefault(name, value)
        if flag != WHOLE and sequence != AT_ONCE:
            return []
        self._large = None
        receipt_id = large.receipt_id if flag == WHOLE else b""
        spans, part_headers = parts.places() if sequence == SPLIT else (None, None)
        if flag == WHOLE:
            parts.close()
        if large.refused is not None:
            return [BadPublish(large.refused, receipt_id)]
        end = LargeEnd((large.topic,), receipt_id, large.headers or None)
        if sequence == AT_ONCE:
            return [replace(end, part_number=part_number)]
        return [replace(end, spans=spans, part_headers=part_headers)]


def check_receipt_id(receipt_id: bytes) -> None:
    """Raise PeerError, not final, if the id is too long to be returned."""
    if len(receipt_id) > RECEIPT_ID_BYTES_MAX:
        text = f"the receipt id is over {RECEIPT_ID_BYTES_MAX} bytes"
        raise PeerError("boson.receipt-id-invalid", text, final=False)
