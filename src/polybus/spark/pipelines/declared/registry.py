"""Collects the declarations of pipeline files, and errors with their position in the file.

PySpark's own registry sends declarations to a server.
"""

import dataclasses
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from polybus.errors import PolybusError, UsageError
from polybus.spark.causes import clean_cause
from polybus.spark.expectations import Expectation, expectations_of
from polybus.spark.internals import (
    AutoCdcFlow,
    GraphElementRegistry,
    MaterializedView,
    Output,
    Sink,
    StreamingTable,
    TemporaryView,
)
from polybus.spark.internals import Flow as Query
from polybus.spark.pipelines.declared.cdc import ChangeRule, rule_of

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}", re.ASCII)
FORMATS = (None, "delta", "parquet")


class PipelineError(UsageError):
    """A pipeline cannot run as it is written; the text begins with `file:line`."""

    def __init__(self, code: str, text: str, *, file: str = "", line: int | None = None) -> None:
        super().__init__(code, f"{shown_place(file, line)}: {text}" if file else text)


def shown_place(file: str, line: int | None) -> str:
    return f"{file}:{line}" if line else file


def place_of(element: Any) -> dict[str, Any]:
    """Where an output or a flow was declared, as keyword arguments of PipelineError."""
    location = element.source_code_location
    return {"file": location.filename, "line": location.line_number}


def located(code: str, error: BaseException, *, file: str, line: int | None) -> PipelineError:
    """The error, at the innermost line of `file` in its traceback.

    `line` is where the element begins, for errors without a line of the file.
    """
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, SyntaxError) and error.filename == file:
        return PipelineError(code, str(error.msg), file=file, line=error.lineno)
    frames = traceback.extract_tb(error.__traceback__)
    line = next((one.lineno for one in reversed(frames) if one.filename == file), None) or line
    if isinstance(error, PolybusError):
        return PipelineError(error.code, error.text, file=file, line=line)
    text, name = clean_cause(error), type(error).__name__
    if not isinstance(error, PySparkException) and not text.startswith(name):
        text = f"{name}: {text}"
    return PipelineError(code, text, file=file, line=line)


@dataclasses.dataclass(slots=True)
class DeclaredPipeline:
    """The declarations of one pipeline.

    `outputs` and `queries` are PySpark's own descriptions. A query is what PySpark calls a flow: a
    function that returns a DataFrame, and the name of its output.
    """

    name: str
    folder: Path
    conf: dict[str, str] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Output] = dataclasses.field(default_factory=dict)
    queries: dict[str, Query] = dataclasses.field(default_factory=dict)
    rules: dict[str, ChangeRule] = dataclasses.field(default_factory=dict)
    """The rule of each table that an auto CDC flow keeps up to date, by the name of the table."""
    expected: dict[str, list[Expectation]] = dataclasses.field(default_factory=dict)
    """The expectations of outputs, by name, from SQL files and the config."""

    def expectations(self, query: Query) -> list[Expectation]:
        """What the rows of a query should be: those of its function, then those of its output."""
        found = [*expectations_of(query.func), *self.expected.get(query.target, ())]
        table = self.table_name(query.target)
        return [dataclasses.replace(one, topic=table) for one in found]

    def queries_into(self, output: str) -> list[Query]:
        return [query for query in self.queries.values() if query.target == output]

    def table_name(self, output: str) -> str:
        """The lake table that holds an output."""
        return f"{self.name}.{output}".lower()


class DeclarationRegistry(GraphElementRegistry):
    """Fills a DeclaredPipeline while its files are loaded.

    Duplicate names and unsupported features are errors at the line of the declaration.
    """

    def __init__(self, pipeline: DeclaredPipeline) -> None:
        self._pipeline = pipeline

    def register_output(self, output: Output) -> None:
        _check_name("an output", output, self._pipeline.outputs)
        table_format = None if isinstance(output, Sink) else getattr(output, "format", None)
        if table_format not in FORMATS:
            text = (
                f"table {output.name}: format {table_format} is not supported; leave it out (Delta)"
            )
            raise PipelineError("pipeline.unsupported", text, **place_of(output))
        self._pipeline.outputs[output.name] = output

    def register_flow(self, flow: Query) -> None:
        _check_name("a flow", flow, self._pipeline.queries)
        self._pipeline.queries[flow.name] = flow

    def register_auto_cdc_flow(self, flow: AutoCdcFlow) -> None:
        place = place_of(flow)
        try:
            rule = rule_of(flow)
        except UsageError as error:
            raise PipelineError(error.code, error.text, **place) from error
        self.register_rule(flow.name or flow.target, flow.target, rule, flow)

    def register_rule(self, name: str, target: str, rule: ChangeRule, element: Any) -> None:
        """Register an auto CDC flow; `element` has its place and its settings."""
        if target in self._pipeline.rules:
            text = f"table {target} has an auto CDC flow already; it can have only one"
            raise PipelineError("pipeline.duplicate", text, **place_of(element))

        def events() -> Any:
            return rule.events(SparkSession.active().readStream.table(rule.source))

        conf, place = getattr(element, "spark_conf", {}), element.source_code_location
        self.register_flow(Query(name, target, conf, place, events))
        self._pipeline.rules[target] = rule

    def register_expectations(self, output: str, expected: Iterable[Expectation]) -> None:
        """Register what the rows of an output should be."""
        self._pipeline.expected.setdefault(output, []).extend(expected)

    def register_sql(self, sql_text: str, file_path: Path) -> None:
        raise NotImplementedError("SqlFile reads SQL files")


def check_targets(pipeline: DeclaredPipeline) -> None:
    """Check that every query has an output, and every table a query.

    Raises:
        PipelineError: `pipeline.unknown-output`, `pipeline.unsupported`, at the line.
    """
    for query in pipeline.queries.values():
        output = pipeline.outputs.get(query.target)
        if output is None:
            text = f"flow {query.name} writes to {query.target}, which is not declared"
            raise PipelineError("pipeline.unknown-output", text, **place_of(query))
        _check_rule(pipeline, query, output)
        single = isinstance(output, MaterializedView | TemporaryView)
        if single and len(pipeline.queries_into(output.name)) > 1:
            text = f"flow {query.name}: the view {output.name} can have only one query"
            raise PipelineError("pipeline.unsupported", text, **place_of(query))
    for output in pipeline.outputs.values():
        if isinstance(output, StreamingTable) and not pipeline.queries_into(output.name):
            text = f"no flow writes to table {output.name}; declare one with append_flow"
            raise PipelineError("pipeline.unknown-output", text, **place_of(output))


def _check_rule(pipeline: DeclaredPipeline, query: Query, output: Output) -> None:
    """A table of an auto CDC flow has no other flow and no partitions."""
    if query.target not in pipeline.rules:
        return
    problem = None
    if not isinstance(output, StreamingTable):
        problem = "is not a streaming table; declare it with create_streaming_table"
    elif len(pipeline.queries_into(output.name)) > 1:
        problem = "has another flow, too; it can have only this one"
    elif output.partition_cols:
        problem = "has partitions, which a table with changing rows cannot have"
    if problem is not None:
        text = f"flow {query.name}: the target {query.target} of an auto CDC flow {problem}"
        raise PipelineError("pipeline.unsupported", text, **place_of(query))


def _check_name(what: str, element: Any, known: Mapping[str, Any]) -> None:
    """Names become names of tables and folders, and must be unique."""
    name = element.name
    if name in known:
        there = shown_place(**place_of(known[name]))
        text = f"{what} named {name} already exists, at {there}; use another name"
        raise PipelineError("pipeline.duplicate", text, **place_of(element))
    if not _NAME.fullmatch(name):
        text = f"{name[:120]!r} is not a valid name: use up to 100 letters, digits, . _ and -"
        raise PipelineError("pipeline.name", text, **place_of(element))
