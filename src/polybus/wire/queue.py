"""Queue messages on the wire: each is its length, 4 bytes big-endian, then its bytes.

There is no handshake, no topic and no reply. Both directions are the same, so this module serves
the bus, its client and `polybus.queues`. `RECEIVING` lists the transitions of the receiver;
docs/protocols/queues.md draws them.
"""

from array import array
from enum import Enum
from io import BytesIO

from polybus import scan
from polybus.batch import Batch, Buffer
from polybus.config import Limits
from polybus.errors import PeerError, UsageError
from polybus.scan.binary_py import LENGTH, LENGTH_BYTES
from polybus.wire.codec import Bad, Large, LargeBegin, LargeEnd, LargePiece, Publish

PROTOCOL = "queue"
MESSAGE_BYTES_MAX = (1 << 31) - 1
"""A length is a signed number of 4 bytes."""


class Receiving(Enum):
    LENGTH = "Length"
    """The next bytes are a message's length, or the rest of it."""
    MESSAGE = "Message"
    """The length is known, and bytes of the message are missing."""
    FAILED = "Failed"
    """A length was invalid: the rest of the stream cannot be read."""


RECEIVING = {
    (Receiving.LENGTH, "whole messages at once"): Receiving.LENGTH,
    (Receiving.LENGTH, "all 4 bytes, a length within the limit"): Receiving.MESSAGE,
    (Receiving.LENGTH, "a length negative or over the limit"): Receiving.FAILED,
    (Receiving.MESSAGE, "the message's last byte"): Receiving.LENGTH,
}
"""The end of the stream ends any state and drops an unfinished message."""

Event = Publish | Bad | Large


class Framing:
    """Cuts a stream into messages, in any chunking, for the two readers below.

    Memory is allocated only for bytes that have arrived, not for a length.
    """

    backlog = False
    """The scan handles every message, so it never pauses."""
    is_held = False

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self.error: PeerError | None = None
        self._header = b""
        # A BytesIO returns its bytes without a copy, and one-byte chunks stay linear.
        self._body = BytesIO()
        self._missing_bytes = 0

    @property
    def state(self) -> Receiving:
        if self.error is not None:
            return Receiving.FAILED
        return Receiving.MESSAGE if len(self._header) == LENGTH_BYTES else Receiving.LENGTH

    @property
    def unfinished_bytes(self) -> int:
        return len(self._header) + self._body.tell()

    @property
    def missing_bytes(self) -> int:
        """How many bytes the unfinished message still needs, as far as known."""
        return self._missing_bytes

    def take_carry(self) -> bytes:
        """Hand out an unfinished message; the caller puts it before the next data."""
        carry = self._header + self._body.getvalue()
        self._reset()
        return carry

    def _reset(self) -> None:
        self._header = b""
        self._body = BytesIO()
        self._missing_bytes = 0

    def _carry_on(self, data: Buffer) -> tuple[int, bytes | None]:
        """Continue an unfinished message; return how many bytes it took, and it if complete."""
        start = 0
        if len(self._header) < LENGTH_BYTES:
            start = min(LENGTH_BYTES - len(self._header), len(data))
            self._header += bytes(data[:start])
            if len(self._header) < LENGTH_BYTES or not self._read_length():
                return len(data), None
        end = min(start + self._missing_bytes, len(data))
        self._body.write(memoryview(data)[start:end])
        self._missing_bytes -= end - start
        if self._missing_bytes:
            return end, None
        message = self._body.getvalue()
        self._reset()
        return end, message

    def _read_length(self) -> bool:
        """Go from LENGTH to MESSAGE; false if it goes to FAILED instead."""
        (length,) = LENGTH.unpack(self._header)
        if length < 0:
            self.error = PeerError("queue.length-negative", f"the length is negative: {length}")
        elif length > self._message_bytes_max:
            text = f"the length is {length}, over {self._message_bytes_max} (message-bytes-max)"
            self.error = PeerError("queue.message-too-large", text)
        if self.error is not None:
            self._reset()
            return False
        self._missing_bytes = length
        return True


class QueueReader(Framing):
    """The messages of a stream as bytes, for programs that handle each one."""

    def receive(self, data: Buffer) -> list[bytes]:
        """The messages that `data` completes; an invalid length sets `error` for good."""
        if self.error is not None:
            return []
        messages: list[bytes] = []
        start, stop = 0, len(data)
        if self._header:
            start, message = self._carry_on(data)
            if message is not None:
                messages.append(message)
        if start < stop:
            start, found = scan.split_queue(data, start, stop, self._message_bytes_max)
            messages += found
        if start < stop:
            self._carry_on(memoryview(data)[start:])
        return messages


class QueueCodec(Framing):
    """One connection of a connector for `topic`; wire/codec.py has the contract."""

    def __init__(self, limits: Limits, topic: str) -> None:
        super().__init__(limits.message_bytes_max)
        self._inline_bytes_max = min(limits.inline_bytes_max, limits.message_bytes_max)
        self._topic = topic
        # What is missing of a message that is passed on in pieces.
        self._large_left = 0

    def receive(self, data: Buffer) -> list[Event]:
        if self.error is not None:
            return []
        events: list[Event] = []
        start, stop = 0, len(data)
        while start < stop and self.error is None:
            if self._large_left:
                start = self._hand_on(data, start, events)
            elif self._header:
                start = self._continue(data, start, events)
            else:
                start = self._scan(data, start, stop, events)
        if self.error is not None:
            events.append(Bad(self.error))
        return events

    def _scan(self, data: Buffer, start: int, stop: int, events: list[Event]) -> int:
        """Publish whole messages; return where a large or incomplete one begins."""
        end, spans = scan.scan_values(data, start, stop, b"", self._inline_bytes_max)
        if spans:
            batch = Batch(self._topic, data, spans)
            encoding = memoryview(data)[start:end]
            batch.carry_encoding(PROTOCOL, encoding)
            events.append(Publish([batch], encoding))
        return self._continue(data, end, events) if end < stop else end

    def _continue(self, data: Buffer, start: int, events: list[Event]) -> int:
        """Continue one message; return the end of what it took."""
        if len(self._header) < LENGTH_BYTES:
            end = min(start + LENGTH_BYTES - len(self._header), len(data))
            self._header += bytes(data[start:end])
            if len(self._header) < LENGTH_BYTES:
                return end
            if not self._read_length():
                return len(data)
            start = end
            if self._missing_bytes > self._inline_bytes_max:
                self._large_left = self._missing_bytes
                events.append(LargeBegin(self._topic))
                return start
        taken, message = self._carry_on(memoryview(data)[start:])
        if message is not None:
            batch = Batch(self._topic, message, array("i", (0, len(message))))
            events.append(Publish([batch]))
        return start + taken

    def _hand_on(self, data: Buffer, start: int, events: list[Event]) -> int:
        piece = memoryview(data)[start : start + self._large_left]
        events.append(LargePiece(piece))
        self._large_left -= len(piece)
        if not self._large_left:
            events.append(LargeEnd((self._topic,)))
            self._reset()
        return start + len(piece)

    def take_carry(self) -> bytes:
        return b"" if self._large_left else super().take_carry()

    def close(self) -> list[Event]:
        """Drop an unfinished message."""
        self._large_left = 0
        self._reset()
        return []


def encode(batch: Batch) -> Buffer:
    """The batch as messages on the wire, without its topic."""
    return scan.encode_queue(batch.buffer, batch.spans)


def encode_length(message: bytes) -> bytes:
    """The length field of a message."""
    return encode_size(len(message))


def encode_size(message_bytes: int) -> bytes:
    """The length field of a message of this size. Raises UsageError `queue.message-too-large`."""
    if message_bytes > MESSAGE_BYTES_MAX:
        text = f"a queue's message has at most {MESSAGE_BYTES_MAX} bytes, not {message_bytes}"
        raise UsageError("queue.message-too-large", text)
    return LENGTH.pack(message_bytes)
