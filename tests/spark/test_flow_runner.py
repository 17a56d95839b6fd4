"""The flow runner: it isolates failures, retries temporary ones, and stops all flows."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from py4j.protocol import Py4JError
from spark_kit import eventually

from polybus.errors import PolybusError
from polybus.spark.causes import BriefError, brief_errors, clean_cause, is_transient
from polybus.spark.checkpoint import our_offset
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.flows import FlowContext, FlowProgress, FlowRunner, PipelineFlow
from polybus.spark.pipelines.lag import LogEnds

Take = Callable[[Any, int], None]


def stream(take: Take) -> Callable[[FlowContext], Any]:
    """A flow of small batches of numbers, each given to `take`."""

    def start(context: FlowContext) -> Any:
        source = context.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5)
        return (
            source.load()
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(context.checkpoint))
            .trigger(**context.trigger)
            .start()
        )

    return start


def states(runner: FlowRunner) -> dict[str, str]:
    return {one.flow: one.state for one in runner.progress()}


def test_a_failing_flow_is_marked_and_the_others_continue(spark: Any, tmp_path: Path) -> None:
    def fail(rows: Any, batch_id: int) -> None:
        raise ValueError("the colour is wrong")

    def unreachable_once(rows: Any, batch_id: int) -> None:
        if not tried:
            tried.append(batch_id)
            raise PolybusError("client.unreachable", "no bus answers")
        rows.count()
        batches.append(batch_id)

    tried: list[int] = []
    batches: list[int] = []
    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=True)
    runner.start(PipelineFlow("p", "bad", stream(fail)))
    runner.start(PipelineFlow("p", "patient", stream(unreachable_once)))
    runner.start(PipelineFlow("p", "broken", lambda context: 1 / 0))
    eventually(lambda: batches[1:] and len(runner.failures) == 2, timeout_s=120)
    assert {one.flow: one.error for one in runner.failures} == {
        "bad": "batch 0: ValueError: the colour is wrong; fix the cause, then restart the "
        "pipeline: it continues with this batch",
        "broken": "division by zero",
    }
    assert batches[:2] == [0, 1], "it went on from its checkpoint"
    (patient,) = (one for one in runner.progress() if one.flow == "patient")
    assert patient.rows and patient.rows >= 5 and patient.batch_ms and patient.error is None
    assert runner.stop(60)
    assert states(runner) == {"bad": "failed", "patient": "stopped", "broken": "failed"}
    assert not any(query.name is None and query.isActive for query in spark.streams.active)


def test_a_row_counts_once_however_often_its_batch_is_read(spark: Any, tmp_path: Path) -> None:
    def start(context: FlowContext) -> Any:
        def take(rows: Any, batch_id: int) -> None:
            for _ in range(3):
                rows.write.format("noop").mode("append").save()
            context.figures.scanned(batch_id, 3)

        return stream(take)(context)

    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=True)
    runner.start(PipelineFlow("p", "eager", start))
    (eager,) = eventually(
        lambda: [one for one in runner.progress() if (one.batch_id or 0) >= 2], timeout_s=120
    )
    assert runner.stop(60)
    assert eager.rows == 5 * (eager.batch_id + 1)


def test_a_flow_that_is_stopped_before_its_next_try_keeps_its_error(
    spark: Any, tmp_path: Path
) -> None:
    def start(context: FlowContext) -> None:
        raise PolybusError("client.unreachable", "no bus answers")

    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=True)
    runner.start(PipelineFlow("p", "hurt", start))
    eventually(lambda: states(runner) == {"hurt": "waiting"}, timeout_s=30)
    assert runner.stop(60)
    (hurt,) = runner.progress()
    assert (hurt.state, hurt.error) == ("stopped", "client.unreachable: no bus answers")


def test_news_end_the_pause_of_a_flow_and_so_does_the_end(spark: Any, tmp_path: Path) -> None:
    runs: list[str] = []
    news = threading.Event()
    flow = PipelineFlow(
        "p", "alert", lambda context: runs.append("run"), repeat_s=3600.0, news=news
    )
    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=True)
    runner.start(flow)
    eventually(lambda: len(runs) == 1 and states(runner) == {"alert": "waiting"}, timeout_s=30)
    news.set()
    eventually(lambda: len(runs) == 2 and states(runner) == {"alert": "waiting"}, timeout_s=30)
    assert runner.stop(60)


def test_a_flow_is_tried_again_after_the_errors_that_it_names(spark: Any, tmp_path: Path) -> None:
    tries: list[str] = []

    def start(context: FlowContext) -> None:
        tries.append("log.damaged")
        if len(tries) < 3:
            raise PolybusError("log.damaged", "a file is damaged")

    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=True)
    runner.start(PipelineFlow("p", "kept", start, repeat_s=60, retried=("log.damaged",)))
    eventually(lambda: len(tries) == 3, timeout_s=30)
    assert runner.stop(60)


def test_flows_run_after_the_flows_that_they_name(spark: Any, tmp_path: Path) -> None:
    order: list[str] = []
    flows = [
        PipelineFlow("p", "last", lambda context: order.append("last"), after=("middle", "first")),
        PipelineFlow("p", "middle", lambda context: order.append("middle"), after=("first",)),
        PipelineFlow("p", "first", lambda context: order.append("first")),
    ]
    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=False)
    runner.start(*flows)
    assert runner.wait(30)
    assert order == ["first", "middle", "last"]
    assert set(states(runner).values()) == {"done"}
    runner.stop()


def test_a_flow_after_a_failed_flow_does_not_run(spark: Any, tmp_path: Path) -> None:
    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=False)
    runner.start(PipelineFlow("p", "first", lambda context: 1 / 0))
    runner.start(PipelineFlow("p", "second", lambda context: None, after=("first",)))
    assert runner.wait(30)
    (second,) = (one for one in runner.progress() if one.flow == "second")
    assert (second.state, second.error) == ("stopped", "not run, because first failed")
    runner.stop()


def test_a_batch_flow_is_repeated_in_continuous_mode(spark: Any, tmp_path: Path) -> None:
    runs: list[int] = []
    runner = FlowRunner(spark, BusLocation(tmp_path), continuous=True)
    runner.start(PipelineFlow("p", "view", lambda context: runs.append(1), repeat_s=0.01))
    eventually(lambda: len(runs) >= 3)
    assert runner.stop()
    assert states(runner) == {"view": "stopped"}


def test_causes_have_no_java_stack_trace() -> None:
    python = (
        "[STREAM_FAILED] Query [id = a, runId = b] terminated with exception: Job aborted\n"
        "Traceback (most recent call last):\n"
        '  File "/x.py", line 3, in f\n'
        "    raise UsageError()\n"
        "polybus.errors.UsageError: topic.unknown: there is no topic blue\n"
        "\n\tat org.apache.spark.Thing(Thing.scala:1)\n"
    )
    assert clean_cause(python) == "topic.unknown: there is no topic blue"
    java = "org.apache.spark.SparkException: [X.Y] It broke. SQLSTATE: 42000\n\tat a.B(C.java:1)"
    assert clean_cause(java) == "[X.Y] It broke."
    missing = "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: polybus. Is it there?"
    assert "PYSPARK_PYTHON" in clean_cause(missing)
    assert is_transient("polybus.errors.PolybusError: client.unreachable: no bus")
    assert not is_transient("ValueError: the colour is wrong")


def test_an_error_of_the_jvm_reaches_spark_without_its_stack_trace() -> None:
    stack = "\n\tat a.B(C.java:1)" * 1000
    with pytest.raises(BriefError) as caught, brief_errors():
        raise Py4JError(f"An error occurred while calling o1.parquet.\n: X: it broke{stack}")
    said = "".join(traceback.format_exception(caught.value))
    assert len(said) < 2000 and clean_cause(said) == "X: it broke"
    with pytest.raises(BriefError) as caught, brief_errors():
        raise Py4JError(f"An error occurred while calling o1.parquet.\n: Y: z{stack}Broken pipe")
    assert is_transient(caught.value)
    with pytest.raises(BriefError, match=r"Py4JJavaError: An error .*java\.lang\.Interrupted"):
        with brief_errors():
            raise Py4JError(f"An error{stack}Caused by: java.lang.InterruptedException{stack}")


def test_a_cause_without_a_message_is_its_java_class() -> None:
    """As when a process that plans a stream is killed between two batches."""

    class Failure(Exception):
        _cause = SimpleNamespace(_stackTrace="java.io.EOFException\n\tat a.B(C.java:1)")

    said = "[STREAM_FAILED] Query [id = a] terminated with exception: (no cause message)"
    assert is_transient(Failure(said))
    assert clean_cause(Failure(said)) == "java.io.EOFException"
    assert not is_transient(said)


def test_only_offsets_of_our_source_are_positions() -> None:
    ours = our_offset('{"group": "", "topics": {"news": {"epoch": 5, "offset": 7}}}')
    assert ours is not None and ours.topics["news"].offset == 7
    for other in ('{"logOffset": 3}', "12", None, "no JSON"):
        assert our_offset(other) is None


class NewestBatch(dict[str, Any]):
    """A batch as Spark reports it, with its one source at offset 1 of some topics."""

    numInputRows = 1
    observedMetrics: ClassVar[dict[str, Any]] = {}

    def __init__(self, *topics: str) -> None:
        places = {topic: {"epoch": 1, "offset": 1} for topic in topics}
        end = json.dumps({"group": "", "topics": places})
        sources = [{"endOffset": end, "latestOffset": end}]
        super().__init__(batchId=len(topics), sources=sources, batchDuration=5)


def test_a_batch_may_bring_more_topics_while_the_lag_is_counted(tmp_path: Path) -> None:
    figures = FlowProgress()

    def take(*topics: str) -> None:
        busy = {"isTriggerActive": True, "isDataAvailable": True}
        batch = NewestBatch(*topics)
        figures.update(SimpleNamespace(lastProgress=batch, recentProgress=[batch], status=busy))

    class GrowingLog(LogEnds):
        def behind(self, positions: Mapping[str, int]) -> int:
            # As the thread of the flow does, at any moment.
            take("news", "sport")
            return 3 * len([*positions])

    log = GrowingLog(tmp_path)
    take("news")
    figures.update_lag(log)
    assert figures.lag == 3
    figures.update_lag(log)
    assert figures.lag == 6
