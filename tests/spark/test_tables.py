"""Topics and lake tables in Spark: read natively where possible, each row once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from log_kit import opened_log
from pipeline_kit import record_writes
from pyspark.sql import functions as F

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.lake import duck
from polybus.lake.compact import compact as compact_table
from polybus.lake.table import LakeTable, open_table
from polybus.log.files import FileLog
from polybus.log.history.handover import compact as hand_over
from polybus.log.layout import topic_folder
from polybus.log.reading.reader import LogReader
from polybus.spark import tables, views
from polybus.spark.views import collect

DAY_US = 86_400_000_000
NOON_US = 1_769_860_800_000_000  # 2026-01-31T12:00:00Z


@contextmanager
def stored(data: Path, now_us: int) -> Iterator[FileLog]:
    data.mkdir(exist_ok=True)
    log = opened_log(data, lambda: now_us)
    try:
        yield log
    finally:
        log.close()


def publish(data: Path, topic: str, values: Sequence[bytes], *, day: int = 0) -> None:
    with stored(data, NOON_US + day * DAY_US) as log:
        if topic not in log.topics():
            log.create_topic(topic)
        batch = Batch.of(topic, values, headers=[{"n": b"1"}] * len(values))
        batch.protocol, batch.sender = "boson", "test"
        log.append(batch)
        log.sync()


def make_topic(data: Path, topic: str = "orders") -> None:
    """Offsets 0-99 in a settled file of day 0, 100-199 in a small last one, 200-299 fresh."""
    publish(data, topic, [b'{"n": %d}' % number for number in range(100)])
    publish(data, topic, [b'{"n": %d}' % number for number in range(100, 200)], day=1)
    hand_over(data)
    publish(data, topic, [b'{"n": %d}' % number for number in range(200, 300)], day=2)


def offsets(rows: Any) -> list[int]:
    return sorted(row[0] for row in rows.select("offset").collect())


def plan_of(rows: Any) -> str:
    return str(rows._jdf.queryExecution().executedPlan().toString())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


# Bronze.


def test_a_topic_is_a_table_of_history_and_journal_with_each_message_once(
    spark: Any, data: Path
) -> None:
    make_topic(data)
    rows = views.table(spark, "orders", data)
    assert offsets(rows) == list(range(300))
    source = spark.read.format("polybus").option("data", str(data)).option("subscribe", "orders")
    assert rows.columns == [*source.load().columns, "date"]
    first, fresh = rows.where("offset in (7, 250)").orderBy("offset").collect()
    for row, number, day in ((first, 7, "2026-01-31"), (fresh, 250, "2026-02-02")):
        assert (row.topic, row.partition, row.value) == ("orders", 0, b'{"n": %d}' % number)
        assert (row.headers, row.protocol, row.sender) == ({"n": b"1"}, "boson", "test")
        assert (row.key, str(row.date)) == (None, day)
        assert row.epoch == LogReader(data).bounds("orders").epoch


def test_the_date_is_in_utc_in_every_session(spark: Any, data: Path) -> None:
    make_topic(data)
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        rows = views.table(spark, "orders", data).selectExpr("offset", "string(date) AS date")
        found = {row.offset: row.date for row in rows.where("offset in (7, 150, 250)").collect()}
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert found == {7: "2026-01-31", 150: "2026-02-01", 250: "2026-02-02"}


def test_history_is_read_natively_and_pruned_by_day_and_by_statistics(
    spark: Any, data: Path
) -> None:
    make_topic(data)
    rows = views.table(spark, "orders", data)
    plan = plan_of(rows.where("date = '2026-01-30' and offset > 10").select("value"))
    assert "FileScan parquet" in plan
    assert "PartitionFilters: [isnotnull(date" in plan
    assert "GreaterThan(offset,10)" in plan
    assert "ReadSchema: struct<offset:bigint,value:binary>" in plan, "only what is asked for"
    scan = rows.where("date = '2026-02-02'")
    assert offsets(scan) == list(range(200, 300))
    by_time = plan_of(rows.where("timestamp >= timestamp'2026-02-02'").select("offset"))
    assert "GreaterThanOrEqual(timestamp" in by_time


def test_a_hand_over_between_planning_and_running_changes_nothing(spark: Any, data: Path) -> None:
    make_topic(data)
    publish(data, "orders", [b"more"] * 50, day=1)
    rows = views.table(spark, "orders", data).select("offset")
    plan_of(rows)
    hand_over(data)  # Takes the journal away, and merges the small last file into another.
    assert sorted(row[0] for row in rows.collect()) == list(range(350))


def test_a_view_that_is_created_again_shows_new_messages(spark: Any, data: Path) -> None:
    make_topic(data, "orders.eu-1")
    assert views.register_views(spark, data) == ["orders.eu-1"]
    count = "select count(*) from `orders.eu-1`"
    assert spark.sql(count).collect()[0][0] == 300
    publish(data, "orders.eu-1", [b"late"] * 5, day=2)
    views.register_views(spark, data)
    assert spark.sql(count).collect()[0][0] == 305
    hand_over(data)
    publish(data, "orders.eu-1", [b"later"] * 5, day=3)
    assert collect(spark, count, data, rows_max=10).to_pylist() == [{"count(1)": 310}]


def test_sql_on_spark_has_the_functions_text_and_json(spark: Any, data: Path) -> None:
    publish(data, "orders", [b'{"price": 2.5}', b"no json", b"\xff\xfe"])
    query = "select text(value) t, json(value) j, json(value):price::double p from orders"
    found = collect(spark, query + " order by offset", data, rows_max=10).to_pylist()
    assert found == [
        {"t": '{"price": 2.5}', "j": '{"price":2.5}', "p": 2.5},
        {"t": "no json", "j": None, "p": None},
        {"t": None, "j": None, "p": None},
    ]
    with pytest.raises(UsageError, match=r"sql\.table-unknown.*orderz; did you mean orders"):
        collect(spark, "select * from orderz", data, rows_max=1)
    with pytest.raises(UsageError, match=r"sql\.invalid.*near 'selec'"):
        collect(spark, "selec 1", data, rows_max=1)


def test_an_unknown_topic_is_named(spark: Any, data: Path) -> None:
    make_topic(data)
    with pytest.raises(UsageError, match=r"topic\.unknown.*orderz"):
        views.table(spark, "orderz", data)
    with pytest.raises(UsageError, match=r"data\.not-found"):
        views.table(spark, "orders", data / "nowhere")


def test_a_damaged_or_missing_history_file_is_named(spark: Any, data: Path) -> None:
    make_topic(data)
    file = topic_folder(data, "orders") / LogReader(data).history("orders").files[0].path
    # Not compressed, so that nothing but the page's checksum can tell.
    table = pq.read_table(file, partitioning=None)
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, file, **options)
    assert views.table(spark, "orders", data).where("value = '{\"n\": 42}'").count() == 1
    file.write_bytes(file.read_bytes().replace(b'{"n": 42}', b'{"n": 43}'))
    rows = views.table(spark, "orders", data)
    with pytest.raises(Exception, match=file.name):
        rows.select("value").collect()
    file.unlink()
    with pytest.raises(Exception, match=file.name):
        rows.select("value").collect()
    with pytest.raises(StorageError, match=rf"log\.damaged: topic 'orders': .*{file.name}"):
        views.table(spark, "orders", data)


def test_a_small_last_file_is_left_to_the_source(data: Path) -> None:
    make_topic(data)
    history = LogReader(data).history("orders")
    assert [file.first for file in history.files] == [0, 100]
    assert [file.first for file in history.settled_files] == [0]


# Lake tables.


def numbers(spark: Any, first: int, count: int) -> Any:
    return spark.range(first, first + count, 1, 2).select(
        F.col("id").alias("offset"),
        F.timestamp_micros(F.col("id")).alias("timestamp"),
        F.when(F.col("id") % 2 == 0, "even").otherwise("odd").alias("topic"),
        F.parse_json(F.concat(F.lit('{"n": '), F.col("id"), F.lit("}"))).alias("body"),
    )


@pytest.fixture
def lake(data: Path) -> LakeTable:
    return open_table(data, "silver")


def test_a_batch_is_appended_once_however_often_it_is_repeated(spark: Any, lake: LakeTable) -> None:
    for batch in (0, 0, 1, 1, 0):
        tables.append(numbers(spark, batch * 10, 10), lake, writer="w", batch_id=batch)
    rows = tables.read(spark, lake)
    assert offsets(rows) == list(range(20))
    assert rows.schema.simpleString() == (
        "struct<offset:bigint,timestamp:timestamp,topic:string,body:variant>"
    )
    assert rows.where("body:n::int = 13").count() == 1
    assert not list((lake.path / "_staging").iterdir()), "nothing is left behind"
    ranges = [file.ranges["offset"] for file in lake.state.files.values()]
    assert min(ranges)[0] == 0 and max(ranges)[1] == 19
    assert all("timestamp" in file.ranges for file in lake.state.files.values())


def test_a_failing_batch_leaves_the_table_as_it_was(spark: Any, lake: LakeTable) -> None:
    tables.append(numbers(spark, 0, 10), lake, writer="w", batch_id=0)
    broken = numbers(spark, 10, 10).withColumn(
        "topic", F.when(F.col("offset") == 15, F.raise_error(F.lit("boom"))).otherwise("x")
    )
    with pytest.raises(Exception, match="boom"):
        tables.append(broken, lake, writer="w", batch_id=1)
    assert (lake.version, lake.last_batch("w"), lake.rows) == (0, 0, 10)
    assert not list((lake.path / "_staging").iterdir())
    other = numbers(spark, 10, 10).withColumn("topic", F.lit(1))
    with pytest.raises(UsageError, match=r"lake\.schema.*topic is integer.*not string"):
        tables.append(other, lake, writer="w", batch_id=1)
    assert offsets(tables.read(spark, lake)) == list(range(10))


def test_partitions_columns_and_compaction_survive_each_other(spark: Any, lake: LakeTable) -> None:
    for batch in range(3):
        rows = numbers(spark, batch * 10, 10).withColumn("date", F.to_date("timestamp"))
        if batch == 2:
            rows = rows.withColumn("price", F.lit(1.5))
        tables.append(rows, lake, writer="w", batch_id=batch, partition_by=["topic", "date"])
    before = tables.read(spark, lake).orderBy("offset").selectExpr("*", "to_json(body) j")
    expected = before.drop("body").collect()
    assert compact_table(lake) > 2
    assert len(lake.files()) == 2
    after = tables.read(spark, lake)
    found = after.orderBy("offset").selectExpr("*", "to_json(body) j").drop("body")
    assert found.collect() == expected
    assert dict(after.dtypes)["date"] == "date"
    even = after.where("topic = 'even'")
    assert "PartitionFilters: [isnotnull(topic" in plan_of(even)
    assert even.count() == 15


def test_duckdb_reads_json_and_partitions_that_spark_wrote(
    spark: Any, lake: LakeTable, data: Path
) -> None:
    make_topic(data)
    for batch in range(2):
        rows = numbers(spark, batch * 10, 10)
        tables.append(rows, lake, writer="w", batch_id=batch, partition_by=["topic"])
    query = "SELECT topic, count(*), sum((body->>'n')::INT) FROM silver GROUP BY 1 ORDER BY 1"
    with duck.Engine(data) as engine:
        assert engine.query(query).fetchall() == [("even", 10, 90), ("odd", 10, 100)]
        compact_table(lake)
        assert engine.query(query).fetchall() == [("even", 10, 90), ("odd", 10, 100)]
        tables.append(numbers(spark, 20, 2), lake, writer="w", batch_id=2, partition_by=["topic"])
        assert engine.query(query).fetchall() == [("even", 11, 110), ("odd", 11, 121)]


def test_an_empty_batch_makes_a_table_with_columns(spark: Any, lake: LakeTable) -> None:
    tables.append(numbers(spark, 0, 0), lake, writer="w", batch_id=0)
    assert tables.read(spark, lake).columns == ["offset", "timestamp", "topic", "body"]
    files = len(lake.files())
    tables.append(numbers(spark, 0, 0), lake, writer="w", batch_id=1)
    assert (lake.rows, len(lake.files()), lake.last_batch("w")) == (0, files, 1)


def test_a_merge_keeps_the_newest_row_of_each_key(spark: Any, lake: LakeTable) -> None:
    def counts(*rows: tuple[str, int, int]) -> Any:
        return spark.createDataFrame(list(rows), "topic string, offset long, n int")

    tables.merge(counts(("a", 1, 1), ("b", 1, 1)), lake, keys=["topic"], writer="w", batch_id=0)
    update = [("b", 3, 30), ("b", 2, 20), ("c", 9, 1), ("c", 9, 2)]
    for order in range(3):
        random.Random(order).shuffle(update)
        tables.merge(counts(*update), lake, keys=["topic"], writer="w", batch_id=order + 1)
        found = {(row.topic, row.n) for row in tables.read(spark, lake).collect()}
        assert found == {("a", 1), ("b", 30), ("c", 2)}, "whatever order the rows come in"
        assert len(lake.files()) == 1
    tables.merge(counts(("a", 0, 7)), lake, keys=["topic"], writer="w", batch_id=2)
    assert tables.read(spark, lake).where("n = 7").count() == 0, "batch 2 was there"
    with pytest.raises(UsageError, match=r"lake\.keys.*nope"):
        tables.merge(counts(("a", 1, 1)), lake, keys=["nope"], writer="w", batch_id=9)


def test_replace_leaves_only_the_new_rows(spark: Any, lake: LakeTable) -> None:
    tables.append(numbers(spark, 0, 10), lake, writer="w", batch_id=0)
    old = tables.read(spark, lake)
    tables.replace(spark.range(3).toDF("id"), lake, writer="daily")
    assert [row.id for row in tables.read(spark, lake).orderBy("id").collect()] == [0, 1, 2]
    assert offsets(old) == list(range(10)), "who reads the version before still can"


def run_stream(spark: Any, data: Path, checkpoint: Path, take: Callable[[Any, int], None]) -> None:
    stream = spark.readStream.format("polybus").options(data=str(data), subscribe="orders")
    stream = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 100)
    query = (
        stream.load()
        .select("offset", "timestamp", "value")
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_a_stream_into_a_table_is_exactly_once_across_restarts(
    spark: Any, lake: LakeTable, data: Path, tmp_path: Path
) -> None:
    def take(rows: Any, batch_id: int) -> None:
        tables.append(rows, lake, writer="flow", batch_id=batch_id)
        if failing:
            raise RuntimeError("after the commit")

    make_topic(data)
    for failing in (True, True, False):
        try:
            run_stream(spark, data, tmp_path / "checkpoint", take)
        except Exception as error:
            assert failing, error
    assert offsets(tables.read(spark, lake)) == list(range(300))


def test_the_plan_of_a_batch_is_durable_before_a_table_has_the_batch(
    spark: Any, lake: LakeTable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not leave a table with a batch that the checkpoint does not have."""
    merged = open_table(data, "merged")

    def take(rows: Any, batch_id: int) -> None:
        tables.append(rows, lake, writer="flow", batch_id=batch_id)
        tables.merge(rows, merged, keys=["offset"], writer="flow", batch_id=batch_id)

    make_topic(data)
    with monkeypatch.context() as patched:
        writes = record_writes(patched)
        run_stream(spark, data, tmp_path / "checkpoint", take)
    plan = str(tmp_path / "checkpoint" / "offsets" / "{}")
    assert writes == [
        write
        for batch in range(3)
        for table in ("silver", "merged")
        for write in (("sync", plan.format(batch)), ("commit", table))
    ]


def test_a_writer_notices_large_rows_before_they_fill_its_memory(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet would look at the size of a row group only after 100 rows."""
    monkeypatch.setitem(tables._WRITE_OPTIONS, "parquet.block.size", str(1 << 20))
    values = [random.Random(number).randbytes(200_000) for number in range(40)]
    rows = spark.createDataFrame([(value,) for value in values], "value BINARY").coalesce(1)
    table = open_table(tmp_path, "large")
    (note,) = tables.stage(rows, table, ())
    assert pq.read_metadata(table.path / note.file.path).num_row_groups >= 4
