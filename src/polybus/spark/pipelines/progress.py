"""How far a flow is: rows, rate, lag and batch time, from what its streaming query reports."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

from polybus.errors import PolybusError
from polybus.spark.source.offsets import our_offset

FlowState = Literal["starting", "running", "waiting", "done", "failed", "stopped"]
DAMAGED_SHOWN_MAX = 5


@dataclasses.dataclass(slots=True)
class FlowProgress:
    """The figures of one flow.

    `rows` counts the rows that a stream has read, or those that a materialized view has. `lag`
    counts messages not yet processed. Either is None if it is unknown.
    """

    pipeline: str
    flow: str
    state: FlowState = "starting"
    rows: int | None = 0
    rows_per_s: float = 0.0
    lag: int | None = None
    batch_ms: int | None = None
    batch_id: int | None = None
    error: str | None = None
    warning: str | None = None
    """Damaged topics, which a running flow does not read."""


class FlowFigures:
    """Keeps a flow's progress up to date; each batch counts once, also after a restart."""

    def __init__(self, progress: FlowProgress | None = None) -> None:
        self._progress = progress or FlowProgress("", "")
        self._batch_id = -1
        self._positions: dict[str, int] = {}
        self._reported_lag: int | None = None
        self._scans: dict[int, int] = {}

    def scanned(self, batch_id: int, times: int) -> None:
        """The flow read a batch this often: Spark counts its rows each time, we count them once."""
        self._scans[batch_id] = times

    def cannot_count(self) -> None:
        """Nobody reports how often the flow reads a batch."""
        self._progress.rows = None

    def wrote(self, rows: int) -> None:
        """A materialized view now has this many rows."""
        self._progress.rows = rows

    def update(self, query: Any) -> None:
        """Take the batches that `query` ran since the last call."""
        last = query.lastProgress
        if last is None:
            return
        is_next = last["batchId"] <= self._batch_id + 1
        for batch in [last] if is_next else query.recentProgress:
            self._take(batch)
        if not query.status["isTriggerActive"] and not query.status["isDataAvailable"]:
            self._progress.rows_per_s = 0.0

    def _take(self, batch: Any) -> None:
        self._take_offsets(batch["sources"])
        if batch["batchId"] <= self._batch_id or batch.numInputRows == 0:
            return
        progress = self._progress
        self._batch_id = progress.batch_id = batch["batchId"]
        rows = batch.numInputRows // max(1, self._scans.get(self._batch_id, 1))
        self._scans = {one: times for one, times in self._scans.items() if one > self._batch_id}
        progress.batch_ms = batch["batchDuration"]
        if progress.rows is not None:
            progress.rows += rows
            progress.rows_per_s = 1000 * rows / max(1, progress.batch_ms)

    def _take_offsets(self, sources: Any) -> None:
        self._reported_lag = None
        damaged: dict[str, str] = {}
        for source in sources:
            end, latest = our_offset(source["endOffset"]), our_offset(source["latestOffset"])
            if end is None:
                continue
            damaged |= end.damaged
            self._positions |= {topic: at.offset for topic, at in end.topics.items()}
            if latest is not None:
                behind = sum(
                    max(0, latest.topics[topic].offset - at.offset)
                    for topic, at in end.topics.items()
                    if topic in latest.topics
                )
                self._reported_lag = behind + (self._reported_lag or 0)
        self._progress.warning = damage_warning(damaged) if damaged else None

    def update_lag(self, log: Path | None) -> None:
        """Compare the positions with the log in a folder; without it, with what Spark reported."""
        ends = None if log is None or not self._positions else log_ends(log, list(self._positions))
        self._progress.lag = (
            self._reported_lag
            if ends is None
            else sum(max(0, end - self._positions[topic]) for topic, end in ends.items())
        )


def log_ends(data: Path, topics: list[str]) -> dict[str, int] | None:
    """The end offsets of topics in the log's files; None if the folder has no log."""
    from polybus.log.reading.reader import LogReader

    try:
        reader = LogReader(data)
    except PolybusError:
        return None
    ends = {}
    for topic in topics:
        with contextlib.suppress(PolybusError):  # deleted, or damaged
            ends[topic] = reader.bounds(topic).stop
    return ends


def damage_warning(damaged: dict[str, str]) -> str:
    """What a flow does not read, what is wrong with it, and what to do."""
    shown = [f"topic {topic!r} is left out: {text}" for topic, text in damaged.items()]
    more = f" (and {len(shown) - DAMAGED_SHOWN_MAX} more topics)"
    return (
        f"log.damaged: {'; '.join(shown[:DAMAGED_SHOWN_MAX])}"
        f"{more if len(shown) > DAMAGED_SHOWN_MAX else ''}; restore the file, and the pipeline "
        "continues the topic where it stopped"
    )
