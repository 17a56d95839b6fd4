"""Columns from spans and back: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import Literal

import pytest
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
def test_spans_come_back_out_of_offsets(columns: ModuleType) -> None:
    offsets = array("i", [0, 2, 2, 7, 9]).tobytes()
    assert columns.spans_of_offsets(offsets, 1, 2).tolist() == [2, 2, 2, 7]
    with pytest.raises(IndexError):
        columns.spans_of_offsets(offsets, 3, 2)
