"""What tests of pipelines share: pipeline files on a real bus, run for one pass."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from spark_kit import RunningBus

from polybus.lake.table import LakeTable, open_table
from polybus.log import spark_checkpoint
from polybus.log.disk import sync_path
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.declared.prepare import Chosen, Prepared, prepare
from polybus.spark.pipelines.flows import FlowRunner

PASS_TIMEOUT_S = 120.0


class PipelineFolder:
    """A folder `pipelines` beside a running bus."""

    def __init__(
        self, spark: Any, bus: RunningBus, folder: Path, where: BusLocation | None = None
    ) -> None:
        self.spark = spark
        self.bus = bus
        self.where = where or BusLocation(bus.data)
        self.folder = folder / "pipelines"

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    def prepare(
        self,
        *only: str,
        reset: Sequence[str] = (),
        refresh: Sequence[str] = (),
        check_only: bool = False,
    ) -> Prepared:
        chosen = Chosen(only, tuple(reset), tuple(refresh))
        return prepare(self.spark, self.folder, self.where, chosen, check_only=check_only)

    def run(self, *only: str, reset: Sequence[str] = (), refresh: Sequence[str] = ()) -> Prepared:
        """One pass; nothing may fail."""
        prepared = self.prepare(*only, reset=reset, refresh=refresh)
        assert prepared.problems == {}, prepared.problems
        runner = self.start(prepared, continuous=False)
        try:
            assert runner.wait(PASS_TIMEOUT_S), runner.progress()
            assert runner.failures == [], runner.failures
        finally:
            runner.stop()
        return prepared

    def start(self, prepared: Prepared, *, continuous: bool) -> FlowRunner:
        runner = FlowRunner(self.spark, self.where, continuous=continuous)
        runner.start(*prepared.flows)
        return runner

    def problem(self, *only: str) -> str:
        """The only problem of the pipelines, as text."""
        (problem,) = self.prepare(*only, check_only=True).problems.values()
        return str(problem)

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """The rows of a lake table, sorted; none if it is not there yet."""
        lake_table = open_table(self.where.data, table)
        if not lake_table.exists:
            return []
        found = lake_table.read().select(list(columns)).to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)


def record_writes(patched: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Lists, in order, what is synced in `offsets` of a checkpoint, and each commit of a table."""

    def recorded_sync(path: Path) -> None:
        sync_path(path)
        if path.parent.name == "offsets":
            writes.append(("sync", str(path)))

    def commit(self: LakeTable, *arguments: Any, **options: Any) -> bool:
        writes.append(("commit", self.name))
        return real_commit(self, *arguments, **options)

    writes: list[tuple[str, str]] = []
    real_commit = LakeTable.commit
    patched.setattr(spark_checkpoint, "sync_path", recorded_sync)
    patched.setattr(LakeTable, "commit", commit)
    return writes


def as_json(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [json.dumps(row) for row in rows]
