"""The scan of Boson properties: one contract, the compiled module and its twin."""

from __future__ import annotations

import struct
from array import array
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import compiled

from polybus.scan import binary_py

_properties = compiled("binary")
BOTH = pytest.mark.parametrize("scan", [_properties, binary_py], ids=["compiled", "pure"])
HEAD = b"<head>"
LIMIT = 1000


def message(value: bytes, head: bytes = HEAD) -> bytes:
    return head + struct.pack(">i", len(value)) + value


def found(scan: ModuleType, data: bytes, start: int = 0) -> tuple[int, list[bytes]]:
    end, spans = scan.scan_values(data, start, len(data), HEAD, LIMIT)
    return end, [data[spans[i] : spans[i + 1]] for i in range(0, len(spans), 2)]


@BOTH
def test_a_scan_finds_every_value_after_the_head(scan: ModuleType) -> None:
    values = [b"1", b"", b"three" * 20] * 100
    data = b"".join(map(message, values))
    assert found(scan, data) == (len(data), values)


@BOTH
@pytest.mark.parametrize(
    "other",
    [
        message(b"x", b"<hEad>"),
        HEAD,
        HEAD + b"\x00\x00\x00",
        HEAD + struct.pack(">i", -1),
        HEAD + struct.pack(">i", -(1 << 31)),
        HEAD + struct.pack(">i", 5) + b"four",
        message(bytes(LIMIT + 1)),
        b"",
        b"<",
    ],
)
def test_a_scan_stops_before_anything_else(scan: ModuleType, other: bytes) -> None:
    good = message(b"a") + message(b"b")
    assert found(scan, good + other) == (len(good), [b"a", b"b"])


@BOTH
def test_a_value_of_exactly_the_limit_is_found(scan: ModuleType) -> None:
    assert found(scan, message(bytes(LIMIT)))[1] == [bytes(LIMIT)]


@BOTH
def test_a_scan_begins_and_ends_where_it_is_told(scan: ModuleType) -> None:
    data = message(b"a") + message(b"b") + message(b"c")
    size = len(message(b"a"))
    end, spans = scan.scan_values(data, size, 2 * size + 1, HEAD, LIMIT)
    assert (end, list(spans)) == (2 * size, [2 * size - 1, 2 * size])


@BOTH
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_scanned_and_encoded(scan: ModuleType, make: type) -> None:
    data = make(message(b"a"))
    end, spans = scan.scan_values(data, 0, len(data), HEAD, LIMIT)
    assert end == len(data)
    assert scan.encode_properties(b"h", b"m", data, spans, 1, 2) == (
        b"h\x00\x00\x00\x031:2m\x00\x00\x00\x01a"
    )


@BOTH
def test_an_encoding_counts_offsets_up(scan: ModuleType) -> None:
    spans = array("i", [0, 3, 3, 3, 1, 2])
    assert scan.encode_properties(b"h", b"m", b"abc", spans, 7, 99) == b"".join(
        (
            b"h\x00\x00\x00\x047:99m\x00\x00\x00\x03abc",
            b"h\x00\x00\x00\x057:100m\x00\x00\x00\x00",
            b"h\x00\x00\x00\x057:101m\x00\x00\x00\x01b",
        )
    )
    assert scan.encode_properties(b"h", b"m", b"abc", array("i"), 7, 99) == b""


@BOTH
def test_the_largest_position_has_room(scan: ModuleType) -> None:
    most = (1 << 63) - 1
    encoded = scan.encode_properties(b"", b"", b"", array("i", [0, 0]), most, most)
    assert encoded == b"\x00\x00\x00\x27%d:%d\x00\x00\x00\x00" % (most, most)


@BOTH
def test_messages_without_a_position_are_not_encoded(scan: ModuleType) -> None:
    with pytest.raises(ValueError, match="position"):
        scan.encode_properties(b"", b"", b"", array("i", [0, 0]), 0, -1)


@given(st.lists(st.binary(max_size=20)), st.binary(max_size=20))
def test_the_twins_agree(values: list[bytes], tail: bytes) -> None:
    data = b"".join(map(message, values)) + tail
    assert found(_properties, data) == found(binary_py, data)
    _, spans = binary_py.scan_values(data, 0, len(data), HEAD, LIMIT)
    encoded = [
        scan.encode_properties(b"head", b"middle", data, spans, 3, 9)
        for scan in (_properties, binary_py)
    ]
    assert encoded[0] == encoded[1]
