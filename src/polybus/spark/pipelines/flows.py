"""Flows, the units of work of a pipeline: what they are, how far each one is, and running them.

A flow is a streaming query, or batch work that is repeated when its inputs change. All flows run on
one Spark session, each in a thread of its own. A flow starts when the flows that it comes after
allow it. A transient failure is retried with back-off: without limit in continuous mode, a few
times in one pass. Any other failure marks the flow as failed, and the other flows continue.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from polybus.spark.causes import clean_cause, is_transient
from polybus.spark.checkpoint import Checkpoint, our_offset
from polybus.spark.expectations import Expectation, ExpectationCount, added, counts_in
from polybus.spark.internals import activate_in_thread
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.lag import LogEnds

FlowState = Literal["starting", "running", "waiting", "done", "failed", "stopped"]
HELD_SHOWN_MAX = 5
_TICK_S = 0.1
_STARTS_AT_ONCE_MAX = 4
_STOP_DEADLINE_S = 10.0
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)


@dataclasses.dataclass
class FlowProgress:
    """The figures of one flow. Each batch counts once, also after a restart.

    `rows` counts the rows that a stream has read, or those that a materialized view has. `lag`
    counts messages not yet processed. Either is None if it is unknown.
    """

    pipeline: str = ""
    flow: str = ""
    state: FlowState = "starting"
    rows: int | None = 0
    rows_per_s: float = 0.0
    lag: int | None = None
    batch_ms: int | None = None
    batch_id: int | None = None
    batch_rows: int | None = None
    """Rows of the last batch."""
    error: str | None = None
    warning: str | None = None
    """Damaged and stopped topics, which a running flow does not read, and refused settings."""
    expectations: list[ExpectationCount] = dataclasses.field(default_factory=list)
    """The counts of each expectation since the flow started."""
    inputs: list[str] = dataclasses.field(default_factory=list)
    outputs: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._batch = -1
        self._positions: dict[str, int] = {}
        self._reported_lag: int | None = None
        self._scans: dict[int, int] = {}
        self._warnings: dict[str, str] = {}
        # By the name of the figures in the query's progress.
        self.observed: dict[str, list[Expectation]] = {}

    def scanned(self, batch_id: int, times: int) -> None:
        """Set how many times the flow read a batch: Spark counts its rows each time, we count them
        once.
        """
        self._scans[batch_id] = times

    def warn(self, topic: str, text: str | None) -> None:
        """Set why the flow runs without some settings of a topic, or None."""
        self._warnings.pop(topic, None)
        if text is not None:
            self._warnings[topic] = text

    def held(
        self, *, damaged: Mapping[str, str] | None = None, stopped: Mapping[str, str] | None = None
    ) -> None:
        """The topics that the flow does not read, and why."""
        texts = [damage_warning(damaged)] if damaged else []
        held = [f"topic {topic!r} is {text}" for topic, text in (stopped or {}).items()]
        texts += held[:HELD_SHOWN_MAX]
        texts += list(self._warnings.values())[:HELD_SHOWN_MAX]
        self.warning = "; ".join(texts) or None

    def expected(self, counts: Iterable[ExpectationCount]) -> None:
        """Add the counts of a finished batch."""
        added(self.expectations, counts)

    def update(self, query: Any) -> None:
        """Take the batches that `query` ran since the last call."""
        last = query.lastProgress
        if last is None:
            return
        is_next = last["batchId"] <= self._batch + 1
        for batch in [last] if is_next else query.recentProgress:
            self._take(batch)
        if not query.status["isTriggerActive"] and not query.status["isDataAvailable"]:
            self.rows_per_s = 0.0

    def _take(self, batch: Any) -> None:
        self._take_offsets(batch["sources"])
        number = batch["batchId"]
        if number <= self._batch or batch.numInputRows == 0:
            return
        self.batch_id = self._batch = number
        for name, found in batch.observedMetrics.items():
            self.expected(counts_in(found.asDict(), self.observed.get(name, ())))
        self.batch_ms = batch["batchDuration"]
        rows = batch.numInputRows // max(1, self._scans.get(number, 1))
        self._scans = {one: times for one, times in self._scans.items() if one > number}
        if self.rows is not None:
            self.rows += rows
            self.batch_rows = rows
            self.rows_per_s = 1000 * rows / max(1, self.batch_ms)

    def _take_offsets(self, sources: Any) -> None:
        self._reported_lag = None
        damaged: dict[str, str] = {}
        stopped: dict[str, str] = {}
        for source in sources:
            end, latest = our_offset(source["endOffset"]), our_offset(source["latestOffset"])
            if end is None:
                continue
            damaged |= end.damaged
            stopped |= end.stopped
            self._positions |= {topic: at.offset for topic, at in end.topics.items()}
            if latest is not None:
                behind = sum(
                    max(0, latest.topics[topic].offset - at.offset)
                    for topic, at in end.topics.items()
                    if topic in latest.topics
                )
                self._reported_lag = behind + (self._reported_lag or 0)
        self.held(damaged=damaged, stopped=stopped)

    def take_begun(self, checkpoint: Checkpoint) -> None:
        """Use the start of an unfinished batch as position, if no batch has finished yet."""
        if self._positions:
            return
        begun = checkpoint.unfinished_batch()
        end = None if begun is None else checkpoint.planned_end(begun)
        if begun is None or end is None:
            return
        before = checkpoint.planned_end(begun - 1)
        known = {} if before is None else before.topics
        for topic, at in end.topics.items():
            start = known[topic].offset if topic in known else 0
            self._positions[topic] = start if at.begin is None else at.begin

    @property
    def positions(self) -> dict[str, int]:
        """The next offset of each topic, as a copy: the flow's own thread may add topics."""
        return dict(self._positions)

    def update_lag(self, log: LogEnds | None) -> None:
        """Compare the positions with the log; without it, take what Spark reported."""
        positions = self.positions
        lag = None if log is None or not positions else log.behind(positions)
        self.lag = self._reported_lag if lag is None else lag


def damage_warning(damaged: Mapping[str, str]) -> str:
    """The topics that a flow does not read, why, and what to do."""
    shown = [f"topic {topic!r} is left out: {text}" for topic, text in damaged.items()]
    more = f" (and {len(shown) - HELD_SHOWN_MAX} more topics)"
    return (
        f"log.damaged: {'; '.join(shown[:HELD_SHOWN_MAX])}"
        f"{more if len(shown) > HELD_SHOWN_MAX else ''}; restore the file, and the pipeline "
        "continues the topic where it stopped"
    )


@dataclasses.dataclass(kw_only=True)
class FlowContext:
    """The context for the start of a flow."""

    spark: Any
    bus: BusLocation
    checkpoint: Path
    trigger: dict[str, Any]
    """Keyword arguments of DataStreamWriter.trigger."""
    figures: FlowProgress = dataclasses.field(default_factory=FlowProgress)
    """Receives the figures that Spark does not have."""


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineFlow:
    """One unit of work of a pipeline.

    `start` starts the flow's streaming query and returns it, or does all work of a batch flow and
    returns None. `after` names flows of the same pipeline that precede this one: in one pass they
    must be done, in continuous mode they must have caught up once. In continuous mode, a batch
    flow with `repeat_s` runs again that long after its last run; `start` itself checks whether
    there is anything to do. `reads` and `writes` name its inputs and its output, for display;
    `inputs` and `outputs` do with their kinds: `topic:orders`, `table:silver`, `sink:console`. An
    output that ends with `*` is every table with this prefix.
    """

    pipeline: str
    name: str
    start: Callable[[FlowContext], Any]
    after: tuple[str, ...] = ()
    repeat_s: float | None = None
    news: threading.Event | None = None
    """Set when there is work before `repeat_s` is over."""
    retried: tuple[str, ...] = ()
    """Codes of errors after which it is retried, in addition to transient failures."""
    retried_advice: str = ""
    """The advice for these errors."""
    reads: tuple[str, ...] = ()
    writes: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    refresh: str = ""
    """How a materialized view is brought up to date, for display."""

    @property
    def full_name(self) -> str:
        return f"{self.pipeline}.{self.name}"


def checkpoints_of(data: Path, pipeline: str) -> Path:
    """The folder with a checkpoint per flow of a pipeline."""
    return data / "pipeline" / "checkpoints" / pipeline


@dataclasses.dataclass(kw_only=True, eq=False)
class _FlowRun(FlowContext):
    """A flow with its query and its figures."""

    flow: PipelineFlow
    query: Any = None
    caught_up: bool = False
    failures_in_a_row: int = 0
    failed_batch: int | None = None
    on_progress: Callable[[Any], None] | None = None
    _updating: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        return self.figures.state in ("done", "failed", "stopped")

    def update(self) -> None:
        """Read the query's progress; a batch that succeeded ends a series of failures."""
        query = self.query
        if query is None:
            return
        with self._updating:
            before = self.figures.batch_id
            try:
                self.figures.update(query)
                if self.on_progress is not None and query.lastProgress is not None:
                    self.on_progress(query.lastProgress)
            except Exception:  # the session has ended; the figures stay as they were
                return
            if self.figures.batch_id != before:
                self.failures_in_a_row = 0
                if self.figures.state == "running":
                    self.figures.error = None


class FlowRunner:
    """Starts flows, retries them, stops them, and knows the progress of each."""

    def __init__(
        self,
        spark: Any,
        bus: BusLocation,
        *,
        continuous: bool,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        """`on_progress` is called with the progress of each query, about every second."""
        self._on_progress = on_progress
        self._spark = spark
        self._bus = bus
        self._continuous = continuous
        self._ends = LogEnds(bus.data) if bus.url is None else None
        self._runs: dict[str, _FlowRun] = {}
        self._threads: list[threading.Thread] = []
        # Guards every state of a flow; notified when one changes.
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._starts = threading.Semaphore(_STARTS_AT_ONCE_MAX)

    def start(self, *flows: PipelineFlow) -> None:
        """Run flows, each as soon as those that it comes after allow it; returns at once."""
        runs = [self._run_of(flow) for flow in flows]
        with self._changed:
            self._runs |= {run.flow.full_name: run for run in runs}
        for run in runs:
            thread = threading.Thread(
                target=self._run, args=(run,), name="polybus-flow", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _run_of(self, flow: PipelineFlow) -> _FlowRun:
        # A stream has read nothing yet; a batch flow reports what it wrote.
        rows = 0 if flow.repeat_s is None else None
        return _FlowRun(
            flow=flow,
            spark=self._spark,
            bus=self._bus,
            checkpoint=checkpoints_of(self._bus.data, flow.pipeline) / flow.name,
            trigger={"processingTime": "0 seconds"} if self._continuous else {"availableNow": True},
            figures=FlowProgress(
                flow.pipeline,
                flow.name,
                rows=rows,
                inputs=list(flow.inputs),
                outputs=list(flow.outputs),
            ),
            on_progress=self._on_progress,
        )

    def progress(self) -> list[FlowProgress]:
        """A copy of every flow's figures."""
        with self._changed:
            runs = list(self._runs.values())
        for run in runs:
            run.update()
            if run.query is not None:
                run.figures.take_begun(Checkpoint(run.checkpoint))
        if self._ends is not None:
            self._ends.look({topic for run in runs for topic in run.figures.positions})
        for run in runs:
            run.figures.update_lag(self._ends)
        return [dataclasses.replace(run.figures) for run in runs]

    @property
    def failures(self) -> list[FlowProgress]:
        return [one for one in self.progress() if one.state == "failed"]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every flow is done, failed or stopped; False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(run.is_over for run in self._runs.values()), timeout_s
            )

    def stop(self, deadline_s: float = _STOP_DEADLINE_S) -> bool:
        """Stop all flows; False if some had not ended at the deadline, which their error states."""
        until_s = time.monotonic() + deadline_s
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        for run in self._runs.values():
            if run.flow.news is not None:
                run.flow.news.set()
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        late = [run for run in self._runs.values() if not run.is_over]
        for run in late:
            self._set_state(run, "stopped", "was still busy at the deadline for stopping")
        return not late

    # In the thread of a flow.

    def _run(self, run: _FlowRun) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None and not self._pause(run, pause_s) and self._await_turn(run):
            try:
                is_stream = self._run_once(run)
            except Exception as error:
                run.figures.take_begun(Checkpoint(run.checkpoint))
                pause_s = self._pause_after(run, error)
                is_final = pause_s is None and not self._stopping.is_set()
                self._set_state(
                    run,
                    "failed" if is_final else "waiting",
                    _failure(run, error, is_final=is_final),
                )
            else:
                run.caught_up = True
                run.failures_in_a_row = 0
                pause_s = run.flow.repeat_s if self._continuous and not is_stream else None
                was_cut = is_stream and (self._continuous or self._stopping.is_set())
                if pause_s is not None:
                    self._set_state(run, "waiting")
                elif not was_cut:
                    self._set_state(run, "done")
        # If it is neither done nor failed. A flow that was waiting for a retry keeps its error.
        self._set_state(run, "stopped", run.figures.error)

    def _pause(self, run: _FlowRun, pause_s: float) -> bool:
        """Wait until there is new work (not after a failure); return whether all flows stop."""
        news = run.flow.news
        if news is None or run.failures_in_a_row:
            return self._stopping.wait(pause_s)
        news.wait(pause_s)
        news.clear()
        return self._stopping.is_set()

    def _await_turn(self, run: _FlowRun) -> bool:
        """Wait until the flow may start; False if it will not."""
        firsts = [f"{run.flow.pipeline}.{name}" for name in run.flow.after]
        with self._changed:
            needed = [self._runs[first] for first in firsts if first in self._runs]
            while not self._stopping.is_set():
                failed = [first.flow.name for first in needed if first.figures.state == "failed"]
                if failed and not self._continuous:
                    run.figures.error = f"not run, because {', '.join(failed)} failed"
                    return False
                if all(one.is_over or (one.caught_up and self._continuous) for one in needed):
                    return True
                if run.figures.state == "starting":
                    self._set_state(run, "waiting")
                self._changed.wait(_TICK_S)
        return False

    def _run_once(self, run: _FlowRun) -> bool:
        """Run a batch flow, or a stream to its end; return whether it was a stream."""
        run.failed_batch = None
        with self._starts:
            if self._stopping.is_set():
                return True
            if run.figures.state == "waiting":
                run.figures.state = "running"
            activate_in_thread(self._spark)
            run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            query = run.flow.start(run)
        if query is None:
            return False
        run.query = query
        self._set_state(run, "running")
        while query.isActive:
            if self._stopping.wait(_TICK_S):
                query.stop()
            elif not run.caught_up:
                run.caught_up = _has_caught_up(query)
        error = query.exception()
        run.update()
        run.query = None
        if error is not None and not self._stopping.is_set():
            run.failed_batch = Checkpoint(run.checkpoint).unfinished_batch()
            raise error
        return True

    def _pause_after(self, run: _FlowRun, error: Exception) -> float | None:
        """How long to wait before the next attempt; None to give up."""
        tries = run.failures_in_a_row
        is_retried = is_transient(error) or clean_cause(error).startswith(run.flow.retried)
        if not is_retried or (not self._continuous and tries >= len(_BACKOFF_S)):
            return None
        run.failures_in_a_row = tries + 1
        return _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]

    def _set_state(self, run: _FlowRun, state: FlowState, error: str | None = None) -> None:
        with self._changed:
            if run.is_over:
                return
            run.figures.state = state
            run.figures.error = error
            if run.is_over:
                run.figures.rows_per_s = 0.0
            self._changed.notify_all()


def _failure(run: _FlowRun, error: Exception, *, is_final: bool) -> str:
    """Which batch of a stream failed, why, and what to do about it."""
    cause = clean_cause(error)
    if run.failed_batch is None:
        return cause
    advice = ""
    if is_final:
        advice = "; fix the cause, then restart the pipeline: it continues with this batch"
    elif run.flow.retried and cause.startswith(run.flow.retried):
        advice = f"; {run.flow.retried_advice}"
    return f"batch {run.failed_batch}: {cause}{advice}"


def _has_caught_up(query: Any) -> bool:
    status = query.status
    is_idle = not status["isDataAvailable"] and not status["isTriggerActive"]
    return is_idle and (query.lastProgress is not None or "Waiting for data" in status["message"])
