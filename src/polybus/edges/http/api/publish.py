"""POST /v1/topics/{topic}/messages: a body is one message, or one JSON line per message."""

import asyncio
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import msgspec

from polybus import names
from polybus.batch import Batch, Headers
from polybus.bus.bus import unknown_topic
from polybus.bus.subscriptions import Publisher
from polybus.edges.http.api.cloud_events import EVENT, EVENTS, headers_of, parse_events
from polybus.edges.http.calls import Call
from polybus.edges.http.state import HttpState
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.references import OCTETS, Reference, reserved_in
from polybus.services.accounts.access import AccountAccess
from polybus.services.blobs.blobs import StoredPayload
from polybus.services.blobs.uploads import IncomingBlob
from polybus.services.transactions.commits import TOPIC as RECORDS_TOPIC
from polybus.wire.msgstream import deeper_than, portable_json

NDJSON = "application/x-ndjson"
WRITE_BYTES = 256 << 10


class Base64(msgspec.Struct, forbid_unknown_fields=True):
    """Bytes that are not text."""

    base64: str


class NewMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One line: either `value`, any JSON, or `text`, or `base64`, bytes."""

    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    base64: str | msgspec.UnsetType = msgspec.UNSET
    key: str | Base64 | None = None
    headers: dict[str, str | Base64] | None = None


class PublishQuery(msgspec.Struct, forbid_unknown_fields=True):
    receipt: Literal["fsync", "memory"] = "fsync"


class Published(msgspec.Struct):
    """The offsets of the messages, in order; durable if a receipt was asked for."""

    topic: str
    epoch: int
    offsets: list[int]


class StoredBlob(Published):
    """The message that refers to the payload, and the reference in it."""

    reference: Reference


class RequestPublisher(Publisher):
    """Publishes one request's batch: there is nothing to hold back, and it waits by itself."""

    def __init__(self, state: HttpState, sender: str, access: AccountAccess) -> None:
        self._context = state.context
        self._access = access
        self._is_admin = access is state.accounts.admin
        self._sender = sender
        self._refusal: PolybusError | None = None
        self._given: asyncio.Future[None] = state.loop.create_future()

    @property
    def access(self) -> AccountAccess:
        return self._access

    def offer(self, batch: Batch, *, wait: bool) -> None:
        """Publish the batch; with `wait`, `given` waits for its receipt. Raises PolybusError."""
        batch.protocol = "http"
        batch.sender = self._sender
        if wait:
            batch.receipt_ids = array("i", [0, 0] * len(batch))
        bus = self._context.bus
        if names.is_reserved(batch.topic) and self._is_admin:
            bus.commit([batch], self.receipt)
        else:
            bus.publish([batch], self)
        if self._refusal is not None:
            raise self._refusal.copy()

    async def given(self) -> None:
        """Wait until the batch is durable. Raises PolybusError: it may not be, or is refused."""
        await self._context.durability.wait_for(self._given)
        if self._refusal is not None:
            raise self._refusal.copy()

    def receipt(self, batches: Sequence[Batch]) -> None:
        if not self._given.done():
            self._given.set_result(None)

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        if error.code == "topic.unknown":
            # By the account's own name for it.
            error = unknown_topic(self._access.shown(batch.topic))
        self._refusal = error
        if not self._given.done():
            self._given.set_result(None)


async def publish(call: Call, topic: str, query: PublishQuery) -> Published:
    """Publish one message, or one per line."""
    limits = call.state.config.limits
    if call.content_type == NDJSON:
        bytes_max = min(limits.message_bytes_max, limits.parts_bytes_max)
        body = await call.body(bytes_max, "message-bytes-max, parts-bytes-max")
        batch = parse_lines(topic, body, limits.json_depth_max, limits.parts_max)
        return await _publish_batch(call, batch, query)
    if call.content_type in (EVENT, EVENTS):
        bytes_max = min(limits.message_bytes_max, limits.parts_bytes_max)
        body = await call.body(bytes_max, "message-bytes-max, parts-bytes-max")
        if deeper_than(body, limits.json_depth_max):
            text = f"nested over {limits.json_depth_max} deep (json-depth-max)"
            raise PeerError("http.body-invalid", text)
        batch = parse_events(topic, body, call.content_type)
        return await _publish_batch(call, batch, query)
    carried = headers_of(call.request.headers)
    received = await _one_message(call, topic)
    if isinstance(received, IncomingBlob):
        return await publish_upload(call, received, query, (topic, carried))
    batch = Batch.of(topic, [received], headers=[carried] if carried else None)
    return await _publish_batch(call, batch, query)


async def _publish_batch(call: Call, batch: Batch, query: PublishQuery) -> Published:
    check_writable(batch.topic)
    blobs = call.state.blobs
    kept: list[StoredPayload] = []
    if blobs.is_large(batch):
        batch, kept = await blobs.spill(batch, call.access)
    publisher = RequestPublisher(call.state, call.client, call.access)
    # A cluster knows no offset before the message is durable.
    is_waiting = query.receipt == "fsync" or call.state.bus.is_late
    try:
        publisher.offer(batch, wait=is_waiting)
    finally:
        for one in kept:
            blobs.published(one, [batch], call.access)
    if is_waiting:
        await publisher.given()
    offsets = list(range(batch.first_offset, batch.last_offset + 1))
    return Published(call.access.shown(batch.topic), batch.epoch, offsets)


def check_writable(topic: str) -> None:
    """Raises UsageError `topic.reserved`."""
    if topic == RECORDS_TOPIC:
        # Not even by the administrator: its records decide which transactions are done.
        raise UsageError("topic.reserved", f"only the bus writes to '{topic}'")


# Large bodies


async def _one_message(call: Call, topic: str) -> bytes | IncomingBlob:
    """The body, which is written to a disk as soon as it is too large for a row."""
    limits = call.state.config.limits
    upload: IncomingBlob | None = None
    held: list[bytes] = []
    size = 0
    try:
        async for piece in gathered(call):
            size += len(piece)
            held.append(piece)
            if upload is None and size > limits.inline_bytes_max:
                upload = begin_upload(call, topic)
            if upload is not None:
                await upload.write(b"".join(held))
                held = []
    except BaseException:
        if upload is not None:
            upload.discard()
        raise
    return b"".join(held) if upload is None else upload


def begin_upload(call: Call, topic: str, sha256: str = "") -> IncomingBlob:
    """Expect a large body: it is not kept in memory. Raises UsageError."""
    check_writable(topic)
    upload = call.state.blobs.upload(call.access, topic, sha256)
    call.request.state.body.is_streamed = True
    return upload


async def publish_upload(
    call: Call, upload: IncomingBlob, query: PublishQuery, about: tuple[str, dict[str, bytes]]
) -> StoredBlob:
    """Publish the message of a payload that has arrived; `about`: its topic and headers."""
    topic, headers = about
    blobs = call.state.blobs
    kept = await blobs.keep(upload, [topic], call.request.headers.get("content-type", OCTETS))
    batch = kept.batch(topic, headers)
    publisher = RequestPublisher(call.state, call.client, call.access)
    # A cluster knows no offset before the message is durable.
    is_waiting = query.receipt == "fsync" or call.state.bus.is_late
    try:
        publisher.offer(batch, wait=is_waiting)
    finally:
        blobs.published(kept, [batch], call.access)
    if is_waiting:
        await publisher.given()
    shown = call.access.shown(topic)
    return StoredBlob(shown, batch.epoch, [batch.first_offset], kept.reference)


async def gathered(call: Call, before_bytes: int = 0) -> AsyncIterator[bytes]:
    """The body in pieces large enough for a write; an earlier part of the payload may precede it.

    Raises PeerError `http.body-too-large`.
    """
    pieces: list[bytes] = []
    waiting, total = 0, before_bytes
    bytes_max = call.state.config.limits.message_bytes_max
    async for some in call.request.stream():
        pieces.append(some)
        waiting += len(some)
        total += len(some)
        if max(total, before_bytes + call.content_length) > bytes_max:
            text = f"the body is over {bytes_max} bytes (message-bytes-max)"
            raise PeerError("http.body-too-large", text)
        if waiting >= WRITE_BYTES:
            yield b"".join(pieces)
            pieces, waiting = [], 0
    if waiting:
        yield b"".join(pieces)


# Lines


def parse_lines(topic: str, body: bytes, depth_max: int, lines_max: int) -> Batch:
    """Messages, one per line; empty lines are ignored.

    Raises:
        PeerError: `http.body-invalid`, naming the line; `http.too-many-lines`.
    """
    if body.count(b"\n") > lines_max:
        raise PeerError("http.too-many-lines", f"over {lines_max} lines (parts-max)")
    values: list[bytes] = []
    keys: list[bytes | None] = []
    headers: list[Headers | None] = []
    for number, line in enumerate(body.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            if deeper_than(line, depth_max):
                raise ValueError(f"nested over {depth_max} deep")
            line.decode()
            message = _decoder.decode(line)
            values.append(_value(message))
            keys.append(None if message.key is None else _bytes(message.key))
            named = (message.headers or {}).items()
            headers.append({name: _bytes(value) for name, value in named} or None)
            if (reserved := reserved_in(message.headers or ())) is not None:
                raise PeerError("headers.reserved", f"line {number}: {reserved[:40]!r} is reserved")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerError("http.body-invalid", f"line {number}: {str(error)[:150]}") from error
    if not values:
        raise PeerError("http.body-invalid", "the body has no message")
    return Batch.of(topic, values, keys=keys, headers=headers)


_decoder = msgspec.json.Decoder(NewMessage)


def _value(message: NewMessage) -> bytes:
    given = [
        one for one in (message.value, message.text, message.base64) if one is not msgspec.UNSET
    ]
    if len(given) != 1:
        raise ValueError("a message must have exactly one of value, text and base64")
    if isinstance(message.base64, str):
        return b64decode(message.base64, validate=True)
    if isinstance(message.text, str):
        return message.text.encode()
    assert isinstance(message.value, msgspec.Raw)
    value = bytes(message.value)
    portable_json(value)
    return value


def _bytes(value: str | Base64) -> bytes:
    return value.encode() if isinstance(value, str) else b64decode(value.base64, validate=True)
