"""Finds the pipelines in a folder, and loads the files of each.

    pipelines/orders/…          a pipeline named `orders`: its .py and .sql files at any depth, or
                                those that its spark-pipeline.yml names (Spark's own spec)
    pipelines/clicks.py         a pipeline of one file, named `clicks`

A Python file runs as in Spark's own runner: with `spark` as a global, in the pipeline's folder, and
not as an importable module, so that functions are sent to workers by value. A SQL file has CREATE
STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW and FLOW; Spark's own parser reads each
statement, so a file means the same to us and to Spark's runner.
"""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.errors import AnalysisException, ParseException
from pyspark.pipelines.flow import Flow as Query
from pyspark.pipelines.output import MaterializedView, StreamingTable, TemporaryView
from pyspark.pipelines.source_code_location import SourceCodeLocation

from polybus.errors import UsageError
from polybus.spark.causes import clean_cause
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.declared import readers
from polybus.spark.pipelines.declared.readers import (
    OPAQUE,
    missing_relation,
    relation_of,
    unknown_relation,
)
from polybus.spark.pipelines.declared.registry import (
    AUTO_CDC,
    DeclarationRegistry,
    DeclaredPipeline,
    PipelineError,
    check_targets,
    located,
)
from polybus.spark.pipelines.sessions import scala_list
from polybus.spark.session.connect import is_connect

_INSERT = re.compile(r"^.*?\bINSERT\s+INTO\s+(?:`[^`]+`|[\w.]+)(?:\s+BY\s+NAME)?\s+", re.I | re.S)
_POSITION = re.compile(r";? \(?line \d+,? pos \d+\)?")
_ERROR_LINE = re.compile(r"\bline (\d+)")
_KINDS = "CREATE STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW or FLOW"
_PIECE = re.compile(rf"{OPAQUE}|`[^`]*`|;|[^'\"`;/-]+|.", re.DOTALL)
_LEAD = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)


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
            raise self._error("pipeline.unsupported", f"{text}; {advice}", None)
        parser = self._spark._jsparkSession.sessionState().sqlParser()  # noqa: SLF001
        for statement in statements(text):
            try:
                plan = parser.parsePlan(statement.text)
            except ParseException as error:
                line = statement.line + _line_of(error) - 1
                raise self._error("pipeline.file", _cause(error), line) from error
            read = self._READERS.get(plan.getClass().getSimpleName())
            if read is None:
                shown = " ".join(statement.text.split()[:4])
                text = f"`{shown} …` does not declare an element of a pipeline: use {_KINDS}"
                raise self._error("pipeline.unsupported", text, statement.line)
            read(self, plan, statement)

    def _error(self, code: str, text: str, line: int | None) -> PipelineError:
        return PipelineError(code, text, file=self._file, line=line)

    def _table(self, plan: Any, statement: Statement) -> None:
        name = _dotted(plan.name().nameParts())
        streaming = "StreamingTable" in plan.getClass().getSimpleName()
        kind = StreamingTable if streaming else MaterializedView
        provider = plan.tableSpec().provider()
        fields = [f"`{one.name()}` {one.dataType().sql()}" for one in scala_list(plan.columns())]
        self._registry.register_output(
            kind(
                name=name,
                comment=None,
                source_code_location=self._place(statement),
                table_properties={},
                partition_cols=_partition_columns(plan.partitioning()),
                cluster_by=None,
                schema=", ".join(fields) or None,
                format=provider.get() if provider.isDefined() else None,
            )
        )
        if plan.getClass().getSimpleName().endswith("AsSelect"):
            self._query(name, name, plan.originalText(), statement)

    def _view(self, plan: Any, statement: Statement) -> None:
        name = relation_of(plan.name().quotedString())
        view = TemporaryView(name=name, comment=None, source_code_location=self._place(statement))
        self._registry.register_output(view)
        self._query(name, name, plan.originalText().get(), statement)

    def _flow(self, plan: Any, statement: Statement) -> None:
        operation = plan.flowOperation()
        if operation.getClass().getSimpleName() != "InsertIntoStatement":
            self._auto_cdc(plan, statement)
        target = _dotted(operation.table().multipartIdentifier())
        query = _INSERT.sub("", statement.text, count=1)
        self._query(_dotted(plan.name().nameParts()), target, query, statement)

    def _auto_cdc(self, plan: Any, statement: Statement) -> None:
        raise self._error("pipeline.unsupported", AUTO_CDC, statement.line)

    def _query(self, name: str, target: str, query: str, statement: Statement) -> None:
        before = max(0, statement.text.find(query))
        line = statement.line + statement.text.count("\n", 0, before)

        def run() -> Any:
            try:
                # Inside a pipeline's function, `sql` resolves our names: see readers.py.
                return self._spark.sql(query)
            except AnalysisException as error:
                code, text = "pipeline.query", _cause(error)
                if (missing := missing_relation(error)) is not None:
                    unknown = unknown_relation(missing)
                    code, text = unknown.code, unknown.text
                raise self._error(code, text, line + _line_of(error) - 1) from error

        place = self._place(statement)
        self._registry.register_flow(
            Query(name=name, target=target, spark_conf={}, source_code_location=place, func=run)
        )

    def _place(self, statement: Statement) -> SourceCodeLocation:
        return SourceCodeLocation(filename=self._file, line_number=statement.line)

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
        ".".join(map(str, reference.fieldNames()))
        for transform in scala_list(partitioning)
        for reference in transform.references()
    ]


SPEC_NAMES = ("spark-pipeline.yml", "spark-pipeline.yaml")
SUFFIXES = (".py", ".sql")
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)


def find_pipelines(folder: Path) -> dict[str, Path]:
    """Name → folder or file of each pipeline in `folder`, sorted by name.

    Raises:
        UsageError: `pipeline.folder`, the folder does not exist; `pipeline.duplicate`.
    """
    if not folder.is_dir():
        text = f"folder {folder} does not exist; polybus pipeline init NAME creates it"
        raise UsageError("pipeline.folder", text)
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if not _is_pipeline(path):
            continue
        name = path.stem.lower() if path.is_file() else path.name.lower()
        if name in found:
            text = f"{path} and {found[name]} are both named {name}; rename one"
            raise UsageError("pipeline.duplicate", text)
        found[name] = path
    return found


def choose(found: dict[str, Path], names: tuple[str, ...]) -> dict[str, Path]:
    """The pipelines with these names, or all without names. UsageError `pipeline.unknown`."""
    unknown = [name for name in names if name.lower() not in found]
    if unknown:
        text = f"no pipeline {', '.join(unknown)}; there are: {', '.join(found) or 'none'}"
        raise UsageError("pipeline.unknown", text)
    chosen = {name.lower() for name in names}
    return {name: path for name, path in found.items() if not names or name in chosen}


def _is_pipeline(path: Path) -> bool:
    if path.name.startswith((".", "_")) or not _NAME.fullmatch(path.stem):
        return False
    if path.is_file():
        return path.suffix in SUFFIXES
    return path.is_dir() and next(source_files(path), None) is not None


def source_files(folder: Path) -> Iterator[Path]:
    """The Python and SQL files of a pipeline, sorted by name."""
    if folder.is_file():
        yield folder
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if path.suffix in SUFFIXES and path.is_file() and not hidden:
            yield path


def load_pipeline(spark: Any, name: str, path: Path, bus: BusLocation) -> DeclaredPipeline:
    """Run the files of a pipeline and return what they declare.

    Raises:
        PipelineError: the first error, with file and line.
    """
    from pyspark.pipelines.graph_element_registry import graph_element_registration_context

    path = path.resolve()
    folder = path.parent if path.is_file() else path
    pipeline = DeclaredPipeline(name, folder)
    files = [path] if path.is_file() else _listed_files(pipeline)
    if not files:
        raise PipelineError("pipeline.file", "it has no .py or .sql file", file=str(path))

    registry = DeclarationRegistry(pipeline)
    readers.install(type(spark))
    with readers.active(spark), readers.using(readers.Resolver(bus)), chdir(folder):
        with graph_element_registration_context(registry):
            for file in files:
                _load_file(spark, registry, file)
    check_targets(pipeline)
    if not pipeline.outputs:
        raise PipelineError("pipeline.file", "it declares no table, view or sink", file=str(path))
    return pipeline


def _load_file(spark: Any, registry: DeclarationRegistry, file: Path) -> None:
    try:
        if file.suffix == ".sql":
            SqlFile(spark, file, registry).read(file.read_text(encoding="utf-8"))
            return
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__dict__["spark"] = spark
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise located("pipeline.file", error, file=str(file), line=None) from error


def _listed_files(pipeline: DeclaredPipeline) -> list[Path]:
    """The files that the spec names, else all; adds the spec's configuration to the pipeline."""
    specs = [path for name in SPEC_NAMES if (path := pipeline.folder / name).is_file()]
    if not specs:
        return list(source_files(pipeline.folder))
    from pyspark.pipelines.cli import load_pipeline_spec

    try:
        spec = load_pipeline_spec(specs[0])
    except Exception as error:
        raise located("pipeline.file", error, file=str(specs[0]), line=None) from error
    pipeline.conf.update(spec.configuration)
    files = [
        path
        for library in spec.libraries
        for path in sorted(pipeline.folder.glob(library.include))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    other = [path for path in files if path.suffix not in SUFFIXES]
    if other:
        text = f"{other[0].name} is neither .py nor .sql; leave it out of the libraries"
        raise PipelineError("pipeline.file", text, file=str(specs[0]))
    return list(dict.fromkeys(files))
