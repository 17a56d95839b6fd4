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
from polybus.errors import PeerError
from polybus.scan.binary_py import LENGTH, LENGTH_BYTES
from polybus.wire.codec import Bad, Publish

PROTOCOL = "queue"


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

Event = Publish | Bad


class Framing:
    """Cuts a stream into messages, in any chunking, for the two readers below.

    Memory is allocated only for bytes that have arrived, not for a length.
    """

    backlog = False
    """The scan handles every message, so it never pauses."""

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
            self.error = PeerError("queue.length-negative", f"the message length is {length}")
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
        self._topic = topic

    def receive(self, data: Buffer) -> list[Event]:
        if self.error is not None:
            return []
        events: list[Event] = []
        batches = []
        whole: Buffer | None = None
        start, stop = 0, len(data)
        if self._header:
            start, message = self._carry_on(data)
            if message is not None:
                batches.append(Batch(self._topic, message, array("i", (0, len(message)))))
        if start < stop:
            end, spans = scan.scan_values(data, start, stop, b"", self._message_bytes_max)
            if spans:
                batch = Batch(self._topic, data, spans)
                encoding = memoryview(data)[start:end]
                batch.carry_encoding(PROTOCOL, encoding)
                whole = None if batches else encoding
                batches.append(batch)
            start = end
        if start < stop:
            self._carry_on(memoryview(data)[start:])
        if batches:
            events.append(Publish(batches, whole))
        if self.error is not None:
            events.append(Bad(self.error))
        return events

    def close(self) -> list[Event]:
        """Drop an unfinished message."""
        self._reset()
        return []


def encode(batch: Batch) -> Buffer:
    """The batch as messages on the wire, without its topic."""
    return scan.encode_queue(batch.buffer, batch.spans)


def encode_length(message: bytes) -> bytes:
    """The length field of a message."""
    return LENGTH.pack(len(message))
