"""An end that is asked for while a pipeline starts: how long it takes, and its exit code."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from polybus.spark.pipelines.running import driver as driver_module
from polybus.spark.pipelines.running import early_end
from polybus.spark.pipelines.running.driver import STOP_FLOWS_S, PipelineOptions, Supervisor
from polybus.spark.pipelines.spark_sessions import JvmProcess
from polybus.spark.session import connect


class Done(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was ended, in order."""
    said: list[str] = []

    def exit_now(code: int) -> None:
        said.append(f"exit {code}")
        raise Done

    monkeypatch.setattr(os, "_exit", exit_now)
    monkeypatch.setattr(early_end, "end_java", lambda: said.append("java"))
    monkeypatch.setattr(connect, "end_all", lambda: said.append("remote"))
    # Those of this process belong to the session that the tests share.
    monkeypatch.setattr(early_end, "remove_every_scratch", lambda: said.append("files"))
    monkeypatch.setattr(early_end, "END_JAVA_S", 0.0)
    monkeypatch.setattr(early_end, "EXIT_S", 0.01)
    return said


def test_what_runs_on_a_server_is_ended_before_the_process(said: list[str]) -> None:
    with pytest.raises(Done):
        early_end.end_early(
            threading.Event(), lambda: said.append("given up"), lambda: 0, flows_s=0
        )
    assert said == ["java", "given up", "remote", "files", "exit 0"]


def test_a_start_that_ends_with_its_java_process_decides_on_the_exit_code(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(early_end, "end_java", is_over.set)
    with pytest.raises(Done):
        early_end.end_early(is_over, lambda: None, lambda: 1, flows_s=0)
    assert said == ["files", "exit 1"]


def test_a_start_that_is_over_in_time_ends_by_itself(said: list[str]) -> None:
    is_over = threading.Event()
    is_over.set()
    early_end.end_early(is_over, lambda: None, lambda: 1, flows_s=60)
    assert said == []


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    return Supervisor(PipelineOptions(data=tmp_path), lambda event: None)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that flows get at each early end."""
    given: list[float] = []

    def note(*about: Any, flows_s: float) -> None:
        given.append(flows_s)

    monkeypatch.setattr(driver_module, "end_early", note)
    return given


def test_an_end_is_early_or_the_pipeline_is_ready_but_never_both(
    supervisor: Supervisor, early: list[float], tmp_path: Path
) -> None:
    other = Supervisor(PipelineOptions(data=tmp_path), lambda event: None)
    assert supervisor._become_ready()
    supervisor._stop_soon()
    assert early == []
    other._stop_soon()
    assert not other._become_ready()
    assert early == [0.0]


def test_flows_without_a_java_process_here_get_the_time_of_any_end(
    supervisor: Supervisor, early: list[float]
) -> None:
    """They run on a Spark Connect server, and outlive this process there."""
    supervisor._runner = object()  # type: ignore[assignment]
    supervisor._jvm = JvmProcess(1, 1)
    supervisor._stop_soon()
    supervisor._jvm = JvmProcess()
    supervisor._stop_soon()
    assert early[0] == early_end.END_FLOWS_S
    assert early[1] > supervisor._end_flows_s() == STOP_FLOWS_S


def test_a_stopped_start_has_the_exit_code_of_what_was_found(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supervisor._exit_code() == 0

    def failing() -> bool:
        raise RuntimeError("no Spark")

    monkeypatch.setattr(supervisor, "_run", failing)
    with pytest.raises(RuntimeError):
        supervisor.run()
    assert supervisor._exit_code() == 1
    monkeypatch.setattr(supervisor, "_run", lambda: True)
    supervisor.run()
    assert supervisor._exit_code() == 0
