"""Detection: the first bytes show the protocol, at any cut, and never another one."""

from __future__ import annotations

import gzip
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.wire.detect import detect

ALL = ("goms", "boson-frames", "boson-properties", "http")
LIMIT = 64 << 20
LARGEST = 256 << 20


def frame(content: bytes = b"", flag: int = 0, topic: bytes = b"") -> bytes:
    return struct.pack(">ibH", len(content), flag, len(topic)) + topic + content


def properties(*pairs: tuple[bytes, bytes]) -> bytes:
    parts = [struct.pack(">i", len(pairs))]
    for key, value in pairs:
        parts.append(struct.pack(">H", len(key)) + key + struct.pack(">i", len(value)) + value)
    return b"".join(parts)


def answers(stream: bytes, speaks: tuple[str, ...] = ALL, limit: int = LIMIT) -> list[str | None]:
    """The answer for each prefix of the stream."""
    return [detect(stream[:end], speaks, limit) for end in range(len(stream) + 1)]


def settled(stream: bytes, speaks: tuple[str, ...] = ALL, limit: int = LIMIT) -> str | None:
    """The one answer the stream's prefixes give, after a time of no answer."""
    found = answers(stream, speaks, limit)
    assert found[0] is None
    said = [answer for answer in found if answer is not None]
    assert len(set(said)) <= 1
    assert found == [None] * (len(found) - len(said)) + said
    return said[0] if said else None


STREAMS = [
    ("goms", b'{"messagetype":"register"}'),
    ("goms", b' {"messagetype":"register"}'),
    ("goms", b"\r\n\t{"),
    ("goms", b"{"),
    ("goms", b"\n"),
    ("http", b"GET / HTTP/1.1\r\n"),
    ("http", b"HEAD /"),
    ("http", b"POST /v1/topics HTTP/1.1\r\n"),
    ("http", b"PUT /"),
    ("http", b"DELETE /"),
    ("http", b"OPTIONS *"),
    ("http", b"PATCH /"),
    ("http", b"CONNECT host"),
    ("http", b"TRACE /"),
    ("http", b"PRI * HTTP/2.0\r\n"),
    ("tls", b"\x16\x03\x01\x02\x00\x01"),
    ("tls", b"\x16\x03"),
    ("gzip", gzip.compress(b"hello", mtime=0)),
    ("gzip", b"\x1f\x8b"),
    ("boson-properties", properties((b"hbfv", b"\x3f\x80\x00\x00"), (b"topic", b"a"))),
    ("boson-properties", properties((b"hbfv", b""))),
    ("boson-properties", b"\xff\xff\xff\xff\x00\x04hbfv"),
    ("boson-properties", b"\x00\x00\x00\x00\x00\x04hbfv"),
    ("boson-properties", b"\x7f\xff\xff\xff\x00\x04hbfv"),
    ("boson-properties", properties((b"topic", b"a"), (b"hbfv", b"1.0"))),
    ("boson-properties", properties((b"hbfs", b"a"), (b"hbfv", b"1.0"))),
    ("boson-properties", properties((b"k", b""))),
    ("boson-frames", frame()),
    ("boson-frames", frame(b"hello", 0, b"topic")),
    ("boson-frames", frame(b"hello", 3)),
    ("boson-frames", frame(b"", 0, b"$subscribe")),
    ("boson-frames", frame(b"x", 0, b"hbfv")),
    ("boson-frames", frame(b"x", 0, b"t" * 1128)),
    ("boson-frames", frame(b"x", 0, b"hbfw" + b"t" * 1124)),
    ("boson-frames", frame(b"x", 0, b"t" * 300)),
    ("boson-frames", struct.pack(">ibH", LIMIT, 0, 5)),
    # One mistake leaves a frame recognisable, so that its codec can say what is wrong.
    ("boson-frames", struct.pack(">ibH", LIMIT + 1, 0, 5) + b"topic"),
    ("boson-frames", struct.pack(">ibH", -1, 0, 5) + b"topic"),
    ("boson-frames", struct.pack(">ibH", 5, 9, 5) + b"topic"),
    ("unknown", b"\xff" * 10),
    ("unknown", b"HELO example.org\r\n"),
    ("unknown", b"GETS it wrong"),
    ("unknown", b"SSH-2.0-OpenSSH\r\n"),
    ("unknown", struct.pack(">ibH", -1, 9, 5)),
    ("unknown", struct.pack(">ibH", -1, 0, 0xFFFF)),
]


@pytest.mark.parametrize(("protocol", "stream"), STREAMS)
def test_each_protocol_is_told_at_any_cut(protocol: str, stream: bytes) -> None:
    assert settled(stream) == protocol


@pytest.mark.parametrize(("protocol", "stream"), STREAMS)
def test_only_protocols_a_connector_speaks_are_answered(protocol: str, stream: bytes) -> None:
    for left_out in ALL:
        speaks = tuple(name for name in ALL if name != left_out)
        answer = settled(stream, speaks)
        if protocol != left_out:
            assert answer == protocol
        else:
            assert answer != left_out


@pytest.mark.parametrize(
    ("stream", "bytes_needed"),
    [
        (b"{", 1),
        (b"GET ", 4),
        (bytes(7), 6),
        (frame(b"x", 1), 5),
        (frame(b"", 0, b"a"), 6),
        (properties((b"hbfv", b"1.0")), 10),
    ],
)
def test_an_answer_comes_with_the_first_byte_that_allows_it(
    stream: bytes, bytes_needed: int
) -> None:
    assert answers(stream).index(settled(stream)) == bytes_needed


@given(st.integers(0, LIMIT), st.integers(0, 3), st.binary(max_size=255))
def test_every_frame_with_a_possible_topic_is_told_from_its_header(
    length: int, flag: int, topic: bytes
) -> None:
    header = struct.pack(">ibH", length, flag, len(topic))
    assert settled(header) == "boson-frames"
    assert settled(header + topic) == "boson-frames"


@given(st.integers(0, LIMIT), st.text(st.characters(codec="ascii", min_codepoint=32), min_size=256))
def test_a_frame_with_an_overlong_topic_is_still_a_frame(length: int, topic: str) -> None:
    stream = struct.pack(">ibH", length, 0, len(topic)) + topic.encode()
    if not topic.startswith("bfv"):
        assert settled(stream) == "boson-frames"


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.binary(max_size=20))
def test_every_message_with_its_version_first_is_properties_unless_text(
    count: int, rest: bytes
) -> None:
    head = struct.pack(">i", count)
    if head[0] in b" \t\r\n{" or head[:2] in (b"\x16\x03", b"\x1f\x8b"):
        return
    assert settled(head + b"\x00\x04hbfv" + rest) == "boson-properties"


@given(st.binary(min_size=1, max_size=40))
def test_no_answer_is_taken_back(stream: bytes) -> None:
    settled(stream)
    settled(stream, limit=LARGEST)


@given(st.integers(0, LARGEST), st.integers(0, 3))
def test_at_the_largest_detectable_limit_frames_are_still_told(length: int, flag: int) -> None:
    stream = struct.pack(">ibH", length, flag, 5) + b"topic"
    assert settled(stream, limit=LARGEST) == "boson-frames"


@given(st.text(" \t\r\n", min_size=5, max_size=8))
def test_at_the_largest_detectable_limit_white_space_is_still_goms(white: str) -> None:
    assert settled(white.encode() + b'{"messagetype":', limit=LARGEST) == "goms"
    assert settled(white[:1].encode() + b'{"messagetype":', limit=LARGEST) == "goms"


@pytest.mark.parametrize("speaks", [("goms",), ("boson-frames",), ("http",), ("queue",)])
def test_a_connector_of_one_protocol_speaks_it_whatever_comes(speaks: tuple[str, ...]) -> None:
    for stream in (b"{", b"\xff", b"GETS", bytes(4), b"\x16\x00", b"\x1f\x00"):
        assert settled(stream, speaks) == speaks[0]
    assert settled(b"\x16\x03", speaks) == "tls"


def test_http_is_never_taken_for_goms() -> None:
    assert settled(b"POST / HTTP/1.1\r\n\r\n{", ("goms",)) == "unknown"


def test_gzip_is_looked_for_only_where_boson_is_spoken() -> None:
    assert settled(b"\x1f\x8b", ("boson-properties",)) == "gzip"
    assert settled(b"\x1f\x8b", ("goms",)) == "goms"
    assert settled(b"\x1f\x8b\x08\x00\x00\x00", ("goms", "http")) == "unknown"


def test_any_kind_of_buffer_is_looked_at() -> None:
    assert detect(bytearray(b"{"), ALL, LIMIT) == "goms"
    assert detect(memoryview(b"{"), ALL, LIMIT) == "goms"
