"""Columns from spans and back: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.scan import _columns, columns_py

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
            columns.ends_into([(b"a", 2)], target, at)
        with pytest.raises(IndexError):
            columns.offsets_into([(1, 2)], target, at)
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
    columns.ends_into([(b"ab", 2), (b"", 1), (b"c", 1)], target, 4)
    assert ints(bytes(target)) == [0, 0, 2, 4, 4, 5]
    target = bytearray(48)
    columns.offsets_into([(5, 3), (0, 2)], target, 8)
    assert ints(bytes(target), "q") == [0, 5, 6, 7, 0, 1]


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
    packed = _columns.pack_runs(runs)
    assert columns_py.pack_runs(runs) == packed
    assert unpacked(packed) == plain
    assert len(packed) <= (len(plain) + 8 if plain else 0)


def test_a_long_run_packs_into_next_to_nothing() -> None:
    assert len(_columns.pack_runs([(b"127.0.0.1:43210", 10_000)])) < 700


@BOTH
def test_runs_larger_than_a_block_are_packed_into_several(columns: ModuleType) -> None:
    runs = [(b"ab", 1), (b"0123456789" * 25, 30_000), (b"c", 3 << 20)]
    packed = columns.pack_runs(runs)
    assert len(packed) < 50_000
    assert unpacked(packed) == b"".join(value * count for value, count in runs)


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
    assert columns.spans_bytes(array("i", [2, 2, 2, 7])) == 5
    assert columns.spans_count(array("i", [2, 2, 2, 7])) == 1
    with pytest.raises(IndexError):
        columns.spans_of_offsets(offsets, 3, 2)
