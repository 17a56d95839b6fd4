"""/v1/topics/{topic}/messages/{offset}: one message, and its bytes in each protocol."""

import asyncio
from typing import Annotated

import msgspec
from starlette.responses import Response

from polybus.batch import Batch
from polybus.edges.http.api.cloud_events import EVENT, binary_headers, event_of
from polybus.edges.http.api.messages import StoredMessage, stored_messages
from polybus.edges.http.api.wire_forms import WireForm, wire_forms
from polybus.edges.http.calls import JSON, OCTETS, Call
from polybus.errors import UsageError
from polybus.log.interface import Log

WIRE_BYTES_MAX = 256 << 10
"""A larger value is not shown as bytes of every protocol."""


class OneQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The epoch that the topic must have."""

    epoch: int | msgspec.UnsetType = msgspec.UNSET


class OneMessage(msgspec.Struct):
    topic: str
    epoch: int
    message: StoredMessage


class WireForms(msgspec.Struct):
    """A message as each protocol delivers it."""

    topic: str
    offset: int
    forms: list[WireForm]


async def show(call: Call, topic: str, query: OneQuery) -> Annotated[Response, OneMessage]:
    """One message; by Accept as a CloudEvent, or its bare value."""
    batch = await _find(call, topic, query)
    mask, shown = call.mask_of(topic), call.access.shown(topic)
    accepted = call.request.headers.get("accept", "")
    seen = batch if mask is None else mask.batch(batch)
    if EVENT in accepted:
        return Response(msgspec.json.encode(event_of(seen, 0, shown)), media_type=EVENT)
    if OCTETS in accepted:
        # Never with the sender's content type: a browser would run it. Only ce-… has that.
        return Response(seen.value(0), headers=binary_headers(seen, shown), media_type=OCTETS)
    (message,) = stored_messages(batch, mask)
    found = OneMessage(shown, batch.epoch, message)
    return Response(msgspec.json.encode(found), media_type=JSON)


async def wire(call: Call, topic: str, query: OneQuery) -> WireForms:
    """One message as the bytes of each protocol, with the meaning of every byte."""
    batch = await _find(call, topic, query)
    mask = call.mask_of(topic)
    if mask is not None:
        batch = mask.batch(batch)
    if batch.value_bytes > WIRE_BYTES_MAX:
        text = f"the message has over {WIRE_BYTES_MAX} bytes: read its value instead"
        raise UsageError("message.too-large", text)
    shown = call.access.shown(topic)
    return WireForms(shown, batch.first_offset, wire_forms(batch, shown))


async def _find(call: Call, topic: str, query: OneQuery) -> Batch:
    """Raises UsageError `message.unknown`, `topic.recreated`."""
    log, text = call.state.bus.log, call.path["offset"]
    epoch = log.bounds(topic).epoch
    if query.epoch not in (msgspec.UNSET, epoch):
        detail = f"the topic was recreated: its epoch is {epoch}, not {query.epoch}"
        raise UsageError("topic.recreated", detail)
    is_offset = text.isascii() and text.isdecimal() and len(text) <= 18
    batch = await asyncio.to_thread(_read, log, topic, int(text)) if is_offset else None
    if batch is None:
        raise UsageError("message.unknown", f"the topic does not hold offset {text[:20]!r}")
    return batch


def _read(log: Log, topic: str, offset: int) -> Batch | None:
    """The batch of one message; None if there is none. May block."""
    try:
        batches = log.read(topic, offset, bytes_max=1)
    except UsageError as error:
        if error.code != "log.offset-unknown":
            raise
        return None
    # Where offsets have a gap, a read begins after it.
    return batches[0].slice(0, 1) if batches and batches[0].first_offset == offset else None
