"""GET /v1/topics/{topic}/messages: read a topic, as JSON or, by `Accept`, as an Arrow stream."""

import asyncio
import contextlib
import io
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from starlette.responses import Response

from polybus import references
from polybus.batch import Batch
from polybus.bus.subscriptions import Publisher, Subscriber
from polybus.edges.http.api.cloud_events import EVENTS, event_of
from polybus.edges.http.calls import JSON, OFFSET_MAX, Call
from polybus.edges.http.downloads import DownloadResponse
from polybus.edges.http.state import HttpState
from polybus.errors import PeerError, UsageError
from polybus.log.columns import SCHEMA
from polybus.log.interface import Log
from polybus.log.journal.message import rows_of
from polybus.references import Reference
from polybus.services.catch_up import resolve
from polybus.services.masks import TopicMask
from polybus.wire.msgstream import compact_json
from polybus.wire.positions import Since, parse_start

ARROW = "application/vnd.apache.arrow.stream"
LIMIT_MAX = 100_000
JSON_LIMIT_DEFAULT = 1000
WAIT_S_MAX = 60.0
PIECE_BYTES = 1 << 20
JSON_BYTES_MAX = 4 << 20
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - written with a Z


class FetchQuery(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """The first message (one of the first three fields; the earliest if none), and how many."""

    # Unset and not None: a query cannot express null.
    offset: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] | msgspec.UnsetType = msgspec.UNSET
    time: str | msgspec.UnsetType = msgspec.UNSET
    from_: Literal["earliest", "latest"] | msgspec.UnsetType = msgspec.field(
        name="from", default=msgspec.UNSET
    )
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] | msgspec.UnsetType = msgspec.UNSET
    # The exclusive end; and the epoch that the topic must have.
    stop: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] | msgspec.UnsetType = msgspec.UNSET
    epoch: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] | msgspec.UnsetType = msgspec.UNSET
    # Of an Arrow stream: only these columns, comma-separated.
    columns: str | msgspec.UnsetType = msgspec.UNSET
    # Of an Arrow stream: no more of a key or value than this; the column `size` has the length of
    # the value.
    cut_bytes: Annotated[int, msgspec.Meta(ge=1, le=OFFSET_MAX)] | msgspec.UnsetType = msgspec.UNSET
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.0


class ShownReference(msgspec.Struct):
    """A large payload, to be read at `/v1/blobs/{id}`."""

    id: str
    size: int
    sha256: str
    type: str


class StoredMessage(msgspec.Struct, omit_defaults=True):
    """One message: its `value` if that is JSON, else its `text`, else its `base64`.

    `size` counts the bytes of its value. With `masked`, settings hide a part of it; with
    `cut`, only its beginning is shown.
    A large payload is a `reference` instead.
    """

    offset: int
    timestamp: str
    key: Any
    headers: dict[str, Any]
    protocol: str
    sender: str
    size: int
    masked: bool = False
    cut: bool = False
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    base64: str | msgspec.UnsetType = msgspec.UNSET
    reference: ShownReference | msgspec.UnsetType = msgspec.UNSET


class Messages(msgspec.Struct):
    """Messages in offset order; read on from `next`."""

    topic: str
    epoch: int
    messages: list[StoredMessage]
    next: int


class TopicWaiter(Subscriber):
    """Waits for a topic to grow."""

    protocol = "http"

    def __init__(self) -> None:
        self.grown = asyncio.Event()

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        self.grown.set()

    def topic_deleted(self, topic: str) -> None:
        self.grown.set()


async def fetch(call: Call, topic: str, query: FetchQuery) -> Annotated[Response, Messages]:
    """Read a topic by offset or time, as JSON or, by Accept, as an Arrow stream."""
    state = call.state
    log = state.bus.log
    shown = call.access.shown(topic)
    epoch = log.bounds(topic).epoch
    if query.epoch not in (msgspec.UNSET, epoch):
        text = f"topic {shown!r} was recreated: its epoch is {epoch}, not {query.epoch}"
        raise UsageError("topic.recreated", text)
    offset = await asyncio.to_thread(_begin, log, topic, query)
    if query.wait_s and offset >= log.bounds(topic).stop:
        await _wait(state, topic, query.wait_s)
        # It may have been deleted, or taken away from the caller, meanwhile.
        call.topic()
    mask = call.mask_of(topic)
    if ARROW in call.request.headers.get("accept", ""):
        schema = _schema(query)
        pieces = _pieces(log, topic, epoch, _ReadCursor(offset, *_limits(query)))
        # Read the first piece before the status is sent, so that a bad offset becomes an error
        # response.
        first = await asyncio.to_thread(next, pieces, None)
        shape = _RowShape(schema, shown, mask, query.cut_bytes)
        return DownloadResponse(_arrow(first, pieces, shape), media_type=ARROW)
    if query.limit is msgspec.UNSET:
        query.limit = JSON_LIMIT_DEFAULT
    cursor = _ReadCursor(offset, *_limits(query))
    found = _pieces(log, topic, epoch, cursor)
    if EVENTS in call.request.headers.get("accept", ""):
        events = await asyncio.to_thread(_events, found, shown, mask)
        return Response(events, headers={"polybus-next": str(cursor.next)}, media_type=EVENTS)
    messages = await asyncio.to_thread(_messages, found, mask)
    body = msgspec.json.encode(Messages(shown, epoch, messages, cursor.next))
    return Response(body, media_type=JSON)


@dataclass(slots=True)
class _ReadCursor:
    """Where a read continues: at `next`, up to `stop`, with `messages_max` messages at most."""

    next: int
    stop: int
    messages_max: int


def _limits(query: FetchQuery) -> tuple[int, int]:
    """The exclusive end of the answer, and how many messages it may have."""
    stop = OFFSET_MAX if query.stop is msgspec.UNSET else query.stop
    return stop, OFFSET_MAX if query.limit is msgspec.UNSET else query.limit


def _schema(query: FetchQuery) -> pa.Schema:
    if query.columns is msgspec.UNSET:
        return SCHEMA
    columns = query.columns.split(",")
    strange = [name for name in columns if name not in SCHEMA.names]
    if strange or len(set(columns)) < len(columns):
        raise PeerError("http.query", f"columns must be a subset of {', '.join(SCHEMA.names)}")
    return pa.schema([SCHEMA.field(name) for name in columns])


@dataclass(frozen=True, slots=True)
class _RowShape:
    """The shape of an Arrow stream's rows: columns, name of the topic, mask, size limit."""

    columns: pa.Schema
    topic: str
    mask: TopicMask | None
    cut_bytes: int | msgspec.UnsetType

    @property
    def schema(self) -> pa.Schema:
        if self.cut_bytes is msgspec.UNSET:
            return self.columns
        return self.columns.append(pa.field("size", pa.int64()))

    def rows(self, batch: Batch) -> pa.RecordBatch:
        rows = _named(rows_of(batch), self.topic)
        size = None
        if self.cut_bytes is not msgspec.UNSET:
            size = pc.binary_length(rows.column("value")).cast(pa.int64())
        rows = rows if self.mask is None else self.mask.rows(rows)
        rows = rows.select(self.columns.names)
        if size is None:
            return rows
        for name in {"key", "value"} & set(rows.schema.names):
            at = rows.schema.get_field_index(name)
            cut = pc.binary_slice(rows.column(at), 0, self.cut_bytes)
            rows = rows.set_column(at, rows.schema.field(at), cut)
        return rows.append_column("size", size)


def _begin(log: Log, topic: str, query: FetchQuery) -> int:
    given = [one for one in (query.offset, query.time, query.from_) if one is not msgspec.UNSET]
    if len(given) > 1:
        raise PeerError("http.query", "give only one of offset, time and from")
    if log.arrives_late:
        # Include messages for which another node has given a receipt.
        log.catch_up(topic)
    if query.offset is not msgspec.UNSET:
        return query.offset
    start = parse_start(str(given[0]) if given else "earliest")
    if query.time is not msgspec.UNSET and not isinstance(start, Since):
        raise PeerError("http.query", "time must be an ISO time")
    return resolve(log, topic, start)[1]


async def _wait(state: HttpState, topic: str, wait_s: float) -> None:
    waiter = TopicWaiter()
    state.bus.subscribe(topic, waiter)
    state.waiters.add(waiter.grown)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiter.grown.wait(), wait_s)
    finally:
        state.waiters.discard(waiter.grown)
        state.bus.unsubscribe(topic, waiter)


def _pieces(log: Log, topic: str, epoch: int, cursor: _ReadCursor) -> Iterator[list[Batch]]:
    """Batches from a cursor on, which advances with them, up to the topic's current end. May block.

    It ends early if the topic is recreated meanwhile.

    Raises:
        UsageError: `log.offset-unknown`.
    """
    stop = min(cursor.stop, log.bounds(topic).stop)
    while cursor.messages_max:
        piece = []
        for batch in log.read(topic, cursor.next, bytes_max=PIECE_BYTES):
            if batch.epoch != epoch:
                break
            # Offsets may have gaps: count from the batch's own first one.
            count = min(max(0, stop - batch.first_offset), cursor.messages_max, len(batch))
            if count:
                part = batch if count == len(batch) else batch.slice(0, count)
                piece.append(part)
                cursor.next = part.last_offset + 1
                cursor.messages_max -= count
        if not piece:
            if log.bounds(topic).epoch == epoch:
                # The rest of the range has no messages.
                cursor.next = max(cursor.next, stop)
            return
        yield piece


def _messages(pieces: Iterator[list[Batch]], mask: TopicMask | None) -> list[StoredMessage]:
    """Messages of about JSON_BYTES_MAX. May block."""
    messages: list[StoredMessage] = []
    size = 0
    for piece in pieces:
        for batch in piece:
            messages += stored_messages(batch, mask)
            size += batch.value_bytes
        if size > JSON_BYTES_MAX:
            break
    return messages


def _events(pieces: Iterator[list[Batch]], shown: str, mask: TopicMask | None) -> bytes:
    """Messages as a batch of CloudEvents. May block."""
    events: list[dict[str, Any]] = []
    size = 0
    for piece in pieces:
        for batch in piece:
            seen = batch if mask is None else mask.batch(batch)
            events += [event_of(seen, index, shown) for index in range(len(seen))]
            size += batch.value_bytes
        if size > JSON_BYTES_MAX:
            break
    return msgspec.json.encode(events)


def stored_messages(batch: Batch, mask: TopicMask | None = None) -> Iterator[StoredMessage]:
    """The messages of a batch, without what the mask hides."""
    rows = batch.stored
    if rows is None:
        # Not through Arrow: messages that were published one by one are one batch each.
        time = _EPOCH + timedelta(microseconds=batch.timestamp_us)
        times = [time.isoformat(timespec="microseconds")] * len(batch)
        protocols = [batch.protocol] * len(batch)
        senders = [batch.sender] * len(batch)
    else:
        times = rows.column("timestamp").cast(pa.timestamp("us")).cast(pa.string()).to_pylist()
        protocols = rows.column("protocol").to_pylist()
        senders = rows.column("sender").to_pylist()
    nothing = [None] * len(batch)
    columns = (times, protocols, senders, batch.keys or nothing, batch.headers or nothing)
    for offset, (value, time_text, protocol, sender, key, headers) in enumerate(
        zip(batch.values(), *columns, strict=True), batch.first_offset
    ):
        size = len(value)
        reference = references.parse(value) if references.marked(headers) else None
        if reference is not None:
            size = reference.size
        if mask is not None:
            value, key = mask.value(value, headers) or b"", mask.key(key)
            headers = mask.headers(headers)
        if reference is not None:
            reference = reference if references.marked(headers) else None
            headers = references.without_mark(headers)
        named = {name: _text(one) for name, one in (headers or {}).items()}
        timestamp = f"{time_text.replace(' ', 'T')}Z"
        message = StoredMessage(
            offset, timestamp, _text(key), named, protocol, sender or "", size, mask is not None
        )
        text = _text(value)
        if reference is not None:
            message.reference = ShownReference(*reference_fields(reference))
        elif not isinstance(text, str):
            message.base64 = text["base64"]
        elif (compact := compact_json(value)) is None:
            message.text = text
        else:
            message.value = msgspec.Raw(compact)
        yield message


def reference_fields(reference: Reference) -> tuple[str, int, str, str]:
    return reference.id, reference.size, reference.sha256, reference.type


def _text(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


async def _arrow(
    first: list[Batch] | None,
    pieces: Iterator[list[Batch]],
    shape: _RowShape,
) -> AsyncIterator[bytes]:
    """An Arrow IPC stream, a piece at a time: it is never completely in memory."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, shape.schema) as writer:

        def write(piece: list[Batch]) -> bytes:
            for batch in piece:
                writer.write_batch(shape.rows(batch))
            return _take(sink)

        piece = first
        while piece is not None:
            yield await asyncio.to_thread(write, piece)
            piece = await asyncio.to_thread(next, pieces, None)
    yield _take(sink)


def _named(rows: pa.RecordBatch, shown: str) -> pa.RecordBatch:
    at = rows.schema.get_field_index("topic")
    if not rows.num_rows or rows.column(at)[0].as_py() == shown:
        return rows
    return rows.set_column(at, rows.schema.field(at), pa.array([shown] * rows.num_rows))


def _take(sink: io.BytesIO) -> bytes:
    """The bytes written since the last call."""
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
