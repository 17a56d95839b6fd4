"""The lifecycle of a pipeline on a data folder, both for `polybus up` and `pipeline run`: the order
in which it starts and stops.

    lock → socket, status → wait for the bus and for the last JVM → Spark → status → flows → report
    → stop the flows → status → remove the socket → end Spark → unlock

It reports in events, which are JSON objects:

    {"event": "starting", "text": …}                    the current step, until it is ready
    {"event": "ready", "seconds": …, "flows": …}        it has started this many flows
    {"event": "progress", "flows": […]}                 every second
    {"event": "waiting", "text": …}                     it, or a flow, waits, mostly for the bus
    {"event": "warning", "flow": …, "text": …}          a flow runs without a damaged topic
    {"event": "failed", "flow": …, "text": …}           a flow failed
    {"event": "problem", "pipeline": …, "code": …, "text": …}   a pipeline cannot start
    {"event": "done", "flows": […]}                     all flows have ended
    {"event": "stopped", "flows": […]}                  it was asked to stop, and did

A batch in progress at the end is finished or, after the deadline, left to the next start, which
runs it again from its checkpoint. A stop that is requested before `ready` takes only seconds: see
early_end.py.

It is also the process of `polybus up`, which stops on SIGTERM, SIGINT, /stop on the socket and the
end of standard input, and writes its events to standard output, one per line:

    python -m polybus.spark.pipelines.running.driver --data DIR [--pipelines DIR] …
"""

import argparse
import contextlib
import datetime
import math
import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from polybus.client.http import blocking as bus_http
from polybus.client.retry import Backoff
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.lake.folders import check_format, table_folders
from polybus.log import file_modes
from polybus.services.pipeline_watch import event_line
from polybus.spark.causes import is_transient
from polybus.spark.internals import is_connect
from polybus.spark.location import BusLocation
from polybus.spark.nodes import nodes_of
from polybus.spark.pipelines.flows import FlowRunner
from polybus.spark.pipelines.running import service
from polybus.spark.pipelines.running.early_end import END_FLOWS_S, end_early
from polybus.spark.pipelines.running.runs import BatchRuns
from polybus.spark.pipelines.running.stats import ExpectationStats
from polybus.spark.pipelines.spark_sessions import (
    MASTER,
    MEMORY,
    JvmProcess,
    another_session,
    jvm_of,
    open_session,
)

PROGRESS_INTERVAL_S = 1.0
POLL_S = 0.05
STARTED_TIMEOUT_S = 10.0
OLD_JVM_TIMEOUT_S = 30.0
JVM_POLL_S = 0.2
STOP_FLOWS_S = 10.0
ENDED_TIMEOUT_S = 3.0
"""How long a run may take to end after its JVM has ended: calls to the JVM may hang."""
LOG_LINES_MAX = 50
LOG_CHARACTERS_MAX = 500
TOKEN_VARIABLE = "POLYBUS_TOKEN"
"""For a bus on another machine (--url), whose token is not in the data folder."""
Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What to run, and where. `pipelines` is the folder of the user's pipelines."""

    data: Path
    url: str | None = None
    token: str | None = field(default=None, repr=False)
    master: str = MASTER
    memory: str = MEMORY
    standard: bool = True
    pipelines: Path | None = None
    only: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    refresh: tuple[str, ...] = ()
    continuous: bool = True
    until_stopped: bool = True
    """Wait for the bus, at the start and with a pipeline that needs it, and outlive all flows."""

    @property
    def bus(self) -> BusLocation:
        # Only the token of an administrator may write system topics; the bus keeps one in its data.
        # Without a URL it is read for each call: a bus that restarts may have created another.
        token = self.token or (bus_http.read_token(self.data) if self.url else None)
        return BusLocation(self.data, self.url, token)

    def session(self) -> contextlib.AbstractContextManager[Any]:
        return open_session(self.data, url=self.url, master=self.master, memory=self.memory)


class Supervisor:
    """One run of a pipeline, from `run` to its return."""

    def __init__(self, options: PipelineOptions, say: Say) -> None:
        self._options = options
        self._tell = say
        self._log: deque[str] = deque(maxlen=LOG_LINES_MAX)
        self._stop = threading.Event()
        self._is_over = threading.Event()
        self._is_ready = threading.Event()
        self._stop_or_ready = threading.Lock()
        self._is_good = True
        self._server: service.Service | None = None
        self._started_s = time.monotonic()
        self._runner: FlowRunner | None = None
        self._jvm = JvmProcess()
        self._problems: dict[str, str] = {}
        self._retried: tuple[str, ...] = ()
        self._retry_backoff = Backoff(first_s=0.5)
        self._retry_due_s = 0.0
        self._reported: set[tuple[str, str, str]] = set()
        self._stats = ExpectationStats(options.bus)
        last = _last_status(options.data)
        self._runs = BatchRuns(options.data, [] if last is None else last.runs)

    def stop(self) -> None:
        """Request the end, from any thread or signal handler."""
        # A signal may arrive while this thread holds the event's lock, which is not reentrant.
        threading.Thread(target=self._stop_soon, name="polybus-stop", daemon=True).start()

    def _stop_soon(self) -> None:
        with self._stop_or_ready:
            self._stop.set()
            is_early = not self._is_ready.is_set()
        if is_early:
            # More for what comes after the flows where Java cannot be ended.
            more_s = 0.0 if self._runner is None or self._jvm.pid else ENDED_TIMEOUT_S
            flows_s = 0.0 if self._runner is None else self._end_flows_s() + more_s
            end_early(self._is_over, self._give_up, self._exit_code, flows_s=flows_s)

    def _become_ready(self) -> bool:
        """Become ready; False if the end was requested before."""
        with self._stop_or_ready:
            if not self._stop.is_set():
                self._is_ready.set()
        return self._is_ready.is_set()

    def _end_flows_s(self) -> float:
        """How long flows may take to end. On a Spark Connect server they would outlive this
        process.
        """
        is_early = not self._is_ready.is_set() and self._jvm.pid
        return END_FLOWS_S if is_early else STOP_FLOWS_S

    def _exit_code(self) -> int:
        return 0 if self._is_good and not self._problems else 1

    def _say(self, event: dict[str, Any]) -> None:
        """Report an event; all except progress are also kept in the status."""
        if event["event"] != "progress":
            self._log.append(event_line(event)[:LOG_CHARACTERS_MAX])
        self._tell(event)

    def run(self) -> bool:
        """Run; True if every pipeline started and no flow failed.

        Raises:
            PolybusError: `pipeline.running`, another pipeline runs on the folder;
                `pipeline.unknown`; `lake.old-format`; Java is missing or has ended; and others that
                prevent all flows from starting.
        """
        try:
            self._is_good = self._run()
            return self._is_good
        except BaseException:
            self._is_good = False
            raise
        finally:
            self._is_over.set()

    def _run(self) -> bool:
        data = self._options.data
        with service.only_one(data):
            for folder in table_folders(data):
                check_format(folder)
            self._jvm = self._old_jvm()
            self._server = service.Service(data, stop=self.stop, run_sql=_no_sql_yet)
            try:
                self._start()
            finally:
                self._server.stop()
        flows = self._flows()
        self._say({"event": "stopped" if self._stop.is_set() else "done", "flows": flows})
        return not self._problems and all(flow["state"] != "failed" for flow in flows)

    def _start(self) -> None:
        """Start Spark and run the flows; the status says `starting` until there is a session."""
        self._note_status("starting")
        try:
            if self._options.until_stopped:
                self._await_bus()
            self._await_old_jvm()
            if not self._stop.is_set():
                self._starting(f"starting Spark on {self._options.master}: this takes some seconds")
                self._note_status("starting")
                with self._options.session() as spark:
                    self._run_flows(spark)
        except Exception as error:
            is_cut_short = self._stop.is_set() and not self._is_ready.is_set()
            if self._runner is None and not is_cut_short:
                self._problems[""] = str(error)
                self._note_status("failed")
            if not is_cut_short:
                raise
        if self._runner is None:
            self._note_status("stopped")

    def _note_status(self, state: str) -> None:
        with contextlib.suppress(OSError):
            self._write_status(state, [])

    def _give_up(self) -> None:
        """Clean up before this process exits during a start that hangs."""
        self._note_status("stopped")
        if self._server is not None:
            self._server.stop()
        self._say({"event": "stopped", "flows": []})

    def _run_flows(self, spark: Any) -> None:
        data, self._jvm = self._options.data, jvm_of(spark)
        threading.Thread(target=self._end_with_jvm, name="polybus-end", daemon=True).start()
        self._starting("Spark is up; starting flows")
        consumers = _remote_consumers(spark, self._options.bus)
        runner = self._runner = FlowRunner(
            spark,
            self._options.bus,
            continuous=self._options.continuous,
            on_progress=None if consumers is None else consumers.take,
        )
        assert self._server is not None
        self._server.run_sql = sql_runner(spark, data)
        state = "failed"
        try:
            self._write_status("running", [])
            if self._options.standard:
                from polybus.spark.pipelines.standard import batches

                runner.start(*batches.flows(data))
            self._load(spark, self._options.only)
            self._await_started(runner)
            seconds = round(time.monotonic() - self._started_s, 2)
            if self._become_ready():
                self._say({"event": "ready", "seconds": seconds, "flows": len(runner.progress())})
            while self._pause(runner):
                self._report(spark)
            if not runner.failures and not self._problems:
                state = "done"
        finally:
            runner.stop(self._end_flows_s())
            state = "stopped" if self._stop.is_set() else state
            flows = self._flows()
            self._stats.publish(flows)
            with contextlib.suppress(OSError):
                self._write_status(state, flows)
            if consumers is not None:
                consumers.reporter.close()
            self._server.stop()

    def _load(self, spark: Any, only: tuple[str, ...]) -> None:
        """Start the flows of the user's pipelines; those that wait for the bus are retried."""
        from polybus.spark.pipelines.declared.prepare import Chosen, prepare

        options = self._options
        if self._runner is None or options.pipelines is None or not options.pipelines.is_dir():
            return
        if not self._retried:
            self._starting(f"reading the pipelines in {options.pipelines}")
        chosen = Chosen(only, options.reset, options.refresh)
        prepared = prepare(spark, options.pipelines, options.bus, chosen)
        for name in only:
            self._problems.pop(name, None)
        waiting = []
        for name, error in prepared.problems.items():
            self._problems[name] = str(error)
            is_waiting = options.until_stopped and is_transient(str(error))
            if is_waiting:
                waiting.append(name)
            if not is_waiting or name not in self._retried:
                about = {"pipeline": name, "code": error.code, "text": error.text}
                self._say({"event": "waiting" if is_waiting else "problem", **about})
        self._retried = tuple(waiting)
        self._retry_due_s = time.monotonic() + self._retry_backoff.next_s()
        self._runner.start(*prepared.flows)

    # Reports.

    def _pause(self, runner: FlowRunner) -> bool:
        """Wait until the next report is due; False at the end."""
        due_s = time.monotonic() + PROGRESS_INTERVAL_S
        while time.monotonic() < due_s:
            is_over = not self._options.until_stopped and runner.wait(0)
            if is_over or self._stop.wait(POLL_S):
                return False
        if self._jvm.pid and not self._jvm.is_alive():
            # No flow can recover: our parent restarts us, with a new JVM.
            raise self._jvm_ended()
        return True

    def _jvm_ended(self) -> PolybusError:
        text = (
            f"the Java process {self._jvm.pid} of the pipeline has ended; start the pipeline again"
        )
        return PolybusError("spark.ended", text)

    def _end_with_jvm(self) -> None:
        """End this process soon after its JVM, unless it ends before."""
        while self._jvm.is_alive():
            time.sleep(JVM_POLL_S)
        if self._jvm.pid and not self._is_over.wait(ENDED_TIMEOUT_S):
            error = self._jvm_ended()
            self._say({"event": "failed", "code": error.code, "text": error.text})
            os._exit(1)

    def _report(self, spark: Any) -> None:
        """Report progress, and once why a flow waits, has failed or has a warning."""
        if self._retried and time.monotonic() >= self._retry_due_s:
            self._load(spark, self._retried)
        flows = self._flows()
        self._stats.publish(flows)
        self._say({"event": "progress", "flows": flows})
        # Flows report a full disk; a missing status must not end them.
        with contextlib.suppress(OSError):
            self._write_status("running", flows)
        news = set()
        for flow in flows:
            name = f"{flow['pipeline']}.{flow['flow']}"
            if flow["warning"]:
                news.add((name, "warning", flow["warning"]))
            if flow["state"] in ("waiting", "failed") and flow["error"]:
                news.add((name, flow["state"], flow["error"]))
        for name, event, text in sorted(news - self._reported):
            self._say({"event": event, "flow": name, "text": text})
        self._reported = news

    def _write_status(self, state: str, flows: list[dict[str, Any]]) -> None:
        service.write_status(
            self._options.data,
            state,
            master=self._options.master,
            jvm=self._jvm.pid,
            jvm_started=self._jvm.started,
            uptime_s=round(time.monotonic() - self._started_s, 1),
            flows=flows,
            runs=self._runs.all(),
            problems=[*self._problems.values()],
            pipelines=""
            if self._options.pipelines is None
            else str(self._options.pipelines.absolute()),
            log=[*self._log],
        )

    def _flows(self) -> list[dict[str, Any]]:
        if self._runner is None:
            return []
        flows = [asdict(one) for one in self._runner.progress()]
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._runs.update(flows, now)
        return flows

    def _starting(self, text: str) -> None:
        self._say({"event": "starting", "text": text})

    # What it waits for.

    def _await_bus(self) -> None:
        """Wait until a bus has created the data folder, or answers at the URL."""
        data, url = self._options.data, self._options.url

        def answers(node: str) -> bool:
            try:
                bus_http.request(node, "GET", "/healthz")
            except PolybusError as error:
                return error.code not in bus_http.GONE
            return True

        if url is not None:
            nodes = nodes_of(url)
            self._await(lambda: any(map(answers, nodes)), f"no bus answers at {url} yet")
        else:
            text = f"{data} does not exist yet; start the bus: polybus serve --data {data}"
            self._await(lambda: BusLocation(data).is_folder_here, text)

    def _old_jvm(self) -> JvmProcess:
        """The JVM of an earlier run, if it is still running.

        It may also belong to a run before the last one, which was killed.
        """
        last = _last_status(self._options.data)
        if last is None or last.pid == os.getpid():
            return JvmProcess()
        old = JvmProcess(last.jvm, last.jvm_started)
        return old if old.is_alive() else JvmProcess()

    def _await_old_jvm(self) -> None:
        """Wait for the JVM of an earlier run: it may still write to the checkpoints."""
        old = self._jvm
        if not old.pid:
            return
        text = f"the Java process {old.pid} of the last pipeline is still stopping"
        self._await(lambda: not old.is_alive(), text, timeout_s=OLD_JVM_TIMEOUT_S)
        if self._stop.is_set():
            return
        if old.is_alive():
            raise UsageError("pipeline.running", f"{text}; end it and start again")
        self._jvm = JvmProcess()

    def _await_started(self, runner: FlowRunner) -> None:
        """Wait until no flow is starting. Flows that come after others may wait much longer."""
        deadline_s = time.monotonic() + STARTED_TIMEOUT_S
        while any(one.state == "starting" for one in runner.progress()):
            if self._stop.wait(POLL_S) or time.monotonic() > deadline_s:
                return

    def _await(
        self, condition: Callable[[], bool], text: str, *, timeout_s: float = math.inf
    ) -> None:
        """Wait with back-off for the condition or the requested end; report that once."""
        if condition():
            return
        self._say({"event": "waiting", "text": text})
        backoff, deadline_s = Backoff(first_s=0.1, delay_s_max=2.0), time.monotonic() + timeout_s
        while not self._stop.wait(backoff.next_s()) and not condition():
            if time.monotonic() > deadline_s:
                return


def _remote_consumers(spark: Any, bus: BusLocation) -> Any:
    """Reports the flows as consumers over Spark Connect, where a session has no listener.

    PySpark 4.3 drops a listener there at the first event of a Python source.
    """
    if not is_connect(spark):
        return None
    # Imports PySpark, which would delay the start of the JVM.
    from polybus.spark.listener import ConsumerListener, Reporter

    data = bus.data if bus.url is None else None
    return ConsumerListener(Reporter(data=data, url=bus.url, token=bus.token))


def _no_sql_yet(_query: str, _rows_max: int) -> tuple[Any, bool]:
    raise PolybusError("pipeline.busy", "the pipeline is still starting Spark; try later")


def sql_runner(spark: Any, data: Path) -> service.RunSql:
    """Runs queries on the pipeline's warm JVM, beside its flows.

    They have their own session, so that a `SET` or a view does not affect the flows. The first
    query creates it: Spark then starts a process that searches for sources, and the flows must not
    wait for it.
    """
    session: Any = None
    # Views belong to the session and are created again for each query.
    one_at_a_time = threading.Lock()

    def run(query: str, rows_max: int) -> tuple[Any, bool]:
        from polybus.spark.views import collect

        nonlocal session
        with one_at_a_time:
            session = session or another_session(spark)
            table = collect(session, query, data, rows_max=rows_max + 1)
        return table.slice(0, rows_max), table.num_rows > rows_max

    return run


def check(options: PipelineOptions) -> Any:
    """Load and analyse the user's pipelines, and change nothing; see `prepare`."""
    from polybus.spark.pipelines.declared.prepare import Chosen, prepare

    assert options.pipelines is not None
    with options.session() as spark:
        chosen = Chosen(options.only)
        return prepare(spark, options.pipelines, options.bus, chosen, check_only=True)


def _last_status(data: Path) -> service.PipelineStatus | None:
    """How the last run ended; None if none did, or if its status cannot be read."""
    # Only the display needs the file, and this run writes it again.
    with contextlib.suppress(StorageError):
        return service.read_status(data)
    return None


def parse(arguments: list[str] | None) -> PipelineOptions:
    parser = argparse.ArgumentParser(
        prog="python -m polybus.spark.pipelines.running.driver",
        description="Run the pipeline of a data folder; its events go to standard output.",
    )
    parser.add_argument("--data", type=Path, required=True, help="data folder of the bus")
    parser.add_argument("--url", help="the bus, if it is on another machine: http://host:port")
    parser.add_argument("--master", default=MASTER, help="Spark master, or sc://host:port")
    parser.add_argument("--memory", default=MEMORY, help="heap of the Java process")
    parser.add_argument("--pipelines", type=Path, help="folder of the user's pipelines")
    parser.add_argument(
        "--refresh", action="append", default=[], help="run only this table's flows"
    )
    parser.add_argument("--reset", action="append", default=[], help="start this table over")
    parser.add_argument("--once", action="store_true", help="one pass over the log, then end")
    parser.add_argument("--no-standard", action="store_true", help="only the user's pipelines")
    given = vars(parser.parse_args(arguments))
    is_standard = not given.pop("no_standard")
    goes_on = not given.pop("once")
    token = os.environ.get(TOKEN_VARIABLE) or None
    given |= {name: tuple(given[name]) for name in ("refresh", "reset")}
    return PipelineOptions(
        **given, standard=is_standard, token=token, continuous=goes_on, until_stopped=goes_on
    )


def stop_with_input(stop: Callable[[], None]) -> None:
    """Stop when the parent process has ended, if standard input is a pipe from it."""
    kind = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop()

    threading.Thread(target=watch, name="polybus-stdin", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    file_modes.adopt(options.data)
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    # Output of Spark or of a user's file must not be mixed with the events.
    os.dup2(2, 1)
    writing = threading.Lock()

    def say(event: dict[str, Any]) -> None:
        with writing, contextlib.suppress(BrokenPipeError):
            lines.write(msgspec.json.encode(event) + b"\n")

    try:
        supervisor = Supervisor(options, say)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop())
        stop_with_input(supervisor.stop)
        supervisor.run()
    except PolybusError as error:
        say({"event": "failed", "code": error.code, "text": error.text})
        if error.code == "spark.ended":
            # Threads that wait for an answer of the JVM would keep the process alive.
            os._exit(1)
        return 1
    except Exception as error:
        # The parent process reads the event; the traceback goes to standard error.
        say({"event": "failed", "text": f"{type(error).__name__}: {error}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
