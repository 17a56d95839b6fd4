"""SQL pipeline files: CREATE STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW and FLOW.

Spark's own parser reads each statement, so a file means the same to us and to Spark's runner.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import ParseException
from pyspark.pipelines.flow import Flow as Query
from pyspark.pipelines.output import MaterializedView, StreamingTable, TemporaryView
from pyspark.pipelines.source_code_location import SourceCodeLocation

from polybus.spark.causes import clean_cause
from polybus.spark.pipelines.declared.problems import PipelineError
from polybus.spark.pipelines.declared.readers import missing_relation, unknown_relation
from polybus.spark.pipelines.declared.registry import AUTO_CDC, DeclarationRegistry
from polybus.spark.pipelines.declared.sql_text import Statement, relation_of, statements
from polybus.spark.pipelines.sessions import scala_list
from polybus.spark.session.connect import is_connect

_INSERT = re.compile(r"^.*?\bINSERT\s+INTO\s+(?:`[^`]+`|[\w.]+)(?:\s+BY\s+NAME)?\s+", re.I | re.S)
_POSITION = re.compile(r";? \(?line \d+,? pos \d+\)?")
_ERROR_LINE = re.compile(r"\bline (\d+)")
_KINDS = "CREATE STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW or FLOW"


class SqlFile:
    """Registers the statements of one file."""

    def __init__(self, spark: Any, file: Path, registry: DeclarationRegistry) -> None:
        self._spark = spark
        self._file = str(file)
        self._registry = registry

    def read(self, text: str) -> None:
        """Register every statement. Raises PipelineError at the line of the first bad one."""
        if is_connect(self._spark):
            text = "SQL files cannot be read over Spark Connect (sc://)"
            advice = "declare the pipeline in Python, or use another --master"
            raise PipelineError("pipeline.unsupported", f"{text}; {advice}", file=self._file)
        for statement in statements(text):
            plan = self._parsed(statement)
            kind = plan.getClass().getSimpleName()
            read = self._READERS.get(kind)
            if read is None:
                shown = " ".join(statement.text.split()[:4])
                text = f"`{shown} …` does not declare an element of a pipeline: use {_KINDS}"
                raise PipelineError(
                    "pipeline.unsupported", text, file=self._file, line=statement.line
                )
            read(self, plan, statement)

    def _parsed(self, statement: Statement) -> Any:
        parser = self._spark._jsparkSession.sessionState().sqlParser()  # noqa: SLF001
        try:
            return parser.parsePlan(statement.text)
        except ParseException as error:
            line = statement.line + _line_of(error) - 1
            raise PipelineError(
                "pipeline.file", _cause(error), file=self._file, line=line
            ) from error

    def _table(self, plan: Any, statement: Statement) -> None:
        name = _dotted(plan.name().nameParts())
        streaming = "StreamingTable" in plan.getClass().getSimpleName()
        kind = StreamingTable if streaming else MaterializedView
        spec = plan.tableSpec()
        self._registry.register_output(
            kind(
                name=name,
                comment=None,
                source_code_location=self._place(statement.line),
                table_properties={},
                partition_cols=_partition_columns(plan.partitioning()),
                cluster_by=None,
                schema=_schema(plan.columns()),
                format=spec.provider().get() if spec.provider().isDefined() else None,
            )
        )
        if plan.getClass().getSimpleName().endswith("AsSelect"):
            self._query(name, name, plan.originalText(), statement)

    def _view(self, plan: Any, statement: Statement) -> None:
        name = relation_of(plan.name().quotedString())
        self._registry.register_output(
            TemporaryView(name=name, comment=None, source_code_location=self._place(statement.line))
        )
        self._query(name, name, plan.originalText().get(), statement)

    def _flow(self, plan: Any, statement: Statement) -> None:
        operation = plan.flowOperation()
        if operation.getClass().getSimpleName() != "InsertIntoStatement":
            self._auto_cdc(plan, statement)
        target = _dotted(operation.table().multipartIdentifier())
        query = _INSERT.sub("", statement.text, count=1)
        self._query(_dotted(plan.name().nameParts()), target, query, statement)

    def _auto_cdc(self, plan: Any, statement: Statement) -> None:
        raise PipelineError("pipeline.unsupported", AUTO_CDC, file=self._file, line=statement.line)

    def _query(self, name: str, target: str, query: str, statement: Statement) -> None:
        before = statement.text.find(query)
        line = statement.line + statement.text.count("\n", 0, max(0, before))
        self._registry.register_flow(
            Query(
                name=name,
                target=target,
                spark_conf={},
                source_code_location=self._place(statement.line),
                func=self._function(query, line),
            )
        )

    def _function(self, query: str, line: int) -> Callable[[], Any]:
        def run() -> Any:
            from pyspark.errors import AnalysisException

            try:
                # Inside a pipeline's function, `sql` resolves our names: see readers.py.
                return self._spark.sql(query)
            except AnalysisException as error:
                here: dict[str, Any] = {"file": self._file, "line": line + _line_of(error) - 1}
                if (name := missing_relation(error)) is not None:
                    unknown = unknown_relation(name)
                    raise PipelineError(unknown.code, unknown.text, **here) from error
                raise PipelineError("pipeline.query", _cause(error), **here) from error

        return run

    def _place(self, line: int) -> SourceCodeLocation:
        return SourceCodeLocation(filename=self._file, line_number=line)

    _READERS = {
        "CreateStreamingTable": _table,
        "CreateStreamingTableAsSelect": _table,
        "CreateMaterializedViewAsSelect": _table,
        "CreateViewCommand": _view,
        "CreateFlowCommand": _flow,
        "CreateStreamingTableAutoCdc": _auto_cdc,
    }


def _cause(error: Exception) -> str:
    """Spark's text without its position, which counts from the start of the statement."""
    return _POSITION.sub("", clean_cause(error))


def _line_of(error: Exception) -> int:
    found = _ERROR_LINE.search(str(error))
    return int(found.group(1)) if found else 1


def _dotted(parts: Any) -> str:
    return ".".join(map(str, scala_list(parts)))


def _partition_columns(partitioning: Any) -> list[str]:
    return [
        ".".join(str(part) for part in reference.fieldNames())
        for transform in scala_list(partitioning)
        for reference in transform.references()
    ]


def _schema(columns: Any) -> str | None:
    fields = [f"`{one.name()}` {one.dataType().sql()}" for one in scala_list(columns)]
    return ", ".join(fields) or None
