"""A slowly changing dimension and its changes: each batch once, however often it is tried."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crash_kit import Crash, Run, crashes

from polybus.lake.dimension import DELETED, SEQUENCE, Dimension
from polybus.lake.fields import fields_of
from polybus.lake.table import open_table

# Batches of (key, city, sequence); no city is a deletion.
BATCHES: list[list[tuple[int, str | None, int]]] = [
    [(1, "Bern", 10), (2, "Oslo", 10)],
    [(1, "Rome", 30), (2, None, 20)],
    [(1, "Nice", 20), (2, "Lima", 15)],
]
# What each type shows after each of them.
STATES: dict[int, list[Any]] = {
    1: [[], [[1, "Bern"], [2, "Oslo"]], [[1, "Rome"]], [[1, "Rome"]]],
    2: [
        [],
        [[1, "Bern", 10, None], [2, "Oslo", 10, None]],
        [[1, "Bern", 10, 30], [1, "Rome", 30, None], [2, "Oslo", 10, 20]],
        [
            *([1, "Bern", 10, 20], [1, "Nice", 20, 30], [1, "Rome", 30, None]),
            *([2, "Lima", 15, 20], [2, "Oslo", 10, 15]),
        ],
    ],
}


def dimension(data: Path, kind: int) -> Dimension:
    table = open_table(data, f"type{kind}")
    if kind == 1:
        return Dimension(table, ("id",))
    return Dimension(table, ("id",), has_history=True, tracked=("city",))


def apply_all(run: Run, kind: int) -> None:
    for batch_id, changes in enumerate(BATCHES):
        ids, cities, sequence = zip(*changes, strict=True)
        columns = {"id": ids, "city": cities, SEQUENCE: sequence}
        events = pa.table({**columns, DELETED: [city is None for city in cities]})
        fields = fields_of("t", events.schema)
        dimension(run.data, kind).apply(events, fields, writer="w", batch_id=batch_id)
        run.acknowledge(batch_id + 1)


def look(data: Path, kind: int) -> Any:
    table = dimension(data, kind).table
    return sorted([*row.values()] for row in table.read().to_pylist()) if table.exists else []


def check_batches(crash: Crash, kind: int) -> None:
    done = max([number for [number] in crash.acknowledged], default=0)
    assert crash.seen in STATES[kind][done:], crash
    assert crash.end == STATES[kind][-1], crash


@pytest.mark.parametrize("kind", [1, 2])
def test_a_dimension_shows_whole_batches_and_repeats_none(kind: int) -> None:
    work, shown = partial(apply_all, kind=kind), partial(look, kind=kind)
    for crash in crashes(work, shown, verified=False):
        check_batches(crash, kind)
