"""Messages sent in parts: the rules both Boson generations share.

The flag and the topic of the first part rule the sequence, whatever the later parts say:

    flag 1   one message of all parts, when the end has come
    flag 2   each part a message, when the end has come
    flag 3   each part a message, at once
    flag 0   outside a sequence a whole message, inside one its end

An end with content is the last part; an empty end adds nothing. The parts of a sequence are bounded
in number and in bytes, those already handed on (flag 3) included.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from polybus.batch import Batch, Buffer, Headers
from polybus.errors import PeerError
from polybus.wire.codec import Publish, PublishPart

WHOLE, JOINED, SPLIT, AT_ONCE = range(4)
FLAGS = range(4)

# What a header takes in memory beside its bytes; without it, tiny headers would escape the bound.
_HEADER_COST_BYTES = 256
# Spans are C ints.
_SPAN_MAX = (1 << 31) - 1


@dataclass(slots=True)
class Finished:
    """Messages that are ready: `buffer[spans[0]:spans[1]]` and so on, as in a Batch.

    `receipt_id` is the one the first part asked for (empty: none), and only there when the sequence
    has ended: the receipt covers all its messages. With an id but no spans, a sequence of flag 3
    ended empty: all its messages were handed on before, and the receipt for the last one is due.
    `at_once` says that this is one of the messages of such a sequence.
    """

    topic: str
    buffer: bytearray
    spans: array[int]
    headers: Sequence[Headers | None] | None
    receipt_id: bytes
    at_once: bool = False
    is_first: bool = False

    @property
    def values(self) -> list[bytes]:
        return list(Batch(self.topic, self.buffer, self.spans).values())

    def publish(self) -> Publish:
        """The messages as an event, the receipt asked for with the last one."""
        if self.at_once:
            return PublishPart([self.batch()], is_first=self.is_first)
        return Publish([self.batch()])

    def batch(self) -> Batch:
        """The messages as a batch, the receipt asked for with the last one."""
        batch = Batch(self.topic, self.buffer, self.spans)
        batch.headers = self.headers
        if self.receipt_id and self.spans:
            start = len(self.buffer)
            self.buffer += self.receipt_id
            batch.receipt_ids = array("i", bytes(self.spans.itemsize * len(self.spans)))
            batch.receipt_ids[-2:] = array("i", (start, len(self.buffer)))
        return batch


class Parts:
    """One connection's sequence of parts, at most one at a time.

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
        self._clear()

    def _clear(self) -> None:
        self._buffer = bytearray()
        self._spans: array[int] = array("i")
        self._headers: list[Headers | None] = []
        self._joined_headers: dict[str, bytes] = {}

    @property
    def held_bytes(self) -> int:
        """About what the parts that wait for their end take in memory."""
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
    ) -> Finished | None:
        """Take a part and return the messages it makes ready, if any.

        `topic` and `receipt_id` count on the first part only. Joined parts share their headers, the
        first with a name wins; a part that is a message of its own keeps its own.

        Raises:
            PeerError: final, `boson.parts-too-many` or `boson.parts-too-large`; nothing is held any
                more.
        """
        if not self.open:
            if flag == WHOLE:
                spans = array("i", (0, len(content)))
                own = [headers] if headers else None
                return Finished(topic, bytearray(content), spans, own, receipt_id)
            self.open = True
            self._flag = flag
            self._topic = topic
            self._receipt_id = receipt_id
            self._parts_count = 0
            self._parts_bytes = 0
        if flag != WHOLE or content:
            self._take(content, headers)
        if flag == WHOLE:
            self.open = False
            return self._finish()
        if self._flag == AT_ONCE:
            return self._hand_on(b"")
        return None

    def close(self) -> None:
        """Forget an unfinished sequence: the peer is gone, and nobody was promised anything."""
        self.open = False
        self._clear()

    def _take(self, content: Buffer, headers: Headers | None) -> None:
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
        if self._flag == JOINED:
            self._buffer += content
            for name, value in headers.items() if headers else ():
                self._joined_headers.setdefault(name, value)
            return
        start = len(self._buffer)
        self._buffer += content
        self._spans.extend((start, len(self._buffer)))
        self._headers.append(headers or None)

    def _finish(self) -> Finished | None:
        if self._flag == JOINED:
            self._spans.extend((0, len(self._buffer)))
            self._headers.append(self._joined_headers or None)
        if not self._spans and not self._receipt_id:
            return None
        return self._hand_on(self._receipt_id)

    def _hand_on(self, receipt_id: bytes) -> Finished:
        headers = self._headers if any(self._headers) else None
        ready = Finished(self._topic, self._buffer, self._spans, headers, receipt_id)
        ready.at_once = self._flag == AT_ONCE
        ready.is_first = self._parts_count == 1
        self._clear()
        return ready


def _cost_bytes(headers: Headers) -> int:
    return sum(_HEADER_COST_BYTES + len(name) + len(value) for name, value in headers.items())
