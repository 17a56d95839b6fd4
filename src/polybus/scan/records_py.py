"""Converts messages to records of Kafka's RecordBatch v2 and back: contract and pure form.

A message is one record. Its key and value are the record's; its headers follow two reserved ones,
`protocol` and `sender`, which always come first and in this order. A record without them came from
another Kafka producer: its protocol is `kafka` and all its headers are the message's own.

Times are milliseconds. The caller handles the envelope (header, checksum, compression).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

from polybus.scan.batch import Batch, Buffer, Headers

FOREIGN_PROTOCOL = "kafka"
PROTOCOL_HEADER = b"protocol"
SENDER_HEADER = b"sender"
MALFORMED = "the records of a Kafka batch are malformed"


def encode_records(batches: Sequence[Batch], base_ms: int) -> bytearray:
    """The messages of batches as records, one after the other; times count from `base_ms`."""
    out = bytearray()
    delta = 0
    for batch in batches:
        reserved = _header(PROTOCOL_HEADER, batch.protocol.encode())
        reserved += _header(SENDER_HEADER, batch.sender.encode())
        time = varint(batch.timestamp_us // 1000 - base_ms)
        for index, value in enumerate(batch.values()):
            key = None if batch.keys is None else batch.keys[index]
            headers = (None if batch.headers is None else batch.headers[index]) or {}
            body = b"\0" + time + varint(delta) + _sized(key) + _sized(value)
            body += varint(2 + len(headers)) + reserved
            body += b"".join(_header(name.encode(), one) for name, one in headers.items())
            out += varint(len(body)) + body
            delta += 1
    return out


def decode_records(
    topic: str, data: Buffer, count: int, first_offset: int, base_ms: int
) -> list[Batch]:
    """Records as batches over `data`: one for each run of equal protocol, sender and time.

    A gap in the offsets begins a new batch, too. Raises ValueError if the records are malformed.
    """
    runs: list[_RecordRun] = []
    reader = _RecordReader(memoryview(data))
    for _ in range(count):
        end = reader.varint() + reader.at
        if end > len(reader.data):
            raise ValueError(MALFORMED)
        reader.skip(1)
        time_us = (base_ms + reader.varint()) * 1000
        offset = first_offset + reader.varint()
        key, value = reader.sized(), reader.sized()
        found = [(reader.sized() or (0, 0), reader.sized()) for _ in range(reader.count())]
        if reader.at != end:
            raise ValueError(MALFORMED)
        headers = [(reader.bytes_of(name), reader.bytes_of(one)) for name, one in found]
        protocol, sender = FOREIGN_PROTOCOL, ""
        if [name for name, _ in headers[:2]] == [PROTOCOL_HEADER, SENDER_HEADER]:
            protocol, sender = (one.decode(errors="replace") for _, one in headers[:2])
            del headers[:2]
        run = runs[-1] if runs else None
        same = (protocol, sender, time_us, offset)
        if run is None or run.next != same:
            run = _RecordRun(*same)
            runs.append(run)
        own = {name.decode(errors="replace"): one for name, one in headers}
        run.add(value or (reader.at, reader.at), key and reader.bytes_of(key), own or None)
    return [run.batch(topic, data) for run in runs]


class _RecordRun:
    """Messages that become one batch."""

    def __init__(self, protocol: str, sender: str, time_us: int, offset: int) -> None:
        self.next = (protocol, sender, time_us, offset)
        self.first = self.next
        self.spans: list[tuple[int, int]] = []
        self.keys: list[bytes | None] = []
        self.headers: list[Headers | None] = []

    def add(self, span: tuple[int, int], key: bytes | None, headers: Headers | None) -> None:
        *same, offset = self.next
        self.next = (*same, offset + 1)  # type: ignore[assignment]
        self.spans.append(span)
        self.keys.append(key)
        self.headers.append(headers)

    def batch(self, topic: str, data: Buffer) -> Batch:
        batch = Batch(topic, data, array("i", chain.from_iterable(self.spans)))
        batch.protocol, batch.sender, batch.timestamp_us, batch.first_offset = self.first
        if any(key is not None for key in self.keys):
            batch.keys = self.keys
        if any(self.headers):
            batch.headers = self.headers
        return batch


class _RecordReader:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError(MALFORMED)

    def varint(self) -> int:
        number = shift = 0
        while True:
            if self.at >= len(self.data) or shift > 63:
                raise ValueError(MALFORMED)
            byte = self.data[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)
            shift += 7

    def count(self) -> int:
        count = self.varint()
        if not 0 <= count <= len(self.data):
            raise ValueError(MALFORMED)
        return count

    def sized(self) -> tuple[int, int] | None:
        """The position of the next bytes; None if they are null."""
        size = self.varint()
        if size == -1:
            return None
        if size < 0:
            raise ValueError(MALFORMED)
        start = self.at
        self.skip(size)
        return start, self.at

    def bytes_of(self, place: tuple[int, int] | None) -> bytes:
        return b"" if place is None else bytes(self.data[place[0] : place[1]])


def varint(number: int) -> bytes:
    """A number in Kafka's zigzag form, in as few bytes as possible."""
    rest = (number << 1) ^ (number >> 63)
    out = bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _sized(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def _header(name: bytes, value: bytes) -> bytes:
    return _sized(name) + _sized(value)
