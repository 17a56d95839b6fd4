"""Collects what pipeline files declare, instead of sending it to a Spark Connect server."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.pipelines.flow import AutoCdcFlow
from pyspark.pipelines.flow import Flow as Query
from pyspark.pipelines.graph_element_registry import GraphElementRegistry
from pyspark.pipelines.output import MaterializedView, Output, Sink, StreamingTable, TemporaryView

from polybus.spark.pipelines.declared.problems import PipelineError, place_of, shown_place

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}", re.ASCII)
FORMATS = (None, "parquet")


@dataclasses.dataclass(slots=True)
class DeclaredPipeline:
    """What the files of one pipeline declare.

    `outputs` and `queries` are PySpark's own descriptions (a query is what PySpark calls a flow:
    a function that gives a DataFrame, and the output that takes it).
    """

    name: str
    folder: Path
    conf: dict[str, str] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Output] = dataclasses.field(default_factory=dict)
    queries: dict[str, Query] = dataclasses.field(default_factory=dict)

    def queries_into(self, output: str) -> list[Query]:
        return [query for query in self.queries.values() if query.target == output]

    def table_name(self, output: str) -> str:
        """The lake table that holds an output."""
        return f"{self.name}.{output}".lower()


class DeclarationRegistry(GraphElementRegistry):
    """Fills a DeclaredPipeline while its files are loaded.

    Two elements of one name, and what we cannot run, are errors at the line that declares them.
    """

    def __init__(
        self, pipeline: DeclaredPipeline, read_sql: Callable[[str, Path, DeclarationRegistry], None]
    ) -> None:
        self._pipeline = pipeline
        self._read_sql = read_sql

    def register_output(self, output: Output) -> None:
        there = self._pipeline.outputs.get(output.name)
        if there is not None:
            self._twice("an output", output, there)
        _check_name(output.name, output)
        table_format = None if isinstance(output, Sink) else getattr(output, "format", None)
        if table_format not in FORMATS:
            text = f"table {output.name} asks for format {table_format}; ours are parquet"
            raise PipelineError("pipeline.unsupported", text, **place_of(output))
        self._pipeline.outputs[output.name] = output

    def register_flow(self, flow: Query) -> None:
        there = self._pipeline.queries.get(flow.name)
        if there is not None:
            self._twice("a flow", flow, there)
        _check_name(flow.name, flow)
        self._pipeline.queries[flow.name] = flow

    def register_auto_cdc_flow(self, flow: AutoCdcFlow) -> None:
        text = (
            f"the flow into {flow.target} is an auto CDC flow, which needs a table format with "
            "MERGE; write to a table with an append flow and keep the newest row of each key in a "
            "materialized view (max_by)"
        )
        raise PipelineError("pipeline.unsupported", text, **place_of(flow))

    def register_sql(self, sql_text: str, file_path: Path) -> None:
        self._read_sql(sql_text, file_path, self)

    def _twice(self, what: str, element: Any, there: Any) -> None:
        location = there.source_code_location
        text = (
            f"{what} named {element.name} is there already, at "
            f"{shown_place(location.filename, location.line_number)}; use another name"
        )
        raise PipelineError("pipeline.duplicate", text, **place_of(element))


def check_targets(pipeline: DeclaredPipeline) -> None:
    """Every query has an output that may take it, and every output but a sink has a query.

    Raises:
        PipelineError: `pipeline.unknown-output`, `pipeline.unsupported`, at the line.
    """
    for query in pipeline.queries.values():
        output = pipeline.outputs.get(query.target)
        if output is None:
            text = f"flow {query.name} writes to {query.target}, which nothing declares"
            raise PipelineError("pipeline.unknown-output", text, **place_of(query))
        single = isinstance(output, MaterializedView | TemporaryView)
        if single and len(pipeline.queries_into(output.name)) > 1:
            text = f"flow {query.name}: {output.name} is a view, and a view has one query"
            raise PipelineError("pipeline.unsupported", text, **place_of(query))
    for output in pipeline.outputs.values():
        if isinstance(output, StreamingTable) and not pipeline.queries_into(output.name):
            text = f"no flow writes to table {output.name}; declare one with append_flow"
            raise PipelineError("pipeline.unknown-output", text, **place_of(output))


def _check_name(name: str, element: Any) -> None:
    """Names become names of tables and folders."""
    if not _NAME.fullmatch(name):
        text = f"{name[:120]!r} cannot be a name: letters, digits, . _ -, at most 100 of them"
        raise PipelineError("pipeline.name", text, **place_of(element))
