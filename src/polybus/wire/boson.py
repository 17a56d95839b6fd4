"""The rules that both Boson generations share: parts, topics, and the events of either side.

A message may be sent in parts. The flag and the topic of the first part apply to the sequence:

    flag 1   one message of all parts, when the sequence has ended
    flag 2   each part is a message, delivered when the sequence has ended
    flag 3   each part is a message, delivered at once
    flag 0   outside a sequence a whole message, inside one its end

An end with content is the last part; an empty end adds nothing. The number and the size of the
parts of a sequence are limited, including parts that are already delivered (flag 3).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from polybus import names
from polybus.batch import Batch, Buffer, Headers
from polybus.config import Limits
from polybus.errors import PeerError, UsageError
from polybus.wire.codec import Bad, Publish, PublishPart
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

    def _clear(self) -> None:
        self._buffer = bytearray()
        self._spans: array[int] = array("i")
        self._headers: list[Headers | None] = []
        self._joined_headers: dict[str, bytes] = {}

    @property
    def held_bytes(self) -> int:
        """The approximate memory of parts that wait for the end of their sequence."""
        if not self.open or self._flag == AT_ONCE:
            return 0
        return self._parts_bytes + self._spans.itemsize * len(self._spans)

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
            self.open = True
            self._flag = flag
            self._topic = topic
            self._receipt_id = receipt_id
            self._parts_count = 0
            self._parts_bytes = 0
            # Not before: most connections never send a part.
            self._clear()
        if flag != WHOLE or content:
            self._append(content, headers)
        if flag == WHOLE:
            self.open = False
            return self._end()
        if self._flag == AT_ONCE:
            return self._finish(b"")
        return None

    def close(self) -> None:
        """Drop an unfinished sequence."""
        self.open = False
        self._clear()

    def _append(self, content: Buffer, headers: Headers | None) -> None:
        self._parts_count += 1
        self._parts_bytes += len(content)
        if headers:
            self._parts_bytes += _cost_bytes(headers)
        if self._parts_count > self._parts_max:
            self.close()
            text = f"more than {self._parts_max} parts (parts-max)"
            raise PeerError("boson.parts-too-many", text)
        if self._parts_bytes > self._parts_bytes_max:
            self.close()
            text = f"the parts are over {self._parts_bytes_max} bytes (parts-bytes-max)"
            raise PeerError("boson.parts-too-large", text)
        start = len(self._buffer)
        self._buffer += content
        if self._flag == JOINED:
            for name, value in headers.items() if headers else ():
                self._joined_headers.setdefault(name, value)
            return
        self._spans.extend((start, len(self._buffer)))
        self._headers.append(headers or None)

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


class BosonCodec:
    """What the server's side of both generations shares."""

    def __init__(self, limits: Limits, default_topic: str | None = None) -> None:
        self._limits = limits
        self._default_topic = default_topic or ""
        self._parts = Parts(limits.parts_max, limits.parts_bytes_max)
        self._parts_refused: PeerError | None = None
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
    ) -> Publish | ReceiptOwed | BadPublish | None:
        """Add a part, or a whole message, and return the event that it completes.

        The first part sets topic and receipt of its sequence. If it cannot, the sequence is still
        followed to its end, because its other parts are not messages, and then refused.

        Raises:
            PeerError: final, as `Parts.add`.
        """
        topic = ""
        if not self._parts.open:
            self._parts_refused = None
            try:
                if receipt_id:
                    check_receipt_id(receipt_id)
                topic = self._topics.get(raw_topic) or self._topic(raw_topic)
            except PeerError as error:
                self._parts_refused = error.bare()
                if len(receipt_id) > RECEIPT_ID_BYTES_MAX:
                    receipt_id = b""
        event = self._parts.add(flag, topic, content, receipt_id, headers)
        if event is not None and self._parts_refused is not None:
            return BadPublish(self._parts_refused, requested(event))
        return event


def check_receipt_id(receipt_id: bytes) -> None:
    """Raise PeerError, not final, if the id is too long to be returned."""
    if len(receipt_id) > RECEIPT_ID_BYTES_MAX:
        text = f"the receipt id is over {RECEIPT_ID_BYTES_MAX} bytes"
        raise PeerError("boson.receipt-id-invalid", text, final=False)
