"""Flows that start over: their rows and their checkpoints go together, or stay together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import changes_kit
from crash_kit import Crash, Run, complete, crashes, kill


def filled(run: Run) -> None:
    changes_kit.start(run.data)
    for flow in changes_kit.FLOWS:
        changes_kit.run_batch(run.data, flow)


def start_over(run: Run) -> None:
    changes_kit.start(run.data, reset=["a"])
    run.acknowledge("reset")


def look(data: Path) -> Any:
    """The next start, which was not told to reset anything."""
    changes_kit.start(data)
    return changes_kit.shown(data)


def check_together(crash: Crash) -> None:
    together = [["a", "b"], ["a", "b"]]
    assert crash.seen == [[], []] or (crash.seen == together and not crash.acknowledged), crash
    assert crash.end == [[], []], crash


def test_rows_and_checkpoints_go_together() -> None:
    for crash in crashes(start_over, look, start=filled, verified=False):
        check_together(crash)


def reset_was_killed(run: Run) -> None:
    complete(filled, run.data)
    kill(start_over, run.data, before="unlink", nth=2)


def finish(run: Run) -> None:
    changes_kit.start(run.data)
    run.acknowledge("reset")


def test_a_start_that_finishes_a_reset_may_be_killed_too() -> None:
    for crash in crashes(finish, look, start=reset_was_killed, verified=False):
        assert crash.seen == [[], []], crash


def test_flows_that_were_renamed_after_the_crash_find_an_empty_table() -> None:
    for crash in crashes(start_over, look_renamed, start=filled, ends=("kill",), verified=False):
        assert crash.seen in ("refused", [[], []]), crash


def look_renamed(data: Path) -> Any:
    from polybus.spark.pipelines.declared.registry import PipelineError

    try:
        changes_kit.start(data, flows=["c"])
    except PipelineError:
        return "refused"
    return changes_kit.shown(data)
