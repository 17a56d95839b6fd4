"""Columns from spans and back: one contract, the compiled module and its twin."""

from __future__ import annotations

import random
from array import array
from types import ModuleType
from typing import Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import compiled

from polybus.scan import columns_py

_columns = compiled("columns")
BOTH = pytest.mark.parametrize("columns", [_columns, columns_py], ids=["compiled", "pure"])


def ints(data: bytes, kind: Literal["i", "q"] = "i") -> list[int]:
    return list(memoryview(data).cast(kind))


@BOTH
def test_gather_lays_spans_of_many_buffers_end_to_end(columns: ModuleType) -> None:
    values, offsets = columns.gather(
        [b"..abc.", memoryview(b"xyz")], [array("i", [2, 4, 4, 5]), array("i", [3, 3, 0, 2])]
    )
    assert (values, ints(offsets)) == (b"abcxy", [0, 2, 3, 3, 5])


@BOTH
def test_gather_of_nothing_is_an_empty_column(columns: ModuleType) -> None:
    assert columns.gather([], []) == (b"", bytes(4))


def test_gather_refuses_spans_outside_their_buffer() -> None:
    for bad in ([0, 4], [-1, 2], [2, 1]):
        with pytest.raises(IndexError):
            _columns.gather([b"abc"], [array("i", bad)])


@BOTH
def test_gather_into_writes_where_it_is_told_and_nowhere_else(columns: ModuleType) -> None:
    target = bytearray(b"." * 32)
    spans = [array("i", [2, 4, 4, 5]), array("i", [3, 3, 0, 2])]
    size = columns.gather_into([b"..abc.", memoryview(b"xyz")], spans, target, 4, 25)
    assert size == 5
    assert ints(bytes(target[4:24])) == [0, 2, 3, 3, 5]
    assert target[:4] == b"...."
    assert target[24:] == b".abcxy.."


@BOTH
@pytest.mark.parametrize("places", [(16, 0), (-4, 0), (0, 30), (0, -1)])
def test_columns_that_do_not_fit_their_place_are_refused(
    columns: ModuleType, places: tuple[int, int]
) -> None:
    target = bytearray(32)
    with pytest.raises(IndexError):
        columns.gather_into([b"abcd"], [array("i", [0, 1, 1, 2, 2, 3, 3, 4])], target, *places)
    for at in (-8, 24):
        with pytest.raises(IndexError):
            columns.ends_into([b"a"], array("q", [2]), target, at)
        with pytest.raises(IndexError):
            columns.offsets_into(array("q", [1]), array("q", [2]), target, at)
    assert target == bytes(32)


def test_gather_into_refuses_spans_outside_their_buffer_and_places_out_of_line() -> None:
    for bad in ([0, 4], [-1, 2], [2, 1]):
        with pytest.raises(IndexError):
            _columns.gather_into([b"abc"], [array("i", bad)], bytearray(100), 0, 50)
    with pytest.raises(ValueError):
        _columns.gather_into([b"abc"], [array("i", [0, 1])], bytearray(100), 1, 50)
    with pytest.raises(BufferError):
        _columns.gather_into([b"abc"], [array("i", [0, 1])], memoryview(bytes(100)), 0, 50)


@BOTH
def test_runs_become_columns(columns: ModuleType) -> None:
    target = bytearray(24)
    columns.ends_into([b"ab", b"", "c"], array("q", [2, 1, 1]), target, 4)
    assert ints(bytes(target)) == [0, 0, 2, 4, 4, 5]
    target = bytearray(48)
    columns.offsets_into(array("q", [5, 0]), array("q", [3, 2]), target, 8)
    assert ints(bytes(target), "q") == [0, 5, 6, 7, 0, 1]
    with pytest.raises(ValueError):
        columns.ends_into([b"ab"], array("q", [2, 1]), target, 0)
    with pytest.raises(ValueError):
        columns.offsets_into(array("q", [5]), array("q", [3, 2]), target, 8)


RUNS = st.lists(
    st.tuples(
        st.one_of(st.binary(max_size=20), st.sampled_from([b"x" * 300, b"x" * 70_000])),
        st.one_of(st.integers(1, 30), st.sampled_from([500, 20_000])),
    ),
    max_size=12,
).filter(lambda runs: sum(len(value) * count for value, count in runs) < 8 << 20)


@given(RUNS)
@settings(max_examples=200, deadline=None)
def test_packed_runs_are_what_arrow_unpacks(runs: list[tuple[bytes, int]]) -> None:
    plain = b"".join(value * count for value, count in runs)
    values, counts = [value for value, _ in runs], array("q", [count for _, count in runs])
    packed = _columns.pack_runs(values, counts)
    assert columns_py.pack_runs(values, counts) == packed
    assert unpacked(packed) == plain
    assert len(packed) <= (len(plain) + 8 if plain else 0)


def test_a_long_run_packs_into_next_to_nothing() -> None:
    assert len(_columns.pack_runs([b"127.0.0.1:43210"], array("q", [10_000]))) < 700


@BOTH
def test_runs_of_text_and_of_numbers_are_packed_too(columns: ModuleType) -> None:
    counts = array("q", [40, 1, 60])
    texts = ["lamp", "", "größe"]
    plain = b"".join(text.encode() * count for text, count in zip(texts, counts, strict=True))
    assert unpacked(columns.pack_runs(texts, counts)) == plain
    numbers = array("q", [1 << 50, -1, 7])
    packed = columns.pack_runs(numbers, counts)
    assert ints(unpacked(packed), "q") == [1 << 50] * 40 + [-1] + [7] * 60
    assert len(packed) < 80
    with pytest.raises(ValueError):
        columns.pack_runs(texts, counts[:2])


@BOTH
def test_runs_larger_than_a_block_are_packed_into_several(columns: ModuleType) -> None:
    runs = [(b"ab", 1), (b"0123456789" * 25, 30_000), (b"c", 3 << 20)]
    values, counts = [value for value, _ in runs], array("q", [count for _, count in runs])
    packed = columns.pack_runs(values, counts)
    assert len(packed) < 50_000
    assert unpacked(packed) == b"".join(value * count for value, count in runs)


@BOTH
def test_what_does_not_get_smaller_is_stored_though_it_is_larger_than_a_block(
    columns: ModuleType,
) -> None:
    values = [random.Random(number).randbytes(1000) for number in range(2200)]
    packed = columns.pack_runs(values, array("q", [1] * len(values)))
    assert packed == b"\xff" * 8 + b"".join(values)
    counts = array("q", [number % 2 for number in range(len(values))])
    assert unpacked(columns.pack_runs(values, counts)) == b"".join(values[1::2])


@BOTH
def test_counts_that_cannot_be_are_refused(columns: ModuleType) -> None:
    with pytest.raises(ValueError):
        columns.pack_runs([b"a"], array("q", [-1]))
    with pytest.raises(ValueError):
        columns.ends_into([b"a"], array("q", [-1]), bytearray(64), 0)


def test_only_numbers_of_64_bits_are_taken_and_no_more_rows_than_a_column_has() -> None:
    short, target = array("i", [3, 0]), bytearray(64)
    with pytest.raises(TypeError):
        _columns.pack_runs([b"a", b"b"], short)
    with pytest.raises(TypeError):
        _columns.pack_runs(short, array("q", [1, 1]))
    with pytest.raises(TypeError):
        _columns.ends_into([b"a", b"b"], short, target, 0)
    for firsts, counts in ((short, array("q", [1, 1])), (array("q", [1, 1]), short)):
        with pytest.raises(TypeError):
            _columns.offsets_into(firsts, counts, target, 0)
    with pytest.raises(OverflowError):
        _columns.offsets_into(array("q", [0]), array("q", [1 << 61]), bytearray(8), 0)
    with pytest.raises(OverflowError):
        _columns.ends_into([b""], array("q", [1 << 62]), bytearray(8), 0)


def unpacked(packed: bytes) -> bytes:
    """A buffer of a compressed Arrow message, as pyarrow reads it."""
    size = int.from_bytes(packed[:8], "little", signed=True)
    if size < 0:
        return packed[8:]
    return pa.Codec("lz4").decompress(packed[8:], size, asbytes=True) if packed else b""


@BOTH
def test_spans_come_back_out_of_offsets(columns: ModuleType) -> None:
    offsets = array("i", [0, 2, 2, 7, 9]).tobytes()
    assert columns.spans_of_offsets(offsets, 1, 2).tolist() == [2, 2, 2, 7]
    with pytest.raises(IndexError):
        columns.spans_of_offsets(offsets, 3, 2)
