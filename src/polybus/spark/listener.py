"""Spark's queries as consumers: their position, lag, speed and last error, told to the bus.

A stream of `format("polybus")` is known by its offsets. Each progress of its query is reported
under the source's `groupId`, or else the query's name or id, and so `polybus topics consumers`,
GET /v1/consumers and the metrics show it beside all others.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from polybus.errors import UsageError
from polybus.spark.causes import clean_cause
from polybus.spark.reporting import Report, Reporter
from polybus.spark.source.offsets import from_json

logger = logging.getLogger("polybus.spark.consumers")

KIND = "spark"
QUERIES_MAX = 1000
OURS = "polybus"


def install(
    spark: Any, *, data: Path | None = None, url: str | None = None, token: str | None = None
) -> ConsumerListener:
    """Report the session's queries, now and later, to the bus of a folder or at an address."""
    listener = ConsumerListener(Reporter(data=data, url=url, token=token))
    spark.streams.addListener(listener)
    return listener


class ConsumerListener(StreamingQueryListener):
    """Turns what Spark tells of queries into reports. Never blocks a query and never fails one."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        # By a query's id: its name, and the groups it reported as.
        self._names: dict[str, str] = {}
        self._groups: dict[str, list[str]] = {}

    def onQueryStarted(self, event: Any) -> None:
        if len(self._names) >= QUERIES_MAX:
            self._names.clear()
        self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: Any) -> None:
        try:
            self._progress(event.progress)
        except Exception:
            logger.exception("a query's progress could not be reported")

    def onQueryIdle(self, event: Any) -> None:
        for group in self._groups.get(str(event.id), ()):
            self.reporter.put(group, {"rows-per-s": 0.0, "run-id": str(event.runId)})

    def onQueryTerminated(self, event: Any) -> None:
        query = str(event.id)
        name = self._names.pop(query, query)
        groups = self._groups.pop(query, [])
        error = event.exception
        if not groups and error and OURS in error:
            # It failed before its first batch, and the reason is ours.
            groups = [name]
        for group in groups:
            report: Report = {"rows-per-s": 0.0}
            if error:
                about = {"kind": KIND, "query-id": query, "run-id": str(event.runId)}
                report |= about | {"last-error": clean_cause(error)}
            self.reporter.put(group, report)

    def _progress(self, progress: Any) -> None:
        query = str(progress.id)
        name = progress.name or query
        groups = positions_by_group(progress.sources, name)
        if len(self._groups) >= QUERIES_MAX:
            self._groups.clear()
        if groups:
            self._groups[query] = list(groups)
        for group, positions in groups.items():
            self.reporter.put(
                group,
                {
                    "kind": KIND,
                    "query-id": query,
                    "run-id": str(progress.runId),
                    "positions": positions,
                    "rows-per-s": _finite(progress.processedRowsPerSecond),
                    "batch-ms": _finite(progress.batchDuration),
                },
            )


def positions_by_group(sources: Any, name: str) -> dict[str, dict[str, dict[str, int]]]:
    """Where a query's sources of ours stand; of two that read one topic, the one behind counts."""
    groups: dict[str, dict[str, dict[str, int]]] = {}
    for source in sources:
        try:
            offset = from_json(json.loads(source.endOffset))
        except (UsageError, ValueError, TypeError):
            continue  # another's source
        positions = groups.setdefault(offset.group or name, {})
        for topic, place in offset.topics.items():
            before = positions.get(topic)
            if before is None or place.offset < before["offset"]:
                positions[topic] = {"epoch": place.epoch, "offset": place.offset}
    return groups


def _finite(figure: Any) -> float:
    try:
        number = float(figure)
    except (TypeError, ValueError):
        return 0.0
    return number if math.isfinite(number) and number >= 0 else 0.0
