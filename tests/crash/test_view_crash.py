"""A materialized view and the note of what it has: the note never says more than is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from crash_kit import Crash, Run, crashes

from polybus.lake.table import open_table
from polybus.spark.pipelines.declared.view_flow import ViewMetadata, commit_view, read_note

REFRESHES = 3


def refresh_often(run: Run) -> None:
    """Each refresh makes the view one row of the number of the input's version."""
    view, folder = open_table(run.data, "shop.totals"), run.data / "checkpoints" / "totals"
    known = read_note(folder, view)
    for covered in range(0 if known is None else known.covered + 1, REFRESHES):
        note = view.write(pa.table({"covered": [covered]}))
        commit_view(view, [note], view.state, folder, ViewMetadata(-1, "q", "i", covered))
        run.acknowledge(covered)


def look(data: Path) -> Any:
    view = open_table(data, "shop.totals")
    rows = view.read()["covered"].to_pylist() if view.exists else []
    note = read_note(data / "checkpoints" / "totals", view)
    return [rows, None if note is None else note.covered]


def check_note(crash: Crash) -> None:
    rows, covered = crash.seen
    assert covered is None or rows == [covered], crash
    done = max([number for [number] in crash.acknowledged], default=-1)
    assert max(rows, default=-1) >= done, crash
    assert crash.end == [[REFRESHES - 1], REFRESHES - 1], crash


def test_a_note_is_believed_only_if_the_view_has_what_it_says() -> None:
    for crash in crashes(refresh_often, look, verified=False):
        check_note(crash)
