"""A lake table's files and its versions: each batch once, however often it is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from crash_kit import Crash, Run, crashes

from polybus.lake.compact import checkpoint, compact, vacuum
from polybus.lake.table import LakeTable

BATCHES = 4


def append_and_compact(run: Run) -> None:
    table = LakeTable(run.data / "tables" / "silver")
    for batch in range(BATCHES):
        rows = pa.table({"offset": [2 * batch, 2 * batch + 1], "topic": ["a", "b"]})
        table.append(rows, writer="w", batch_id=batch, partition_by=["topic"])
        run.acknowledge(batch)
        if batch % 2 == 0:
            checkpoint(table)
        if batch == 1:
            compact(table)
            vacuum(table, grace_s=0.0)


def look(data: Path) -> Any:
    table = LakeTable(data / "tables" / "silver")
    if not table.exists:
        return [-1, []]
    last = table.last_batch("w")
    return [-1 if last is None else last, sorted(table.read().column("offset").to_pylist())]


def check_batches(crash: Crash) -> None:
    last, offsets = crash.seen
    assert offsets == list(range(2 * (last + 1))), crash
    assert last >= max([batch for [batch] in crash.acknowledged], default=-1), crash
    assert crash.end == [BATCHES - 1, list(range(2 * BATCHES))], crash


def test_a_batch_is_in_the_table_once_or_not_at_all() -> None:
    for crash in crashes(append_and_compact, look, verified=False):
        check_batches(crash)
