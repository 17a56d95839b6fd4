"""`polybus pipeline run`: the user's pipelines in this process, for one pass or until stopped.

Tells what it does in the events of polybus.spark.pipelines.running.driver, and one more:

    {"event": "problem", "pipeline": …, "code": …, "text": …}   a pipeline that does not start
    {"event": "done", "flows": […]}                             the end of a pass
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polybus.client.http import blocking as bus_http
from polybus.errors import UsageError
from polybus.spark.pipelines.declared.prepare import Prepared, prepare
from polybus.spark.pipelines.places import Where
from polybus.spark.pipelines.running import service
from polybus.spark.pipelines.running.driving import (
    Options,
    SqlRunner,
    end_session,
    is_jvm,
    jvm_pid,
    only_one,
    open_session,
    write_note,
)
from polybus.spark.pipelines.running.runner import FlowRunner
from polybus.spark.pipelines.running.status import write_status

PROGRESS_INTERVAL_S = 1.0
OLD_JVM_TIMEOUT_S = 30.0
Say = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What to run, and where."""

    folder: Path
    data: Path
    url: str | None = None
    token: str | None = None
    master: str = Options.master
    only: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    continuous: bool = False

    @property
    def where(self) -> Where:
        return Where(self.data, self.url, self.token or bus_http.read_token(self.data))

    @property
    def driver(self) -> Options:
        return Options(data=self.data, url=self.url, master=self.master, standard=False)


class PipelineRun:
    """One run, from `run` to its return; `stop` ends it early, from any thread."""

    def __init__(self, options: RunOptions, say: Say) -> None:
        self._options = options
        self._say = say
        self._stop = threading.Event()
        self._started_s = time.monotonic()
        self._runner: FlowRunner | None = None
        self._problems: list[str] = []

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> bool:
        """Run; True if every pipeline started and no flow failed.

        Raises:
            PolybusError: `pipeline.running`, `pipeline.folder`, `pipeline.unknown`, no Java, …
        """
        options = self._options
        with only_one(options.data):
            self._await_old_jvm()
            self._say({"event": "starting", "text": f"starting Spark on {options.master}"})
            spark = open_session(options.driver)
            try:
                return self._run(spark)
            finally:
                end_session(spark)

    def _await_old_jvm(self) -> None:
        """The Java process of a run that was killed ends by itself; two at once must not be."""
        note = service.read_note(self._options.data)
        until_s = time.monotonic() + OLD_JVM_TIMEOUT_S
        while note is not None and note.jvm and is_jvm(note.jvm):
            if time.monotonic() > until_s:
                text = f"the Java process {note.jvm} of the last run does not end; end it yourself"
                raise UsageError("pipeline.running", text)
            self._stop.wait(0.1)

    def _run(self, spark: Any) -> bool:
        options = self._options
        self._say({"event": "starting", "text": f"reading {options.folder}"})
        where = options.where
        prepared = prepare(spark, options.folder, where, only=options.only, reset=options.reset)
        self._tell_problems(prepared)
        runner = self._runner = FlowRunner(
            spark, where.data, url=where.url, token=where.token, continuous=options.continuous
        )
        socket = service.Service(
            options.data,
            status=self.status,
            stop_driver=self.stop,
            run_sql=SqlRunner(spark, options.data),
        )
        socket.start()
        write_note(options.driver, socket.socket, jvm_pid(spark))
        try:
            for flow in prepared.flows:
                runner.start(flow)
            seconds = round(time.monotonic() - self._started_s, 2)
            self._say({"event": "ready", "seconds": seconds, "flows": len(prepared.flows)})
            self._watch(runner)
        finally:
            runner.stop()
            self._end(runner)
            (service.folder(options.data) / "pipeline.json").unlink(missing_ok=True)
            socket.stop()
        return not self._problems and not runner.failures

    def _watch(self, runner: FlowRunner) -> None:
        while not self._stop.is_set() and not runner.wait(0.05):
            flows = self._flows()
            self._say({"event": "progress", "flows": flows})
            write_status(self._options.data, "running", flows, self._problems)
            until_s = time.monotonic() + PROGRESS_INTERVAL_S
            while time.monotonic() < until_s and not self._stop.is_set():
                if runner.wait(0.05):
                    break

    def _end(self, runner: FlowRunner) -> None:
        flows = self._flows()
        failed = bool(runner.failures or self._problems)
        state = "stopped" if self._stop.is_set() else "failed" if failed else "done"
        write_status(self._options.data, state, flows, self._problems)
        self._say({"event": "stopped" if self._stop.is_set() else "done", "flows": flows})

    def _tell_problems(self, prepared: Prepared) -> None:
        for problem in prepared.problems:
            self._problems.append(str(problem.error))
            self._say(
                {
                    "event": "problem",
                    "pipeline": problem.pipeline,
                    "code": problem.error.code,
                    "text": problem.error.text,
                }
            )

    def _flows(self) -> list[dict[str, Any]]:
        return [] if self._runner is None else _as_dicts(self._runner)

    def status(self) -> dict[str, Any]:
        """What the socket's verb `status` answers."""
        return {
            "master": self._options.master,
            "uptime-s": round(time.monotonic() - self._started_s, 1),
            "flows": self._flows(),
            "problems": self._problems,
        }


def _as_dicts(runner: FlowRunner) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in runner.progress()]


def check(options: RunOptions) -> Prepared:
    """Load and analyse, and change nothing."""
    spark = open_session(options.driver)
    try:
        return prepare(spark, options.folder, options.where, only=options.only, check_only=True)
    finally:
        end_session(spark)
