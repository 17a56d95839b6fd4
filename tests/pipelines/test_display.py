"""What `pipeline run` prints, and the status of a killed run."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from polybus.cli import main
from polybus.cli.pipeline.display import RunDisplay
from polybus.spark.pipelines.running import service

FLOW: dict[str, Any] = {
    "pipeline": "shop",
    "flow": "orders",
    "state": "running",
    "rows": 12,
    "rows_per_s": 3.04,
    "lag": None,
    "batch_ms": 310,
    "batch_id": 4,
    "error": None,
}


def test_without_a_terminal_only_changes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {**FLOW, "state": "failed", "error": "no [luck]"}
    with closing(RunDisplay()) as display:
        display.show({"event": "starting", "text": "reading [x]"})
        display.show({"event": "problem", "code": "pipeline.file", "text": "a.py:3: bad"})
        for flow in (FLOW, FLOW, failed, failed):
            display.show({"event": "progress", "flows": [flow]})
        display.show({"event": "failed", "flow": "shop.orders", "text": "no [luck]"})
        display.show({"event": "done", "flows": [failed]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "reading [x]",
        "pipeline.file: a.py:3: bad",
        "shop.orders running",
        "shop.orders failed: no [luck]",
    ]
    assert lines[4].split() == ["flow", "state", "rows", "rows/s", "lag", "batch", "ms", "error"]
    assert lines[5].split() == "shop.orders failed 12 3.0 - 310 no [luck]".split()


def test_the_status_tells_a_flow_that_fails_from_one_that_is_idle(tmp_path: Path) -> None:
    idle = {**FLOW, "lag": 0}
    failed = {**FLOW, "flow": "bills", "state": "failed", "error": "date out of range", "lag": 7}
    retried = {**failed, "flow": "sums", "state": "waiting"}
    service.write_status(tmp_path, "done", flows=[idle, failed, retried], problems=[])
    shown = CliRunner().invoke(main, ["pipeline", "status", "--data", str(tmp_path)])
    assert ": 2 of 3 flows failing" in shown.stdout.splitlines()[0]
    assert "shop.bills   failed     12     3.0    7       310  date out of range" in shown.stdout


def test_the_status_of_a_killed_run_is_killed(tmp_path: Path) -> None:
    assert service.read_status(tmp_path) is None
    warned = {**FLOW, "warning": "log.damaged: topic 'red' is left out"}
    service.write_status(
        tmp_path, "running", flows=[warned], problems=["pipeline.file: bad.py:1: no"]
    )
    written = service.folder(tmp_path) / "status.json"
    written.write_text(written.read_text().replace(f'"pid":{os.getpid()},', f'"pid":{2**22 - 1},'))
    shown = CliRunner().invoke(main, ["pipeline", "status", "--data", str(tmp_path)])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("killed at 2")
    assert "shop.orders  running    12     3.0  -         310" in shown.stdout
    assert "shop.orders: log.damaged: topic 'red' is left out\n" in shown.stderr
    assert "bad.py:1" in shown.stderr


def test_the_status_of_a_run_that_starts_is_starting_until_it_is_killed(tmp_path: Path) -> None:
    status = ["pipeline", "status", "--data", str(tmp_path)]
    service.write_status(tmp_path, "starting")
    assert CliRunner().invoke(main, status).stdout.startswith("starting at 2")
    written = service.folder(tmp_path) / "status.json"
    written.write_text(written.read_text().replace(f'"pid":{os.getpid()},', f'"pid":{2**22 - 1},'))
    assert CliRunner().invoke(main, status).stdout.startswith("killed at 2")
