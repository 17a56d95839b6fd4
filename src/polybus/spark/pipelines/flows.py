"""Flows, the units of work of a pipeline, and how far each one is.

A flow is a streaming query, or batch work that is repeated when its inputs change.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from polybus.errors import PolybusError
from polybus.spark.checkpoint import our_offset
from polybus.spark.location import BusLocation

FlowState = Literal["starting", "running", "waiting", "done", "failed", "stopped"]
DAMAGED_SHOWN_MAX = 5


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
    error: str | None = None
    warning: str | None = None
    """Damaged topics, which a running flow does not read."""

    def __post_init__(self) -> None:
        self._positions: dict[str, int] = {}
        self._reported_lag: int | None = None
        self._scans: dict[int, int] = {}

    def scanned(self, batch_id: int, times: int) -> None:
        """The flow read a batch this often: Spark counts its rows each time, we count them once."""
        self._scans[batch_id] = times

    def update(self, query: Any) -> None:
        """Take the batches that `query` ran since the last call."""
        last = query.lastProgress
        if last is None:
            return
        is_next = last["batchId"] <= self._last_batch + 1
        for batch in [last] if is_next else query.recentProgress:
            self._take(batch)
        if not query.status["isTriggerActive"] and not query.status["isDataAvailable"]:
            self.rows_per_s = 0.0

    @property
    def _last_batch(self) -> int:
        return -1 if self.batch_id is None else self.batch_id

    def _take(self, batch: Any) -> None:
        self._take_offsets(batch["sources"])
        number = batch["batchId"]
        if number <= self._last_batch or batch.numInputRows == 0:
            return
        self.batch_id, self.batch_ms = number, batch["batchDuration"]
        rows = batch.numInputRows // max(1, self._scans.get(number, 1))
        self._scans = {one: times for one, times in self._scans.items() if one > number}
        if self.rows is not None:
            self.rows += rows
            self.rows_per_s = 1000 * rows / max(1, self.batch_ms)

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
        self.warning = damage_warning(damaged) if damaged else None

    def update_lag(self, log: Path | None) -> None:
        """Compare the positions with the log in a folder; without it, with what Spark reported."""
        from polybus.log.reading.reader import LogReader

        lag = self._reported_lag
        if log is not None and self._positions:
            with contextlib.suppress(PolybusError):  # the folder has no log
                reader, lag = LogReader(log), 0
                for topic, position in self._positions.items():
                    with contextlib.suppress(PolybusError):  # deleted, or damaged
                        lag += max(0, reader.bounds(topic).stop - position)
        self.lag = lag


def damage_warning(damaged: dict[str, str]) -> str:
    """What a flow does not read, what is wrong with it, and what to do."""
    shown = [f"topic {topic!r} is left out: {text}" for topic, text in damaged.items()]
    more = f" (and {len(shown) - DAMAGED_SHOWN_MAX} more topics)"
    return (
        f"log.damaged: {'; '.join(shown[:DAMAGED_SHOWN_MAX])}"
        f"{more if len(shown) > DAMAGED_SHOWN_MAX else ''}; restore the file, and the pipeline "
        "continues the topic where it stopped"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class FlowContext:
    """What a flow needs to start."""

    spark: Any
    bus: BusLocation
    checkpoint: Path
    trigger: dict[str, Any]
    """Keyword arguments of DataStreamWriter.trigger."""
    figures: FlowProgress = dataclasses.field(default_factory=FlowProgress)
    """Takes the figures that Spark does not know."""


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineFlow:
    """One unit of work of a pipeline.

    `start` starts the flow's streaming query and returns it, or does all work of a batch flow and
    returns None. `after` names flows of the same pipeline that precede this one: in one pass they
    must be done, in continuous mode they must have caught up once. In continuous mode, a batch
    flow with `repeat_s` runs again that long after its last run; `start` itself checks whether
    there is anything to do. `reads` and `writes` name its inputs and its output, for display.
    """

    pipeline: str
    name: str
    start: Callable[[FlowContext], Any]
    after: tuple[str, ...] = ()
    repeat_s: float | None = None
    retried: tuple[str, ...] = ()
    """Codes of errors after which it is tried again, besides failures that pass by themselves."""
    reads: tuple[str, ...] = ()
    writes: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.pipeline}.{self.name}"


def checkpoints_of(data: Path, pipeline: str) -> Path:
    """The folder with a checkpoint per flow of a pipeline."""
    return data / "pipeline" / "checkpoints" / pipeline
