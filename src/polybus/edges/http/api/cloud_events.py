"""CloudEvents 1.0 over HTTP, in and out, structured and binary; and the headers of a trace.

An event is a message: its data is the value, its attributes are headers `ce-id`, `ce-source` and so
on, as in the binary mode, and `content-type`. An event that arrives over HTTP is an event on every
protocol that has headers. A message that is not an event gets attributes when it is requested as
one: its position as `id`, its topic as `source`, and TYPE.

`traceparent` and `tracestate` of a request become headers of its messages, so that a trace
continues through the bus.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from polybus.batch import Batch, Headers
from polybus.errors import PeerError
from polybus.services.events import iso_time
from polybus.wire.msgstream import portable_json

EVENT = "application/cloudevents+json"
EVENTS = "application/cloudevents-batch+json"
PREFIX = "ce-"
TYPE = "polybus.message"
VERSION = "1.0"
TRACE = ("traceparent", "tracestate")
REQUIRED = ("id", "source", "type")
EVENTS_MAX = 10_000
HEADERS_BYTES_MAX = 64 << 10
_OWN = ("data", "data_base64", "datacontenttype")
_KEY = "partitionkey"


def parse_events(topic: str, body: bytes, content_type: str) -> Batch:
    """A body in structured mode, one event or a list of them. Raises PeerError."""
    try:
        body.decode()
        found = msgspec.json.decode(body)
        portable_json(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError("http.body-invalid", str(error)[:200]) from error
    events = found if content_type == EVENTS else [found]
    if not isinstance(events, list) or not 0 < len(events) <= EVENTS_MAX:
        raise PeerError("http.body-invalid", f"the body must have 1 to {EVENTS_MAX} events")
    values, keys, headers = [], [], []
    for event in events:
        value, key, attributes = _parsed(event)
        values.append(value)
        keys.append(key)
        headers.append(attributes)
    return Batch.of(topic, values, keys=keys, headers=headers)


def _parsed(event: Any) -> tuple[bytes, bytes | None, Headers]:
    if not isinstance(event, dict) or str(event.get("specversion")) != VERSION:
        raise PeerError("http.body-invalid", f"an event must be an object of specversion {VERSION}")
    missing = [name for name in REQUIRED if not isinstance(event.get(name), str)]
    if missing:
        raise PeerError("http.body-invalid", f"an event lacks {missing[0]}, which must be a text")
    headers: dict[str, bytes] = {}
    for name, one in event.items():
        if name in _OWN:
            continue
        if not isinstance(one, str | int | bool):
            raise PeerError("http.body-invalid", f"the attribute {name[:40]} must be a text")
        text = one if isinstance(one, str) else msgspec.json.encode(one).decode()
        headers[name if name in TRACE else f"{PREFIX}{name}"] = text.encode()
    kind = event.get("datacontenttype", "application/json" if "data" in event else "")
    if kind:
        headers["content-type"] = str(kind).encode()
    key = headers.get(f"{PREFIX}{_KEY}")
    return _data(event, str(kind)), key, headers


def _data(event: dict[str, Any], kind: str) -> bytes:
    if "data_base64" in event:
        try:
            return b64decode(event["data_base64"], validate=True)
        except (ValueError, TypeError) as error:
            raise PeerError("http.body-invalid", "data_base64 is not base64") from error
    if "data" not in event:
        return b""
    data = event["data"]
    if isinstance(data, str) and not _is_json(kind):
        return data.encode()
    return msgspec.json.encode(data)


def _is_json(kind: str) -> bool:
    bare = kind.partition(";")[0].strip().lower()
    return bare == "application/json" or bare.endswith("+json")


def headers_of(request: Mapping[str, str]) -> dict[str, bytes]:
    """The request headers that belong to its messages: an event's in binary mode, a trace's."""
    found = {name: request[name].encode() for name in TRACE if name in request}
    if f"{PREFIX}specversion" in request:
        for name, value in request.items():
            if name.startswith(PREFIX):
                found[name] = unquote(value).encode()
        if "content-type" in request:
            found["content-type"] = request["content-type"].encode()
    if sum(len(name) + len(value) for name, value in found.items()) > HEADERS_BYTES_MAX:
        raise PeerError(
            "http.head-too-large", f"the event has over {HEADERS_BYTES_MAX} bytes of headers"
        )
    return found


def attributes_of(batch: Batch, index: int, shown: str) -> dict[str, str]:
    """The attributes of a message as an event: its own, or generated ones."""
    headers = (batch.headers[index] if batch.headers is not None else None) or {}
    found = {
        name[len(PREFIX) :]: value.decode(errors="replace")
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    if "id" not in found:
        time_us = batch.timestamp_us
        if batch.stored is not None:
            time_us = batch.stored.column("timestamp")[index].value
        found = {
            "specversion": VERSION,
            "id": f"{batch.epoch}:{batch.first_offset + index}",
            "source": f"/v1/topics/{quote(shown, safe='')}",
            "type": TYPE,
            "time": iso_time(time_us),
        }
    for name in TRACE:
        if name in headers:
            found[name] = headers[name].decode(errors="replace")
    return found


def event_of(batch: Batch, index: int, shown: str) -> dict[str, Any]:
    """A message as an event in structured mode."""
    event: dict[str, Any] = dict(attributes_of(batch, index, shown))
    headers = (batch.headers[index] if batch.headers is not None else None) or {}
    kind = headers.get("content-type", b"").decode(errors="replace")
    value = batch.value(index)
    if kind:
        event["datacontenttype"] = kind
    try:
        event["data"] = value.decode()
    except UnicodeDecodeError:
        event["data_base64"] = b64encode(value).decode()
        return event
    if not kind or _is_json(kind):
        try:
            event["data"] = msgspec.json.decode(value)
            event["datacontenttype"] = kind or "application/json"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event["datacontenttype"] = "text/plain"
    return event


def binary_headers(batch: Batch, shown: str) -> dict[str, str]:
    """The response headers of one message as an event in binary mode."""
    attributes = attributes_of(batch, 0, shown)
    return {
        name if name in TRACE else f"{PREFIX}{name}": quote(value, safe=" !#$&'()*+,/:;=?@[]-._~")
        for name, value in attributes.items()
    }
