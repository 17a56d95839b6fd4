"""Flows: what a pipeline is made of.

A flow is one stream of a pipeline, or one piece of batch work that is done again when its inputs
have changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polybus.spark.pipelines.running.progress import QueryProgress, unseen


@dataclasses.dataclass(frozen=True, slots=True)
class FlowContext:
    """What a flow is given to start with."""

    spark: Any
    data: Path
    url: str | None
    token: str | None
    continuous: bool
    checkpoint: Path
    trigger: dict[str, Any]
    """Keyword arguments of DataStreamWriter.trigger."""
    figures: QueryProgress = dataclasses.field(default_factory=unseen)
    """Where a flow tells what Spark does not know of its rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """One stream of a pipeline.

    `start` starts its streaming query and returns it; None says that the flow did all its work
    in the call (a batch flow). `after` names flows of the same pipeline that come first: in one
    pass they must be done, in continuous mode they must have caught up once. A batch flow with
    `again_s` is started again so many seconds after its last run, in continuous mode; `start`
    looks for itself whether there is anything to do. `recover` is asked when the flow has failed:
    True says that it has made sure that the flow gets further now.
    """

    pipeline: str
    name: str
    start: Callable[[FlowContext], Any]
    after: tuple[str, ...] = ()
    again_s: float | None = None
    recover: Callable[[FlowContext, BaseException], bool] | None = None

    @property
    def full_name(self) -> str:
        return f"{self.pipeline}.{self.name}"


def use_in_thread(spark: Any) -> None:
    """Make the session the one of this thread: Spark looks there for sources made in Python."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:  # with Spark Connect, threads need no such thing
        sessions = type(spark)._get_j_spark_session_class(jvm)  # noqa: SLF001
        sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001


def in_order(flows: Sequence[Flow]) -> list[Flow]:
    """The flows with those that others come after first; the given order otherwise."""
    by_name = {(flow.pipeline, flow.name): flow for flow in flows}
    ordered: dict[tuple[str, str], Flow] = {}

    def add(flow: Flow) -> None:
        if (flow.pipeline, flow.name) in ordered:
            return
        for name in flow.after:
            if (first := by_name.get((flow.pipeline, name))) is not None:
                add(first)
        ordered[flow.pipeline, flow.name] = flow

    for flow in flows:
        add(flow)
    return list(ordered.values())
