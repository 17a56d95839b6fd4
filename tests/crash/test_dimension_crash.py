"""A slowly changing dimension and its changes: each batch once, however often it is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
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
# What type 1 and type 2 show after each of them.
STATES: list[Any] = [
    [[], []],
    [[[1, "Bern"], [2, "Oslo"]], [[1, "Bern", 10, None], [2, "Oslo", 10, None]]],
    [[[1, "Rome"]], [[1, "Bern", 10, 30], [1, "Rome", 30, None], [2, "Oslo", 10, 20]]],
    [
        [[1, "Rome"]],
        [
            *([1, "Bern", 10, 20], [1, "Nice", 20, 30], [1, "Rome", 30, None]),
            *([2, "Lima", 15, 20], [2, "Oslo", 10, 15]),
        ],
    ],
]


def dimensions(data: Path) -> list[Dimension]:
    return [
        Dimension(open_table(data, "first"), ("id",)),
        Dimension(open_table(data, "second"), ("id",), has_history=True, tracked=("city",)),
    ]


def apply_all(run: Run) -> None:
    for batch_id, changes in enumerate(BATCHES):
        ids, cities, sequence = zip(*changes, strict=True)
        columns = {"id": ids, "city": cities, SEQUENCE: sequence}
        events = pa.table({**columns, DELETED: [city is None for city in cities]})
        for one in dimensions(run.data):
            one.apply(events, fields_of("t", events.schema), writer="w", batch_id=batch_id)
        run.acknowledge(batch_id + 1)


def look(data: Path) -> Any:
    return [
        sorted([*row.values()] for row in one.table.read().to_pylist()) if one.table.exists else []
        for one in dimensions(data)
    ]


def check_batches(crash: Crash) -> None:
    done = max([number for [number] in crash.acknowledged], default=0)
    for kind in (0, 1):
        assert crash.seen[kind] in [state[kind] for state in STATES[done:]], crash
    assert crash.end == STATES[-1], crash


def test_a_dimension_shows_whole_batches_and_repeats_none() -> None:
    for crash in crashes(apply_all, look, verified=False):
        check_batches(crash)
