"""OTLP: the metrics of the bus, sent to an OpenTelemetry collector as JSON over HTTP.

They are those of /metrics, under the same names. A collector that does not answer only causes a
line in the log at the beginning and the end of the outage: the next totals include what was not
sent.
"""

import asyncio
import logging
import time
import urllib.request
from collections.abc import Iterable
from typing import Any

import msgspec

from polybus.edges.http.metrics.gather import Metrics, gather
from polybus.edges.http.metrics.of_process import Labels, Sample
from polybus.edges.http.state import HttpState
from polybus.log.journal.timings import BOUNDS_S, Timings
from polybus.version import __version__

logger = logging.getLogger("polybus.otlp")

CUMULATIVE = 2
ANSWER_TIMEOUT_S = 10.0


class OtlpExport:
    """Sends the metrics every `otlp.interval-s` seconds, until it is stopped."""

    def __init__(self, state: HttpState) -> None:
        self._state = state
        self._settings = state.config.otlp
        self._started_ns = time.time_ns()
        self._is_failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._settings.endpoint:
            self._task = self._state.loop.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_s)
            metrics = await gather(self._state)
            try:
                await asyncio.to_thread(self._send, metrics)
            except (OSError, ValueError) as error:
                if not self._is_failing:
                    text = "metrics cannot be sent to %s (otlp.endpoint); the bus tries again: %s"
                    logger.warning(text, self._settings.endpoint, error)
                self._is_failing = True
            else:
                if self._is_failing:
                    logger.info("metrics are sent to %s again", self._settings.endpoint)
                self._is_failing = False

    def _send(self, metrics: Metrics) -> None:
        """May block. Raises OSError, ValueError."""
        # A scheme other than these would read files.
        if not self._settings.endpoint.startswith(("http://", "https://")):
            raise ValueError("the URL must begin with http:// or https://")
        request = urllib.request.Request(
            self._settings.endpoint,
            msgspec.json.encode(encode(metrics, self._started_ns, time.time_ns())),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            answer.read(1024)


def encode(metrics: Metrics, started_ns: int, now_ns: int) -> dict[str, Any]:
    """An ExportMetricsServiceRequest in the JSON form of OTLP: 64-bit numbers are text there."""
    times = {"startTimeUnixNano": str(started_ns), "timeUnixNano": str(now_ns)}
    found: list[dict[str, Any]] = []
    for name, kind, text, samples in metrics.families:
        if points := _points(samples, times):
            about: dict[str, Any] = {"name": name, "description": text}
            if kind == "counter":
                total = {"aggregationTemporality": CUMULATIVE, "isMonotonic": True}
                found.append(about | {"sum": total | {"dataPoints": points}})
            else:
                found.append(about | {"gauge": {"dataPoints": points}})
    for name, (text, timings) in metrics.timings.items():
        data = {"aggregationTemporality": CUMULATIVE, "dataPoints": [_timed(timings, times)]}
        about = {"name": f"polybus_{name}", "description": text, "unit": "s"}
        found.append(about | {"histogram": data})
    scope = {"name": "polybus", "version": __version__}
    resource = {"attributes": _attributes({"service.name": "polybus"})}
    measured = {"scope": scope, "metrics": found}
    return {"resourceMetrics": [{"resource": resource, "scopeMetrics": [measured]}]}


def _points(samples: Iterable[Sample], times: dict[str, str]) -> list[dict[str, Any]]:
    return [
        times | {"asDouble": float(value), "attributes": _attributes(labels)}
        for labels, value in samples
    ]


def _timed(timings: Timings, times: dict[str, str]) -> dict[str, Any]:
    counts = list(timings.counts)
    return times | {
        "count": str(sum(counts)),
        "sum": timings.total_s,
        "bucketCounts": [str(one) for one in counts],
        "explicitBounds": list(BOUNDS_S),
    }


def _attributes(labels: Labels) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in labels.items()]
