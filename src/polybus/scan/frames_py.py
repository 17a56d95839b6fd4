"""Boson frames: the pure-Python twin of `_frames.pyx`.

A frame is int32 content length, int8 flag, uint16 topic length, topic, content (big-endian).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from polybus.scan.batch_py import Batch, Buffer

HEADER = struct.Struct(">ibH")
HEADER_BYTES = 7
RECEIPT_MARK = b"?receipt="
RECEIPT_ID_BYTES_MAX = 255
RECEIPT_TOPIC = b"$receipt"


class Group(NamedTuple):
    """The messages of one topic that a scan found.

    `receipts` is None if no message requested one, else spans like `spans`, empty for messages that
    requested none.
    """

    topic: bytes
    spans: array[int]
    receipts: array[int] | None


def scan_frames(
    buffer: Buffer, start: int, stop: int, message_bytes_max: int, topic_bytes_max: int
) -> tuple[int, list[Group]]:
    """Scan `buffer[start:stop]` for plain frames; return where it stopped, and groups by topic.

    A plain frame is complete, has flag 0, lengths within the limits and a topic that is not empty
    and does not begin with `$`, with or without a receipt request. The scan stops at the first
    other frame, which the codec handles. The order within a topic is kept.
    """
    view = memoryview(buffer)
    groups: dict[bytes, tuple[array[int], array[int]]] = {}
    asked = set()
    while stop - start >= HEADER_BYTES:
        length, flag, topic_length = HEADER.unpack_from(view, start)
        content = start + HEADER_BYTES + topic_length
        end = content + length
        if flag or not 0 <= length <= message_bytes_max or not topic_length or end > stop:
            break
        topic = bytes(view[start + HEADER_BYTES : content])
        topic, mark, _ = topic.partition(b"?")
        if not topic or topic.startswith(b"$") or len(topic) > topic_bytes_max:
            break
        receipt = content
        if mark:
            receipt = start + HEADER_BYTES + len(topic) + len(RECEIPT_MARK)
            if not _asks_for_receipt(view[receipt - len(RECEIPT_MARK) : content]):
                break
            asked.add(topic)
        spans, receipts = groups.setdefault(topic, (array("i"), array("i")))
        spans.extend((content, end))
        receipts.extend((receipt, content))
        start = end
    found = [
        Group(topic, spans, receipts if topic in asked else None)
        for topic, (spans, receipts) in groups.items()
    ]
    return start, found


def scan_batches(  # noqa: PLR0913 - the scan's, and what a batch needs
    buffer: Buffer,
    start: int,
    stop: int,
    message_bytes_max: int,
    topic_bytes_max: int,
    names: Mapping[bytes, str],
    protocol: str,
) -> tuple[int, list[Batch] | None]:
    """`scan_frames` with a batch for each topic; None if a topic is not in `names`."""
    stop, groups = scan_frames(buffer, start, stop, message_bytes_max, topic_bytes_max)
    batches = []
    for group in groups:
        name = names.get(group.topic)
        if name is None:
            return stop, None
        batch = Batch(name, buffer, group.spans)
        batch.receipt_ids = group.receipts
        batch.protocol = protocol
        batches.append(batch)
    return stop, batches


def _asks_for_receipt(mark: memoryview) -> bool:
    id_bytes = len(mark) - len(RECEIPT_MARK)
    return 0 < id_bytes <= RECEIPT_ID_BYTES_MAX and mark[: len(RECEIPT_MARK)] == RECEIPT_MARK


def encode_frames(topic: bytes, buffer: Buffer, spans: array[int]) -> bytes:
    """Each span of `buffer` as a frame with flag 0."""
    view = memoryview(buffer)
    parts: list[Buffer] = []
    for index in range(0, len(spans), 2):
        content = view[spans[index] : spans[index + 1]]
        parts += (HEADER.pack(len(content), 0, len(topic)), topic, content)
    return b"".join(parts)


def encode_frames_of(batches: Iterable[Batch]) -> bytes:
    """Each message of the batches as a frame with flag 0 and the topic of its batch."""
    return b"".join(
        encode_frames(batch.topic.encode(), batch.buffer, batch.spans) for batch in batches
    )


def encode_receipts(buffer: Buffer, ids: array[int], epoch: int, first_offset: int) -> bytes:
    """A `$receipt` frame with `ID EPOCH:OFFSET` for each id that is not empty."""
    view = memoryview(buffer)
    parts = []
    for index in range(0, len(ids), 2):
        if ids[index] == ids[index + 1]:
            continue
        receipt_id = bytes(view[ids[index] : ids[index + 1]])
        content = receipt_id + b" %d:%d" % (epoch, first_offset + index // 2)
        parts.append(HEADER.pack(len(content), 0, len(RECEIPT_TOPIC)) + RECEIPT_TOPIC + content)
    return b"".join(parts)


def encode_receipts_of(batches: Iterable[Batch]) -> bytes:
    """`encode_receipts` for every batch that requested any, concatenated."""
    return b"".join(
        encode_receipts(batch.buffer, batch.receipt_ids, batch.epoch, batch.first_offset)
        for batch in batches
        if batch.receipt_ids is not None
    )
