"""POST /v1/topics/{topic}/messages: a body is one message, or one JSON line per message."""

import asyncio
from array import array
from base64 import b64decode
from collections.abc import Sequence
from typing import Literal

import msgspec

from polybus import names
from polybus.batch import Batch, Headers
from polybus.bus.bus import unknown_topic
from polybus.bus.subscriptions import Publisher
from polybus.edges.http.calls import Call
from polybus.edges.http.state import HttpState
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.services.accounts.access import AccountAccess
from polybus.services.transactions.commits import TOPIC as RECORDS_TOPIC
from polybus.wire.msgstream import deeper_than

NDJSON = "application/x-ndjson"


class Base64(msgspec.Struct, forbid_unknown_fields=True):
    """Bytes that are not text."""

    base64: str


class NewMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One line: either `value`, any JSON, or `base64`, bytes."""

    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
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

    async def publish(self, batch: Batch, *, wait: bool) -> None:
        """Publish the batch; with `wait`, return when it is durable.

        Raises:
            PolybusError: it was refused, or may not be durable.
        """
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
            raise self._refusal.again()
        if wait:
            await self._context.durability.wait_for(self._given)

    def receipt(self, batches: Sequence[Batch]) -> None:
        if not self._given.done():
            self._given.set_result(None)

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        if error.code == "topic.unknown":
            # By the account's own name for it.
            error = unknown_topic(self._access.shown(batch.topic))
        self._refusal = error


async def publish(call: Call, topic: str, query: PublishQuery) -> Published:
    """Publish one message, or one per line."""
    limits = call.state.config.limits
    body = await call.body(limits.message_bytes_max, "message-bytes-max")
    if call.content_type == NDJSON:
        batch = parse_lines(topic, body, limits.json_depth_max, limits.parts_max)
    else:
        batch = Batch.of(topic, [body])
    if topic == RECORDS_TOPIC:
        # Not even by the administrator: its records decide which transactions are done.
        raise UsageError("topic.reserved", f"'{topic}' is written by the bus alone")
    await RequestPublisher(call.state, call.client, call.access).publish(
        batch, wait=query.receipt == "fsync"
    )
    offsets = list(range(batch.first_offset, batch.last_offset + 1))
    return Published(call.access.shown(topic), batch.epoch, offsets)


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
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerError("http.body-invalid", f"line {number}: {str(error)[:150]}") from error
    if not values:
        raise PeerError("http.body-invalid", "the body has no message")
    return Batch.of(topic, values, keys=keys, headers=headers)


_decoder = msgspec.json.Decoder(NewMessage)


def _value(message: NewMessage) -> bytes:
    if (message.value is msgspec.UNSET) == (message.base64 is msgspec.UNSET):
        raise ValueError("a message has either value or base64")
    if isinstance(message.base64, str):
        return b64decode(message.base64, validate=True)
    assert isinstance(message.value, msgspec.Raw)
    return bytes(message.value)


def _bytes(value: str | Base64) -> bytes:
    return value.encode() if isinstance(value, str) else b64decode(value.base64, validate=True)
