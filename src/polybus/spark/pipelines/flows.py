"""Flows: the units of work of a pipeline.

A flow is a streaming query, or batch work that is repeated when its inputs change.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polybus.spark.location import BusLocation
from polybus.spark.pipelines.progress import FlowFigures


@dataclasses.dataclass(frozen=True, slots=True)
class FlowContext:
    """What a flow needs to start."""

    spark: Any
    bus: BusLocation
    checkpoint: Path
    trigger: dict[str, Any]
    """Keyword arguments of DataStreamWriter.trigger."""
    figures: FlowFigures = dataclasses.field(default_factory=FlowFigures)
    """Takes the figures that Spark does not know."""


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineFlow:
    """One unit of work of a pipeline.

    `start` starts the flow's streaming query and returns it, or does all work of a batch flow and
    returns None. `after` names flows of the same pipeline that precede this one: in one pass they
    must be done, in continuous mode they must have caught up once. In continuous mode, a batch
    flow with `repeat_s` runs again that long after its last run; `start` itself checks whether
    there is anything to do.
    """

    pipeline: str
    name: str
    start: Callable[[FlowContext], Any]
    after: tuple[str, ...] = ()
    repeat_s: float | None = None
    retried: tuple[str, ...] = ()
    """Codes of errors after which it is tried again, besides failures that pass by themselves."""
    reads: tuple[str, ...] = ()
    """Names of its inputs, for display."""
    writes: str = ""
    """The name of its output, for display."""

    @property
    def full_name(self) -> str:
        return f"{self.pipeline}.{self.name}"


def checkpoints_of(data: Path, pipeline: str) -> Path:
    """The folder with a checkpoint per flow of a pipeline."""
    return data / "pipeline" / "checkpoints" / pipeline
