"""Batch, and the bus's loops over many batches: the pure-Python twin of `_batch.pyx`.

`polybus.batch` says what a batch is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

Buffer = bytes | bytearray | memoryview
Headers = Mapping[str, bytes]
T = TypeVar("T")


class Batch:
    """Messages of one topic, in order.

    Attributes:
        topic: the topic's name, in lower case.
        buffer, spans: the values (see `polybus.batch`); `spans` holds C ints.
        keys, headers: None when no message has any, else one entry per message.
        receipt_ids: None, or one span per message, like `spans`, of the requested receipt id; an
            empty span requests no receipt.
        protocol, sender: the wire protocol and the peer that the messages came from.
        timestamp_us: when the bus received them, in microseconds since 1970, UTC.
        epoch, first_offset: set by the log's append; message `i` has offset `first_offset + i`.
        stored: the rows of the log that this batch was read from, else None. Then `protocol`,
            `sender` and `timestamp_us` are only those of the first row.
    """

    __slots__ = (
        "_encodings",
        "buffer",
        "epoch",
        "first_offset",
        "headers",
        "keys",
        "protocol",
        "receipt_ids",
        "sender",
        "spans",
        "stored",
        "timestamp_us",
        "topic",
    )

    def __init__(self, topic: str, buffer: Buffer, spans: array[int]) -> None:
        self.topic = topic
        self.buffer = buffer
        self.spans = spans
        self.keys: Sequence[bytes | None] | None = None
        self.headers: Sequence[Headers | None] | None = None
        self.receipt_ids: array[int] | None = None
        self.protocol = ""
        self.sender = ""
        self.timestamp_us = 0
        self.epoch = 0
        self.first_offset = -1
        self.stored: pa.RecordBatch | None = None
        self._encodings: dict[str, Buffer] | None = None

    @classmethod
    def of(
        cls,
        topic: str,
        values: Sequence[bytes],
        *,
        headers: Sequence[Headers | None] | None = None,
        keys: Sequence[bytes | None] | None = None,
    ) -> Batch:
        """Build a batch from separate values, for slow paths and tests."""
        spans = array("i")
        end = 0
        for value in values:
            spans.append(end)
            end += len(value)
            spans.append(end)
        batch = cls(topic, b"".join(values), spans)
        if headers is not None and any(headers):
            batch.headers = headers
        if keys is not None and any(key is not None for key in keys):
            batch.keys = keys
        return batch

    def __len__(self) -> int:
        return len(self.spans) // 2

    def __repr__(self) -> str:
        return f"<Batch {self.topic!r} {self.epoch}:{self.first_offset} of {len(self)}>"

    @property
    def value_bytes(self) -> int:
        """The total size of the values."""
        return sum(self.spans[1::2]) - sum(self.spans[0::2])

    @property
    def last_offset(self) -> int:
        return self.first_offset + len(self) - 1

    def value(self, index: int) -> bytes:
        return bytes(self.buffer[self.spans[2 * index] : self.spans[2 * index + 1]])

    def values(self) -> Iterator[bytes]:
        """Each value as bytes, for callers that need single messages."""
        view = memoryview(self.buffer)
        spans = self.spans
        for index in range(0, len(spans), 2):
            yield bytes(view[spans[index] : spans[index + 1]])

    def slice(self, start: int, stop: int) -> Batch:
        """Messages `start` to `stop` (exclusive) as a batch over the same buffer."""
        part = Batch(self.topic, self.buffer, self.spans[2 * start : 2 * stop])
        part.keys = None if self.keys is None else self.keys[start:stop]
        part.headers = None if self.headers is None else self.headers[start:stop]
        part.protocol = self.protocol
        part.sender = self.sender
        part.timestamp_us = self.timestamp_us
        part.epoch = self.epoch
        if self.first_offset >= 0:
            part.first_offset = self.first_offset + start
        if self.stored is not None:
            part.stored = self.stored.slice(start, stop - start)
        return part

    def encoded(self, protocol: str, encode: Callable[[Batch], Buffer]) -> Buffer:
        """The batch in a protocol's bytes; all subscribers share one encoding."""
        # A local name, because another thread may call `forget_encodings` meanwhile.
        encodings = self._encodings
        if encodings is None:
            encodings = self._encodings = {}
        encoding = encodings.get(protocol)
        if encoding is None:
            encoding = encodings[protocol] = encode(self)
        return encoding

    def forget_encodings(self) -> None:
        """Drop the cached encodings. Thread-safe."""
        self._encodings = None

    def carry_encoding(self, protocol: str, encoding: Buffer) -> None:
        """Use the bytes that the batch arrived in as its encoding in that protocol."""
        if self._encodings is None:
            self._encodings = {}
        self._encodings[protocol] = encoding


class Flow:
    """Counts messages and their bytes."""

    __slots__ = ("messages", "value_bytes")

    def __init__(self, messages: int = 0, value_bytes: int = 0) -> None:
        self.messages = messages
        self.value_bytes = value_bytes


class BusTopic(Protocol):
    """What this module needs of a topic of the bus; `taken` counts its messages by protocol."""

    @property
    def taken(self) -> dict[str, Flow]: ...

    @property
    def subscribers(self) -> object: ...


B = TypeVar("B", bound=BusTopic)


def weigh(batches: Iterable[Batch], message_bytes: int, batch_bytes: int) -> int:
    """The size of all values, plus a fixed cost for each message and each batch."""
    return sum(batch.value_bytes + len(batch) * message_bytes + batch_bytes for batch in batches)


def find_topics(batches: Iterable[Batch], topics: dict[str, B], now_us: int) -> list[B] | None:
    """Set each batch's timestamp and return its topic; None if a topic does not exist."""
    found = []
    for batch in batches:
        batch.timestamp_us = now_us
        topic = topics.get(batch.topic)
        if topic is None:
            return None
        found.append(topic)
    return found


def count_taken(batches: Sequence[Batch], topics: Sequence[BusTopic]) -> None:
    """Add each batch to the incoming traffic of its topic and protocol."""
    for batch, topic in zip(batches, topics, strict=True):
        flow = topic.taken.setdefault(batch.protocol, Flow())
        flow.messages += len(batch)
        flow.value_bytes += batch.value_bytes


def listen_alike(topics: Sequence[BusTopic]) -> bool:
    """Whether all these topics have the same subscribers."""
    return all(topic.subscribers == topics[0].subscribers for topic in topics)


def count_receipts(batches: Iterable[Batch]) -> int:
    """How many receipts the batches request: one per id; a request without ids counts as one."""
    total = 0
    for batch in batches:
        ids = batch.receipt_ids
        if ids is not None:
            total += max(1, sum(ids[at + 1] > ids[at] for at in range(0, len(ids) - 1, 2)))
    return total
