"""Encodes the lines of both sides of goMS: one compact object each, keys in the protocol's order.

`data` is always last. A value that is not UTF-8 is sent as base64, with `encoding`.
"""

from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from polybus import scan
from polybus.batch import Batch, Headers
from polybus.wire.positions import Position

_json: Callable[[Any], bytes] = msgspec.json.encode


def encode(batch: Batch) -> bytes:
    """The batch as `message` lines."""
    head = _head("message", [batch.topic])
    if batch.headers is None:
        return scan.encode_lines(head, batch.buffer, batch.spans)
    return b"".join(
        _with_data(head + _headers(headers), value)
        for value, headers in zip(batch.values(), batch.headers, strict=True)
    )


def encode_with_offsets(batch: Batch) -> bytes:
    """The batch as `message` lines with their offsets.

    Raises:
        ValueError: the batch is not in the log.
    """
    head = _head("message", [batch.topic])
    if batch.headers is None:
        spans, epoch = batch.spans, batch.epoch
        return scan.encode_lines(head, batch.buffer, spans, epoch, batch.first_offset)
    if batch.first_offset < 0:
        raise ValueError("an offset cannot be negative")
    lines = []
    for index, (value, headers) in enumerate(zip(batch.values(), batch.headers, strict=True)):
        offset = _offsets([Position(batch.epoch, batch.first_offset + index)])
        lines.append(_with_data(head + offset + _headers(headers), value))
    return b"".join(lines)


def encode_message(
    topics: Sequence[str],
    value: bytes,
    headers: Headers | None = None,
    offsets: Iterable[Position] | None = None,
) -> bytes:
    """One `message` that was sent to several topics of its receiver."""
    return _with_data(_head("message", topics) + _offsets(offsets) + _headers(headers), value)


def encode_error(code: str, text: str) -> bytes:
    """An `error`. The code may be a PeerError's, with `goms.` in front.

    The code has two keys: that of the specification and that of its reference program.
    """
    digits = code.removeprefix("goms.")
    error = {"messagetype": "error", "error-code": digits, "errorcode": digits, "error": text}
    return _json(error) + b"\n"


def encode_reg_ack(topics: Sequence[str], offsets: Iterable[Position] | None = None) -> bytes:
    """The topics that are now registered, and where each starts if that was requested."""
    return _head("reg-ack", topics) + _offsets(offsets) + b"}\n"


def encode_send_ack(topics: Sequence[str], offsets: Iterable[Position]) -> bytes:
    """A send is durable: its topics, and the offset in each, in the same order."""
    return _head("send-ack", topics) + _offsets(offsets) + b"}\n"


def encode_register(
    topics: Sequence[str], *, start: str | None = None, ack: bool = False, offsets: bool = False
) -> bytes:
    parts = [_head("register", topics)]
    if start is not None:
        parts.append(b',"from":' + _json(start))
    if ack:
        parts.append(b',"ack":true')
    if offsets:
        parts.append(b',"offsets":true')
    return b"".join(parts) + b"}\n"


def encode_send(
    topics: Sequence[str], value: bytes, headers: Headers | None = None, *, ack: bool = False
) -> bytes:
    head = _head("send", topics) + (b',"ack":true' if ack else b"")
    return _with_data(head + _headers(headers), value)


def encode_sends(batch: Batch) -> bytes:
    """The batch as plain `send` lines, without headers and acks."""
    return scan.encode_lines(_head("send", [batch.topic]), batch.buffer, batch.spans)


def encode_logout(topics: Sequence[str] | None = None) -> bytes:
    """Leave these topics; None means all."""
    if topics is None:
        return b'{"messagetype":"logout"}\n'
    return _head("logout", topics) + b"}\n"


def encode_close() -> bytes:
    return b'{"messagetype":"close"}\n'


def _head(messagetype: str, topics: Sequence[str]) -> bytes:
    return b'{"messagetype":"%b","topics":%b' % (messagetype.encode(), _json(list(topics)))


def _offsets(offsets: Iterable[Position] | None) -> bytes:
    if offsets is None:
        return b""
    return b',"offsets":' + _json([str(offset) for offset in offsets])


def _headers(headers: Headers | None) -> bytes:
    if not headers:
        return b""
    return b',"headers":' + _json({name: _header(value) for name, value in headers.items()})


def _header(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


def _with_data(head: bytes, value: bytes) -> bytes:
    return scan.encode_lines(head, value, array("i", [0, len(value)]))
