"""LZ4 frames: ours are read by every decompressor, and theirs by ours."""

from __future__ import annotations

import random

import cramjam
import pytest
from aiokafka import codec
from hypothesis import given
from hypothesis import strategies as st

from polybus.log.kafka import lz4_frame
from polybus.log.kafka.lz4_frame import BLOCK_BYTES, compress, decompress

CONTENTS = {
    "nothing": b"",
    "text": b"the same words, " * 5_000,
    "random": random.Random(1).randbytes(70_000),
    "blocks": b"x" * BLOCK_BYTES + random.Random(2).randbytes(BLOCK_BYTES) + b"y",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_frame_comes_back_from_any_decompressor(content: bytes) -> None:
    frame = b"".join(compress(content))
    assert len(frame) < len(content) + 64
    assert decompress(memoryview(frame)) == content
    assert codec.lz4_decode(frame) == content
    assert bytes(cramjam.lz4.decompress(frame)) == content


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_frames_of_other_programs_are_read(content: bytes) -> None:
    assert decompress(codec.lz4_encode(content)) == content
    assert decompress(bytes(cramjam.lz4.compress(content))) == content


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (0, 0x40),
        (64 << 10, 0x40),
        ((64 << 10) + 1, 0x50),
        ((256 << 10) + 1, 0x60),
        ((1 << 20) + 1, 0x70),
        ((4 << 20) + 1, 0x70),
    ],
)
def test_a_frame_announces_the_smallest_blocks_that_hold_its_content(size: int, kind: int) -> None:
    """Kafka's Java client and librdkafka allocate as much for each frame."""
    content = random.Random(size).randbytes(100) * (size // 100 + 1)
    frame = b"".join(compress(content[:size]))
    assert frame[5] == kind
    for found in (decompress(frame), codec.lz4_decode(frame), cramjam.lz4.decompress(frame)):
        assert bytes(found) == content[:size]


@given(st.data())
def test_a_frame_that_was_changed_is_an_error_or_has_the_size_that_it_names(
    data: st.DataObject,
) -> None:
    """The checksum of its RecordBatch finds it first; but nothing is written beyond the content."""
    content = CONTENTS["text"] + CONTENTS["random"][:300]
    changed = bytearray(b"".join(compress(content)))
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(changed)))
    for frame in (bytes(changed), bytes(changed[:cut])):
        try:
            found = decompress(frame)
        except (ValueError, cramjam.DecompressionError):
            continue
        assert len(found) in (0, len(content))


def test_a_size_that_no_frame_can_have_takes_no_memory() -> None:
    head = bytearray(lz4_frame.HEADER.pack(lz4_frame.MAGIC, lz4_frame.FLAGS, 0x70, 1 << 60))
    frame = bytes(head) + bytes([lz4_frame._sum_of(head)]) + lz4_frame.END
    with pytest.raises(ValueError, match="malformed"):
        decompress(frame)
