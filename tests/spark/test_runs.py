"""The batches of a pipeline in its status: which are kept, and which one runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from polybus.spark.pipelines.flows import checkpoints_of
from polybus.spark.pipelines.running.runs import RUNS_MAX, BatchRuns


def flow(batch: int | None, state: str = "running") -> dict[str, Any]:
    about = {"pipeline": "shop", "flow": "sums", "state": state}
    return about | {"batch_id": batch, "batch_rows": 2, "batch_ms": 30}


def test_each_batch_is_kept_once_and_the_next_run_continues_the_list(tmp_path: Path) -> None:
    runs = BatchRuns(tmp_path)
    for batch in (None, 0, 0, 1, 4):
        runs.update([flow(batch)], "now")
    assert [(one["batch"], one["rows"], one["ms"]) for one in runs.all()] == [
        (0, 2, 30),
        (1, 2, 30),
        (4, 2, 30),
    ]
    next_run = BatchRuns(tmp_path, runs.all())
    for batch in range(5, 5 + RUNS_MAX):
        next_run.update([flow(batch)], "later")
    assert [one["batch"] for one in next_run.all()] == list(range(5, 5 + RUNS_MAX))


def test_a_batch_runs_from_its_plan_to_its_commit(tmp_path: Path) -> None:
    folder = checkpoints_of(tmp_path, "shop") / "sums"
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
        (folder / name / "0").touch()
    runs, idle, busy, failed = BatchRuns(tmp_path), flow(0), flow(0), flow(0, "failed")
    runs.update([idle], "now")
    (folder / "offsets" / "1").touch()
    runs.update([busy, failed], "now")
    assert "running_batch" not in idle and "running_batch" not in failed
    assert busy["running_batch"] == 1 and busy["running_s"] >= 0
    # It begins again with a run, whenever an earlier one has planned it.
    os.utime(folder / "offsets" / "1", (0, 0))
    runs.update([busy], "now")
    assert busy["running_s"] < 60
    (folder / "commits" / "1").touch()
    runs.update([idle], "now")
    assert "running_batch" not in idle
