"""The binary protocols: the pure-Python twin of `_binary.pyx`. Numbers are big-endian and signed.

A Boson frame is int32 content length, int8 flag, uint16 topic length, topic, content. Boson
properties and queues have messages that are a head, an int32 length and a value. The head of a
queue's messages is empty. Most properties of a publisher differ in their last value only: once the
codec has decoded one message, it knows the head they share and scans for more of them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping

from polybus.scan.batch import Batch, Buffer

HEADER = struct.Struct(">ibH")
HEADER_BYTES = 7
LENGTH = struct.Struct(">i")
LENGTH_BYTES = 4
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


def scan_values(
    buffer: Buffer, start: int, stop: int, head: bytes, value_bytes_max: int
) -> tuple[int, array[int]]:
    """Scan `buffer[start:stop]` for messages that are `head` and one more value.

    Returns where the first other message begins (another head, an invalid length, incomplete), and
    the spans of the values before it. The caller handles that message.
    """
    spans = array("i")
    view = memoryview(buffer)
    value = start + len(head) + LENGTH_BYTES
    while value <= stop and view[start : start + len(head)] == head:
        length: int = LENGTH.unpack_from(view, value - LENGTH_BYTES)[0]
        if not 0 <= length <= min(value_bytes_max, stop - value):
            break
        start = value + length
        spans.extend((value, start))
        value = start + len(head) + LENGTH_BYTES
    return start, spans


def encode_properties(
    head: bytes, middle: bytes, buffer: Buffer, spans: array[int], epoch: int, first_offset: int
) -> bytes:
    """Each span of `buffer` as a message: `head`, its position as a value, `middle`, its value."""
    if epoch < 0 or first_offset < 0:
        raise ValueError("a message needs a position")
    view = memoryview(buffer)
    parts: list[Buffer] = []
    for index in range(0, len(spans), 2):
        position = b"%d:%d" % (epoch, first_offset + index // 2)
        value = view[spans[index] : spans[index + 1]]
        parts += (head, LENGTH.pack(len(position)), position)
        parts += (middle, LENGTH.pack(len(value)), value)
    return b"".join(parts)


def split_queue(
    buffer: Buffer, start: int, stop: int, message_bytes_max: int
) -> tuple[int, list[bytes]]:
    """Like `scan_values` without a head, with each message as bytes."""
    end, spans = scan_values(buffer, start, stop, b"", message_bytes_max)
    return end, list(Batch("", buffer, spans).values())


def encode_queue(buffer: Buffer, spans: array[int]) -> bytes:
    """Each span of `buffer` as a message of a queue."""
    parts: list[Buffer] = []
    for message in Batch("", buffer, spans).values():
        parts += (LENGTH.pack(len(message)), message)
    return b"".join(parts)


def join_queue(
    messages: list[bytes], first: int, run_bytes_max: int, message_bytes_max: int
) -> tuple[int, bytes]:
    """Encode a run of `messages` from `first` on; return where it ended, and its bytes.

    The run ends before a message over `message_bytes_max`, or one that would exceed
    `run_bytes_max`; it is empty if that is the first one.
    """
    parts: list[bytes] = []
    run_bytes = 0
    while first < len(messages):
        message = messages[first]
        run_bytes += LENGTH_BYTES + len(message)
        if len(message) > message_bytes_max or run_bytes > run_bytes_max:
            break
        parts += (LENGTH.pack(len(message)), message)
        first += 1
    return first, b"".join(parts)
