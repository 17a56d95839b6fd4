"""Boson properties: versioned lists of properties, the second generation of Boson.

    hbfs, hbfu       a request: subscribe, unsubscribe; it publishes nothing
    hbfl             a login, and its answer
    hbfe             an error of the peer: ignored by the server
    anything else    a publish, whole or (hbff) a part of one; hbfr requests a receipt

Unknown flags are ignored: a later minor version may have more of them.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence

from polybus import scan
from polybus.batch import Batch, Buffer, Headers
from polybus.config import Limits
from polybus.errors import PeerError, UsageError
from polybus.references import reserved_in
from polybus.wire.boson import (
    FLAGS,
    RECEIPT_ID_BYTES_MAX,
    WHOLE,
    BadPublish,
    BosonCodec,
    OpenLarge,
    ReceiptOwed,
    Subscribe,
    Unsubscribe,
    check_receipt_id,
)
from polybus.wire.boson_properties_format import (
    CONTENT,
    FLAG_PREFIX,
    INT32,
    KEY_BYTES_MAX,
    LENGTH_BYTES,
    TOPIC,
    UINT16,
    VERSION,
    Framer,
    Properties,
    PropertyOffsets,
    Span,
    decode,
)
from polybus.wire.codec import (
    STEPS_MAX,
    Bad,
    Large,
    LargeBegin,
    LargeDropped,
    LargePiece,
    Login,
    Publish,
    parse_login,
)
from polybus.wire.positions import parse_lines, subscribe_lines

PROTOCOL = "boson-properties"
SUBSCRIBE = b"hbfs"
UNSUBSCRIBE = b"hbfu"
LOGIN = b"hbfl"
PART = b"hbff"
RECEIPT = b"hbfr"
ERROR = b"hbfe"
OFFSET = b"hbfo"
POSITION = b"hbfp"
COMPLAINTS_PER_READ_MAX = 16

# The count and the first key's length.
_BEFORE_FIRST_KEY_BYTES = 6
_NO_SPAN: Span = (0, 0)


Event = Publish | Subscribe | Unsubscribe | Login | ReceiptOwed | Bad | Large


class _Group:
    """The spans of one topic's messages.

    Receipts and headers are rare: their lists are filled only when one occurs.
    """

    __slots__ = ("headers", "receipts", "spans")

    def __init__(self) -> None:
        self.spans = array("i")
        self.receipts = array("i")
        self.headers: list[dict[str, bytes] | None] = []

    def add(self, content: Span, receipt: Span, headers: dict[str, bytes]) -> None:
        if headers or receipt[0] != receipt[1]:
            self._fill()
            self.receipts.extend(receipt)
            self.headers.append(headers or None)
        self.spans.extend(content)

    def _fill(self) -> None:
        missing = len(self.spans) - len(self.receipts)
        self.receipts.frombytes(bytes(missing * self.receipts.itemsize))
        self.headers += [None] * (missing // 2)

    def batch(self, topic: str, buffer: Buffer) -> Batch:
        batch = Batch(topic, buffer, self.spans)
        if self.headers:
            self._fill()
            batch.receipt_ids = self.receipts if any(self.receipts) else None
            batch.headers = self.headers if any(self.headers) else None
        return batch


class BosonPropertiesCodec(BosonCodec):
    """The server's side of one connection; wire/codec.py has the contract."""

    def __init__(self, limits: Limits, default_topic: str | None = None) -> None:
        super().__init__(limits, default_topic)
        self._framer = Framer(
            limits.message_bytes_max,
            limits.properties_max,
            STEPS_MAX,
            inline_bytes_max=limits.inline_bytes_max,
            hands_on=True,
        )
        self._failed = False
        # How much of the current message's content was passed on.
        self._handed_bytes = 0
        # The receipt id of the current message, in case it is refused.
        self._requested = b""
        self._events: list[Event] = []
        self._complaints = 0
        self._groups: dict[str, _Group] = {}
        self._run_topic = ""

    @property
    def backlog(self) -> bool:
        return self._framer.backlog

    @property
    def unfinished_bytes(self) -> int:
        return self._framer.held_bytes + self._parts.held_bytes

    def receive(self, data: Buffer) -> list[Event]:
        if self._failed:
            return []
        buffer = data
        try:
            for found, offsets, run in self._framer.feed(data):
                if offsets is None:
                    self._hand_on(buffer, found)
                    continue
                buffer = found
                if run is not None:
                    self._group(self._run_topic).spans.extend(run)
                    continue
                self._requested = b""
                try:
                    self._handle(buffer, offsets)
                except PeerError as problem:
                    self._refuse(buffer, problem, self._requested)
                    if self._failed:
                        break
                    self._drop_large()
        except PeerError as error:
            self._refuse(buffer, error)
        self._flush(buffer)
        self._topics.clear()
        self._complaints = 0
        events, self._events = self._events, []
        return events

    def take_carry(self) -> bytes:
        return self._framer.take_carry()

    def close(self) -> list[Event]:
        """Drop an unfinished message or sequence: its publisher has no receipt for it."""
        self._framer.drop()
        self._parts.close()
        self._large = None
        self._handed_bytes = 0
        return []

    def _hand_on(self, buffer: Buffer, content: Buffer) -> None:
        """Pass on a piece of the content of a message that has not ended."""
        self._flush(buffer)
        if self._large is None and not self._handed_bytes:
            topic = self._parts.first[0] if self._parts.open else ""
            if not self._parts.open or self._parts_refused is None:
                self._events.append(LargeBegin(topic))
            if self._parts.open:
                self._large = OpenLarge(*self._parts.first[:2], self._parts_refused)
                self._large.headers = self._parts.first[2]
                self._events += self._pieces(self._parts.spill(WHOLE))
        self._handed_bytes += len(content)
        if self._large is None or self._large.refused is None:
            self._events.append(LargePiece(content))

    def _end_handed(self, message: Properties, flag: int) -> None:
        """A message ends whose content was passed on. Raises PeerError if it is refused."""
        size, self._handed_bytes = self._handed_bytes, 0
        if self._large is None:
            topic, receipt_id = self._named(message.topic, self._requested)
            self._large = OpenLarge(topic, receipt_id, self._parts_refused)
            if self._parts_refused is not None:
                self._events.append(LargeDropped())
            if flag != WHOLE:
                self._parts.spill(flag, topic, receipt_id)
        if self._parts.open:
            self._parts.count(size, is_part=True)
        for event in self._end_piece(flag, message.headers):
            self._take(b"", event)

    def _drop_large(self) -> None:
        """The message was refused, so the pieces that were passed on are dropped."""
        if self._handed_bytes:
            self._handed_bytes = 0
            self._events.append(LargeDropped())

    def _handle(self, buffer: Buffer, offsets: PropertyOffsets) -> None:
        """Handle one complete message. Raises PeerError if it is refused."""
        try:
            message = decode(buffer, offsets)
        except PeerError:
            self._requested = requested_in(buffer, offsets)
            raise
        flags, receipt = message.flags, _NO_SPAN
        if flags:
            if SUBSCRIBE in flags or UNSUBSCRIBE in flags or LOGIN in flags:
                self._drop_large()
                self._request(buffer, flags)
                return
            if ERROR in flags:
                self._drop_large()
                return
            receipt = flags.get(RECEIPT, _NO_SPAN)
            self._requested = bytes(buffer[receipt[0] : receipt[1]])
        if message.headers and (name := reserved_in(message.headers)) is not None:
            text = f"the header {name[:40]!r} is reserved for the bus"
            raise PeerError("headers.reserved", text, final=False)
        flag = part_flag(buffer, flags.get(PART))
        if self._handed_bytes:
            self._end_handed(message, flag)
            return
        if flag != WHOLE or self._parts.open:
            self._part(buffer, message, flag)
            return
        topic = self._topic(message.topic)
        check_receipt_id(self._requested)
        self._group(topic).add(message.content, receipt, message.headers)
        if not flags and not message.headers and message.content[1] == offsets[-1]:
            # The next messages most likely differ in their content only.
            head = buffer[offsets[0] - _BEFORE_FIRST_KEY_BYTES : offsets[-2]]
            self._framer.learn(bytes(head))
            self._run_topic = topic

    def _group(self, topic: str) -> _Group:
        group = self._groups.get(topic)
        if group is None:
            group = self._groups[topic] = _Group()
        return group

    def _request(self, buffer: Buffer, flags: dict[bytes, Span]) -> None:
        if LOGIN in flags:
            start, end = flags[LOGIN]
            login = parse_login(bytes(buffer[start:end]))
            self._flush(buffer)
            self._events.append(login)
        for flag, event in ((UNSUBSCRIBE, Unsubscribe), (SUBSCRIBE, Subscribe)):
            if flag in flags:
                start, end = flags[flag]
                lines = parse_lines(bytes(buffer[start:end]), self._limits)
                self._flush(buffer)
                self._events.append(event(lines))

    def _part(self, buffer: Buffer, message: Properties, flag: int) -> None:
        if not self._parts.open:
            self._framer.learn(b"")
        start, end = message.content
        with memoryview(buffer)[start:end] as content:
            for event in self._add_part(
                flag, message.topic, content, self._requested, message.headers
            ):
                self._take(buffer, event)

    def _take(self, buffer: Buffer, event: Event) -> None:
        if isinstance(event, BadPublish):
            self._report(buffer, event.error, event.receipt_id)
            return
        if isinstance(event, LargePiece):
            # The buffer grows when more arrives.
            event = LargePiece(bytes(event.data))
        self._flush(buffer)
        self._events.append(event)

    def _refuse(self, buffer: Buffer, error: PeerError, receipt_id: bytes = b"") -> None:
        """Refuse a message; a final error also ends the stream."""
        if self._parts.open and not error.final:
            # It may have been a part or the end, so the sequence cannot be recovered.
            error = PeerError(error.code, f"{error.text}, within a message of parts")
        if error.final:
            self._failed = True
            self.close()
        self._report(buffer, error, receipt_id)

    def _report(self, buffer: Buffer, error: PeerError, receipt_id: bytes) -> None:
        if 0 < len(receipt_id) <= RECEIPT_ID_BYTES_MAX:
            # The publisher waits for an answer to this message.
            self._flush(buffer)
            self._events.append(BadPublish(error, receipt_id))
            return
        # Four bytes can be an error; an answer to each would cost many times that.
        self._complaints += 1
        if error.final or self._complaints <= COMPLAINTS_PER_READ_MAX:
            self._flush(buffer)
            self._events.append(Bad(error))

    def _flush(self, buffer: Buffer) -> None:
        """Emit everything published so far as an event, to keep the order."""
        if self._groups:
            batches = [group.batch(topic, buffer) for topic, group in self._groups.items()]
            self._events.append(Publish(batches))
            self._groups = {}


def requested_in(buffer: Buffer, offsets: PropertyOffsets) -> bytes:
    """The receipt id of a message that cannot be decoded, as the lengths alone show it."""
    for start, end, value_end in zip(*[iter(offsets)] * 3, strict=True):
        if bytes(buffer[start:end]) == RECEIPT:
            return bytes(buffer[end + LENGTH_BYTES : value_end])
    return b""


def part_flag(buffer: Buffer, span: Span | None) -> int:
    """Decode the flag `hbff`. Raises PeerError, not final."""
    if span is None:
        return WHOLE
    value = bytes(buffer[span[0] : span[1]])
    if len(value) == 1:
        flag = value[0] - ord("0") if value.isdigit() else value[0]
        if flag in FLAGS:
            return flag
    text = f"the part flag hbff is {value[:40].hex() or 'empty'}, not one byte from 0 to 3"
    raise PeerError("boson.flag-unknown", text, final=False)


# Encoding: the version, then flags, then user properties


_RESERVED = (TOPIC.decode(), CONTENT.decode())
_FLAG_PREFIX = FLAG_PREFIX.decode()


def _key(key: bytes) -> bytes:
    return UINT16.pack(len(key)) + key


def _property(key: bytes, value: bytes) -> bytes:
    return _key(key) + INT32.pack(len(value)) + value


# 1.0 as IEEE-754, big-endian.
_VERSION = _property(VERSION, bytes.fromhex("3f800000"))
_CONTENT_KEY = _key(CONTENT)
# Version, offset, topic and content.
_DELIVERED_COUNT = 4


def encode(batch: Batch) -> bytes:
    """The batch's messages, each with its position, for subscribers.

    Headers named `topic`, `content` or like a flag are left out, because a subscriber must be able
    to trust those properties.
    """
    head = _VERSION + _key(OFFSET)
    middle = _property(TOPIC, batch.topic.encode()) + _CONTENT_KEY
    if batch.headers is None:
        head = INT32.pack(_DELIVERED_COUNT) + head
        return scan.encode_properties(
            head, middle, batch.buffer, batch.spans, batch.epoch, batch.first_offset
        )
    parts: list[bytes] = []
    length = INT32.pack
    offset = batch.first_offset
    for value, headers in zip(batch.values(), batch.headers, strict=True):
        at = _position(batch.epoch, offset)
        extra = _header_properties(headers) if headers else []
        parts += (length(_DELIVERED_COUNT + len(extra)), head, length(len(at)), at, middle)
        parts += (length(len(value)), value, *extra)
        offset += 1
    return b"".join(parts)


def _header_properties(headers: Headers) -> list[bytes]:
    return [
        _property(name.encode("utf-8", "replace"), bytes(value))
        for name, value in headers.items()
        if _carries(name)
    ]


def _carries(name: str) -> bool:
    if name in _RESERVED or name.startswith(_FLAG_PREFIX):
        return False
    return len(name) <= KEY_BYTES_MAX // 4 or len(name.encode("utf-8", "replace")) <= KEY_BYTES_MAX


def _message(properties: Sequence[bytes]) -> bytes:
    return INT32.pack(1 + len(properties)) + _VERSION + b"".join(properties)


def _position(epoch: int, offset: int) -> bytes:
    return b"%d:%d" % (epoch, offset)


def encode_receipt(topic: str, receipt_id: bytes, epoch: int, offset: int) -> bytes:
    return _message(
        [
            _property(RECEIPT, receipt_id),
            _property(OFFSET, _position(epoch, offset)),
            _property(TOPIC, topic.encode()),
        ]
    )


def encode_receipts(batch: Batch) -> bytes:
    """The receipts that a durable batch requested."""
    return b"".join(
        encode_receipt(batch.topic, receipt_id, batch.epoch, batch.first_offset + index)
        for index, receipt_id in _receipt_ids(batch)
    )


def encode_refusals(batch: Batch, code: str, text: str) -> bytes:
    """One error for each receipt that a refused batch requested; empty if it requested none."""
    return b"".join(encode_error(code, text, receipt_id) for _, receipt_id in _receipt_ids(batch))


def _receipt_ids(batch: Batch) -> Iterator[tuple[int, bytes]]:
    """The index and receipt id of each message that requested a receipt."""
    ids = batch.receipt_ids
    if ids is None:
        return
    for index in range(len(batch)):
        start, end = ids[2 * index], ids[2 * index + 1]
        if start != end:
            yield index, bytes(batch.buffer[start:end])


def encode_part(first: Batch | None, content: bytes, flag: int) -> bytes:
    """A part of a large message for a subscriber.

    The first part is given the message, for its topic, position and headers.
    """
    properties = [_property(PART, bytes([flag]))]
    if first is not None:
        position = _position(first.epoch, first.first_offset)
        properties += (_property(OFFSET, position), _property(TOPIC, first.topic.encode()))
        properties += _header_properties((first.headers or [None])[0] or {})
    return _message([*properties, _property(CONTENT, content)])


def encode_error(code: str, text: str, receipt_id: bytes = b"") -> bytes:
    """An error, with the receipt id of its message, if that requested one."""
    properties = [_property(ERROR, f"{code} {text}".encode())]
    if receipt_id:
        properties.append(_property(RECEIPT, receipt_id))
    return _message(properties)


def encode_login(content: str) -> bytes:
    """A client's login, or the server's answer: the name of the account."""
    return _message([_property(LOGIN, content.encode())])


def encode_position(topic: str, epoch: int, offset: int) -> bytes:
    """The position of a subscription's next message, for clients that requested it."""
    position = _property(POSITION, _position(epoch, offset))
    return _message([position, _property(TOPIC, topic.encode())])


def encode_publish(
    topic: str,
    content: bytes,
    headers: Headers | None = None,
    receipt_id: bytes = b"",
    flag: int = 0,
) -> bytes:
    """A message as a publisher sends it.

    Raises:
        UsageError: `headers.invalid`, a header has a name that the protocol reserves.
    """
    for name in headers or ():
        if not _carries(name):
            text = f"a header cannot be named {name[:40]!r} on Boson properties"
            raise UsageError("headers.invalid", text)
    properties = [_property(PART, bytes([flag]))] if flag else []
    if receipt_id:
        properties.append(_property(RECEIPT, receipt_id))
    properties.append(_property(TOPIC, topic.encode()))
    properties.append(_property(CONTENT, content))
    properties += _header_properties(headers or {})
    return _message(properties)


def encode_subscribe(starts: Mapping[str, str], *, tell: bool = False) -> bytes:
    """Subscribe to each topic from its start; `tell` requests the position of each."""
    return _message([_property(SUBSCRIBE, subscribe_lines(starts, tell=tell))])
