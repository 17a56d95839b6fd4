"""SQL files of a pipeline: CREATE STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW and FLOW.

Spark's own parser reads each statement, so a file has the same meaning as in Spark's runner. Over
Spark Connect that parser is not accessible. Then a separate process, with a small Spark on this
machine, parses the file and exits:

    python -m polybus.spark.pipelines.declared.sql_files < FILE
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from pyspark.errors import AnalysisException, ParseException

from polybus.spark.causes import clean_cause
from polybus.spark.expectations import Expectation
from polybus.spark.internals import (
    REMOTE_VARIABLES,
    MaterializedView,
    PipelineStatement,
    SourceCodeLocation,
    StreamingTable,
    TemporaryView,
    is_connect,
    parsed_statement,
)
from polybus.spark.internals import Flow as Query
from polybus.spark.pipelines.declared import constraints
from polybus.spark.pipelines.declared.cdc import ChangeRule
from polybus.spark.pipelines.declared.readers import (
    OPAQUE,
    missing_relation,
    relation_of,
    unknown_relation,
)
from polybus.spark.pipelines.declared.registry import DeclarationRegistry, PipelineError
from polybus.structs import decode

_INSERT = re.compile(r"^.*?\bINSERT\s+INTO\s+(?:`[^`]+`|[\w.]+)(?:\s+BY\s+NAME)?\s+", re.I | re.S)
_POSITION = re.compile(r";? \(?line \d+,? pos \d+\)?")
_ERROR_LINE = re.compile(r"\bline (\d+)")
_KINDS = "CREATE STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW or FLOW"
_PIECE = re.compile(rf"{OPAQUE}|`[^`]*`|;|[^'\"`;/-]+|.", re.DOTALL)
_LEAD = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
PARSER_MEMORY = "512m"
"""Spark does not start with less."""
PARSER_TIMEOUT_S = 120.0


class Statement(NamedTuple):
    text: str
    line: int


def statements(text: str) -> Iterator[Statement]:
    """The statements of a file without semicolons, each with its first line."""
    ends = [piece.start() for piece in _PIECE.finditer(text) if piece.group() == ";"]
    begin = 0
    for end in [*ends, len(text)]:
        lead = _LEAD.match(text, begin, end)
        first = lead.end() if lead else begin
        if statement := text[first:end].rstrip():
            yield Statement(statement, text.count("\n", 0, first) + 1)
        begin = end + 1


class SqlElement(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a statement: an output, a flow into it, or both.

    `kind` is the class of the output, or empty for a flow alone. The flow has a `query` or a `rule`
    for auto CDC, or is missing.
    """

    line: int
    kind: str = ""
    name: str
    target: str
    columns: str = ""
    partition_by: tuple[str, ...] = ()
    format: str | None = None
    query: str = ""
    query_line: int = 0
    rule: ChangeRule | None = None
    expected: tuple[Expectation, ...] = ()


class SqlProblem(msgspec.Struct, frozen=True):
    """Why a file cannot be read, and the line."""

    code: str
    text: str
    line: int


def parse(spark: Any, text: str) -> list[SqlElement] | SqlProblem:
    """The declarations of the statements, or the first problem; `spark` is a session with a JVM."""
    found = []
    for written in statements(text):
        bare, expected = constraints.split(written.text)
        statement = Statement(bare, written.line)
        try:
            declared = parsed_statement(spark, statement.text)
        except ParseException as error:
            line = statement.line + _line_of(error) - 1
            return SqlProblem("pipeline.file", _cause(error), line)
        if declared is None:
            shown = " ".join(statement.text.split()[:4])
            problem = f"`{shown} …` does not declare an element of a pipeline: use {_KINDS}"
            return SqlProblem("pipeline.unsupported", problem, statement.line)
        element = _element(declared, statement)
        found.append(msgspec.structs.replace(element, expected=tuple(expected)))
    return found


def _element(found: PipelineStatement, statement: Statement) -> SqlElement:
    name, query = found.name, found.query
    target = found.target
    if found.kind == TemporaryView.__name__:
        name = target = relation_of(name)
    elif not found.kind and found.changes is None:
        query = _INSERT.sub("", statement.text, count=1)
    return SqlElement(
        line=statement.line,
        kind=found.kind,
        name=name,
        target=target,
        columns=", ".join(found.columns),
        partition_by=found.partition_by,
        format=found.format,
        query=query,
        query_line=_query_line(query, statement),
        rule=None if found.changes is None else ChangeRule(**found.changes),
    )


def _query_line(query: str, statement: Statement) -> int:
    before = max(0, statement.text.find(query))
    return statement.line + statement.text.count("\n", 0, before)


def _cause(error: Exception) -> str:
    """Spark's text without its position, which counts from the start of the statement."""
    return _POSITION.sub("", clean_cause(error))


def _line_of(error: Exception) -> int:
    found = _ERROR_LINE.search(str(error))
    return int(found.group(1)) if found else 1


class SqlFile:
    """Registers the statements of one file."""

    def __init__(self, spark: Any, file: Path, registry: DeclarationRegistry) -> None:
        self._spark = spark
        self._file = str(file)
        self._registry = registry

    def read(self, text: str) -> None:
        """Register every statement. Raises PipelineError at the line of the first bad one."""
        found = self._parse_apart(text) if is_connect(self._spark) else parse(self._spark, text)
        if isinstance(found, SqlProblem):
            raise self._error(found.code, found.text, found.line)
        for element in found:
            self._register(element)

    def _parse_apart(self, text: str) -> list[SqlElement] | SqlProblem:
        """Parse the file in another process. Raises PipelineError `pipeline.file` if it fails."""
        command = [sys.executable, "-m", __spec__.name]
        env = {name: text for name, text in os.environ.items() if name not in REMOTE_VARIABLES}
        try:
            done = subprocess.run(
                command,
                input=text.encode(),
                capture_output=True,
                env=env,
                timeout=PARSER_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            reason = f"the process that parses SQL did not end within {PARSER_TIMEOUT_S:g} s"
            raise self._error("pipeline.file", f"{reason}: try again", None) from error
        try:
            return decode(done.stdout, list[SqlElement] | SqlProblem)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            reason = f"the process that parses SQL for Spark Connect ended: {last}"
            raise self._error("pipeline.file", reason, None) from error

    def _error(self, code: str, text: str, line: int | None) -> PipelineError:
        return PipelineError(code, text, file=self._file, line=line)

    def _register(self, element: SqlElement) -> None:
        place = SourceCodeLocation(filename=self._file, line_number=element.line)
        about: dict[str, Any] = {
            "name": element.name,
            "comment": None,
            "source_code_location": place,
        }
        if element.expected:
            self._registry.register_expectations(element.name, element.expected)
        if element.kind == TemporaryView.__name__:
            self._registry.register_output(TemporaryView(**about))
        elif element.kind:
            streaming = element.kind == StreamingTable.__name__
            self._registry.register_output(
                (StreamingTable if streaming else MaterializedView)(
                    **about,
                    table_properties={},
                    partition_cols=list(element.partition_by),
                    cluster_by=None,
                    schema=element.columns or None,
                    format=element.format,
                )
            )
        if element.rule is not None:
            flow = SimpleNamespace(source_code_location=place)
            self._registry.register_rule(element.name, element.target, element.rule, flow)
        elif element.query:
            run = self._runner(element)
            self._registry.register_flow(Query(element.name, element.target, {}, place, run))

    def _runner(self, element: SqlElement) -> Any:
        def run() -> Any:
            try:
                # Inside a pipeline's function, `sql` resolves our names: see readers.py.
                return self._spark.sql(element.query)
            except AnalysisException as error:
                code, text = "pipeline.query", _cause(error)
                if (missing := missing_relation(error)) is not None:
                    unknown = unknown_relation(missing)
                    code, text = unknown.code, unknown.text
                line = element.query_line + _line_of(error) - 1
                raise self._error(code, text, line) from error

        return run


def main() -> None:
    from polybus.spark.session import session

    text = sys.stdin.buffer.read().decode()
    found: list[SqlElement] | SqlProblem
    try:
        spark = session(master="local[1]", app="polybus sql files", memory=PARSER_MEMORY)
        found = parse(spark, text)
    except Exception as error:
        reason = f"the Spark that parses SQL files for Spark Connect failed: {clean_cause(error)}"
        found = SqlProblem("pipeline.file", reason, 1)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
