"""The runner that keeps many flows going on one Spark session.

One that fails is marked failed with its cause and the others go on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polybus.spark.pipelines.flows import Flow, FlowContext, use_in_thread
from polybus.spark.pipelines.running.causes import clean_cause, is_transient
from polybus.spark.pipelines.running.progress import (
    FlowProgress,
    QueryProgress,
    StopOffsets,
    log_ends,
)

logger = logging.getLogger("polybus.spark")

_TICK_S = 0.1
_STARTS_AT_ONCE_MAX = 4
_STOP_DEADLINE_S = 10.0
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class _Running:
    """A flow with its query and its figures; changed under the runner's lock only."""

    def __init__(self, flow: Flow, context: FlowContext) -> None:
        self.flow = flow
        # A stream has read nothing yet; work that is done in one call says for itself what it did.
        rows = 0 if flow.again_s is None else None
        self.shown = FlowProgress(flow.pipeline, flow.name, rows=rows)
        self.figures = QueryProgress(self.shown)
        self.context = dataclasses.replace(context, figures=self.figures)
        self.query: Any = None
        self.launching = False
        self.caught_up = False
        self.due_s = 0.0
        self.failures_in_a_row = 0
        self.failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.shown.state in ("done", "failed", "stopped")


class FlowRunner:
    """Starts flows, restarts what failed for a passing reason, and knows how far each is.

    A thread of its own looks after the queries, so `start` returns at once.
    """

    def __init__(
        self,
        spark: Any,
        data: Path,
        *,
        url: str | None = None,
        token: str | None = None,
        continuous: bool = False,
        trigger: dict[str, Any] | None = None,
    ) -> None:
        self._spark = spark
        self._data = data
        self._url = url
        self._token = token
        self._continuous = continuous
        self._trigger = trigger or ({"processingTime": "0 seconds"} if continuous else {})
        self._trigger = self._trigger or {"availableNow": True}
        self._flows: dict[str, _Running] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self._starters = ThreadPoolExecutor(_STARTS_AT_ONCE_MAX, "polybus-flow")
        self._watcher: threading.Thread | None = None

    def start(self, flow: Flow) -> None:
        """Let `flow` run as soon as the flows it comes after allow it; returns at once.

        A flow that is over may be started again, and goes on from its checkpoint.
        """
        with self._lock:
            before = self._flows.get(flow.full_name)
            assert before is None or before.is_over, f"{flow.full_name} runs already"
            running = _Running(flow, self._context(flow))
            if before is not None:
                running.shown.rows = before.shown.rows
            self._flows[flow.full_name] = running
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="polybus-flows", daemon=True
                )
                self._watcher.start()

    def _context(self, flow: Flow) -> FlowContext:
        checkpoints = self._data / "pipeline" / "checkpoints"
        return FlowContext(
            spark=self._spark,
            data=self._data,
            url=self._url,
            token=self._token,
            continuous=self._continuous,
            checkpoint=checkpoints / flow.pipeline / flow.name,
            trigger=dict(self._trigger),
        )

    # What the outside sees

    def progress(self, stop_offsets: StopOffsets | None = None) -> list[FlowProgress]:
        """A copy of every flow's figures.

        `stop_offsets` gives the ends of topics, for the lag; without it the log in the data folder
        is asked or, where the bus is elsewhere, what the source last heard counts.
        """
        with self._lock:
            flows = list(self._flows.values())
        if stop_offsets is None and self._url is None:
            stop_offsets = log_ends(self._data)
        for running in flows:
            query = running.query
            if query is not None:
                self._update(running, query)
            running.figures.update_lag(stop_offsets)
        return [dataclasses.replace(running.shown) for running in flows]

    @property
    def failures(self) -> list[FlowProgress]:
        with self._lock:
            return [
                dataclasses.replace(running.shown)
                for running in self._flows.values()
                if running.shown.state == "failed"
            ]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every flow is done, failed or stopped; False if time ran out first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(running.is_over for running in self._flows.values()), timeout_s
            )

    def stop(self, deadline_s: float = _STOP_DEADLINE_S) -> bool:
        """Stop all flows; False if one had not ended at the deadline (it is marked so)."""
        until_s = time.monotonic() + deadline_s
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            flows = [running for running in self._flows.values() if not running.is_over]
        stoppers = [
            threading.Thread(
                target=self._stop_one, args=(running,), name="polybus-stop", daemon=True
            )
            for running in flows
        ]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join(max(0.0, until_s - time.monotonic()))
        self._starters.shutdown(wait=False, cancel_futures=True)
        if self._watcher is not None:
            self._watcher.join(max(0.1, until_s - time.monotonic()))
        late = [running for running in flows if not running.is_over]
        for running in late:
            self._set_state(running, "stopped", "was still busy when the time to stop was over")
        return not late

    def _stop_one(self, running: _Running) -> None:
        query = running.query
        if query is not None:
            try:
                query.stop()
            except Exception as error:  # a query that fails while it is stopped has stopped
                self._set_state(running, "stopped", clean_cause(error))
                return
            self._update(running, query)
        with self._changed:
            self._changed.wait_for(lambda: not running.launching, _STOP_DEADLINE_S)
        failure = running.failure
        self._set_state(running, "stopped", clean_cause(failure) if failure else None)

    # The watcher's thread

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_TICK_S)
                if self._stopping:
                    return
                flows = list(self._flows.values())
            for running in flows:
                self._look_after(running)

    def _look_after(self, running: _Running) -> None:
        if running.is_over or running.launching:
            return
        query = running.query
        if query is None:
            if time.monotonic() < running.due_s:
                return
            if self._may_start(running):
                self._launch(running)
            elif running.shown.state == "starting":
                self._set_state(running, "waiting")
        elif not query.isActive:
            self._ended(running, query)
        elif not running.caught_up:
            self._look_for_caught_up(running, query)

    def _may_start(self, running: _Running) -> bool:
        firsts = [
            first
            for name in running.flow.after
            if (first := self._flows.get(f"{running.flow.pipeline}.{name}")) is not None
        ]
        if any(first.shown.state == "failed" for first in firsts) and not self._continuous:
            names = ", ".join(one.flow.name for one in firsts if one.shown.state == "failed")
            self._set_state(running, "stopped", f"not run, because {names} failed")
            return False
        return all(first.is_over or first.caught_up for first in firsts)

    def _launch(self, running: _Running) -> None:
        running.launching = True
        self._starters.submit(self._start_now, running)

    def _start_now(self, running: _Running) -> None:
        try:
            if running.shown.state == "waiting" and running.query is None:
                running.shown.state = "running"
            running.context.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            use_in_thread(running.context.spark)
            if not self._recovered(running):
                return
            query = running.flow.start(running.context)
        except Exception as error:
            self._failed(running, error)
        else:
            with self._changed:
                running.query = query
                running.failures_in_a_row = 0 if query is None else running.failures_in_a_row
            if query is None:
                self._batch_done(running)
            else:
                self._set_state(running, "running")
        finally:
            with self._changed:
                running.launching = False
                self._changed.notify_all()
        if self._stopping and running.query is not None:
            running.query.stop()

    def _batch_done(self, running: _Running) -> None:
        running.caught_up = True
        if self._continuous and running.flow.again_s is not None:
            running.due_s = time.monotonic() + running.flow.again_s
            self._set_state(running, "waiting")
        else:
            self._set_state(running, "done")

    def _ended(self, running: _Running, query: Any) -> None:
        error = query.exception()
        self._update(running, query)
        with self._lock:
            running.query = None
        if error is not None:
            self._failed(running, error)
        else:
            self._set_state(running, "stopped" if self._continuous else "done")

    def _failed(self, running: _Running, error: BaseException) -> None:
        """Let the flow recover if it can: on a starter's thread, since that may take a while."""
        if running.flow.recover is None:
            self._try_later(running, error)
            return
        running.failure = error
        running.due_s = 0.0
        self._set_state(running, "waiting", clean_cause(error))

    def _recovered(self, running: _Running) -> bool:
        """Whether the flow may start now: it did not fail, or did something about it."""
        error, recover = running.failure, running.flow.recover
        if error is None or recover is None:
            return True
        try:
            may_start = recover(running.context, error)
        except Exception as problem:
            if is_transient(problem) and self._wait(running, clean_cause(error)):
                # The failure stays, and is looked at again then.
                return False
            logger.exception("flow %s cannot recover", running.flow.full_name)
            may_start = False
        running.failure = None
        if not may_start:
            self._try_later(running, error)
        return may_start

    def _try_later(self, running: _Running, error: BaseException) -> None:
        """Try again later if that may help, as long as a pipeline without end, else say why."""
        cause = clean_cause(error)
        if not (is_transient(error) and self._wait(running, cause)):
            self._set_state(running, "failed", cause)

    def _wait(self, running: _Running, cause: str) -> bool:
        """Wait before the next try; False when there were enough."""
        tries = running.failures_in_a_row
        if not self._continuous and tries >= len(_BACKOFF_S):
            return False
        running.failures_in_a_row = tries + 1
        running.due_s = time.monotonic() + _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
        self._set_state(running, "waiting", cause)
        return True

    def _look_for_caught_up(self, running: _Running, query: Any) -> None:
        status = query.status
        idle = not status["isDataAvailable"] and not status["isTriggerActive"]
        if idle and (query.lastProgress is not None or "Waiting for data" in status["message"]):
            running.caught_up = True

    def _update(self, running: _Running, query: Any) -> None:
        try:
            before = running.shown.batch_id
            running.figures.update(query)
        except Exception:  # the session may be gone; the figures stay as they were
            return
        if running.shown.batch_id != before:
            running.failures_in_a_row = 0
            if running.shown.state == "running":
                running.shown.error = None

    def _set_state(self, running: _Running, state: Any, error: str | None = None) -> None:
        with self._changed:
            if running.is_over:
                return
            running.shown.state = state
            running.shown.error = error
            if running.is_over:
                running.shown.rows_per_s = 0.0
            self._changed.notify_all()
