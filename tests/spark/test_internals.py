"""What PySpark does not publish and we use. If one fails, a new PySpark has changed just that."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import re
import threading
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from docs_kit import ROOT
from private_kit import Private
from pyspark.errors import AnalysisException, ParseException, StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from spark_kit import eventually

from polybus.spark import internals
from polybus.spark.source import PolybusDataSource

PACKAGE = ROOT / "src" / "polybus" / "spark"
VERSION = f"PySpark {pyspark.__version__}"
PYSPARK = Path(str(pyspark.__file__)).parent
PLANS = "org.apache.spark.sql.catalyst.plans.logical"


def test_no_other_module_uses_what_is_private() -> None:
    found = [one for one in Private(PACKAGE).findings() if "/internals.py:" not in one]
    assert found == [], "move it to internals.py"


PRIVATE = """
import py4j
from pyspark.pipelines.flow import Flow
from pyspark.sql import _private

class Reader(DataFrameReader):
    def load(self, frame):
        self._own = frame._jdf.plan
        frame.plan.deleteCondition()
        getattr(frame, "_cause")
        frame.__class__ = Reader
        return self._spark, self._own, "streaming.sql.batchId", "org.apache.spark.Some"
"""


def test_every_kind_of_private_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(PRIVATE)
    found = sorted(one.rpartition(": ")[2] for one in Private(tmp_path).findings())
    assert found == [
        "'org.apache.spark.Some'",
        "'streaming.sql.batchId'",
        ".__class__",
        "._jdf",
        ".deleteCondition",
        "getattr(frame, '_cause')",
        "import of py4j",
        "import of pyspark.pipelines.flow",
        "import of pyspark.sql",
        "self._spark of Reader",
    ]


def test_no_other_module_uses_a_setting_that_spark_does_not_document(spark: Any) -> None:
    documented = {row.key for row in spark.sql("SET -v").collect()}
    used = {
        name
        for path in PACKAGE.rglob("*.py")
        if path.name != "internals.py"
        for name in re.findall(r"[\"'](spark\.sql\.[\w.]+)[\"']", path.read_text())
    }
    assert used and used <= documented


def test_every_function_of_internals_has_a_test() -> None:
    here = Path(__file__).read_text()
    source = (PACKAGE / "internals.py").read_text()
    names = re.findall(r"^(?:def |class )?([a-zA-Z]\w+)(?:\(| = |:$)", source, re.M)
    assert len(names) > 30
    assert [name for name in names if f"internals.{name}" not in here] == []


def test_the_classes_of_pipelines_are_where_sparks_own_runner_finds_them() -> None:
    for name in internals.__all__:
        assert callable(getattr(internals, name)), f"{VERSION}: pyspark.pipelines: {name}"
    with pytest.raises(AttributeError):
        internals.nothing  # noqa: B018


def test_the_jvm_is_started_as_pyspark_starts_it(spark: Any) -> None:
    """The session of the tests is started so; this names what changed if it is not."""
    forName = spark._jvm.java.lang.Class.forName
    assert forName(internals.GATEWAY_MAIN).getName(), f"{VERSION}: {internals.GATEWAY_MAIN}"
    text = (PYSPARK / "java_gateway.py").read_text()
    for name in (
        *(internals.GATEWAY_APPLICATION, internals.GATEWAY_FILE),
        *(internals.GATEWAY_PORT, internals.GATEWAY_SECRET, internals.CONNECT_MODE),
    ):
        assert f'"{name}"' in text, f"{VERSION}: {name}"


def test_the_files_of_a_checkpoint_are_written_as_we_set(spark: Any) -> None:
    for setting, kind in internals.CHECKPOINT_FILES.items():
        assert spark.conf.get(setting) == kind, f"{VERSION}: {setting}"
        assert spark._jvm.java.lang.Class.forName(kind).getName() == kind, f"{VERSION}: {kind}"


def test_settings_that_spark_does_not_document_are_still_read(spark: Any) -> None:
    """Spark takes any name for a setting. RocksDB has a list of its own."""
    (jar,) = PYSPARK.glob("jars/spark-sql_2*.jar")
    with zipfile.ZipFile(jar) as packed:
        (name,) = [one for one in packed.namelist() if one.endswith("/RocksDBConf$.class")]
        of_rocksdb = packed.read(name)
    settings = {**internals.STREAM_SETTINGS, **internals.INTERPRETED}
    for setting in (internals.STATE_STORE, *settings):
        end = setting.rpartition(".rocksdb.")[2]
        is_read = spark.conf.isModifiable(setting) or end.encode() in of_rocksdb
        assert is_read, f"{VERSION}: {setting}"
    assert not spark.conf.isModifiable("spark.sql.streaming.nothing")


def test_python_processes_are_forked_from_a_parent_that_has_imported_our_modules(
    spark: Any,
) -> None:
    """Spark calls `internals.run_worker_parent` in a process of its own."""
    assert callable(internals.run_worker_parent)
    assert spark.conf.get(internals.WORKER_PARENT) == "polybus.spark.worker_parent"

    def parent(rows: Any) -> Any:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " ")
        found = {"command": command, "frozen": gc.get_freeze_count()}
        for batch in rows:
            yield pa.RecordBatch.from_pylist([found] * batch.num_rows)

    (row,) = spark.range(1).mapInArrow(parent, "command string, frozen long").collect()
    assert "-m polybus.spark.worker_parent pyspark.worker" in row.command, VERSION
    assert row.frozen > 10_000, "what was imported costs nothing after each task"


def test_a_worker_that_asks_for_filters_has_its_module() -> None:
    assert importlib.util.find_spec(internals.FILTER_WORKER), f"{VERSION}: push-down of filters"


def test_the_nodes_of_plans_have_their_names(spark: Any) -> None:
    nodes = (*internals.ROW_BY_ROW, *internals.STATEFUL, internals.AGGREGATE, internals.JOIN)
    for name in nodes:
        kind = spark._jvm.java.lang.Class.forName(f"{PLANS}.{name}")
        assert kind.getSimpleName() == name, f"{VERSION}: {name}"


def test_expressions_that_change_have_the_names_that_are_known(spark: Any) -> None:
    texts = ("now()", "current_date()", "current_user()", "(SELECT max(id) FROM range(3))")
    plan = internals.analysed_plan(spark.range(1).selectExpr(*texts))
    assert isinstance(plan, internals.PlanNode)
    kinds = [one.children()[0].kind for one in plan.expressions()]
    assert all(internals.VOLATILE.match(kind) for kind in kinds), f"{VERSION}: {kinds}"
    plain = internals.analysed_plan(spark.range(1).selectExpr("upper('x')"))
    assert plain is not None
    assert not internals.VOLATILE.match(plain.expressions()[0].children()[0].kind)


def test_a_session_and_its_reader_can_be_of_our_classes(spark: Any) -> None:
    class Ours(type(spark)):  # type: ignore[misc]
        pass

    other = spark.newSession()
    assert type(internals.turned_into(other, Ours)) is Ours
    assert internals.session_of(other.read) is other, f"{VERSION}: DataFrameReader._spark"


def test_a_batch_knows_its_query_and_a_failure_its_cause(spark: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def take(frame: Any, batch_id: int) -> None:
        context = frame.sparkSession.sparkContext
        names = (internals.QUERY_ID, internals.BATCH_ID)
        seen.append((context.getLocalProperty(names[0]), context.getLocalProperty(names[1])))
        raise ValueError("on purpose")

    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(take)
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(30)
    assert seen == [(query.id, "0")], f"{VERSION}: local properties of a batch"
    assert "on purpose" in internals.java_cause(raised.value), f"{VERSION}: _cause._stackTrace"
    assert internals.java_cause(ValueError()) == ""


def test_a_listener_gets_a_progress_in_few_calls(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from py4j.clientserver import ClientServerConnection
    from pyspark.sql.streaming import StreamingQueryListener

    calls: Counter[int] = Counter()
    asked: list[int] = []
    send = ClientServerConnection.send_command

    def counted(connection: Any, command: str) -> Any:
        calls[threading.get_ident()] += 1
        return send(connection, command)

    class Notes(StreamingQueryListener):  # type: ignore[misc]
        def __init__(self) -> None:
            self.found: list[Any] = []

        def onQueryProgress(self, event: Any) -> None:
            asked.append(calls.pop(threading.get_ident()))
            self.found.append(event.progress)

        def onQueryStarted(self, event: Any) -> None: ...

        def onQueryIdle(self, event: Any) -> None: ...
        def onQueryTerminated(self, event: Any) -> None: ...

    monkeypatch.setattr(ClientServerConnection, "send_command", counted)
    notes = Notes()
    internals.listen(spark, notes)
    try:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "one.txt").write_text("a\nb\n")
        stream = spark.readStream.text(str(tmp_path / "in")).writeStream.format("noop")
        query = stream.option("checkpointLocation", str(tmp_path / "out")).start()
        query.processAllAvailable()
        query.stop()
        eventually(lambda: notes.found)
    finally:
        spark.streams.removeListener(notes)
    (found,) = [one for one in notes.found if one.numInputRows]
    assert (found.numInputRows, str(found.id), found.sources[0].numInputRows) == (2, query.id, 2)
    # Ours are recognised by their offset, which must be JSON.
    assert json.loads(found.sources[0].endOffset) == {"logOffset": 0}
    assert found.durationMs["addBatch"] >= 0 and found.batchDuration is not None
    # Asked field by field, a progress takes 300 calls and more.
    assert max(asked) < 50, f"{VERSION}: {asked} calls"


def test_a_progress_whose_text_cannot_be_read_is_asked_for_field_by_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyspark.sql.streaming.listener import QueryProgressEvent

    found: list[str] = []
    made: list[Any] = []
    wrapper = SimpleNamespace(PythonStreamingQueryListenerWrapper=made.append)
    sql = SimpleNamespace(streaming=wrapper)
    jvm = SimpleNamespace(
        org=SimpleNamespace(apache=SimpleNamespace(spark=SimpleNamespace(sql=sql)))
    )
    streams = SimpleNamespace(addListener=lambda listener: None)
    listener = SimpleNamespace(onQueryProgress=found.append)
    internals.listen(SimpleNamespace(_jvm=jvm, streams=streams), listener)
    monkeypatch.setattr(QueryProgressEvent, "fromJObject", lambda event: "by field")
    made[0].onQueryProgress(SimpleNamespace(json=lambda: '{"progress": {}}'))
    assert found == ["by field"]


def leaves_of(node: Any) -> list[Any]:
    leaves = node.collectLeaves()
    return [leaves.apply(index) for index in range(leaves.size())]


def test_what_was_done_with_a_batch_is_done_with_the_next_one(spark: Any, tmp_path: Path) -> None:
    plans: list[internals.ReusedPlan] = []
    found: list[list[str]] = []
    ids: list[int] = []
    named_datasets = spark._jvm.org.apache.spark.sql.catalyst.trees.TreeNodeTag("dataset_id")

    def take(frame: Any, batch_id: int) -> None:
        if not plans:
            made = (
                frame.coalesce(1).where("value <> ''").selectExpr("upper(value) AS x", "x || x y")
            )
            plans.append(internals.ReusedPlan(frame, made))
        done = plans[0].onto(frame)
        assert done is not None, f"{VERSION}: the columns of a query's batches differ"
        datasets = done._jdf.queryExecution().analyzed().getTagValue(named_datasets)
        ids.append(datasets.get().size())
        found.append([row.y for row in done.where("x <> 'C'").collect()])

    (tmp_path / "in").mkdir()
    stream = spark.readStream.text(str(tmp_path / "in")).writeStream.foreachBatch(take)
    query = stream.option("checkpointLocation", str(tmp_path / "out")).start()
    for name in ("a", "b", "c"):
        (tmp_path / "in" / name).write_text(f"{name}\n\n")
        query.processAllAvailable()
    query.stop()
    assert found == [["AA"], ["BB"], []]
    assert ids == [1, 1, 1], f"{VERSION}: each batch leaves the id of a Dataset in the plan"
    leaves = {str(leaf.nodeName()) for node in plans[0]._nodes for leaf in leaves_of(node)}
    assert leaves == {"LocalRelation"}, f"{VERSION}: the plan keeps the rows of the first batch"
    assert plans[0].onto(spark.range(1)) is None


def test_an_error_of_the_jvm_has_its_class(spark: Any) -> None:
    """Of classes that PySpark does not know: it has errors of its own for the others."""
    with pytest.raises(internals.java_errors(), match="ClassNotFoundException"):
        spark._jvm.java.lang.Class.forName("no.such.Class")


def test_a_session_with_a_jvm_is_told_from_one_without(spark: Any) -> None:
    from pyspark.sql.connect.session import SparkSession

    assert not internals.is_connect(spark), f"{VERSION}: SparkSession._jsparkSession is gone"
    assert not hasattr(SparkSession, "_jsparkSession")


def test_a_session_can_be_made_the_active_one(spark: Any) -> None:
    from pyspark.sql.connect.session import SparkSession

    other = spark.newSession()
    try:
        internals.activate(other)
        assert type(spark).getActiveSession() is other, f"{VERSION}: _activeSession"
        internals.activate_in_thread(spark)
        active = spark._jvm.SparkSession.active()
        assert active.equals(spark._jsparkSession), f"{VERSION}: setActiveSession of the JVM"
    finally:
        internals.activate(spark)
    assert hasattr(SparkSession, "_active_session"), f"{VERSION}: active session of Spark Connect"


def test_a_python_source_can_be_looked_up(spark: Any) -> None:
    assert internals.knows_source(spark, "polybus"), f"{VERSION}: dataSourceManager"
    assert not internals.knows_source(spark, "nothing")


def test_python_sources_can_be_told(spark: Any) -> None:
    class Told(PolybusDataSource):
        @classmethod
        def name(cls) -> str:
            return "told"

    try:
        internals.set_python_sources(spark, [PolybusDataSource, Told])
        session = spark.newSession()
        assert internals.knows_source(session, "told"), f"{VERSION}: DataSourceManager"
        assert session.read.format("told").load().columns[0] == "topic"
    finally:
        internals.set_python_sources(spark, [PolybusDataSource])
    assert not internals.knows_source(spark.newSession(), "told")
    assert internals.knows_source(spark.newSession(), "polybus")


def test_the_jvm_has_a_process_id(spark: Any) -> None:
    os.kill(internals.jvm_pid(spark), 0)


def test_sparks_parser_reads_the_statements_of_pipelines(spark: Any) -> None:
    table = "CREATE STREAMING TABLE a (b INT) PARTITIONED BY (b)"
    found = internals.parsed_statement(spark, table)
    expected = internals.PipelineStatement("StreamingTable", "a", "a", ("`b` INT",), ("b",))
    assert found == expected, f"{VERSION}: CreateStreamingTable"
    for kind, text in {
        "StreamingTable": "CREATE STREAMING TABLE a AS SELECT 1",
        "MaterializedView": "CREATE MATERIALIZED VIEW a AS SELECT 1",
        "TemporaryView": "CREATE TEMPORARY VIEW a AS SELECT 1",
    }.items():
        found = internals.parsed_statement(spark, text)
        assert found is not None, f"{VERSION}: {text}"
        assert (found.kind, found.name.strip("`"), found.query) == (kind, "a", "SELECT 1")
    flow = "CREATE FLOW a AS INSERT INTO b BY NAME SELECT 1"
    found = internals.parsed_statement(spark, flow)
    assert found == internals.PipelineStatement("", "a", "b"), f"{VERSION}: CreateFlowCommand"
    assert internals.parsed_statement(spark, "SELECT 1") is None
    with pytest.raises(ParseException):
        internals.parsed_statement(spark, "CREATE STREAMING TABEL a")


CHANGES = """FROM STREAM s KEYS (k, n) APPLY AS DELETE WHEN op = 'd' SEQUENCE BY at
COLUMNS * EXCEPT (op) STORED AS SCD TYPE 2 TRACK HISTORY ON * EXCEPT (at)"""


@pytest.mark.parametrize(
    "text",
    [
        f"CREATE STREAMING TABLE a FLOW AUTO CDC {CHANGES}",
        f"CREATE FLOW f AS AUTO CDC INTO a {CHANGES}",
    ],
)
def test_sparks_parser_reads_the_clauses_of_auto_cdc(spark: Any, text: str) -> None:
    if pyspark.__version__.startswith("4.2."):
        # As docs/howto/spark.md says.
        with pytest.raises(ParseException):
            internals.parsed_statement(spark, text)
        return
    found = internals.parsed_statement(spark, text)
    assert found is not None and found.target == "a", f"{VERSION}: CreateStreamingTableAutoCdc"
    assert found.changes == {
        "source": "s",
        "keys": ("k", "n"),
        "sequence": "at",
        "deletes": "(op = 'd')",
        "columns": (),
        "except_columns": ("op",),
        "has_history": True,
        "tracked": (),
        "except_tracked": ("at",),
    }, f"{VERSION}: the plan of AUTO CDC"


def test_the_plan_of_a_frame_can_be_walked(spark: Any) -> None:
    frame = spark.range(3).groupBy((F.col("id") % 2).alias("n")).agg(F.sum("id").alias("ids"))
    plan = internals.analysed_plan(frame)
    assert plan is not None
    assert (plan.name, plan.is_streaming) == (internals.AGGREGATE, False), f"{VERSION}: plans"
    (key, total) = plan.aggregates()
    assert (key[0], total[0]) == ("n", "ids"), f"{VERSION}: aggregateExpressions"
    (group,) = plan.groupings()
    assert group.is_same(key[1]) and group.is_deterministic, f"{VERSION}: groupingExpressions"
    assert total[1].aggregate_function() == ("Sum", False), f"{VERSION}: AggregateExpression"
    assert key[1].aggregate_function() == ("", False)
    assert [child.name for child in plan.children()] == ["Range"]
    assert "Aggregate" in plan.text(100) and plan.source() == ""
    assert internals.analysed_plan(object()) is None


def test_a_streaming_plan_has_its_source_and_is_checked(spark: Any) -> None:
    stream = spark.readStream.format("rate").option("rowsPerSecond", "1").load()
    plan = internals.analysed_plan(stream)
    assert plan is not None and plan.is_streaming
    assert plan.source() == "rate", f"{VERSION}: sources of streams"
    found = plan.source_options(("rowspersecond", "path"))
    assert found == {"rowspersecond": "1"}, f"{VERSION}: options of streams"
    internals.check_streaming_plan(spark, plan)
    sorted_plan = internals.analysed_plan(stream.orderBy("value"))
    assert sorted_plan is not None
    with pytest.raises(AnalysisException):
        internals.check_streaming_plan(spark, sorted_plan)


def test_the_checkpoint_of_a_running_query_is_found(spark: Any, tmp_path: Path) -> None:
    writer = spark.readStream.format("rate").load().writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        root = internals.checkpoint_root(spark.newSession(), query.id)
        assert root.endswith(str(tmp_path / "checkpoint")), f"{VERSION}: activeStreamingQueries"
    finally:
        query.stop()


def test_columns_of_an_auto_cdc_flow_become_text() -> None:
    from pyspark.sql.connect.functions import builtin

    assert internals.expression_of(builtin.col("id")) == "id", f"{VERSION}: ColumnReference"
    assert internals.expression_of(builtin.expr("a + 1")) == "a + 1", f"{VERSION}: SQLExpression"


def test_a_column_of_a_session_with_a_jvm_has_its_name(spark: Any) -> None:
    assert internals.expression_of(F.col("id")) == "id", f"{VERSION}: Column._jc"
    computed = F.col("id") + 1
    assert internals.expression_of(computed) is computed


def test_a_query_over_spark_connect_carries_the_frames_that_it_names() -> None:
    inner = internals.remote_query(object(), "SELECT 1 AS a", {})
    frame = internals.remote_query(object(), "SELECT * FROM `x.y`", {"x.y": inner})
    text = str(frame._plan.plan(None))
    assert 'alias: "`x.y`"' in text and "SELECT 1 AS a" in text, f"{VERSION}: plan.SQL"


@pytest.mark.usefixtures("spark")
def test_the_arrow_schema_of_a_source_is_known() -> None:
    schema = internals.arrow_schema_of(StructType.fromDDL("a INT, b TIMESTAMP"))
    assert str(schema.field("b").type) == "timestamp[us, tz=UTC]", f"{VERSION}: to_arrow_schema"


def test_paths_with_brackets_are_no_patterns(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "a[b]"
    spark.range(3).write.parquet(str(path))
    reader = spark.read.schema("id LONG").option(internals.GLOB_OPTION, "false")
    assert reader.parquet(str(path)).count() == 3, f"{VERSION}: {internals.GLOB_OPTION}"


def test_the_logger_of_errors_in_queries_takes_what_pyspark_gives_it() -> None:
    log: Any = internals.context_logger()
    log.error("a mistake", errorClass="SOME_CLASS")


def test_the_names_that_pyspark_uses_are_still_its_names(
    spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(AnalysisException):
        spark.sql("SELECT * FROM nowhere_at_all")
    names = {record.name for record in caplog.records}
    assert not names or internals.CONTEXT_LOGGER in names, f"{VERSION}: logs to {names}"
    source = Path(str(pyspark.__file__)).parent / "sql" / "session.py"
    text = source.read_text() + (source.parent / "utils.py").read_text()
    assert all(name in text for name in internals.REMOTE_VARIABLES), f"{VERSION}: variables"
