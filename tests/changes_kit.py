"""Two flows into one table of a pipeline, without Spark: `start` is what its start does."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyspark.pipelines.flow import Flow as Query
from pyspark.pipelines.output import StreamingTable
from pyspark.pipelines.source_code_location import SourceCodeLocation

from polybus.lake.table import LakeTable, open_table
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.declared.changes import Changes, Fingerprint
from polybus.spark.pipelines.declared.registry import DeclaredPipeline
from polybus.spark.pipelines.flows import checkpoints_of

FLOWS = ("a", "b")
PLACE = SourceCodeLocation("shop.py", 1)


def table_of(data: Path) -> LakeTable:
    return open_table(data, "shop.clean")


def start(data: Path, reset: Collection[str] = (), flows: Collection[str] = FLOWS) -> None:
    """Prepare the pipeline's flows. Raises PipelineError if one of them must not start."""
    queries = {name: Query(name, "clean", {}, PLACE, lambda: None) for name in flows}
    table = StreamingTable("clean", None, PLACE, {}, None, None, None, None)
    pipeline = DeclaredPipeline("shop", data, outputs={"clean": table}, queries=queries)
    names: Any = SimpleNamespace(
        pipeline=pipeline, bus=SimpleNamespace(data=data), table=lambda _: table_of(data)
    )
    prints = {
        name: Fingerprint(flow=name, target="clean", sources=("t",), state=(), columns={})
        for name in flows
    }
    changes = Changes(names, checkpoints_of(data, "shop"), prints)
    chosen = [one for one in queries.values() if changes.is_reset(one, set(reset))]
    changes.check([one for one in queries.values() if one not in chosen])
    changes.start_over(chosen)
    changes.store(flows)


def run_batch(data: Path, flow: str) -> None:
    """The first batch of a flow: its checkpoint as Spark writes it, and a row."""
    checkpoint = Checkpoint(checkpoints_of(data, "shop") / flow)
    writer = f"{flow}:{checkpoint.create_query_id()}"
    for folder in ("offsets", "commits"):
        (checkpoint.path / folder).mkdir(exist_ok=True)
        (checkpoint.path / folder / "0").write_text("v1")
    table_of(data).append(pa.table({"flow": [flow]}), writer=writer, batch_id=0)


def shown(data: Path) -> list[list[str]]:
    """The flows with rows in the table, and those with a checkpoint that has batches."""
    table, checkpoints = table_of(data), checkpoints_of(data, "shop")
    rows = sorted(table.read()["flow"].to_pylist()) if table.rows else []
    begun = [path.name for path in checkpoints.glob("*") if Checkpoint(path).has_batches()]
    return [rows, sorted(begun)]
