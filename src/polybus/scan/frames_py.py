"""Boson frames: the pure-Python twin of `_frames.pyx`.

A frame is int32 content length, int8 flag, uint16 topic length, topic, content (big-endian).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping

from polybus.scan.batch import Batch, Buffer

HEADER = struct.Struct(">ibH")
HEADER_BYTES = 7
RECEIPT_MARK = b"?receipt="
RECEIPT_ID_BYTES_MAX = 255
RECEIPT_TOPIC = b"$receipt"


def scan_frames(  # noqa: PLR0913 - the scan's, and what a batch needs
    buffer: Buffer,
    start: int,
    stop: int,
    message_bytes_max: int,
    topic_bytes_max: int,
    names: Mapping[bytes, str],
    protocol: str,
) -> tuple[int, list[Batch], list[tuple[Batch, bytes]]]:
    """Scan `buffer[start:stop]` for plain frames: (where it stopped, batches by topic, unnamed).

    A plain frame is complete, has flag 0, lengths within the limits and a topic that is not empty
    and does not begin with `$`, with or without a receipt request. The scan stops at the first
    other frame, which the codec handles. The order within a topic is kept. `names` has the names of
    known topics; a batch of another topic has an empty name and is in `unnamed`, with its topic.
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
    batches: list[Batch] = []
    unnamed: list[tuple[Batch, bytes]] = []
    for topic, (spans, receipts) in groups.items():
        batch = Batch(names.get(topic, ""), buffer, spans)
        batch.receipt_ids = receipts if topic in asked else None
        batch.protocol = protocol
        batches.append(batch)
        if topic not in names:
            unnamed.append((batch, topic))
    return start, batches, unnamed


def _asks_for_receipt(mark: memoryview) -> bool:
    id_bytes = len(mark) - len(RECEIPT_MARK)
    return 0 < id_bytes <= RECEIPT_ID_BYTES_MAX and mark[: len(RECEIPT_MARK)] == RECEIPT_MARK


def encode_frames(batches: Iterable[Batch]) -> bytes:
    """Each message of the batches as a frame with flag 0 and the topic of its batch."""
    parts: list[Buffer] = []
    for batch in batches:
        topic = batch.topic.encode()
        for content in batch.values():
            parts += (HEADER.pack(len(content), 0, len(topic)), topic, content)
    return b"".join(parts)


def encode_receipts(batches: Iterable[Batch]) -> bytes:
    """A `$receipt` frame with `ID EPOCH:OFFSET` for each receipt id of the batches."""
    parts = []
    for batch in batches:
        ids = batch.receipt_ids or ()
        for index in range(0, len(ids), 2):
            if ids[index] == ids[index + 1]:
                continue
            receipt_id = bytes(batch.buffer[ids[index] : ids[index + 1]])
            content = receipt_id + b" %d:%d" % (batch.epoch, batch.first_offset + index // 2)
            parts.append(HEADER.pack(len(content), 0, len(RECEIPT_TOPIC)) + RECEIPT_TOPIC + content)
    return b"".join(parts)
