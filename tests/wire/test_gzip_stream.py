"""The gzip layer: any chunking, bounded chunks, no bombs, only PeerErrors."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import PeerError
from polybus.wire.gzip_stream import CHUNK_BYTES_MAX, GzipStream

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


def inflate(stream: GzipStream, data: bytes) -> bytes:
    return b"".join(stream.decompress(data))


@pytest.mark.parametrize("cut", range(1, 80))
def test_what_is_inflated_does_not_depend_on_the_chunks(cut: int) -> None:
    packed = gzip.compress(TEXT)
    stream = GzipStream()
    parts = [packed[start : start + cut] for start in range(0, len(packed), cut)]
    assert b"".join(inflate(stream, part) for part in parts) == TEXT


def test_everything_flushed_can_be_read_before_the_stream_ends() -> None:
    ours, theirs = GzipStream(), GzipStream()
    for message in (b"one", b"two", TEXT):
        assert inflate(theirs, ours.compress(message)) == message


def test_the_first_answer_begins_with_the_gzip_header_and_the_next_does_not() -> None:
    stream = GzipStream()
    assert stream.compress(b"one").startswith(b"\x1f\x8b")
    assert not stream.compress(b"two").startswith(b"\x1f\x8b")


def test_nothing_to_send_sends_nothing() -> None:
    assert GzipStream().compress(b"") == b""
    assert GzipStream().finish() == b""


def test_a_finished_stream_is_a_file_any_gzip_reads() -> None:
    stream = GzipStream()
    packed = stream.compress(b"one ") + stream.compress(b"two") + stream.finish()
    assert gzip.decompress(packed) == b"one two"


def test_members_may_follow_each_other() -> None:
    packed = gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two")
    for cut in range(len(packed) + 1):
        stream = GzipStream()
        assert inflate(stream, packed[:cut]) + inflate(stream, packed[cut:]) == b"one two"


def test_many_tiny_members_are_read() -> None:
    assert inflate(GzipStream(), gzip.compress(b"x") * 5000) == b"x" * 5000


def test_chunks_are_bounded_and_nothing_is_left_inside() -> None:
    payload = random.Random(1).randbytes(64 << 10) * 20
    chunks = list(GzipStream().decompress(gzip.compress(payload)))
    assert max(map(len, chunks)) <= CHUNK_BYTES_MAX
    assert b"".join(chunks) == payload


def test_output_that_ends_with_a_full_chunk_is_given_whole() -> None:
    payload = bytes(2 * CHUNK_BYTES_MAX)
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    flushed = packer.compress(payload) + packer.flush(zlib.Z_SYNC_FLUSH)
    assert inflate(GzipStream(), flushed) == payload


def test_a_bomb_is_cut_at_the_ratio() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    stream = GzipStream(ratio_max=256, slack_bytes=1 << 20)
    given_bytes = 0
    with pytest.raises(PeerError) as caught:
        for chunk in stream.decompress(bomb):
            given_bytes += len(chunk)
    assert (caught.value.code, caught.value.final) == ("gzip.bomb", True)
    assert given_bytes <= 256 * len(bomb) + (1 << 20)


def test_output_at_the_ratio_is_no_bomb() -> None:
    packed = gzip.compress(bytes(100_000), 9)
    slack = 100_000 - 2 * len(packed)
    assert inflate(GzipStream(ratio_max=2, slack_bytes=slack), packed) == bytes(100_000)
    with pytest.raises(PeerError, match=r"gzip\.bomb"):
        inflate(GzipStream(ratio_max=2, slack_bytes=slack - 1), packed)


@given(st.binary(min_size=20, max_size=200))
def test_garbage_gives_only_a_peer_error(garbage: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        inflate(GzipStream(), b"\x00" + garbage)
    assert (caught.value.code, caught.value.final) == ("gzip.invalid", True)


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_damaged_stream_gives_a_peer_error_or_bytes(place: int, flip: int) -> None:
    packed = bytearray(gzip.compress(TEXT))
    packed[place % len(packed)] ^= flip
    try:
        inflate(GzipStream(), bytes(packed))
    except PeerError as error:
        assert error.code == "gzip.invalid"


def test_garbage_after_a_member_is_an_error() -> None:
    with pytest.raises(PeerError, match=r"gzip\.invalid"):
        inflate(GzipStream(), gzip.compress(b"one") + b"garbage")
