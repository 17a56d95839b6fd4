"""The server's side: messages of a peer to batches and requests.

    hbfs, hbfu       a request: subscribe, unsubscribe; it publishes nothing
    hbfe             an error of the peer: ignored
    anything else    a publish, whole or (hbff) a part of one; hbfr requests a receipt

Unknown flags are ignored: a later minor version may have more of them.
"""

from array import array

from polybus.batch import Batch, Buffer
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.wire.boson import (
    FLAGS,
    RECEIPT_ID_BYTES_MAX,
    WHOLE,
    BadPublish,
    BosonCodec,
    ReceiptOwed,
    Subscribe,
    Unsubscribe,
    check_receipt_id,
)
from polybus.wire.boson_properties.framing import Framer, PropertyOffsets
from polybus.wire.boson_properties.versions import Properties, Span, decode
from polybus.wire.codec import STEPS_MAX, Bad, Publish
from polybus.wire.positions import parse_lines

PROTOCOL = "boson-properties"
SUBSCRIBE = b"hbfs"
UNSUBSCRIBE = b"hbfu"
PART = b"hbff"
RECEIPT = b"hbfr"
ERROR = b"hbfe"
OFFSET = b"hbfo"
POSITION = b"hbfp"
COMPLAINTS_PER_READ_MAX = 16

# The count and the first key's length.
_BEFORE_FIRST_KEY_BYTES = 6
_NO_SPAN: Span = (0, 0)


Event = Publish | Subscribe | Unsubscribe | ReceiptOwed | Bad


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
        if receipt[0] != receipt[1]:
            self._fill_receipts()
            self.receipts.extend(receipt)
        if headers:
            self._fill_headers()
            self.headers.append(headers)
        self.spans.extend(content)

    def _fill_receipts(self) -> None:
        missing = len(self.spans) - len(self.receipts)
        self.receipts.frombytes(bytes(missing * self.receipts.itemsize))

    def _fill_headers(self) -> None:
        self.headers += [None] * (len(self.spans) // 2 - len(self.headers))

    def batch(self, topic: str, buffer: Buffer) -> Batch:
        batch = Batch(topic, buffer, self.spans)
        if self.receipts:
            self._fill_receipts()
            batch.receipt_ids = self.receipts
        if self.headers:
            self._fill_headers()
            batch.headers = self.headers
        return batch


class BosonPropertiesCodec(BosonCodec):
    """The server's side of one connection; wire/codec.py has the contract."""

    def __init__(self, limits: Limits, default_topic: str | None = None) -> None:
        super().__init__(limits, default_topic)
        self._framer = Framer(limits.message_bytes_max, limits.properties_max, STEPS_MAX)
        self._failed = False
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
            for buffer, offsets, run in self._framer.feed(data):
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
        return []

    def _handle(self, buffer: Buffer, offsets: PropertyOffsets) -> None:
        """Handle one complete message. Raises PeerError if it is refused."""
        message = decode(buffer, offsets)
        flags, receipt = message.flags, _NO_SPAN
        if flags:
            if SUBSCRIBE in flags or UNSUBSCRIBE in flags:
                self._request(buffer, flags)
                return
            if ERROR in flags:
                return
            receipt = flags.get(RECEIPT, _NO_SPAN)
            self._requested = bytes(buffer[receipt[0] : receipt[1]])
        flag = _part_flag(buffer, flags.get(PART))
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
            event = self._add_part(flag, message.topic, content, self._requested, message.headers)
        if isinstance(event, BadPublish):
            self._report(buffer, event.error, event.receipt_id)
        elif event is not None:
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


def _part_flag(buffer: Buffer, span: Span | None) -> int:
    if span is None:
        return WHOLE
    value = bytes(buffer[span[0] : span[1]])
    if len(value) == 1:
        flag = value[0] - ord("0") if value.isdigit() else value[0]
        if flag in FLAGS:
            return flag
    text = f"the part flag hbff is {value[:40].hex() or 'empty'}, not one byte from 0 to 3"
    raise PeerError("boson.flag-unknown", text, final=False)
