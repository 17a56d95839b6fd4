"""What the tests of Boson properties share: messages by hand, right or wrong, and plain events."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from polybus.batch import Batch
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.wire import boson_properties as wire
from polybus.wire.codec import Bad, Publish

LIMITS = Limits(
    message_bytes_max=1000, properties_max=20, parts_max=5, parts_bytes_max=2000, topic_bytes_max=20
)
ONE = struct.pack(">f", 1.0)


def message(*properties: tuple[bytes, bytes], count: int | None = None) -> bytes:
    """Any properties in any order, right or wrong."""
    parts = [struct.pack(">i", len(properties) if count is None else count)]
    for key, value in properties:
        parts.append(struct.pack(">H", len(key)) + key + struct.pack(">i", len(value)) + value)
    return b"".join(parts)


def versioned(*properties: tuple[bytes, bytes]) -> bytes:
    return message((b"hbfv", ONE), *properties)


def publish(topic: bytes = b"a", content: bytes = b"x", *more: tuple[bytes, bytes]) -> bytes:
    return versioned(*more, (b"topic", topic), (b"content", content))


def codec(limits: Limits = LIMITS, default_topic: str | None = None) -> wire.BosonPropertiesCodec:
    return wire.BosonPropertiesCodec(limits, default_topic)


Plain = tuple[object, ...]


def plain(events: Iterable[wire.Event]) -> list[Plain]:
    """Events as values to compare, one entry per message."""
    found: list[Plain] = []
    for event in events:
        if isinstance(event, Publish):
            found += [entry for batch in event.batches for entry in plain_batch(batch)]
        elif isinstance(event, Bad):
            found.append((event.error.code, event.error.final))
        else:
            found.append((event,))
    return found


def plain_batch(batch: Batch) -> list[Plain]:
    receipts = batch.receipt_ids or [0, 0] * len(batch)
    return [
        (
            batch.topic,
            value,
            bytes(batch.buffer[receipts[2 * index] : receipts[2 * index + 1]]),
            dict((batch.headers[index] if batch.headers else None) or {}),
        )
        for index, value in enumerate(batch.values())
    ]


def error_of(events: list[wire.Event]) -> PeerError:
    bad = events[-1]
    assert isinstance(bad, Bad)
    return bad.error


def part(flag: bytes, content: bytes, *more: tuple[bytes, bytes]) -> bytes:
    return versioned((b"hbff", flag), *more, (b"content", content))
