"""The pipeline's process: one Spark session that runs the standard flows and the user's own.

    python -m polybus.spark.pipelines.running.driver --data DIR [--pipelines DIR] …

It speaks JSON lines on standard output, one event a line:

    {"event": "starting", "text": …}     what it does now, while it starts
    {"event": "ready", "seconds": …}     all flows were started
    {"event": "progress", "flows": […]}  every second
    {"event": "waiting", "text": …}      what it waits for: the bus, most of the time
    {"event": "warning", "text": …}      what a flow goes on without: a damaged topic
    {"event": "failed", "text": …}       a flow that failed, or the driver's own end
    {"event": "problem", "text": …}      a pipeline of the user's that cannot start
    {"event": "stopped"}

SIGTERM, SIGINT, the verb `stop` on its socket and the end of its standard input stop it. A batch
that is under way is finished or, after a while, left to the next start: checkpoints see to it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from polybus.client.http import blocking as bus_http
from polybus.errors import PolybusError, UsageError
from polybus.spark.pipelines.running import service
from polybus.spark.pipelines.running.driving import (
    MASTER,
    MEMORY,
    Options,
    SqlRunner,
    end_session,
    is_jvm,
    jvm_pid,
    only_one,
    open_session,
    write_note,
)
from polybus.spark.pipelines.running.user_pipelines import UserPipelines

if TYPE_CHECKING:
    from polybus.spark.pipelines.running.progress import FlowProgress
    from polybus.spark.pipelines.running.runner import FlowRunner

__all__ = ["Driver", "Options", "SqlRunner", "jvm_pid", "only_one", "open_session", "write_note"]

PROGRESS_INTERVAL_S = 1.0
STARTED_INTERVAL_S = 0.02
STARTED_TIMEOUT_S = 10.0
WAIT_FIRST_S = 0.1
WAIT_LAST_S = 2.0
OLD_JVM_TIMEOUT_S = 30.0
Say = Callable[[dict[str, Any]], None]


class Driver:
    """One run of the pipeline, from `run` to its return."""

    def __init__(self, options: Options, say: Say) -> None:
        self._options = options
        self._say = say
        self._stop = threading.Event()
        self._runner: FlowRunner | None = None
        self._users: UserPipelines | None = None
        self._started = time.monotonic()

    def stop(self) -> None:
        """Ask for the end, from any thread or signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Run until `stop`.

        Raises:
            PolybusError: the pipeline cannot start: another runs on the folder, Java is missing,
                a pipeline file is broken beyond the flow it declares.
        """
        options = self._options
        with only_one(options.data):
            self._await_data()
            self._await_old_jvm()
            if self._stop.is_set():
                return
            self._starting(f"starting Spark on {options.master}: this takes some seconds")
            spark = open_session(options)
            try:
                self._run_flows(spark)
            finally:
                end_session(spark)

    def _run_flows(self, spark: Any) -> None:
        from polybus.spark.pipelines.running.runner import FlowRunner

        options = self._options
        self._starting("Spark is up; starting flows")
        runner = self._runner = FlowRunner(
            spark,
            options.data,
            url=options.url,
            token=options.token,
            continuous=True,
        )
        socket = service.Service(
            options.data,
            status=self.status,
            stop_driver=self.stop,
            run_sql=SqlRunner(spark, options.data),
        )
        try:
            socket.start()
            write_note(options, socket.socket, jvm_pid(spark))
            if options.standard:
                from polybus.spark.pipelines.standard import flows

                for flow in flows(options.data):
                    runner.start(flow)
            users = self._users = UserPipelines(spark, options, self._say)
            for flow in users.load():
                runner.start(flow)
            deadline = time.monotonic() + STARTED_TIMEOUT_S
            # A flow that comes after others starts when these have caught up: not waited for.
            while any(one.state == "starting" for one in runner.progress()):
                if self._stop.wait(STARTED_INTERVAL_S):
                    return
                if time.monotonic() > deadline:
                    break
            seconds = round(time.monotonic() - self._started, 2)
            self._say({"event": "ready", "seconds": seconds, "socket": str(socket.socket)})
            self._report(runner, users)
        finally:
            runner.stop()
            # Before the note goes: `pipeline status` asks us while it is there, then the file.
            self._keep_status("stopped" if self._stop.is_set() else "failed")
            (service.folder(options.data) / "pipeline.json").unlink(missing_ok=True)
            socket.stop()

    def _report(self, runner: FlowRunner, users: UserPipelines) -> None:
        """Tell of progress, and once of each new trouble, until the end."""
        told: dict[str, tuple[str, str]] = {}
        warned: dict[str, str] = {}
        while not self._stop.wait(PROGRESS_INTERVAL_S):
            for flow in users.retry():
                runner.start(flow)
            flows = self._progress()
            self._say({"event": "progress", "flows": [asdict(one) for one in flows]})
            self._keep_status("running", flows)
            for one in flows:
                name, trouble = f"{one.pipeline}.{one.flow}", (one.state, one.error or "")
                if one.state in ("waiting", "failed") and one.error and told.get(name) != trouble:
                    self._say({"event": one.state, "flow": name, "text": one.error})
                told[name] = trouble
                if one.warning and warned.get(name) != one.warning:
                    warned[name] = one.warning
                    self._say({"event": "warning", "flow": name, "text": one.warning})

    def status(self) -> dict[str, Any]:
        """What the verb `status` answers."""
        return {
            "pid": os.getpid(),
            "master": self._options.master,
            "uptime-s": round(time.monotonic() - self._started, 1),
            "flows": [asdict(one) for one in self._progress()],
            "problems": [] if self._users is None else self._users.problems,
        }

    def _keep_status(self, state: str, flows: list[FlowProgress] | None = None) -> None:
        """Write what `pipeline status` answers when no pipeline runs."""
        from polybus.spark.pipelines.running.status import write_status

        shown = self._progress() if flows is None else flows
        problems = [] if self._users is None else self._users.problems
        write_status(self._options.data, state, [asdict(one) for one in shown], problems)

    def _progress(self) -> list[FlowProgress]:
        from polybus.spark.pipelines.running.progress import log_ends

        return [] if self._runner is None else self._runner.progress(log_ends(self._options.data))

    def _starting(self, text: str) -> None:
        self._say({"event": "starting", "text": text})

    def _await_data(self) -> None:
        """Wait until a bus has made the data folder, or answers at the URL."""
        options = self._options
        if options.url is not None:
            url = options.url
            await_true(lambda: answers(url), f"no bus answers at {url} yet", self._stop, self._say)
        else:
            note = options.data / "polybus.json"
            text = f"no bus has made {options.data} yet: polybus serve --data {options.data}"
            await_true(note.exists, text, self._stop, self._say)

    def _await_old_jvm(self) -> None:
        """The Java process of a driver that was killed ends by itself; two at once must not be."""
        note = service.read_note(self._options.data)
        if note is None or not note.jvm or not is_jvm(note.jvm):
            return
        deadline = time.monotonic() + OLD_JVM_TIMEOUT_S
        text = f"the Java process {note.jvm} of the last pipeline is still ending"

        def ended() -> bool:
            if time.monotonic() > deadline:
                raise UsageError("pipeline.running", f"{text}; end it and start again")
            return not is_jvm(note.jvm)

        await_true(ended, text, self._stop, self._say)


def await_true(condition: Callable[[], bool], text: str, stop: threading.Event, say: Say) -> None:
    """Wait with growing pauses until the condition or `stop` holds; say so once."""
    pause_s = WAIT_FIRST_S
    said = False
    while not condition() and not stop.is_set():
        if not said:
            say({"event": "waiting", "text": text})
            said = True
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, WAIT_LAST_S)


def answers(url: str) -> bool:
    try:
        bus_http.request(url, "GET", "/healthz")
    except PolybusError as error:
        return error.code not in bus_http.GONE
    return True


def watch_input(stop: Callable[[], None]) -> None:
    """Stop when whoever started the driver with a pipe as its input is gone."""
    kind = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop()

    threading.Thread(target=watch, name="polybus-stdin", daemon=True).start()


def parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m polybus.spark.pipelines.running.driver", description=__doc__
    )
    parser.add_argument("--data", type=Path, required=True, help="the bus's data folder")
    parser.add_argument("--url", help="the bus, when its files are not here: http://host:port")
    parser.add_argument("--master", default=MASTER, help="Spark master, or sc://host:port")
    parser.add_argument("--memory", default=MEMORY, help="heap of the Java process")
    parser.add_argument("--pipelines", type=Path, help="folder of the user's pipeline files")
    parser.add_argument("--no-standard", action="store_true", help="only the user's pipelines")
    given = parser.parse_args(arguments)
    return Options(
        data=given.data,
        url=given.url,
        master=given.master,
        memory=given.memory,
        pipelines=given.pipelines,
        standard=not given.no_standard,
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    # Whatever Spark or a user's file prints must not get between the events.
    os.dup2(2, 1)
    writing = threading.Lock()

    def say(event: dict[str, Any]) -> None:
        with writing, contextlib.suppress(BrokenPipeError):
            lines.write(msgspec.json.encode(event) + b"\n")

    driver = Driver(options, say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: driver.stop())
    watch_input(driver.stop)
    try:
        driver.run()
    except PolybusError as error:
        say({"event": "failed", "code": error.code, "text": error.text})
        return 1
    except Exception as error:
        # Whoever started us hears of it too; the traceback goes to standard error.
        say({"event": "failed", "text": f"{type(error).__name__}: {error}"})
        raise
    say({"event": "stopped"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
