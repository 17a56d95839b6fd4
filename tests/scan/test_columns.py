"""Columns from spans and back: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from types import ModuleType

import pytest

from polybus.scan import _columns, columns_py

BOTH = pytest.mark.parametrize("columns", [_columns, columns_py], ids=["compiled", "pure"])


def ints(data: bytes, kind: str = "i") -> list[int]:
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
def test_runs_become_columns(columns: ModuleType) -> None:
    values, offsets = columns.string_runs([(b"ab", 2), (b"", 1), (b"c", 1)])
    assert (values, ints(offsets)) == (b"ababc", [0, 2, 4, 4, 5])
    assert ints(columns.offset_runs([(5, 3), (0, 2)]), "q") == [5, 6, 7, 0, 1]
    assert ints(columns.integer_runs([(5, 2), (-1, 1)]), "q") == [5, 5, -1]


@BOTH
def test_spans_come_back_out_of_offsets(columns: ModuleType) -> None:
    offsets = array("i", [0, 2, 2, 7, 9]).tobytes()
    assert columns.spans_of_offsets(offsets, 1, 2).tolist() == [2, 2, 2, 7]
    assert columns.spans_bytes(array("i", [2, 2, 2, 7])) == 5
    with pytest.raises(IndexError):
        columns.spans_of_offsets(offsets, 3, 2)
