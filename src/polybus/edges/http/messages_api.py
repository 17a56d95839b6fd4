"""GET /v1/topics/{topic}/messages: read a topic, as JSON or, by `Accept`, as an Arrow stream."""

import asyncio
import contextlib
import io
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
from starlette.responses import Response, StreamingResponse

from polybus.batch import Batch
from polybus.bus.subscriptions import Publisher, Subscriber
from polybus.edges.http.calls import JSON, Call
from polybus.edges.http.state import HttpState
from polybus.errors import PeerError, UsageError
from polybus.log.columns import SCHEMA
from polybus.log.interface import Log
from polybus.log.journal.message import rows_of
from polybus.services.replay import resolve
from polybus.wire.msgstream import compact_json
from polybus.wire.positions import Since, parse_start

ARROW = "application/vnd.apache.arrow.stream"
LIMIT_MAX = 100_000
JSON_LIMIT_DEFAULT = 1000
WAIT_S_MAX = 60.0
PIECE_BYTES = 1 << 20
JSON_BYTES_MAX = 4 << 20
_OFFSET_MAX = (1 << 63) - 1
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - written with a Z


class FetchQuery(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """The first message (one of the first three fields; the earliest if none), and how many."""

    # Unset and not None: a query cannot express null.
    offset: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)] | msgspec.UnsetType = msgspec.UNSET
    time: str | msgspec.UnsetType = msgspec.UNSET
    from_: Literal["earliest", "latest"] | msgspec.UnsetType = msgspec.field(
        name="from", default=msgspec.UNSET
    )
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] | msgspec.UnsetType = msgspec.UNSET
    # The exclusive end; and the epoch that the topic must have.
    stop: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)] | msgspec.UnsetType = msgspec.UNSET
    epoch: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)] | msgspec.UnsetType = msgspec.UNSET
    # Of an Arrow stream: only these columns, comma-separated.
    columns: str | msgspec.UnsetType = msgspec.UNSET
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.0


class StoredMessage(msgspec.Struct, omit_defaults=True):
    """One message: its `value` if that is JSON, else its `text`, else its `base64`."""

    offset: int
    timestamp: str
    key: Any
    headers: dict[str, Any]
    protocol: str
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    base64: str | msgspec.UnsetType = msgspec.UNSET


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
    if ARROW in call.request.headers.get("accept", ""):
        schema = _schema(query)
        pieces = _pieces(log, topic, epoch, offset, _stop(query, offset))
        # Read the first piece before the status is sent: a bad offset is still a problem then.
        first = await asyncio.to_thread(next, pieces, None)
        return StreamingResponse(_arrow(first, pieces, schema, shown), media_type=ARROW)
    if query.limit is msgspec.UNSET:
        query.limit = JSON_LIMIT_DEFAULT
    stop = _stop(query, offset)
    body = await asyncio.to_thread(_json, log, (topic, shown), epoch, (offset, stop))
    return Response(body, media_type=JSON)


def _stop(query: FetchQuery, offset: int) -> int:
    """The exclusive end of the answer."""
    stop = _OFFSET_MAX if query.stop is msgspec.UNSET else query.stop
    return stop if query.limit is msgspec.UNSET else min(stop, offset + query.limit)


def _schema(query: FetchQuery) -> pa.Schema:
    if query.columns is msgspec.UNSET:
        return SCHEMA
    columns = query.columns.split(",")
    strange = [name for name in columns if name not in SCHEMA.names]
    if strange or len(set(columns)) < len(columns):
        raise PeerError("http.query", f"columns are some of {', '.join(SCHEMA.names)}, each once")
    return pa.schema([SCHEMA.field(name) for name in columns])


def _begin(log: Log, topic: str, query: FetchQuery) -> int:
    given = [one for one in (query.offset, query.time, query.from_) if one is not msgspec.UNSET]
    if len(given) > 1:
        raise PeerError("http.query", "give one of offset, time and from")
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


def _pieces(log: Log, topic: str, epoch: int, offset: int, stop: int) -> Iterator[list[Batch]]:
    """Batches from the offset up to `stop` or the topic's current end. May block.

    It ends early if the topic is recreated meanwhile.

    Raises:
        UsageError: `log.offset-unknown`.
    """
    stop = min(stop, log.bounds(topic).stop)
    while True:
        batches = log.read(topic, offset, bytes_max=PIECE_BYTES)
        piece = []
        for batch in batches:
            if batch.epoch != epoch:
                break
            part = batch if batch.last_offset < stop else batch.slice(0, max(0, stop - offset))
            if len(part):
                piece.append(part)
                offset = part.last_offset + 1
        if not piece:
            return
        yield piece


def _json(log: Log, named: tuple[str, str], epoch: int, where: tuple[int, int]) -> bytes:
    """The answer as JSON, up to an offset or about JSON_BYTES_MAX. May block.

    `named`: the topic's full name, and the name that the caller has for it.
    """
    (topic, shown), (offset, stop) = named, where
    messages: list[StoredMessage] = []
    following = offset
    size = 0
    for piece in _pieces(log, topic, epoch, offset, stop):
        for batch in piece:
            messages += stored_messages(batch)
            following = batch.last_offset + 1
            size += batch.value_bytes
        if size > JSON_BYTES_MAX:
            break
    return msgspec.json.encode(Messages(shown, epoch, messages, following))


def stored_messages(batch: Batch) -> Iterator[StoredMessage]:
    rows = batch.stored
    if rows is None:
        # Not through Arrow: messages that were published one by one are a batch each.
        time = _EPOCH + timedelta(microseconds=batch.timestamp_us)
        times = [time.isoformat(timespec="microseconds")] * len(batch)
        protocols = [batch.protocol] * len(batch)
    else:
        times = rows.column("timestamp").cast(pa.timestamp("us")).cast(pa.string()).to_pylist()
        protocols = rows.column("protocol").to_pylist()
    nothing = [None] * len(batch)
    columns = (times, protocols, batch.keys or nothing, batch.headers or nothing)
    for offset, (value, time_text, protocol, key, headers) in enumerate(
        zip(batch.values(), *columns, strict=True), batch.first_offset
    ):
        named = {name: _text(one) for name, one in (headers or {}).items()}
        timestamp = f"{time_text.replace(' ', 'T')}Z"
        message = StoredMessage(offset, timestamp, _text(key), named, protocol)
        text = _text(value)
        if not isinstance(text, str):
            message.base64 = text["base64"]
        elif (compact := compact_json(value)) is None:
            message.text = text
        else:
            message.value = msgspec.Raw(compact)
        yield message


def _text(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


async def _arrow(
    first: list[Batch] | None, pieces: Iterator[list[Batch]], schema: pa.Schema, shown: str
) -> AsyncIterator[bytes]:
    """An Arrow IPC stream, a piece at a time: nothing is built whole in memory.

    `shown` is the topic in its rows.
    """
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        piece = first
        while piece is not None:
            for batch in piece:
                writer.write_batch(_named(rows_of(batch), shown).select(schema.names))
            yield _take(sink)
            piece = await asyncio.to_thread(next, pieces, None)
    yield _take(sink)


def _named(rows: pa.RecordBatch, shown: str) -> pa.RecordBatch:
    at = rows.schema.get_field_index("topic")
    if not rows.num_rows or rows.column(at)[0].as_py() == shown:
        return rows
    return rows.set_column(at, rows.schema.field(at), pa.array([shown] * rows.num_rows))


def _take(sink: io.BytesIO) -> bytes:
    """What was written since the last call."""
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
