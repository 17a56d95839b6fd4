"""Encodes the messages of both sides: the version, then flags, then user properties."""

from collections.abc import Iterator, Mapping, Sequence

from polybus import scan
from polybus.batch import Batch, Headers
from polybus.errors import UsageError
from polybus.wire.boson_properties.codec import (
    ERROR,
    OFFSET,
    PART,
    POSITION,
    RECEIPT,
    SUBSCRIBE,
    UNSUBSCRIBE,
)
from polybus.wire.boson_properties.framing import INT32, KEY_BYTES_MAX, UINT16
from polybus.wire.boson_properties.versions import CONTENT, FLAG_PREFIX, TOPIC, VERSION
from polybus.wire.positions import subscribe_lines

_RESERVED = (TOPIC.decode(), CONTENT.decode())
_FLAG_PREFIX = FLAG_PREFIX.decode()


def _key(key: bytes) -> bytes:
    return UINT16.pack(len(key)) + key


def _property(key: bytes, value: bytes) -> bytes:
    return _key(key) + INT32.pack(len(value)) + value


# 1.0 as IEEE-754, big-endian.
_VERSION = _property(VERSION, bytes.fromhex("3f800000"))
_CONTENT_KEY = _key(CONTENT)
# Version, offset, topic and content.
_DELIVERED_COUNT = 4


def encode(batch: Batch) -> bytes:
    """The batch's messages, each with its position, for subscribers.

    Headers named `topic`, `content` or like a flag are left out, because a subscriber must be able
    to trust those properties.
    """
    head = _VERSION + _key(OFFSET)
    middle = _property(TOPIC, batch.topic.encode()) + _CONTENT_KEY
    if batch.headers is None:
        head = INT32.pack(_DELIVERED_COUNT) + head
        return scan.encode_properties(
            head, middle, batch.buffer, batch.spans, batch.epoch, batch.first_offset
        )
    parts: list[bytes] = []
    length = INT32.pack
    offset = batch.first_offset
    for value, headers in zip(batch.values(), batch.headers, strict=True):
        at = _position(batch.epoch, offset)
        extra = _header_properties(headers) if headers else []
        parts += (length(_DELIVERED_COUNT + len(extra)), head, length(len(at)), at, middle)
        parts += (length(len(value)), value, *extra)
        offset += 1
    return b"".join(parts)


def _header_properties(headers: Headers) -> list[bytes]:
    return [
        _property(name.encode("utf-8", "replace"), bytes(value))
        for name, value in headers.items()
        if _carries(name)
    ]


def _carries(name: str) -> bool:
    if name in _RESERVED or name.startswith(_FLAG_PREFIX):
        return False
    return len(name) <= KEY_BYTES_MAX // 4 or len(name.encode("utf-8", "replace")) <= KEY_BYTES_MAX


def _message(properties: Sequence[bytes]) -> bytes:
    return INT32.pack(1 + len(properties)) + _VERSION + b"".join(properties)


def _position(epoch: int, offset: int) -> bytes:
    return b"%d:%d" % (epoch, offset)


def encode_receipt(topic: str, receipt_id: bytes, epoch: int, offset: int) -> bytes:
    return _message(
        [
            _property(RECEIPT, receipt_id),
            _property(OFFSET, _position(epoch, offset)),
            _property(TOPIC, topic.encode()),
        ]
    )


def encode_receipts(batch: Batch) -> bytes:
    """The receipts that a durable batch requested."""
    return b"".join(
        encode_receipt(batch.topic, receipt_id, batch.epoch, batch.first_offset + index)
        for index, receipt_id in _receipt_ids(batch)
    )


def encode_refusals(batch: Batch, code: str, text: str) -> bytes:
    """One error for each receipt that a refused batch requested; empty if it requested none."""
    return b"".join(encode_error(code, text, receipt_id) for _, receipt_id in _receipt_ids(batch))


def _receipt_ids(batch: Batch) -> Iterator[tuple[int, bytes]]:
    """The index and receipt id of each message that requested a receipt."""
    ids = batch.receipt_ids
    if ids is None:
        return
    for index in range(len(batch)):
        start, end = ids[2 * index], ids[2 * index + 1]
        if start != end:
            yield index, bytes(batch.buffer[start:end])


def encode_error(code: str, text: str, receipt_id: bytes = b"") -> bytes:
    """An error, with the receipt id of its message, if that requested one."""
    properties = [_property(ERROR, f"{code} {text}".encode())]
    if receipt_id:
        properties.append(_property(RECEIPT, receipt_id))
    return _message(properties)


def encode_position(topic: str, epoch: int, offset: int) -> bytes:
    """The position of a subscription's next message, for clients that requested it."""
    position = _property(POSITION, _position(epoch, offset))
    return _message([position, _property(TOPIC, topic.encode())])


def encode_publish(
    topic: str,
    content: bytes,
    headers: Headers | None = None,
    receipt_id: bytes = b"",
    flag: int = 0,
) -> bytes:
    """A message as a publisher sends it.

    Raises:
        UsageError: `headers.invalid`, a header has a name that the protocol reserves.
    """
    for name in headers or ():
        if not _carries(name):
            text = f"a header cannot be named {name[:40]!r} on Boson properties"
            raise UsageError("headers.invalid", text)
    properties = [_property(PART, bytes([flag]))] if flag else []
    if receipt_id:
        properties.append(_property(RECEIPT, receipt_id))
    properties.append(_property(TOPIC, topic.encode()))
    properties.append(_property(CONTENT, content))
    properties += _header_properties(headers or {})
    return _message(properties)


def encode_subscribe(starts: Mapping[str, str], *, tell: bool = False) -> bytes:
    """Subscribe to each topic from its start; `tell` requests the position of each."""
    return _message([_property(SUBSCRIBE, subscribe_lines(starts, tell=tell))])


def encode_unsubscribe(topics: Sequence[str] = ()) -> bytes:
    """End the subscriptions to these topics; without topics, to all."""
    return _message([_property(UNSUBSCRIBE, "\n".join(topics).encode())])
