"""How far a flow is: rows, rate, lag and batch time, read from its streaming query."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from polybus.errors import PolybusError

State = Literal["starting", "running", "waiting", "done", "failed", "stopped"]

# topic -> the offset after its last message
StopOffsets = Callable[[list[str]], Mapping[str, int]]


@dataclasses.dataclass(slots=True)
class FlowProgress:
    """Figures of one flow.

    `rows` is what a stream read, or what a materialized view has since it was made last, and `lag`
    messages not yet processed. Either is None where nobody can tell.
    """

    pipeline: str
    flow: str
    state: State = "starting"
    rows: int | None = 0
    rows_per_s: float = 0.0
    lag: int | None = None
    batch_ms: int | None = None
    batch_id: int | None = None
    error: str | None = None
    warning: str | None = None
    """What the flow does without, while it runs."""


class QueryProgress:
    """Adds up what a streaming query reports; a batch counts once, also after a restart."""

    def __init__(self, shown: FlowProgress) -> None:
        self._shown = shown
        self._batch_id = -1
        self._positions: dict[str, int] = {}
        self._told_lag: int | None = None
        self._scans: dict[int, int] = {}

    def scanned(self, batch_id: int, times: int) -> None:
        """A batch was read so often: Spark counts a row each time, and we do once."""
        self._scans[batch_id] = times

    def warn(self, text: str) -> None:
        """Say what the flow goes on without; it stays until the next word."""
        self._shown.warning = text

    def cannot_count(self) -> None:
        """Nobody will tell how often batches are read."""
        self._shown.rows = None

    def wrote(self, rows: int) -> None:
        """A view was made anew."""
        self._shown.rows = rows

    def update(self, query: Any) -> None:
        """Take over what `query` did since the last call."""
        last = query.lastProgress
        if last is None:
            return
        batches = [last]
        if last["batchId"] > self._batch_id + 1:
            batches = query.recentProgress
        for progress in batches:
            self._take(progress)
        if not query.status["isTriggerActive"] and not query.status["isDataAvailable"]:
            self._shown.rows_per_s = 0.0

    def _take(self, progress: Any) -> None:
        rows = progress.numInputRows
        self._take_positions(progress["sources"])
        if progress["batchId"] <= self._batch_id or rows == 0:
            return
        shown = self._shown
        self._batch_id = shown.batch_id = progress["batchId"]
        times = max(1, self._scans.get(self._batch_id, 1))
        for done in list(self._scans):
            if done <= self._batch_id:
                del self._scans[done]
        shown.batch_ms = progress["batchDuration"]
        if shown.rows is not None:
            shown.rows += rows // times
            shown.rows_per_s = 1000 * (rows // times) / max(1, shown.batch_ms)

    def _take_positions(self, sources: Any) -> None:
        lag: int | None = None
        for source in sources:
            end = topic_offsets(source["endOffset"])
            self._positions.update(end)
            latest = topic_offsets(source["latestOffset"])
            if end and latest:
                behind = sum(max(0, latest[topic] - end[topic]) for topic in latest if topic in end)
                lag = behind + (lag or 0)
        self._told_lag = lag

    def update_lag(self, stop_offsets: StopOffsets | None) -> None:
        """Set the lag against the log's own end, or against what the source last knew of it."""
        if not self._positions:
            self._shown.lag = None
            return
        if stop_offsets is None:
            self._shown.lag = self._told_lag
            return
        stops = stop_offsets(list(self._positions))
        self._shown.lag = sum(
            max(0, stops[topic] - offset)
            for topic, offset in self._positions.items()
            if topic in stops
        )


def unseen() -> QueryProgress:
    """Figures that nobody looks at, for a flow without a runner."""
    return QueryProgress(FlowProgress("", ""))


def topic_offsets(offset: Any) -> dict[str, int]:
    """topic -> next offset, of an offset of our source; {} for any other source's."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    topics = offset.get("topics") if isinstance(offset, dict) else None
    if not isinstance(topics, dict):
        return {}
    return {
        topic: position["offset"]
        for topic, position in topics.items()
        if isinstance(position, dict) and isinstance(position.get("offset"), int)
    }


def log_ends(data: Path) -> StopOffsets | None:
    """Gives the ends of topics from the log's files; None if there is no log in the folder."""
    from polybus.log.reading.reader import LogReader

    try:
        reader = LogReader(data)
    except PolybusError:
        return None

    def ends(topics: list[str]) -> dict[str, int]:
        found = {}
        for topic in topics:
            with contextlib.suppress(PolybusError):  # deleted meanwhile
                found[topic] = reader.bounds(topic).stop
        return found

    return ends
