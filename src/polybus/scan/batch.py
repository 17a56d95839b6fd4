# cython: annotation_typing=False, boundscheck=False, wraparound=False, cdivision=True
"""Batch, and the loops of the bus and its log over many batches; `polybus.batch` says what it is.

Compiled, with the C types of batch.pxd, or run as plain Python: see `polybus.scan`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa
try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.scan.plain import (
        add_entry,
        append_long,
        bytes_of,
        count_filled,
        count_of,
        field,
    )

Buffer = bytes | bytearray | memoryview
Headers = Mapping[str, bytes]
LONGS = array("q")
T = TypeVar("T")


# Thousands of batches exist and never form reference cycles, so the collector need not visit them.
@cython.no_gc
@cython.freelist(256)
@cython.cclass
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
        if spans is None:
            raise TypeError("the spans must be an array")
        self._begin(topic, buffer, spans)

    def _begin(self, topic: str, buffer: Buffer, spans: array[int]) -> None:
        self.topic = topic
        self.buffer = buffer
        self.spans = spans
        self.protocol = ""
        self.sender = ""
        self.first_offset = -1
        if not cython.compiled:
            # In C these need not be set.
            self.keys: Sequence[bytes | None] | None = None
            self.headers: Sequence[Headers | None] | None = None
            self.receipt_ids: array[int] | None = None
            self.timestamp_us = 0
            self.epoch = 0
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
        return bytes_of(self.spans)

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
        part = new_batch(self.topic, self.buffer, self.spans[2 * start : 2 * stop])
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
        # A local variable, because another thread may call `keep_batches` meanwhile.
        encodings = self._encodings
        if encodings is None:
            encodings = self._encodings = {}
        encoding = encodings.get(protocol)
        if encoding is None:
            encoding = encodings[protocol] = encode(self)
        return encoding

    def rename(self, topic: str) -> None:
        """Give the batch the topic's full name; it arrived under the name of an account."""
        self.topic = topic
        # Cached encodings have the other name.
        self._encodings = None

    def carry_encoding(self, protocol: str, encoding: Buffer) -> None:
        """Use the bytes that the batch arrived in as its encoding in that protocol."""
        if self._encodings is None:
            self._encodings = {}
        self._encodings[protocol] = encoding


def new_batch(topic: str, buffer: Buffer, spans: array[int]) -> Batch:
    """The same as `Batch(…)`, and in C faster."""
    batch = Batch.__new__(Batch)
    batch._begin(topic, buffer, spans)  # noqa: SLF001
    return batch


class Traffic:
    """Counts messages and their bytes."""

    __slots__ = ("messages", "value_bytes")

    def __init__(self, messages: int = 0, value_bytes: int = 0) -> None:
        self.messages = messages
        self.value_bytes = value_bytes

    def add(self, messages: int, value_bytes: int) -> None:
        self.messages += messages
        self.value_bytes += value_bytes


class BusTopic(Protocol):
    """The part of a bus topic that this module needs; `taken` counts its messages by protocol."""

    @property
    def taken(self) -> dict[str, Traffic]: ...

    @property
    def subscribers(self) -> object: ...


B = TypeVar("B", bound=BusTopic)


def weigh(batches: Iterable[Batch], message_bytes: int, batch_bytes: int) -> int:
    """The size of all values, plus a fixed cost for each message and each batch."""
    total = 0
    for batch in batches:
        total += bytes_of(batch.spans) + count_of(batch.spans) * message_bytes + batch_bytes
    return total


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
    if len(batches) != len(topics):
        raise ValueError("batches and topics must have the same length")
    for batch, topic in zip(batches, topics):  # noqa: B905 - in C the argument is slow
        taken = topic.taken
        traffic = taken.get(batch.protocol)
        if traffic is None:
            traffic = taken[batch.protocol] = Traffic()
        traffic.add(count_of(batch.spans), bytes_of(batch.spans))


def listen_alike(topics: Sequence[BusTopic]) -> bool:
    """Whether all these topics have the same subscribers."""
    first = None
    for topic in topics:
        if first is None:
            first = topic.subscribers
        elif topic.subscribers != first:
            return False
    return True


def count_receipts(batches: Iterable[Batch]) -> int:
    """How many receipts the batches request: one per id; a request without ids counts as one."""
    total = 0
    for batch in batches:
        if batch.receipt_ids is not None:
            total += max(1, count_filled(batch.receipt_ids))
    return total


# The log


class TopicEnd:
    """The end of a topic's log and the index of its commits; `frozen` says why it is read-only."""

    __slots__ = ("_entries", "_segment", "epoch", "frozen", "places", "stop", "tail")

    def __init__(self, epoch: int, stop: int, places: Any) -> None:
        self.epoch = epoch
        self.stop = stop
        self.tail: deque[Batch] = deque()
        self.frozen: Exception | None = None
        self.places = places
        self.forget_entries()

    def forget_entries(self) -> None:
        """Drop the cached index entries."""
        self._segment: Path | None = None
        self._entries: array[int] | None = None

    def _entries_in(self, segment: Path) -> array[int]:
        """The index entries of a segment, cached for the next commit."""
        if self._segment is not segment or self._entries is None:
            self._entries = self.places.in_segment(segment).entries
            self._segment = segment
        return self._entries


E = TypeVar("E", bound=TopicEnd)


def find_ends(batches: Iterable[Batch], ends: dict[str, E]) -> list[E] | None:
    """The end of each batch's topic; None if a topic does not exist or is read-only."""
    found = []
    for batch in batches:
        end = ends.get(batch.topic)
        if end is None or end.frozen is not None:
            return None
        found.append(end)
    return found


def take_batches(batches: Sequence[Batch], ends: Sequence[TopicEnd], now_us: int) -> list[Batch]:
    """Assign each batch its topic's epoch and next offsets, and append it to the topic's tail.

    A batch without a timestamp gets `now_us`. Empty batches are not appended; returns the others.
    """
    taken = []
    if len(batches) != len(ends):
        raise ValueError("batches and ends must have the same length")
    for batch, end in zip(batches, ends):  # noqa: B905 - in C the argument is slow
        batch.epoch = end.epoch
        batch.first_offset = end.stop
        if batch.timestamp_us == 0:
            batch.timestamp_us = now_us
        if len(batch.spans) == 0:
            continue
        # The tail before `stop`: a reader that sees the new end finds the messages.
        end.tail.append(batch)
        end.stop += count_of(batch.spans)
        taken.append(batch)
    return taken


def keep_batches(
    batches: Iterable[Batch],
    ends: Mapping[str, TopicEnd],
    last_owner: object,
    batch_bytes: int,
    extra_bytes: Callable[[Batch], int],
) -> tuple[list[tuple[list[deque[Batch]], int]], object]:
    """For each read buffer the tails of its batches and its memory; and the last buffer.

    A batch keeps its whole read buffer alive, and consecutive batches share it, so each buffer is
    counted once. Batches that continue with `last_owner` do not count it again. Batches of deleted
    topics are left out and encodings dropped; `extra_bytes` is the memory of keys and headers.
    """
    reads: list[tuple[list[deque[Batch]], int]] = []
    tails: list[deque[Batch]] | None = None
    weight = 0
    for batch in batches:
        end = ends.get(batch.topic)
        if end is None or end.epoch != batch.epoch:
            continue
        batch._encodings = None  # noqa: SLF001 - in C this is not a call
        owner: object = batch.buffer
        if isinstance(owner, memoryview):
            owner = owner.obj or owner
        if tails is None or owner is not last_owner:
            if tails is not None:
                reads.append((tails, weight))
            tails = []
            weight = 0 if owner is last_owner else memoryview(owner).nbytes  # type: ignore[arg-type]
            last_owner = owner
        weight += batch_bytes + 4 * len(batch.spans)
        if batch.keys is not None or batch.headers is not None:
            weight += extra_bytes(batch)
        tails.append(end.tail)
    if tails is not None:
        reads.append((tails, weight))
    return reads, last_owner


def drop_oldest(
    reads: deque[tuple[list[deque[Batch]], int]], total: int, total_max: int, count_max: int
) -> int:
    """Drop the oldest reads beyond the limits, each batch from its tail; return what is left.

    `total` is the memory of all reads, which come from `keep_batches`.
    """
    while total > total_max or len(reads) > count_max:
        tails, weight = reads.popleft()
        for tail in tails:
            tail.popleft()
        total -= weight
    return total


def take_groups(
    queue: deque[tuple[list[Batch], int]], weight_max: int
) -> list[tuple[list[Batch], int]]:
    """Empty a queue of batches and their weights into groups; only one entry may be heavier.

    Another thread may add to the queue meanwhile.
    """
    groups = []
    group: list[Batch] = []
    weight = 0
    for _ in range(len(queue)):
        batches, added = queue.popleft()
        if group and weight + added > weight_max:
            groups.append((group, weight))
            group, weight = [], 0
        group += batches
        weight += added
    if group:
        groups.append((group, weight))
    return groups


@cython.freelist(256)
@cython.cclass
class _Run:
    """The batches of one topic and epoch; most topics have one batch only."""

    __slots__ = ("count", "earliest", "first", "latest", "others")
    first: Batch
    others: list[Batch] | None
    count: int
    earliest: int
    latest: int


def _new_run(batch: Batch) -> _Run:
    # Without a constructor call, which in C takes longer than the rest of the work for a batch.
    run = _Run.__new__(_Run)
    run.first = batch
    run.others = None
    run.count = 0
    run.earliest = run.latest = batch.timestamp_us
    return run


def rows_by_topic(
    batches: Iterable[Batch], kind: type[T], account: str
) -> tuple[list[Batch], tuple[T, ...], tuple[list[str], array[int], array[int]]]:
    """The batches ordered by topic and epoch, and a `kind` for each topic.

    `kind` is a named tuple of account, topic, epoch, first offset, row count, first row, and
    smallest and largest timestamp. The last value repeats the topics' names, first offsets and row
    counts as columns.
    """
    runs: dict[str | tuple[str, int], _Run] = {}
    for batch in batches:
        key: str | tuple[str, int] = batch.topic
        run = runs.get(key)
        if run is not None and run.first.epoch != batch.epoch:
            # The topic was deleted and recreated within a commit.
            key = (batch.topic, batch.epoch)
            run = runs.get(key)
        if run is None:
            run = runs[key] = _new_run(batch)
        elif run.others is None:
            run.others = [batch]
        else:
            run.others.append(batch)
        run.count += count_of(batch.spans)
        run.earliest = min(run.earliest, batch.timestamp_us)
        run.latest = max(run.latest, batch.timestamp_us)
    ordered: list[Batch] = []
    topics = []
    names = []
    firsts, rows = LONGS[:], LONGS[:]
    row = 0
    for run in runs.values():
        batch = run.first
        names.append(batch.topic)
        append_long(firsts, batch.first_offset)
        append_long(rows, run.count)
        topics.append(
            tuple.__new__(  # type: ignore[type-var]
                kind,
                (
                    account,
                    batch.topic,
                    batch.epoch,
                    batch.first_offset,
                    run.count,
                    row,
                    run.earliest,
                    run.latest,
                ),
            )
        )
        row += run.count
        ordered.append(batch)
        if run.others is not None:
            ordered += run.others
    return ordered, tuple(topics), (names, firsts, rows)


def have_extras(batches: Iterable[Batch]) -> bool:
    """Whether any batch has keys or headers."""
    for batch in batches:
        if batch.keys is not None or batch.headers is not None:
            return True
    return False


def add_places(
    parts: Iterable[tuple[str, str, int, int, int, int, int, int]],
    ends: Mapping[str, TopicEnd],
    segment: Path,
    position: int,
    size: int,
) -> None:
    """Add a commit to the index of each of its topics; `parts` come from `rows_by_topic`."""
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 8:
            raise ValueError("a part must be a tuple of eight")
        epoch = field(part, 2)
        end = ends.get(field(part, 1))
        if end is not None and end.epoch == epoch:
            add_entry(end._entries_in(segment), part, position, size)  # noqa: SLF001
