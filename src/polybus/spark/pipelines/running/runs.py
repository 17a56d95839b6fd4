"""The batches of a pipeline for its status: the last finished ones, and each flow's current one.

The driver checks each second. If several batches of a flow end within a second, the last one is
kept; its number shows that there were others. The list outlives the run: the next one continues it.
"""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.flows import checkpoints_of

RUNS_MAX = 100


class BatchRuns:
    """The batches of one data folder's flows."""

    def __init__(self, data: Path, known: Iterable[dict[str, Any]] = ()) -> None:
        self._data = data
        self._began_s = time.time()
        self._ended: deque[dict[str, Any]] = deque(known, maxlen=RUNS_MAX)
        self._last: dict[tuple[str, str], int] = {}

    def all(self) -> list[dict[str, Any]]:
        """The last that ended, the oldest first."""
        return [*self._ended]

    def update(self, flows: list[dict[str, Any]], now: str) -> None:
        """Keep batches that have ended since the last call; add to each flow its running one."""
        for flow in flows:
            name, batch = (flow["pipeline"], flow["flow"]), flow["batch_id"]
            if batch is not None and self._last.get(name) != batch:
                self._last[name] = batch
                about = {"pipeline": name[0], "flow": name[1], "batch": batch, "time": now}
                self._ended.append(about | {"rows": flow["batch_rows"], "ms": flow["batch_ms"]})
            if flow["state"] == "running":
                flow |= self._running(*name)

    def _running(self, pipeline: str, flow: str) -> dict[str, Any]:
        """The batch that is planned and not committed, and for how long in this run."""
        checkpoint = Checkpoint(checkpoints_of(self._data, pipeline) / flow)
        batch = checkpoint.unfinished_batch()
        planned_s = None if batch is None else checkpoint.planned_s(batch)
        if planned_s is None:
            # It does not exist, or it has ended meanwhile and was removed.
            return {}
        # A batch that an earlier run planned begins again in this one.
        since_s = max(planned_s, self._began_s)
        return {"running_batch": batch, "running_s": round(max(0.0, time.time() - since_s), 1)}
