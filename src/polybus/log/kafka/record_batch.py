"""Kafka's RecordBatch v2: the envelope of the records that `polybus.scan` encodes and decodes.

A batch is checksummed with CRC32C, and compressed with LZ4 if that saves enough. The producer's id
and the batch's sequence number let the broker drop a batch that is sent again after a lost answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiokafka import codec
from aiokafka.record.util import calc_crc32c

from polybus import scan
from polybus.batch import Batch, Buffer
from polybus.errors import StorageError
from polybus.log.kafka import lz4_frame
from polybus.scan.records_py import varint

HEADER = struct.Struct(">qiibIhiqqqhii")
CHECKED_FROM = 21
"""The offset of the first byte that the checksum covers: the attributes."""
# The batch's length field counts the bytes after itself.
LENGTH_END = 12
MAGIC = 2
NO_LEADER_EPOCH = -1
LZ4 = 3
CODEC_MASK = 0b111
LOG_APPEND_TIME = 0b1000
TRANSACTIONAL = 0b10000
CONTROL = 0b100000
DECOMPRESS = {
    1: codec.gzip_decode,
    2: codec.snappy_decode,
    LZ4: lz4_frame.decompress,
    4: codec.zstd_decode,
}
COMPRESSED_BYTES_MIN = 512
"""Fewer bytes are not compressed."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """Who sends a batch, and its first sequence number in the partition."""

    producer_id: int
    producer_epoch: int
    sequence: int


NOBODY = ProducerState(-1, -1, -1)


def encode_batch(
    batches: Sequence[Batch], producer: ProducerState = NOBODY, *, is_transactional: bool = False
) -> bytes:
    """All messages of batches of one topic as one RecordBatch."""
    times = [batch.timestamp_us // 1000 for batch in batches]
    base_ms, max_ms = min(times), max(times)
    count = sum(map(len, batches))
    records = scan.encode_records(batches, base_ms)
    pieces: list[Buffer] = [records]
    attributes = TRANSACTIONAL if is_transactional else 0
    if len(records) >= COMPRESSED_BYTES_MIN:
        pieces = lz4_frame.compress(records)
        attributes |= LZ4
    return _framed(pieces, (attributes, count - 1, base_ms, max_ms), producer)


def encode_tombstones(keys: Sequence[bytes], time_ms: int) -> bytes:
    """A RecordBatch of tombstones: compaction removes the records of these keys."""
    records = bytearray()
    for number, key in enumerate(keys):
        # Attributes, time, offset, key, no value, no headers.
        body = b"\0\0" + varint(number) + varint(len(key)) + key + varint(-1) + b"\0"
        records += varint(len(body)) + body
    return _framed([records], (0, len(keys) - 1, time_ms, time_ms), NOBODY)


def _framed(
    records: Sequence[Buffer], about: tuple[int, int, int, int], producer: ProducerState
) -> bytes:
    """Records with their header; `about` has attributes, last delta, first and last time."""
    size = HEADER.size + sum(map(len, records))
    sent_by = (producer.producer_id, producer.producer_epoch, producer.sequence)
    begin = (0, size - LENGTH_END, NO_LEADER_EPOCH, MAGIC, 0)
    head = HEADER.pack(*begin, *about, *sent_by, about[1] + 1)
    checked = b"".join([head[CHECKED_FROM:], *records])
    checksum = struct.pack(">I", calc_crc32c(checked))
    return b"".join([head[: CHECKED_FROM - len(checksum)], checksum, checked])


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """A RecordBatch as it is stored; `fields` is its header, which may be damaged."""

    data: memoryview
    fields: tuple[int, ...]

    @property
    def first_offset(self) -> int:
        return self.fields[0]

    @property
    def next_offset(self) -> int:
        """The offset after the last one, which compaction may have removed."""
        return self.fields[0] + self.fields[6] + 1

    @property
    def count(self) -> int:
        """The number of its messages; a transaction marker counts as one."""
        return self.fields[12]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A RecordBatch from a fetch. `batches` is empty if it has no messages (a marker)."""

    batches: list[Batch]
    next_offset: int
    producer_id: int
    is_transactional: bool
    is_marker: bool


def frames(data: bytes) -> Iterator[RecordFrame]:
    """The whole RecordBatches in the bytes of a fetch; the last one may be cut off.

    If no RecordBatch can begin at a position, the rest of the bytes is returned as one, which
    `decode_frame` refuses.
    """
    at, whole = 0, memoryview(data)
    while len(data) - at >= HEADER.size:
        fields = HEADER.unpack_from(data, at)
        end = at + LENGTH_END + fields[1]
        is_header = fields[3] == MAGIC and end >= at + HEADER.size
        if is_header and end > len(data):
            return
        if end < at + HEADER.size or end > len(data):
            end = len(data)
        yield RecordFrame(whole[at:end], fields)
        at = end


def decode_batches(topic: str, data: bytes) -> Iterator[Fetched]:
    """The messages of all whole RecordBatches. Raises as `decode_frame` does."""
    for frame in frames(data):
        yield decode_frame(topic, frame)


def decode_frame(topic: str, frame: RecordFrame) -> Fetched:
    """The messages of a RecordBatch.

    Raises:
        StorageError: `log.damaged`, a checksum or the records are wrong.
    """
    base_offset, _, _, magic, checksum, attributes = frame.fields[:6]
    max_ms, producer_id = frame.fields[8:10]
    if magic != MAGIC:
        text = f"topic {topic!r}, offset {base_offset}: Kafka message format {magic} is not 2"
        raise StorageError("log.damaged", text)
    if calc_crc32c(frame.data[CHECKED_FROM:]) != checksum:
        raise _damaged(topic, base_offset, "its checksum is wrong")
    is_marker = bool(attributes & CONTROL)
    found: list[Batch] = []
    if frame.count and not is_marker:
        found = _messages(topic, frame.data[HEADER.size :], frame.fields)
    if attributes & LOG_APPEND_TIME:
        for batch in found:
            batch.timestamp_us = max_ms * 1000
    is_transactional = bool(attributes & TRANSACTIONAL)
    return Fetched(found, frame.next_offset, producer_id, is_transactional, is_marker)


def _messages(topic: str, records: Buffer, fields: tuple[int, ...]) -> list[Batch]:
    base_offset, attributes, base_ms, count = fields[0], fields[5], fields[7], fields[12]
    try:
        if attributes & CODEC_MASK:
            records = DECOMPRESS[attributes & CODEC_MASK](records)
        else:
            # Without the envelope, which the messages would keep in memory.
            records = bytes(records)
        return scan.decode_records(topic, records, count, base_offset, base_ms)
    except Exception as error:
        # Each compression library raises its own errors.
        raise _damaged(topic, base_offset, str(error) or type(error).__name__) from error


def _damaged(topic: str, offset: int, reason: str) -> StorageError:
    return StorageError(
        "log.damaged", f"topic {topic!r}: the Kafka batch at offset {offset} is damaged: {reason}"
    )
