"""The sink on a real bus: exactly once, all or nothing, whatever fails on the way."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from sink_kit import messages, proxied, staged_files, values
from spark_kit import RunningBus, running_bus

from polybus import connect
from polybus.client.http.blocking import request_json
from polybus.spark import publish, upsert


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBus]:
    """One bus for all: each test has topics of its own."""
    settings = {"limits": {"message-bytes-max": 1 << 20}}
    with running_bus(tmp_path_factory.mktemp("bus"), ["bad"], settings) as running:
        yield running


def topics(bus: RunningBus, *names: str) -> None:
    for name in names:
        request_json(bus.url, "POST", "/v1/topics", {"name": name})


def write(df: Any, bus: RunningBus, **options: Any) -> None:
    where = {} if "url" in options else {"data": bus.data}
    df.write.format("polybus").mode("append").options(**where, **options).save()


class Files:
    """A stream of lines: each file that is added is one micro-batch."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._folder = folder / "lines"
        self._folder.mkdir()
        self._spark = spark
        self._count = 0

    def add(self, *lines: object) -> None:
        fresh = self._folder.parent / "fresh"
        fresh.write_text("".join(f"{line}\n" for line in lines))
        # Spark takes the oldest first, and knows no more than milliseconds.
        os.utime(fresh, (self._count, self._count))
        fresh.rename(self._folder / f"{self._count:05}.txt")
        self._count += 1

    def stream(self) -> Any:
        return self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._folder))


def run(stream: Any, checkpoint: Path, **options: Any) -> None:
    """Publish all that is new."""
    writer = stream.writeStream.format("polybus").options(**options)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        query.awaitTermination(120)
    finally:
        query.stop()


def test_a_batch_write_goes_to_the_topics_its_rows_name(spark: Any, bus: RunningBus) -> None:
    topics(bus, "even", "odd")
    rows = spark.range(100, numPartitions=2).selectExpr(
        "if(id % 2 = 0, 'even', 'odd') AS topic",
        "cast(cast(id AS STRING) AS BINARY) AS value",
        "concat('k', id) AS key",
        "map('unit', 'm') AS headers",
    )
    write(rows, bus)
    write(rows, bus, url=bus.url)
    assert Counter(values(bus, "even")) == Counter([*range(0, 100, 2)] * 2)
    assert Counter(values(bus, "odd")) == Counter([*range(1, 100, 2)] * 2)
    first = messages(bus, "odd")[0]
    assert first["key"] == f"k{first['value']}"
    assert (first["headers"], first["protocol"]) == ({"unit": "m"}, "spark")
    assert staged_files(bus) == []


def test_a_batch_write_with_a_task_that_fails_publishes_nothing(
    spark: Any, bus: RunningBus
) -> None:
    topics(bus, "whole")

    def fail_late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1:
            raise ValueError("this partition never works")

    lines = spark.range(1000, numPartitions=2).selectExpr("cast(id AS STRING) AS value")
    with pytest.raises(PySparkException, match="this partition never works"):
        write(lines.mapInArrow(fail_late, "value STRING"), bus, topic="whole")
    assert values(bus, "whole") == []
    assert staged_files(bus) == []


def test_repeated_tasks_publish_nothing_twice(spark: Any, bus: RunningBus) -> None:
    topics(bus, "retried")

    def fail_at_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise ValueError("the first attempt fails when all of its rows are staged")

    lines = spark.range(1000, numPartitions=3).selectExpr("cast(id AS STRING) AS value")
    write(lines.mapInArrow(fail_at_first, "value STRING"), bus, topic="retried")
    assert sorted(values(bus, "retried")) == list(range(1000))
    assert staged_files(bus) == []


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        (["id AS value"], {"topic": "bad"}, "column value is bigint"),
        (["'x' AS value"], {"topic": "nobody"}, "option topic: topic 'nobody' does not exist"),
        (
            ["'x' AS value", "if(id = 1, 'nobody', 'bad') AS topic"],
            {},
            "topic.unknown: there is no topic 'nobody'",
        ),
        (["'x' AS value"], {"topic": "$stats", "token": "a wrong one"}, "auth.failed"),
        (["repeat('x', 2000000) AS value"], {"topic": "bad"}, "message-bytes-max"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_and_nothing_is_published(
    spark: Any, bus: RunningBus, columns: list[str], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        write(spark.range(2).selectExpr(*columns), bus, **options)
    assert says in str(caught.value)
    assert values(bus, "bad") == []
    assert staged_files(bus) == []


def test_a_stream_resumes_from_its_checkpoint_and_repeats_nothing(
    spark: Any, bus: RunningBus, tmp_path: Path
) -> None:
    topics(bus, "lines")
    files = Files(spark, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    options = {"data": bus.data, "topic": "lines", "producer": "lines"}
    files.add(1, 2, 3)
    files.add(4, 5, 6)
    run(files.stream(), checkpoint, **options)
    # Spark forgets that it did the last batch, as when it is killed before it wrote so down.
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)
    files.add(7)
    run(files.stream(), checkpoint, **options)
    assert sorted(values(bus, "lines")) == [1, 2, 3, 4, 5, 6, 7]
    # Another checkpoint is another query: it may not publish all of it again under this name.
    with pytest.raises(PySparkException, match=r"commit\.query.*takeOver"):
        run(files.stream(), tmp_path / "other", **options)
    assert len(values(bus, "lines")) == 7


def test_a_topic_is_copied_into_another_in_any_number_of_runs(
    spark: Any, bus: RunningBus, tmp_path: Path
) -> None:
    topics(bus, "original", "copy")
    source = spark.readStream.format("polybus").options(
        data=bus.data, subscribe="original", startingOffsets="earliest", maxOffsetsPerTrigger=60
    )
    for first in (0, 100):
        bus.publish("original", [str(n) for n in range(first, first + 100)])
        rows = source.load().drop("topic")
        run(rows, tmp_path / "checkpoint", data=bus.data, topic="copy")
    assert sorted(values(bus, "copy")) == list(range(200))


def test_lost_answers_and_a_bus_that_is_killed_cost_time_and_nothing_else(
    spark: Any, bus: RunningBus, tmp_path: Path
) -> None:
    topics(bus, "patient")
    with proxied(bus) as proxy:
        calls: Counter[str] = Counter()

        def lose_first_answers(method: str, path: str) -> bool:
            """The call is done, and nobody is notified; the first commit costs the bus its life."""
            if path.startswith("/v1/topics"):
                return True
            calls[path] += 1
            if path == "/v1/commits" and calls[path] == 1:
                bus.kill()
                bus.start()
            return calls[path] % 2 == 0

        proxy.after = lose_first_answers
        files = Files(spark, tmp_path)
        for first in (0, 10):
            files.add(*range(first, first + 10))
        run(files.stream(), tmp_path / "checkpoint", url=proxy.url, topic="patient")
    assert calls["/v1/commits"] == 4
    assert sorted(values(bus, "patient")) == list(range(20))


def test_complete_mode_publishes_the_whole_result_with_every_batch(
    spark: Any, bus: RunningBus, tmp_path: Path
) -> None:
    topics(bus, "totals")
    files = Files(spark, tmp_path)
    files.add("a", "b", "a")
    files.add("a")
    counts = files.stream().groupBy("value").count()
    rows = counts.selectExpr("value AS key", "cast(count AS STRING) AS value")
    writer = rows.writeStream.outputMode("complete").format("polybus")
    query = (
        writer.options(data=bus.data, topic="totals", checkpointLocation=tmp_path / "checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    found = [(one["key"], one["value"]) for one in messages(bus, "totals")]
    assert sorted(found[:2]) == [("a", 2), ("b", 1)]
    assert sorted(found[2:]) == [("a", 3), ("b", 1)]


def test_update_mode_goes_through_upsert_once_for_each_batch(
    spark: Any, bus: RunningBus, tmp_path: Path
) -> None:
    topics(bus, "changes")
    files = Files(spark, tmp_path)
    files.add("a", "b", "a")
    files.add("a")
    send = upsert("changes", producer="changes", key="word", data=bus.data)

    def twice(df: Any, batch_id: int) -> None:
        send(df, batch_id)
        send(df, batch_id)

    counts = files.stream().withColumnRenamed("value", "word").groupBy("word").count()
    writer = counts.writeStream.outputMode("update").foreachBatch(twice)
    query = (
        writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    found = [(one["key"], one["value"]["count"]) for one in messages(bus, "changes")]
    assert sorted(found[:2]) == [("a", 2), ("b", 1)]
    assert found[2:] == [("a", 3)]
    last = request_json(bus.url, "GET", "/v1/commits/changes")
    assert (last["query"], last["batch"]) == (query.id, 1)


def test_publish_commits_each_batch_number_once_and_allows_gaps(
    spark: Any, bus: RunningBus
) -> None:
    topics(bus, "numbers")
    for number in (0, 0, 4, 4, 2, 5):
        rows = spark.range(1).selectExpr(f"'{number}' AS value")
        publish(rows, producer="numbers", batch_id=number, topic="numbers", data=bus.data)
    assert values(bus, "numbers") == [0, 4, 5]
    # The bus's own topics too, for whoever may read its token.
    rows = spark.range(1).selectExpr("'hello' AS value")
    publish(rows, producer="alerts", batch_id=0, topic="$alerts", data=bus.data)
    assert values(bus, "$alerts") == ["hello"]


def test_subscribers_of_two_protocols_receive_a_committed_batch_once(
    spark: Any, bus: RunningBus
) -> None:
    topics(bus, "heard")

    async def hear(scheme: str, ready: asyncio.Event) -> list[bytes]:
        found: list[bytes] = []
        async with connect(f"{scheme}://127.0.0.1:{bus.port}") as client:
            async with client.subscribe("heard", start="latest") as subscription:
                ready.set()
                async for message in subscription:
                    found.append(message.value)
                    if message.value == b"end":
                        return found
        return found

    async def main() -> list[list[bytes]]:
        ready = [asyncio.Event(), asyncio.Event()]
        listeners = [
            asyncio.create_task(hear(scheme, one))
            for scheme, one in zip(("boson", "goms"), ready, strict=True)
        ]
        for one in ready:
            await one.wait()
        lines = spark.range(500, numPartitions=2).selectExpr("cast(id AS STRING) AS value")
        for _ in range(2):
            await asyncio.to_thread(
                publish, lines, producer="heard", batch_id=0, topic="heard", data=bus.data
            )
        await asyncio.to_thread(bus.publish, "heard", [b"end"])
        return await asyncio.wait_for(asyncio.gather(*listeners), 60)

    wanted = sorted(b"%d" % number for number in range(500))
    for found in asyncio.run(main()):
        assert sorted(found[:-1]) == wanted
