"""All uses of internal parts of PySpark and Spark: no other module touches one.

A new version of Spark may change any of them. tests/spark/test_internals.py has a test for each,
which says what broke, and finds every private name, internal module, undocumented setting and
object of the JVM that another module uses. log/spark_checkpoint.py has the layout of a checkpoint.

The file is long because it is the only one. PySpark is not imported before it is used: a session
starts its JVM while PySpark is imported.
"""

import gc
import importlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark.pipelines.cli import load_pipeline_spec
    from pyspark.pipelines.flow import AutoCdcFlow, Flow
    from pyspark.pipelines.graph_element_registry import (
        GraphElementRegistry,
        graph_element_registration_context,
    )
    from pyspark.pipelines.output import (
        MaterializedView,
        Output,
        Sink,
        StreamingTable,
        TemporaryView,
    )
    from pyspark.pipelines.source_code_location import SourceCodeLocation

__all__ = [
    "AutoCdcFlow",
    "Flow",
    "GraphElementRegistry",
    "MaterializedView",
    "Output",
    "Sink",
    "SourceCodeLocation",
    "StreamingTable",
    "TemporaryView",
    "graph_element_registration_context",
    "load_pipeline_spec",
]

GATEWAY_MAIN = "org.apache.spark.deploy.SparkSubmit"
"""The class that starts a JVM for PySpark."""
GATEWAY_APPLICATION = "pyspark-shell"
"""What makes it listen for PySpark."""
GATEWAY_FILE = "_PYSPARK_DRIVER_CONN_INFO_PATH"
"""The variable with the file to which it writes its port and its secret."""
GATEWAY_PORT = "PYSPARK_GATEWAY_PORT"
GATEWAY_SECRET = "PYSPARK_GATEWAY_SECRET"
"""The variables by which PySpark connects to a running JVM."""
CONNECT_MODE = "SPARK_CONNECT_MODE"
"""The variable that says whether a JVM serves Spark Connect."""
REMOTE_VARIABLES = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE")
"""The variable by which PySpark marks that a process, and its children, use Spark Connect."""
CHECKPOINT_FILES = {
    # Without native Hadoop the default manager starts two processes for each checkpoint file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}
"""Settings with which a checkpoint on a local disk is quick."""
STREAM_SETTINGS = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.pollingDelay": "50ms",
    "spark.sql.streaming.stateStore.rocksdb.boundedMemoryUsage": "true",
    "spark.sql.streaming.stateStore.rocksdb.maxMemoryUsageMB": "64",
}
"""Settings of queries that `SET -v` does not list."""
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Settings with which Spark interprets expressions, and compiles no Java for them."""
STATE_STORE = "spark.sql.streaming.stateStore.providerClass"
"""The setting with the class that keeps the state of streams."""
GLOB_OPTION = "__globPaths__"
"""The option of a reader of files that says whether paths are patterns."""
CONTEXT_LOGGER = "SQLQueryContextLogger"
"""The logger to which PySpark writes every error in a query, with the whole stack of the JVM."""
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
"""Local properties of the tasks and of `foreachBatch` of a streaming query."""
WORKER_PARENT = "spark.python.daemon.module"
"""The setting with the main module of the process from which Python processes are forked."""
FILTER_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
"""The main module of the process in which a source is asked for its filters."""

ROW_BY_ROW = ("Project", "Filter", "SubqueryAlias", "Generate", "View")
"""Nodes of a plan that handle each row by itself."""
AGGREGATE = "Aggregate"
JOIN = "Join"
STATEFUL = (
    AGGREGATE,
    "Deduplicate",
    "DeduplicateWithinWatermark",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPySpark",
    "GlobalLimit",
)
"""Nodes of a streaming plan that have state."""
VOLATILE = re.compile(
    r"^(Current|Local|Now|UnixTimestamp$|Scalar(Subquery|UDF)|Python|Exists|ListQuery|InSubquery"
    r"|LateralSubquery|Window|Input|User|Session)"
)
"""Classes of expressions that may have another value for the same row later."""
_PIPELINES = {
    "pyspark.pipelines.cli": ("load_pipeline_spec",),
    "pyspark.pipelines.flow": ("AutoCdcFlow", "Flow"),
    "pyspark.pipelines.graph_element_registry": (
        "GraphElementRegistry",
        "graph_element_registration_context",
    ),
    "pyspark.pipelines.output": (
        *("MaterializedView", "Output", "Sink", "StreamingTable", "TemporaryView"),
    ),
    "pyspark.pipelines.source_code_location": ("SourceCodeLocation",),
}
_MODULES = {name: module for module, names in _PIPELINES.items() for name in names}


def run_worker_parent() -> None:
    """Run as the process of `WORKER_PARENT`. The argument names the main module of its forks."""
    importlib.import_module(sys.argv[1])
    daemon = importlib.import_module("pyspark.daemon")
    # PySpark collects garbage after each task, and so would look at all that was imported: 40 ms.
    gc.freeze()
    daemon.manager()


def __getattr__(name: str) -> Any:
    """The name that Spark's own pipeline runner imports."""
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_MODULES[name]), name)


def context_logger() -> logging.Logger:
    """PySpark's logger of that name. PySpark's calls fail with a logger of another class."""
    from pyspark.logger import PySparkLogger

    found: logging.Logger = PySparkLogger.getLogger(CONTEXT_LOGGER)
    return found


def listen(spark: Any, listener: Any) -> None:
    """As `spark.streams.addListener`, with a progress as one text.

    PySpark 4.3 asks the JVM for each of its fields, in some 500 calls, because the iteration of
    each map and list of the JVM ends with an exception that is inspected.
    """
    from pyspark.sql.streaming.listener import JStreamingQueryListener, QueryProgressEvent

    class BriefListener(JStreamingQueryListener):
        def onQueryProgress(self, event: Any) -> None:
            try:
                found = QueryProgressEvent.fromJson(json.loads(event.json()))
            except Exception:
                # The text leaves out a figure that is not a number, and may lack others.
                super().onQueryProgress(event)
            else:
                self.pylistener.onQueryProgress(found)

    wrapper = spark._jvm.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper
    listener._jlistenerobj = wrapper(BriefListener(listener))
    spark.streams.addListener(listener)


def is_connect(spark: Any) -> bool:
    """Whether a session uses Spark Connect: its plans and its JVM are then inaccessible."""
    return getattr(spark, "_jsparkSession", None) is None


def activate_in_thread(spark: Any) -> None:
    """Make a session this thread's active one in the JVM, which looks there for Python sources."""
    if not is_connect(spark):
        spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)


def activate(spark: Any) -> None:
    """Make a session the one that `SparkSession.active()` returns."""
    if is_connect(spark):
        type(spark)._active_session.session = spark  # one per thread
    else:
        from pyspark.sql import SparkSession

        SparkSession._activeSession = spark
        activate_in_thread(spark)


def knows_source(spark: Any, name: str) -> bool:
    """Whether a session with a JVM has a Python data source of that name."""
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    return bool(manager.dataSourceExists(name))


def set_python_sources(spark: Any, sources: Iterable[Any]) -> None:
    """Tell a JVM all Python data sources, so that it starts no process to look for them.

    They are known to all of its sessions, as those are that it finds.
    """
    from pyspark.serializers import CPickleSerializer

    jvm, context = spark._jvm, spark.sparkContext
    place: list[Any] = [context.environment, [], context.pythonExec, context.pythonVer, []]
    sql = jvm.org.apache.spark.sql.execution.datasources
    known = jvm.java.util.HashMap()
    for source in sources:
        # Without an accumulator, which would cost each task a call to this process.
        pickled = bytearray(CPickleSerializer().dumps(source))
        function = jvm.SimplePythonFunction(pickled, *place, None)
        known.put(source.name(), sql.v2.python.UserDefinedPythonDataSource(function))
    manager = getattr(getattr(sql, "DataSourceManager$"), "MODULE$")
    found = jvm.scala.Option.apply(jvm.PythonUtils.toScalaMap(known))
    getattr(manager, "dataSourceBuilders_$eq")(found)


def jvm_pid(spark: Any) -> int:
    """The process id of the session's JVM. Raises with Spark Connect."""
    return int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())


class PipelineStatement(NamedTuple):
    """A statement of a pipeline's SQL file.

    `kind` is the name of the class of its output, empty for a flow alone. `query` is empty if there
    is none, or the statement is a flow with INSERT. `changes` are the clauses of auto CDC, by the
    names of a ChangeRule.
    """

    kind: str
    name: str
    target: str
    columns: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    format: str | None = None
    query: str = ""
    changes: dict[str, Any] | None = None


def parsed_statement(spark: Any, text: str) -> PipelineStatement | None:
    """An SQL statement parsed by Spark; None if it declares no element of a pipeline.

    A view's name is quoted. Raises ParseException.
    """
    plan = spark._jsparkSession.sessionState().sqlParser().parsePlan(text)
    match _kind_of(plan):
        case (
            "CreateStreamingTable"
            | "CreateStreamingTableAsSelect"
            | "CreateMaterializedViewAsSelect"
            | "CreateStreamingTableAutoCdc"
        ):
            return _table_statement(plan)
        case "CreateViewCommand":
            name = str(plan.name().quotedString())
            return PipelineStatement("TemporaryView", name, name, query=plan.originalText().get())
        case "CreateFlowCommand":
            return _flow_statement(plan)
    return None


def _table_statement(plan: Any) -> PipelineStatement:
    name, kind = _dotted(plan.name().nameParts()), _kind_of(plan)
    provider = plan.tableSpec().provider()
    references = [one.references() for one in _listed(plan.partitioning())]
    return PipelineStatement(
        kind="StreamingTable" if "StreamingTable" in kind else "MaterializedView",
        name=name,
        target=name,
        columns=tuple(f"`{one.name()}` {one.dataType().sql()}" for one in _listed(plan.columns())),
        partition_by=tuple(_path(one) for found in references for one in found),
        format=provider.get() if provider.isDefined() else None,
        query=plan.originalText() if kind.endswith("AsSelect") else "",
        changes=_auto_cdc(plan) if kind.endswith("AutoCdc") else None,
    )


def _flow_statement(plan: Any) -> PipelineStatement:
    operation, name = plan.flowOperation(), _dotted(plan.name().nameParts())
    if _kind_of(operation) == "AutoCdcInto":
        target = _relation_in(operation.targetTable())
        return PipelineStatement("", name, target, changes=_auto_cdc(operation))
    return PipelineStatement("", name, _dotted(operation.table().multipartIdentifier()))


def _auto_cdc(plan: Any) -> dict[str, Any]:
    deletes = plan.deleteCondition()
    return {
        "source": _relation_in(plan.source()),
        "keys": _names(plan.keys()),
        "sequence": plan.sequenceByExpr().sql(),
        "deletes": deletes.get().sql() if deletes.isDefined() else None,
        "columns": _optional_names(plan.includeColumns()),
        "except_columns": _optional_names(plan.excludeColumns()),
        "has_history": plan.storedAsScdType() == 2,
        "tracked": _optional_names(plan.trackHistoryColumns()),
        "except_tracked": _optional_names(plan.trackHistoryExceptColumns()),
    }


def _relation_in(plan: Any) -> str:
    """The name of the single relation of a plan, without aliases."""
    while (kind := _kind_of(plan)) != "UnresolvedRelation":
        if kind == "UnresolvedIdentifier":
            return _dotted(plan.nameParts())
        (plan,) = _listed(plan.children())
    return _dotted(plan.multipartIdentifier())


def _names(attributes: Any) -> tuple[str, ...]:
    return tuple(_dotted(one.nameParts()) for one in _listed(attributes))


def _path(reference: Any) -> str:
    return ".".join(map(str, reference.fieldNames()))


def _optional_names(attributes: Any) -> tuple[str, ...]:
    return _names(attributes.get()) if attributes.isDefined() else ()


def _dotted(parts: Any) -> str:
    return ".".join(map(str, _listed(parts)))


def _listed(sequence: Any) -> list[Any]:
    """The items of a Scala sequence in the JVM."""
    return [sequence.apply(index) for index in range(sequence.size())]


def _kind_of(node: Any) -> str:
    """The class of a plan or an expression in the JVM, without its package."""
    return str(node.getClass().getSimpleName())


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A node of an analysed plan, or an expression in one."""

    java: Any

    @property
    def name(self) -> str:
        return str(self.java.nodeName())

    @property
    def kind(self) -> str:
        return _kind_of(self.java)

    @property
    def is_streaming(self) -> bool:
        return bool(self.java.isStreaming())

    @property
    def is_deterministic(self) -> bool:
        return bool(self.java.deterministic())

    def children(self) -> "list[PlanNode]":
        return [PlanNode(one) for one in _listed(self.java.children())]

    def expressions(self) -> "list[PlanNode]":
        return [PlanNode(one) for one in _listed(self.java.expressions())]

    def text(self, fields_max: int) -> str:
        return str(self.java.simpleString(fields_max))

    def groupings(self) -> "list[PlanNode]":
        """The grouping expressions of an Aggregate."""
        return [PlanNode(one) for one in _listed(self.java.groupingExpressions())]

    def aggregates(self) -> "list[tuple[str, PlanNode]]":
        """The columns of an Aggregate, with their expressions."""
        return [
            (str(one.name()), PlanNode(one.child() if _kind_of(one) == "Alias" else one))
            for one in _listed(self.java.aggregateExpressions())
        ]

    def aggregate_function(self) -> tuple[str, bool]:
        """The function of an aggregate and whether it is DISTINCT; empty if it is not one."""
        if self.kind != "AggregateExpression":
            return "", False
        return _kind_of(self.java.aggregateFunction()), bool(self.java.isDistinct())

    def is_same(self, other: "PlanNode") -> bool:
        return bool(self.java.semanticEquals(other.java))

    def source(self) -> str:
        """The format of the source of a stream; empty if this is not a source."""
        return str(self.java.sourceName()) if self.name.startswith("StreamingRelation") else ""

    def source_options(self, names: Sequence[str]) -> dict[str, str]:
        """The options of the source of a stream, by their lowercase names."""
        if self.kind == "StreamingRelation":
            options = self.java.dataSource().options()
            return {name: options.get(name).get() for name in names if options.contains(name)}
        options = self.java.extraOptions()
        return {name: options.get(name) for name in names if options.containsKey(name)}


def analysed_plan(frame: Any) -> PlanNode | None:
    """The plan of a DataFrame, analysed; None with Spark Connect, which has it on the server."""
    java = getattr(frame, "_jdf", None)
    return None if java is None else PlanNode(java.queryExecution().analyzed())


class ReusedPlan:
    """The analysed steps on a batch of a query, to reuse them for its other batches.

    Spark would analyse it for each batch, although they all have the same columns.
    """

    def __init__(self, frame: Any, done: Any) -> None:
        """`done` was derived from `frame` in steps that each have one input."""
        base, node = (one._jdf.queryExecution().analyzed() for one in (frame, done))
        self._columns = base.output()
        nodes: list[Any] = []
        while not node.equals(base):
            nodes.insert(0, node)
            (node,) = _listed(node.children())
        # Each part of a name is a call of the JVM, so they are looked up once.
        self._sequence = frame.sparkSession._jvm.PythonUtils.toSeq
        # One list for all calls: a list of Python takes three calls to pass.
        self._children = frame.sparkSession._jvm.java.util.ArrayList()
        self._children.add(base)
        self._dataset = frame.sparkSession._jvm.org.apache.spark.sql.classic.Dataset
        trees = frame.sparkSession._jvm.org.apache.spark.sql.catalyst
        # Above the batch itself they would keep its rows.
        empty = getattr(getattr(trees.plans.logical, "LocalRelation$"), "MODULE$")
        below = empty.apply(self._columns)
        # A Dataset adds its id to those of the nodes that it is made of, in a set which they share.
        datasets = trees.trees.TreeNodeTag("dataset_id")
        self._nodes: list[Any] = []
        for node in nodes:
            below = self._above(node, below)
            below.unsetTagValue(datasets)
            self._nodes.append(below)

    def onto(self, frame: Any) -> Any:
        """The same steps on another batch; None if its columns differ from those of the first."""
        plan = frame._jdf.queryExecution().analyzed()
        if not plan.output().equals(self._columns):
            return None
        for node in self._nodes:
            plan = self._above(node, plan)
        plan.setAnalyzed()
        done = self._dataset.ofRows(frame._jdf.sparkSession(), plan)
        return type(frame)(done, frame.sparkSession)

    def _above(self, node: Any, plan: Any) -> Any:
        """The node of a plan with another one below it."""
        self._children.set(0, plan)
        return node.withNewChildren(self._sequence(self._children))


def check_streaming_plan(spark: Any, plan: PlanNode) -> None:
    """Check what Spark checks when a stream in append mode starts. Raises AnalysisException."""
    jvm = spark._jvm
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(plan.java, jvm.org.apache.spark.sql.streaming.OutputMode.Append())


def checkpoint_root(spark: Any, query: str) -> str:
    """The `checkpointLocation` of an active query, by its id, also from a cloned session."""
    number = spark._jvm.java.util.UUID.fromString(query)
    active = spark._jsparkSession.sharedState().activeStreamingQueries()
    return str(active.get(number).resolvedCheckpointRoot())


def expression_of(column: Any) -> Any:
    """A column as SQL text if it is a name or was made from text, else the column.

    `create_auto_cdc_flow` turns texts into columns of Spark Connect, whatever the session is.
    """
    java = getattr(column, "_jc", None)
    if java is not None:
        text = str(java.toString())
        return text if text.replace("_", "a").isalnum() else column
    given = column._expr
    return getattr(given, "_unparsed_identifier", None) or getattr(given, "_expr", column)


def remote_query(spark: Any, text: str, named: dict[str, Any]) -> Any:
    """A query over Spark Connect whose plan carries the DataFrames that it names."""
    from pyspark.sql.connect.dataframe import DataFrame
    from pyspark.sql.connect.plan import SQL, SubqueryAlias

    # The server makes each a view while it analyses, and parses the name.
    views = [SubqueryAlias(frame._plan, f"`{name}`") for name, frame in named.items()]
    return DataFrame(SQL(text, [], {}, views), spark)


def arrow_schema_of(schema: Any) -> Any:
    """The Arrow schema that Spark expects from a source with these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def java_errors() -> type[Exception]:
    """The class of errors that a call of the JVM raises."""
    from py4j.protocol import Py4JError

    found: type[Exception] = Py4JError
    return found


def java_cause(error: object) -> str:
    """The stack trace of the Java error that caused a query's failure; empty if there is none."""
    return str(getattr(getattr(error, "_cause", None), "_stackTrace", ""))


def turned_into(spark: Any, kind: type[Any]) -> Any:
    """Turn a session into one of a subclass: PySpark's builder creates only its own class."""
    spark.__class__ = kind
    return spark


def session_of(reader: Any) -> Any:
    """The session of a DataFrameReader."""
    return reader._spark
