"""POST /v1/topics/{topic}/messages: the body is one message, or one JSON line per message."""

from array import array
from base64 import b64decode
from collections.abc import Hashable
from typing import Literal

import msgspec
from starlette.responses import Response

from polybus import names
from polybus.batch import Batch, Headers
from polybus.edges.http.calls import Call, answer
from polybus.edges.http.state import HttpState
from polybus.edges.http.topics_api import topic_of
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.services.durability import FutureReceipt
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


class RequestPublisher(FutureReceipt):
    """Publishes one request's batch. Implements bus.Publisher."""

    def __init__(self, state: HttpState, sender: str, *, is_admin: bool = False) -> None:
        super().__init__()
        self._context = state.context
        self._is_admin = is_admin
        self._sender = sender
        self._refusal: PolybusError | None = None

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
            bus.commit([batch], self)
        else:
            bus.publish([batch], self)
        if self._refusal is not None:
            raise self._refusal
        if wait:
            await self._context.durability.wait_for(self.given)

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        self._refusal = error

    def hold(self, gate: Hashable) -> bool:
        """One request is one batch: there is nothing to hold back."""
        return False

    def release(self, gate: Hashable) -> None: ...


async def publish(call: Call) -> Response:
    """Publish one message, or one per line."""
    topic = topic_of(call)
    query = call.query(PublishQuery)
    limits = call.state.config.limits
    body = await call.body(limits.message_bytes_max, "message-bytes-max")
    if call.content_type == NDJSON:
        batch = parse_lines(topic, body, limits.json_depth_max, limits.parts_max)
    else:
        batch = Batch.of(topic, [body])
    if topic == RECORDS_TOPIC:
        # Not even by the administrator: its records decide which transactions are done.
        raise UsageError("topic.reserved", f"'{topic}' is written by the bus alone")
    client = call.request.client
    sender = f"{client.host}:{client.port}" if client else ""
    publisher = RequestPublisher(call.state, sender, is_admin=call.is_admin)
    await publisher.publish(batch, wait=query.receipt == "fsync")
    offsets = list(range(batch.first_offset, batch.last_offset + 1))
    return answer(Published(topic, batch.epoch, offsets))


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
                raise PeerError("http.body-invalid", f"nested over {depth_max} deep")
            line.decode()
            message = _decoder.decode(line)
            values.append(_value(message))
            keys.append(None if message.key is None else _bytes(message.key))
            headers.append(
                {name: _bytes(value) for name, value in message.headers.items()}
                if message.headers
                else None
            )
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerError("http.body-invalid", f"line {number}: {str(error)[:150]}") from error
        except PeerError as error:
            raise PeerError("http.body-invalid", f"line {number}: {error.text}") from error
    if not values:
        raise PeerError("http.body-invalid", "the body has no message")
    return Batch.of(topic, values, keys=keys, headers=headers)


_decoder = msgspec.json.Decoder(NewMessage)


def _value(message: NewMessage) -> bytes:
    if (message.value is msgspec.UNSET) == (message.base64 is msgspec.UNSET):
        raise PeerError("http.body-invalid", "a message has either value or base64")
    if isinstance(message.base64, str):
        return b64decode(message.base64, validate=True)
    assert isinstance(message.value, msgspec.Raw)
    return bytes(message.value)


def _bytes(value: str | Base64) -> bytes:
    return value.encode() if isinstance(value, str) else b64decode(value.base64, validate=True)
