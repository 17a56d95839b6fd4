"""The server's side: messages of a peer to batches and requests.

    hbfs, hbfu       a request: subscribe, unsubscribe; it publishes nothing
    hbfe             the peer's complaint about us: nothing to do
    anything else    a publish, whole or (hbff) a part of one; hbfr asks for a receipt

Other flags are ignored: a later revision may know more of them than we do.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from polybus import names
from polybus.batch import Batch, Buffer
from polybus.config import Limits
from polybus.errors import PeerError, UsageError
from polybus.wire.boson_properties.framing import Framer, Places
from polybus.wire.boson_properties.versions import Properties, Span, decode
from polybus.wire.codec import STEPS_MAX, Bad, Publish
from polybus.wire.parts import FLAGS, WHOLE, Parts
from polybus.wire.positions import SubscribeLine, parse_lines

PROTOCOL = "boson-properties"
SUBSCRIBE = b"hbfs"
UNSUBSCRIBE = b"hbfu"
PART = b"hbff"
RECEIPT = b"hbfr"
ERROR = b"hbfe"
OFFSET = b"hbfo"
POSITION = b"hbfp"
RECEIPT_ID_BYTES_MAX = 255
COMPLAINTS_PER_READ_MAX = 16

# The count and the first key's length.
_BEFORE_FIRST_KEY_BYTES = 6
_NOWHERE: Span = (0, 0)
_EMPTY_TOPIC = "the topic is empty and this connector has no default-topic"


@dataclass(frozen=True, slots=True)
class Subscribe:
    lines: list[SubscribeLine]


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """No lines means everything."""

    lines: list[SubscribeLine]


@dataclass(frozen=True, slots=True)
class ReceiptOwed:
    """Parts that were published one by one have ended: the receipt for the last one is due."""

    topic: str
    receipt_id: bytes


@dataclass(slots=True)
class BadPublish(Bad):
    """A message that asked for a receipt is refused."""

    receipt_id: bytes


Event = Publish | Subscribe | Unsubscribe | ReceiptOwed | Bad


class _Group:
    """The messages of one topic, where they are in the buffer.

    Receipts and headers are rare: their lists grow only when there is one.
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


class BosonPropertiesCodec:
    """The server's side of one connection; wire/codec.py has the contract."""

    def __init__(self, limits: Limits, default_topic: str | None = None) -> None:
        self._limits = limits
        self._default_topic = default_topic or ""
        self._framer = Framer(limits.message_bytes_max, limits.properties_max, STEPS_MAX)
        self._parts = Parts(limits.parts_max, limits.parts_bytes_max)
        self._failed = False
        # The receipt id of the message at hand, for the case that it is refused.
        self._asked = b""
        self._events: list[Event] = []
        self._complaints = 0
        self._parts_refused: PeerError | None = None
        self._groups: dict[str, _Group] = {}
        self._run_topic = ""
        self._topics: dict[bytes, str] = {}

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
            for buffer, places, run in self._framer.feed(data):
                if run is not None:
                    self._group(self._run_topic).spans.extend(run)
                    continue
                self._asked = b""
                try:
                    self._take(buffer, places)
                except PeerError as problem:
                    self._refuse(buffer, problem, self._asked)
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
        """An unfinished message or sequence is dropped: its publisher has no receipt for it."""
        self._framer.drop()
        self._parts.close()
        return []

    def _take(self, buffer: Buffer, places: Places) -> None:
        """Act on one complete message. Raises PeerError if it is refused."""
        message = decode(buffer, places)
        flags = message.flags
        if flags:
            if SUBSCRIBE in flags or UNSUBSCRIBE in flags:
                self._request(buffer, flags)
                return
            if ERROR in flags:
                return
            self._asked = _asked(buffer, flags)
        flag = _part_flag(buffer, flags.get(PART))
        if flag != WHOLE or self._parts.open:
            self._add_part(buffer, message, flag)
            return
        topic = self._topic(message.topic)
        self._group(topic).add(message.content, _receipt(flags), message.headers)
        if not flags and not message.headers and message.content[1] == places[-1]:
            # The next messages will most likely differ in their content only.
            head = buffer[places[0] - _BEFORE_FIRST_KEY_BYTES : places[-2]]
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

    def _add_part(self, buffer: Buffer, message: Properties, flag: int) -> None:
        topic, receipt = "", _NOWHERE
        if not self._parts.open:
            # The first part names topic and receipt for all. Where it cannot, the sequence is still
            # followed to its end, or its other parts would be taken for messages of their own.
            self._framer.learn(b"")
            self._parts_refused = None
            try:
                receipt = _receipt(message.flags)
                topic = self._topic(message.topic)
            except PeerError as error:
                self._parts_refused = error
        receipt_id = bytes(buffer[receipt[0] : receipt[1]])
        start, end = message.content
        with memoryview(buffer)[start:end] as content:
            finished = self._parts.add(flag, topic, content, receipt_id, message.headers)
        if finished is None:
            return
        if self._parts_refused is not None:
            self._tell(buffer, self._parts_refused, finished.receipt_id)
            return
        self._flush(buffer)
        if finished.spans:
            self._events.append(finished.publish())
        else:
            self._events.append(ReceiptOwed(finished.topic, finished.receipt_id))

    def _topic(self, raw: bytes) -> str:
        """The topic's one spelling; worked out once per topic and read."""
        topic = self._topics.get(raw)
        if topic is None:
            if not raw and not self._default_topic:
                raise PeerError("topic.empty", _EMPTY_TOPIC, final=False)
            try:
                text = raw.decode() or self._default_topic
                topic = names.canonical(text, topic_bytes_max=self._limits.topic_bytes_max)
            except UnicodeDecodeError as error:
                raise PeerError("topic.invalid", "the topic is not UTF-8", final=False) from error
            except UsageError as error:
                raise PeerError(error.code, error.text, final=False) from error
            self._topics[raw] = topic
        return topic

    def _refuse(self, buffer: Buffer, error: PeerError, receipt_id: bytes = b"") -> None:
        """A message is refused; whether the stream goes on is the error's to say."""
        if self._parts.open and not error.final:
            # It may have been a part, or the end: the sequence is beyond repair.
            error = PeerError(error.code, f"{error.text}, within a message of parts")
        if error.final:
            self._failed = True
            self.close()
        self._tell(buffer, error, receipt_id)

    def _tell(self, buffer: Buffer, error: PeerError, receipt_id: bytes) -> None:
        if receipt_id:
            # Somebody waits for an answer to this very message.
            self._flush(buffer)
            self._events.append(BadPublish(error, receipt_id))
            return
        # Four bytes can be wrong; answering each would cost us and the peer many times that.
        self._complaints += 1
        if error.final or self._complaints <= COMPLAINTS_PER_READ_MAX:
            self._flush(buffer)
            self._events.append(Bad(error))

    def _flush(self, buffer: Buffer) -> None:
        """Everything published so far becomes an event, before what comes next."""
        if self._groups:
            batches = [group.batch(topic, buffer) for topic, group in self._groups.items()]
            self._events.append(Publish(batches))
            self._groups = {}


def _part_flag(buffer: Buffer, place: Span | None) -> int:
    if place is None:
        return WHOLE
    value = bytes(buffer[place[0] : place[1]])
    if len(value) == 1:
        flag = value[0] - ord("0") if value.isdigit() else value[0]
        if flag in FLAGS:
            return flag
    text = f"the part flag hbff is {value[:40].hex() or 'empty'}, not one byte from 0 to 3"
    raise PeerError("boson.flag-unknown", text, final=False)


def _receipt(flags: dict[bytes, Span]) -> Span:
    """Where the receipt id is; an empty place asks for none."""
    place = flags.get(RECEIPT, _NOWHERE)
    if place[1] - place[0] > RECEIPT_ID_BYTES_MAX:
        text = f"the receipt id is over {RECEIPT_ID_BYTES_MAX} bytes"
        raise PeerError("boson.receipt-id-invalid", text, final=False)
    return place


def _asked(buffer: Buffer, flags: dict[bytes, Span]) -> bytes:
    """The receipt id to answer with; none if it is too long to be given back."""
    start, end = flags.get(RECEIPT, _NOWHERE)
    return bytes(buffer[start:end]) if end - start <= RECEIPT_ID_BYTES_MAX else b""
