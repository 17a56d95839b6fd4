"""Spark queries as consumers of the bus: their position, lag, speed and last error.

A stream of `format("polybus")` is recognised by its offsets. Each progress of its query is reported
under the source's `groupId`, or else under the query's name or id. So `polybus topics consumers`,
GET /v1/consumers and the metrics show it beside other consumers.

A thread sends the reports, so they never delay a query. Only the newest report of each group is
queued, also while the bus is unavailable; if too many groups wait, the oldest reports are dropped.
"""

import logging
import math
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyspark.sql.streaming.listener import StreamingQueryListener

from polybus.client.http.blocking import GONE
from polybus.errors import PolybusError
from polybus.spark.causes import clean_cause
from polybus.spark.checkpoint import our_offset
from polybus.spark.internals import listen
from polybus.spark.location import find_location

logger = logging.getLogger("polybus.spark.consumers")

KIND = "spark"
OURS = "polybus"
QUERIES_MAX = 1000
WAITING_MAX = 1000
RETRY_S = 1.0
SEND_TIMEOUT_S = 5.0

QueryReport = dict[str, Any]


def install(
    spark: Any, *, data: Path | None = None, url: str | None = None, token: str | None = None
) -> "ConsumerListener":
    """Report the session's queries from now on to the bus of a folder or at a URL."""
    listener = ConsumerListener(Reporter(data=data, url=url, token=token))
    listen(spark, listener)
    return listener


class ConsumerListener(StreamingQueryListener):
    """Turns Spark's events into reports. Never blocks a query and never fails one."""

    def __init__(self, reporter: "Reporter") -> None:
        self.reporter = reporter
        # By query id: the query's name, and the groups under which it was reported.
        self._queries: dict[str, tuple[str, list[str]]] = {}

    def onQueryStarted(self, event: Any) -> None:
        self._keep(str(event.id), event.name or str(event.id), [])

    def _keep(self, query: str, name: str, groups: list[str]) -> None:
        if len(self._queries) >= QUERIES_MAX:
            self._queries.clear()
        self._queries[query] = (name, groups)

    def onQueryProgress(self, event: Any) -> None:
        try:
            self.take(event.progress)
        except Exception:
            logger.exception("cannot report the progress of a query")

    def onQueryIdle(self, event: Any) -> None:
        for group in self._queries.get(str(event.id), ("", []))[1]:
            self.reporter.put(group, {"rows-per-s": 0.0, "run-id": str(event.runId)})

    def onQueryTerminated(self, event: Any) -> None:
        query = str(event.id)
        name, groups = self._queries.pop(query, (query, []))
        error = event.exception
        if not groups and error and OURS in error:
            # It failed before its first batch, because of our source or sink.
            groups = [name]
        report: QueryReport = {"rows-per-s": 0.0}
        if error:
            report |= {"kind": KIND, "query-id": query, "run-id": str(event.runId)}
            report["last-error"] = clean_cause(error)
        for group in groups:
            self.reporter.put(group, report)

    def take(self, progress: Any) -> None:
        """Report the progress of a query, also of one that Spark sends no events about."""
        query = str(progress.id)
        name = progress.name or query
        groups = positions_by_group(progress.sources, name)
        if groups:
            self._keep(query, name, list(groups))
        report = {
            "kind": KIND,
            "query-id": query,
            "run-id": str(progress.runId),
            "rows-per-s": _finite(progress.processedRowsPerSecond),
            "batch-ms": _finite(progress.batchDuration),
        }
        offsets = [our_offset(source.endOffset) for source in progress.sources]
        stopped: dict[str, str] = {}
        for offset in filter(None, offsets):
            stopped |= offset.stopped
        for group, positions in groups.items():
            self.reporter.put(group, report | {"positions": positions, "stopped": stopped})


def positions_by_group(sources: Any, name: str) -> dict[str, dict[str, dict[str, int]]]:
    """The positions of our sources in a query; if two read one topic, the lower offset counts."""
    groups: dict[str, dict[str, dict[str, int]]] = {}
    for source in sources:
        offset = our_offset(source.endOffset)
        if offset is None:
            continue
        positions = groups.setdefault(offset.group or name, {})
        for topic, end in offset.topics.items():
            known = positions.get(topic)
            if known is None or end.offset < known["offset"]:
                positions[topic] = {"epoch": end.epoch, "offset": end.offset}
    return groups


def _finite(figure: float | None) -> float:
    return max(0.0, float(figure)) if figure is not None and math.isfinite(figure) else 0.0


class Reporter:
    """Sends reports to the bus of a folder or at a URL, or to the one that the source finds."""

    def __init__(
        self, *, data: Path | None = None, url: str | None = None, token: str | None = None
    ) -> None:
        given = {"data": data, "url": None if data else url, "token": token}
        self._options = {name: str(value) for name, value in given.items() if value is not None}
        self._waiting: dict[str, QueryReport] = {}
        self._sending: QueryReport | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_failing = False
        self.dropped = 0
        threading.Thread(target=self._run, name="polybus-consumers", daemon=True).start()

    def put(self, group: str, report: QueryReport) -> None:
        """Send a report soon. Fields that it lacks keep the values of the last report."""
        with self._changed:
            before = self._waiting.pop(group, {})
            # A report in flight is not merged: the bus would take an old error for a new one.
            self._waiting[group] = report if before is self._sending else before | report
            while len(self._waiting) > WAITING_MAX:
                self._waiting.pop(next(iter(self._waiting)))
                self.dropped += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until everything is sent, or the timeout; return whether it is sent."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send queued reports within the timeout, and stop."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                group, report = next(iter(self._waiting.items()))
                self._sending = report
            is_settled = self._send(group, report)
            with self._changed:
                self._sending = None
                # Another report may have arrived meanwhile, which is newer.
                if not is_settled:
                    self._waiting[group] = report | self._waiting.get(group, {})
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)
                elif self._waiting.get(group) is report:
                    del self._waiting[group]
                self._changed.notify_all()

    def _send(self, group: str, report: QueryReport) -> bool:
        """Return whether the report is settled: accepted, or refused for good."""
        try:
            location = find_location(self._options)
            path = f"/v1/consumers/{quote(group, safe='')}"
            location.call("PUT", path, report, timeout_s=SEND_TIMEOUT_S)
        except PolybusError as error:
            if not self._is_failing:
                logger.info("cannot report positions for now: %s", error.text)
            self._is_failing = True
            return error.code not in (*GONE, "data.not-found")
        except Exception:
            logger.exception("cannot report a position")
            return True
        self._is_failing = False
        return True
