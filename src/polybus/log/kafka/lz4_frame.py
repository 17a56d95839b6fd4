"""LZ4 frames, faster than a general compressor: few blocks, and the size is known in advance.

The frames are those of the LZ4 specification, with independent blocks, no checksum of the content
(a RecordBatch has one) and the content's size in the header. Every Kafka program reads them. The
general decompressor handles frames of other programs, which may lack the size or use other kinds of
blocks.
"""

from __future__ import annotations

import struct

import cramjam
import xxhash
from aiokafka import codec

from polybus.batch import Buffer

MAGIC = 0x184D2204
VERSION = 0x40
INDEPENDENT, BLOCK_SUMS, SIZED, CONTENT_SUM, DICTIONARY = 0x20, 0x10, 0x08, 0x04, 0x01
FLAGS = VERSION | INDEPENDENT | SIZED
BLOCK_KINDS = {0x40: 64 << 10, 0x50: 256 << 10, 0x60: 1 << 20, 0x70: 4 << 20}
"""The block sizes that a frame can announce: other programs allocate that much."""
LARGEST = 0x70
BLOCK_BYTES = BLOCK_KINDS[LARGEST]
PLAIN = 0x80000000
"""Marks the size of a block that is not compressed."""
HEADER = struct.Struct("<IBBQ")
BEGIN = HEADER.size + 1
"""The offset after the header and its checksum."""
SIZE = struct.Struct("<I")
END = SIZE.pack(0)
RATIO_MAX = 255
"""The maximum compression ratio of an LZ4 block."""
MALFORMED = "the LZ4 frame is malformed"


def compress(data: Buffer) -> list[Buffer]:
    """A frame with the data, in pieces."""
    view = memoryview(data)
    fitting = (one for one, size in BLOCK_KINDS.items() if len(view) <= size)
    head = HEADER.pack(MAGIC, FLAGS, next(fitting, LARGEST), len(view))
    pieces: list[Buffer] = [head, bytes([_sum_of(head)])]
    for at in range(0, len(view), BLOCK_BYTES):
        plain = view[at : at + BLOCK_BYTES]
        block = memoryview(cramjam.lz4.compress_block(plain, store_size=False))
        if len(block) < len(plain):
            pieces += [SIZE.pack(len(block)), block]
        else:
            pieces += [SIZE.pack(len(plain) | PLAIN), plain]
    pieces.append(END)
    return pieces


def _sum_of(head: Buffer) -> int:
    return xxhash.xxh32_intdigest(bytes(head[SIZE.size :])) >> 8 & 0xFF


def decompress(data: Buffer) -> Buffer:
    """The content of a frame. Raises ValueError, or an error of the decompressor's."""
    view = memoryview(data)
    magic, flags, kind, size = HEADER.unpack_from(view) if len(view) >= BEGIN else (0, 0, 0, 0)
    if (magic, flags) != (MAGIC, FLAGS) or kind not in BLOCK_KINDS:
        found: bytes = codec.lz4_decode(data)
        return found
    if view[HEADER.size] != _sum_of(view[: HEADER.size]) or size > RATIO_MAX * len(view):
        raise ValueError(MALFORMED)
    out = bytearray(size)
    target, at, done = memoryview(out), BEGIN, 0
    while at + SIZE.size <= len(view):
        (length,) = SIZE.unpack_from(view, at)
        at += SIZE.size
        if length == 0:
            break
        block = view[at : at + (length & ~PLAIN)]
        at += len(block)
        if length & PLAIN:
            target[done : done + len(block)] = block
            done += len(block)
        else:
            room = min(BLOCK_KINDS[kind], size - done)
            done += cramjam.lz4.decompress_block_into(block, target[done:], output_len=room)
    if done != size:
        raise ValueError(MALFORMED)
    return out
