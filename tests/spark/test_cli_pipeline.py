"""`polybus pipeline`: from a template to a run that other processes watch and stop."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from docs_kit import run_by
from spark_kit import RunningBus, environment, eventually, running_bus

from polybus.cli import main
from polybus.lake.table import open_table
from polybus.spark.pipelines.running import driver, service


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[RunningBus]:
    with running_bus(tmp_path, ["news"]) as started:
        yield started


def polybus(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["pipeline", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_template_runs_and_is_watched_and_stopped_by_other_processes(
    bus: RunningBus, tmp_path: Path
) -> None:
    folder = tmp_path / "pipelines"
    polybus("init", "clicks", "--folder", folder)
    assert "pipeline.exists" in polybus("init", "clicks", "--folder", folder, code=1)
    bus.publish("news", ["one", "three"])
    where = ["--data", str(bus.data)]
    command = [sys.executable, "-m", "polybus.cli", "pipeline", "run", "--continuous", "--json"]
    with subprocess.Popen(
        [*command, "--folder", str(folder), *where], stdout=subprocess.PIPE, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            events = (json.loads(line) for line in process.stdout)
            ready = next(event for event in events if event["event"] == "ready")
            assert ready["flows"] == 2
            totals = open_table(bus.data, "clicks.totals")
            eventually(lambda: totals.exists and totals.rows == 1, timeout_s=120)
            flows = {one["flow"]: one for one in next(events)["flows"]}
            assert set(flows) == {"messages", "totals"}
            said = json.loads(polybus("status", "--json", *where))
            assert said["state"] == "running"
            shown = {one["flow"]: (one["state"], one["rows"]) for one in said["flows"]}
            assert shown["messages"] == ("running", 2)
            second = subprocess.run(
                [*command, "--folder", str(folder), *where], capture_output=True, check=False
            )
            assert second.returncode == 1 and b"pipeline.running" in second.stderr
            assert "stopped (process" in polybus("stop", *where)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert totals.read().select(["topic", "messages", "bytes"]).to_pylist() == [
        {"topic": "news", "messages": 2, "bytes": 8}
    ]
    last = json.loads(polybus("status", "--json", *where))
    assert last["state"] == "stopped"
    assert [one["state"] for one in last["flows"]] == ["stopped", "stopped"]
    listed = json.loads(polybus("list", "--folder", folder, "--json", *where))
    assert [(one["name"], one["files"], one["states"]) for one in listed] == [
        ("clicks", 2, ["stopped"])
    ]


def test_check_shows_what_flows_read_and_write_and_all_errors(
    spark: Any, bus: RunningBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests' session, which `check` must not end.
    session = contextlib.nullcontext(spark)
    monkeypatch.setattr(driver, "open_session", lambda data, **options: session)
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "good.sql").write_text(
        "CREATE STREAMING TABLE sizes AS SELECT offset, length(value) AS size FROM STREAM(news)"
    )
    where = ["--data", bus.data, "--folder", folder]
    assert json.loads(polybus("check", "--json", *where)) == {
        "flows": [{"flow": "good.sizes", "reads": ["news"], "writes": "good.sizes", "refresh": ""}],
        "problems": [],
    }
    (folder / "bad.sql").write_text("CREATE STREAMING TABLE a AS\nSELECT size FROM STREAM(news)")
    text = polybus("check", *where, code=1)
    assert "good.sizes  news   good.sizes" in text
    assert f"pipeline.query: {folder / 'bad.sql'}:2: " in text
    assert "pipeline.unknown" in polybus("check", "ugly", *where, code=1)
    assert not (bus.data / "pipeline" / "checkpoints").exists()


def test_verbs_without_a_pipeline_are_errors(bus: RunningBus, tmp_path: Path) -> None:
    assert "pipeline.folder" in polybus("list", "--folder", tmp_path / "none", code=1)
    assert polybus("status", "--data", bus.data) == "never run\n"
    assert "pipeline.not-running" in polybus("stop", "--data", bus.data, code=1)
    assert "pipeline.name" in polybus("init", "a b", "--folder", tmp_path, code=1)
    text = polybus("run", "--data", tmp_path / "none", code=1)
    assert "log.no-data" in text


def test_the_commands_of_the_page_work_in_its_order(
    spark: Any, bus: RunningBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests' session, which the commands must not end.
    session = contextlib.nullcontext(spark)
    monkeypatch.setattr(driver, "open_session", lambda data, **options: session)
    monkeypatch.setattr(driver, "end_early", lambda *about, **more: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "polybus-data").symlink_to(bus.data)
    (block,) = run_by("spark/test_cli_pipeline.py", "docs/howto/pipelines.md")
    commands = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    bus.publish("news", ["one"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for command in commands:
            assert command[:2] == ["polybus", "pipeline"]
            with interrupting(bus.data) if "--continuous" in command else contextlib.nullcontext():
                polybus(*command[2:])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert open_table(bus.data, "clicks.totals").rows == 1
    assert json.loads(polybus("status", "--json"))["state"] == "stopped"


@contextlib.contextmanager
def interrupting(data: Path) -> Iterator[None]:
    """Ctrl-C for a pipeline in this process, when its flows run."""

    def interrupt() -> None:
        eventually(lambda: (found := service.running(data)) and found.flows)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    yield
    waiting.join()
