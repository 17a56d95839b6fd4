"""The source over a bus in Kafka: the same rows, options and errors as over files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from docs_kit import run_by
from kafka_spark_kit import ClusterNode, cluster_node
from pipeline_kit import PipelineFolder
from pyspark.sql.streaming.datasource import ReadAllAvailable
from sink_kit import values
from source_kit import offsets_of, rows_of
from spark_cluster_kit import standalone_cluster
from spark_kit import environment, eventually, running_bus
from warm_kit import WARM_SPARK

from polybus.batch import Batch
from polybus.cli import main
from polybus.client.http.blocking import read_token, request_json
from polybus.errors import ConfigError, UsageError
from polybus.lake.table import open_table
from polybus.log.cluster_location import ClusterLocation
from polybus.log.kafka.kafka_names import kafka_name
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.reader import ClusterReader, shared_link
from polybus.log.kafka.registry import KafkaOptions
from polybus.spark import shipping
from polybus.spark.location import BusLocation, find_location
from polybus.spark.pipelines.flows import FlowRunner
from polybus.spark.pipelines.standard.batches import flows
from polybus.spark.source.options import parse
from polybus.spark.source.readers import PolybusReader, PolybusStreamReader
from polybus.spark.views import collect
from polybus.testing.kafka import KafkaBrokers

EVERY = [0, 1, 3, 4, 5, 7, 8]
"""The offsets of the messages in `news`: 2, 6 and 9 are the ends of transactions."""
STOP = 10


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, brokers: KafkaBrokers) -> Iterator[ClusterNode]:
    with cluster_node(tmp_path_factory.mktemp("node"), brokers, ["news", "empty"]) as found:
        found.commit(news=[b"0", b"1"])
        found.bus.publish("news", ["3"], headers={"a": "1"}, scheme="boson+properties")
        found.commit(news=[b"4", b"5"])
        found.bus.publish("news", ["7"])
        found.commit(news=[b"8"])
        yield found


def batch(place: dict[str, str], **given: Any) -> PolybusReader:
    chosen = {} if "subscribePattern" in given else {"subscribe": "news"}
    options = {name: str(value) for name, value in (place | chosen | given).items()}
    return PolybusReader(parse(options, streaming=False))


def read(place: dict[str, str], **given: Any) -> list[int]:
    reader = batch(place, **given)
    return [offset for _, offset in offsets_of(reader, reader.partitions())]


def test_a_topic_reads_the_same_in_every_way(node: ClusterNode) -> None:
    found = {}
    for way, place in node.places.items():
        reader = batch(place)
        found[way] = rows_of(reader, reader.partitions())
    rows = found["log"]
    assert rows.column("offset").to_pylist() == EVERY
    assert rows.column("value").to_pylist() == [b"%d" % one for one in EVERY]
    assert rows.column("headers").to_pylist()[2] == [("a", b"1")]
    assert set(rows.column("protocol").to_pylist()) == {"spark", "boson-frames", "boson-properties"}
    assert found["data"].equals(rows)
    assert found["url"].equals(rows)


def test_the_program_of_the_page_reads_the_brokers(spark: Any, node: ClusterNode) -> None:
    (block,) = run_by("spark/test_kafka_source.py", "docs/howto/cluster.md")
    text = re.sub(r"kafka://[^\"]+", node.log, block.text)
    # The tests share the brokers.
    text = text.replace(".load()", f'.option("cluster.prefix", "{node.prefix}").load()')
    names: dict[str, Any] = {"spark": spark}
    exec(compile(text, "cluster.md", "exec"), names)
    assert names["news"].isStreaming and "value" in names["news"].columns


@pytest.mark.parametrize("way", ["url", "data", "log"])
def test_options_mean_the_same_over_a_cluster(node: ClusterNode, way: str) -> None:
    place = node.places[way]
    for start in range(STOP + 1):
        stop = min(STOP, start + 4)
        starting, ending = f'{{"news": {start}}}', f'{{"news": {stop}}}'
        expected = [one for one in EVERY if start <= one < stop]
        assert read(place, startingOffsets=starting, endingOffsets=ending) == expected
    assert read(place, columns="topic,offset", minPartitions=4) == EVERY
    assert read(place, columns="topic,offset", maxRecordsPerPartition=1) == EVERY
    assert read(place, startingTimestamp=0, endingTimestamp="2999-01-01T00:00:00Z") == EVERY
    assert read(place, subscribe="empty") == []
    assert read(place, subscribePattern="n.*") == EVERY
    late = {"startingOffsetsByTimestampStrategy": "latest"}
    assert read(place, startingTimestamp="2999-01-01T00:00:00Z", **late) == []
    with pytest.raises(UsageError) as unknown:
        read(place, subscribe="nothing")
    assert unknown.value.code == "topic.unknown"


def test_a_time_begins_with_the_message_of_that_time(node: ClusterNode) -> None:
    reader = batch(node.places["log"])
    times = rows_of(reader, reader.partitions()).column("timestamp").to_pylist()
    for way in node.places.values():
        found = read(way, startingTimestamp=times[3].isoformat())
        assert found == [one for one, time in zip(EVERY, times, strict=True) if time >= times[3]]


def test_tasks_read_ranges_of_a_topic_apart_and_each_message_once(node: ClusterNode) -> None:
    reader = batch(node.places["data"], minPartitions=5)
    parts = reader.partitions()
    found = [[offset for _, offset in offsets_of(reader, [part])] for part in parts]
    assert len(parts) == 5
    assert [offset for one in found for offset in one] == EVERY


def test_a_stream_reads_each_message_once_and_no_open_or_aborted_transaction(
    node: ClusterNode, brokers: KafkaBrokers
) -> None:
    node.create("live")
    options = KafkaOptions(node="t", prefix=node.prefix, replicas=1, insync_min=1)
    given = {"subscribe": "live", "startingOffsets": "earliest"}
    readers = {
        way: PolybusStreamReader(parse(place | given, streaming=True))
        for way, place in node.places.items()
    }
    places = {way: reader.initialOffset() for way, reader in readers.items()}

    def new_of(way: str) -> list[int]:
        reader = readers[way]
        end = reader.latestOffset(places[way], ReadAllAvailable())
        rows = offsets_of(reader, reader.partitions(places[way], end))
        places[way] = end
        return [offset for _, offset in rows]

    def step() -> list[int]:
        found = [new_of(way) for way in readers]
        assert found[0] == found[1] == found[2]
        return found[0]

    log = KafkaLog(brokers.url, options=options, clock=lambda: 1_700_000_000_000_000)
    try:
        node.commit(live=[b"0"])
        assert step() == [0]
        transaction = log.begin("open")
        transaction.append([Batch.of("live", [b"aborted"] * 3)])
        node.bus.publish("live", ["behind"])
        # A message behind an open transaction is not there before that has ended.
        assert step() == []
        transaction.abort()
        # Kafka ends it a moment later.
        for way in readers:
            assert eventually(partial(new_of, way)) == [5]
        node.commit(live=[b"7", b"8"])
        node.bus.restart()
        node.bus.publish("live", ["10"])
        assert step() == [7, 8, 10]
        assert step() == []
    finally:
        log.close()


def test_a_recreated_or_deleted_topic_is_never_read_as_the_old_one(node: ClusterNode) -> None:
    node.create("again")
    node.bus.publish("again", ["old"] * 5)
    ways = [(batch(place, subscribe="again"), place) for place in node.places.values()]
    planned = [(reader, reader.partitions(), place) for reader, place in ways]
    node.delete("again")
    node.create("again")
    node.bus.publish("again", ["new"] * 5)
    for reader, parts, place in planned:
        with pytest.raises(UsageError) as caught:
            rows_of(reader, parts)
        assert caught.value.code == "spark.data-loss"
        assert offsets_of(batch(place, subscribe="again", failOnDataLoss="false"), parts) == []
        assert read(place, subscribe="again") == [*range(5)]
    node.delete("again")
    reader, parts, _ = planned[1]
    with pytest.raises(UsageError) as caught:
        rows_of(reader, parts)
    assert caught.value.code == "spark.data-loss"


def test_a_topic_that_is_recreated_during_a_read_gives_no_row_of_the_new_one(
    node: ClusterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look at the registry, before the fetch: only Kafka's id of the topic tells."""
    node.create("swap")
    node.bus.publish("swap", ["old"] * 5)
    reader = batch(node.places["log"], subscribe="swap")
    parts = reader.partitions()
    real = ClusterReader._planned

    def planned(self: ClusterReader, plan: Any) -> Any:
        found = real(self, plan)
        node.delete("swap")
        node.create("swap")
        node.bus.publish("swap", ["new"] * 5)
        return found

    monkeypatch.setattr(ClusterReader, "_planned", planned)
    with pytest.raises(UsageError) as caught:
        rows_of(reader, parts)
    assert caught.value.code == "spark.data-loss"
    assert "created again" in caught.value.text


def remove(brokers: KafkaBrokers, before: TopicPartition) -> None:
    """Not in the test itself: what a caught error refers to stays, and so would the client."""
    admin = AdminClient({"bootstrap.servers": brokers.url.removeprefix("kafka://")})
    for future in admin.delete_records([before]).values():
        future.result(20)


def test_messages_that_kafka_has_removed_are_data_loss_or_left_out(
    node: ClusterNode, brokers: KafkaBrokers
) -> None:
    node.create("old")
    node.bus.publish("old", [str(number) for number in range(6)])
    planned = [(batch(place, subscribe="old"), place) for place in node.places.values()]
    parts = [reader.partitions() for reader, _ in planned]
    remove(brokers, TopicPartition(kafka_name("old", node.prefix), 0, 4))
    for (reader, place), its_parts in list(zip(planned, parts, strict=True))[1:]:
        with pytest.raises(UsageError) as caught:
            rows_of(reader, its_parts)
        assert caught.value.code == "spark.data-loss"
        tolerant = batch(place, subscribe="old", failOnDataLoss="false")
        assert [offset for _, offset in offsets_of(tolerant, its_parts)] == [4, 5]
        assert read(place, subscribe="old") == [4, 5]


def test_a_reader_creates_nothing_in_a_cluster(node: ClusterNode, brokers: KafkaBrokers) -> None:
    with pytest.raises(UsageError) as caught:
        read({"log": node.log, "cluster.prefix": "nobody."})
    assert caught.value.code == "data.not-found"
    with pytest.raises(UsageError):
        read(node.places["log"], subscribe="nothing")
    link = shared_link(ClusterLocation(log=brokers.url))
    link.run(link.refreshed())
    assert not [name for name in link.partitions if "nobody" in name or "nothing" in name]


def test_tls_and_a_login_are_options_and_are_found_in_the_folder_of_a_node(
    node: ClusterNode, brokers: KafkaBrokers, tmp_path: Path
) -> None:
    secure = {
        "log": brokers.secure_url,
        "cluster.prefix": node.prefix,
        "cluster.tls.ca": str(brokers.folder / "authority.pem"),
        "cluster.login.user": "bus",
        "cluster.login.password-file": str(brokers.folder / "password"),
        "cluster.login.mechanism": "PLAIN",
    }
    assert read(secure) == EVERY
    assert find_location(secure).options() == secure
    cluster = {
        "prefix": node.prefix,
        "replicas": 1,
        "insync-min": 1,
        "tls": {"ca": str(brokers.folder / "authority.pem")},
        "login": {
            "user": "bus",
            "password-file": str(brokers.folder / "password"),
            "mechanism": "PLAIN",
        },
    }
    settings = {"log": brokers.secure_url, "cluster": cluster}
    with cluster_node(tmp_path, brokers, prefix=node.prefix, settings=settings) as other:
        assert read({"data": str(other.bus.data)}) == EVERY
        assert "secret" not in (other.bus.data / "cluster.json").read_text()
    # Also while no node runs on it.
    assert read({"data": str(other.bus.data)}) == EVERY


# Without a cluster.


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"log": "kafka://a:1", "url": "http://a"}, "spark.option-conflict"),
        ({"log": "kafka://a:1", "data": "/tmp"}, "spark.option-conflict"),
        ({"log": "kafka://a:1", "token": "x"}, "spark.option-conflict"),
        ({"url": "http://a", "cluster.prefix": "x"}, "spark.option-conflict"),
        ({"log": "files"}, "spark.option-invalid"),
        ({"log": "kafka://a:1", "cluster.login.user": "x"}, "spark.option-invalid"),
        ({"log": "kafka://a:1", "cluster.login.name": "x"}, "spark.option-unknown"),
    ],
)
def test_mistakes_in_the_options_of_a_cluster_are_named(given: dict[str, str], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        batch(given)
    assert caught.value.code == code


def test_a_machine_without_the_library_for_kafka_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "polybus.log.kafka.reader")
    monkeypatch.setitem(sys.modules, "polybus.log.kafka.following", None)
    with pytest.raises(ConfigError) as caught:
        batch({"log": "kafka://127.0.0.1:1"}).partitions()
    assert caught.value.code == "cluster.library-missing"
    assert "executor" in caught.value.text


def test_a_cluster_alone_has_no_node_to_call() -> None:
    place = BusLocation(cluster=ClusterLocation(log="kafka://a:1"), is_cluster_only=True)
    with pytest.raises(UsageError) as caught:
        place.call("GET", "/v1/topics")
    assert caught.value.code == "spark.option-invalid"
    assert str(place) == "kafka://a:1"


# With Spark.


def test_spark_reads_a_cluster_and_writes_back_exactly_once(
    spark: Any, node: ClusterNode, tmp_path: Path
) -> None:
    """The first node that the sink's `url` names is gone. The last run has nothing left to do."""
    sinks = {"data": node.places["data"], "url": {"url": f"127.0.0.1:1,{node.bus.url}"}}
    for way, sink in (("data", "data"), ("log", "url"), ("log", "url")):
        place, topic = node.places[way], f"copy-{way}"
        if not (tmp_path / way).exists():
            node.create(topic)
        source = spark.readStream.format("polybus").options(**place, subscribe="news")
        query = (
            source.option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 6)
            .load()
            .select("value")
            .writeStream.format("polybus")
            .options(**sinks[sink], topic=topic)
            .option("checkpointLocation", str(tmp_path / way))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert values(node.bus, topic) == EVERY
        rows = spark.read.format("polybus").options(**place, subscribe=topic).load()
        assert rows.selectExpr("count(*)", "max(offset)").first()[0] == len(EVERY)


# What a user's program does, in a process of its own. The executors have a core each, and there
# are more tasks than one of them can have at a time.
PROGRAM = """
import json, sys
from polybus.spark.session import session

master, buses, folder = (json.loads(word) for word in sys.argv[1:])
java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
spark = session(
    master=master,
    conf={
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": java,
    },
)

def readers(batches):
    import os, time
    import polybus
    import pyarrow as pa
    for batch in batches:
        time.sleep(0.5)
        # The parent of a worker is the one process of its executor that starts workers.
        reader = pa.array([f"{os.getppid()} {polybus.__file__}"] * batch.num_rows)
        yield pa.record_batch({"value": batch["value"], "reader": reader})

def done(name, source, sink):
    rows = spark.read.format("polybus").options(**source, minPartitions="4").load()
    found = rows.select("value").mapInArrow(readers, "value binary, reader string").collect()
    stream = spark.readStream.format("polybus").options(**source, minPartitions="4")
    query = (
        stream.option("startingOffsets", "earliest").load()
        .selectExpr("concat('copy of ', decode(value, 'UTF-8')) AS value", "key")
        .writeStream.format("polybus").options(**sink, topic="copies", producer="cluster")
        .option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True).start()
    )
    query.awaitTermination()
    rows.limit(2).selectExpr("'batch' AS value").write.format("polybus").mode("append").options(
        **sink, topic="batches", producer="cluster-batch"
    ).save()
    values, who = zip(*[(bytes(row.value).decode(), row.reader.split(" ")) for row in found])
    executors, homes = (sorted(set(each)) for each in zip(*who))
    return {"values": values, "executors": executors, "homes": homes}

said = {name: done(name, *places) for name, places in buses.items()}
json.dump(said | {"master": spark.sparkContext.master}, sys.stdout)
spark.stop()
"""


def test_source_and_sink_run_on_executors_that_have_polybus_only_as_the_zip(
    node: ClusterNode, tmp_path: Path
) -> None:
    """Over a bus in files, and over brokers that each executor reads by itself."""
    topics = ["news", "copies", "batches"]
    for topic in topics[1:]:
        node.create(topic)
    with (
        standalone_cluster(tmp_path) as master,
        running_bus(tmp_path, topics=topics) as bus,
    ):
        bus.publish("news", [str(one) for one in EVERY])
        places = {"files": ({"data": str(bus.data)},) * 2}
        places["kafka"] = (node.places["log"], node.places["data"])
        buses = {
            name: (place | {"subscribe": "news"}, sink) for name, (place, sink) in places.items()
        }
        given = (master, buses, str(tmp_path / "checkpoints"))
        run = subprocess.run(
            [sys.executable, "-c", WARM_SPARK + PROGRAM, *map(json.dumps, given)],
            capture_output=True,
            env=environment(),
            timeout=240,
            check=False,
        )
        assert run.returncode == 0, run.stderr.decode()
        said = json.loads(run.stdout)
        assert said["master"] == master
        for name, one in (("files", bus), ("kafka", node.bus)):
            assert sorted(said[name]["values"]) == [str(each) for each in EVERY]
            assert len(said[name]["executors"]) == 2
            (home,) = said[name]["homes"]
            assert Path(home).parts[-3:-1] == (shipping.package().name, "polybus")
            assert sorted(values(one, "copies")) == [f"copy of {each}" for each in EVERY]
            assert values(one, "batches") == ["batch"] * 2


# SQL and searches.


def polybus(node: ClusterNode, *arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments, "--data", str(node.bus.data)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_sql_over_topics_of_a_cluster_needs_no_files(node: ClusterNode) -> None:
    query = "SELECT offset, text(value) AS value, epoch > 0 AS known FROM news"
    rows = json.loads(
        polybus(node, "sql", f"{query} WHERE date > '2020-01-01' ORDER BY offset", "--json")
    )
    assert rows == [{"offset": one, "value": str(one), "known": True} for one in EVERY]
    twice = "SELECT count(*) AS n FROM news a JOIN news b USING (offset)"
    assert json.loads(polybus(node, "sql", twice, "--json")) == [{"n": len(EVERY)}]
    tables = polybus(node, "sql", "SHOW TABLES", "--csv")
    assert f"news,topic,{STOP}" in tables.splitlines()
    where = ["--data", str(node.bus.data)]
    inferred = CliRunner().invoke(main, ["topics", "infer", "news", *where])
    assert f"of the {len(EVERY)} messages" in inferred.output
    # Other tests make lake tables; a topic in Kafka is not one.
    listed = json.loads(polybus(node, "tables", "list", "--json"))
    assert "news" not in {one["table"] for one in listed}
    unknown = CliRunner().invoke(main, ["sql", "SELECT 1 FROM no", *where])
    assert "sql.table-unknown" in unknown.output


def test_a_node_answers_sql_searches_and_histograms_over_its_cluster(node: ClusterNode) -> None:
    token = read_token(node.bus.data)

    def ask(method: str, path: str, body: Any = None) -> Any:
        return request_json(node.bus.url, method, path, body, token=token)

    query = {"query": "SELECT offset FROM news WHERE text(value) >= '4' ORDER BY offset"}
    assert ask("POST", "/v1/sql", query)["rows"] == [[4], [5], [7], [8]]
    for given, expected in (
        ("text=7", [7]),
        ("header=a:1", [3]),
        ("sql=text(value)%3E%3D'5'", [5, 7, 8]),
        ("newest=true&limit=2", [8, 7]),
        ("limit=3", [0, 1, 3]),
    ):
        found = ask("GET", f"/v1/topics/news/search?{given}")
        assert [one["offset"] for one in found["messages"]] == expected
    assert ask("GET", "/v1/topics/news/search?limit=3")["next"] == 4
    counted = ask("GET", "/v1/topics/news/histogram")
    assert sum(counted["counts"]) == len(EVERY)


# Pipelines.


def test_pipelines_run_over_a_node_of_a_cluster_with_their_tables_in_its_folder(
    spark: Any, node: ClusterNode, tmp_path: Path
) -> None:
    node.create("orders")
    node.create("large")
    node.commit(orders=[b'{"id": 1, "amount": 10}', b'{"id": 2, "amount": 20}'])
    node.bus.publish("orders", ['{"id": 3, "amount": 30}'])
    node.commit(orders=[b'{"id": 4, "amount": 40}'])
    data = node.bus.data
    own = PipelineFolder(spark, node.bus, tmp_path)
    own.write(
        "shop/flows.py",
        """
        from pyspark import pipelines as dp
        from pyspark.sql import SparkSession
        from pyspark.sql import functions as F

        spark = SparkSession.active()

        @dp.table
        def clean():
            row = F.from_json(F.col("value").cast("string"), "id INT, amount INT")
            return spark.readStream.table("orders").select(row.alias("row")).select("row.*")

        @dp.materialized_view
        def totals():
            return spark.read.table("clean").agg(F.sum("amount").alias("sum"))

        @dp.materialized_view
        def counted():
            return spark.read.table("orders").agg(F.count("*").alias("count"))

        dp.create_sink("sent", format="polybus", options={"topic": "large"})

        @dp.append_flow(target="sent", name="large_orders")
        def large_orders():
            large = spark.readStream.table("clean").where("amount >= 20")
            return large.select(F.to_json(F.struct("id")).alias("value"))
        """,
    )
    standard = FlowRunner(spark, BusLocation(data), continuous=True)
    standard.start(*flows(data))
    try:
        own.run()
        eventually(lambda: len(silver_of(data, "orders")) == 4, timeout_s=90)
        eventually(lambda: standard.progress()[0].lag == 0, timeout_s=60)
    finally:
        assert standard.stop(60)
    assert standard.failures == []
    # Offsets 2 and 5 are the ends of transactions.
    assert silver_of(data, "orders") == [0, 1, 3, 4]
    assert own.rows("shop.totals", "sum") == [(100,)]
    assert own.rows("shop.counted", "count") == [(4,)]
    assert [one["id"] for one in values(node.bus, "large")] == [2, 3, 4]
    both = "SELECT count(*) AS n FROM orders o JOIN silver s USING (topic, offset)"
    assert json.loads(polybus(node, "sql", both, "--json")) == [{"n": 4}]
    assert collect(spark, both, data, rows_max=2).to_pylist() == [{"n": 4}]
    listed = json.loads(polybus(node, "tables", "list", "--json"))
    assert {"silver", "shop.clean"} <= {one["table"] for one in listed}


def silver_of(data: Path, topic: str) -> list[int]:
    table = open_table(data, "silver")
    rows = table.read().select(["topic", "offset"]).to_pylist() if table.exists else []
    return sorted(row["offset"] for row in rows if row["topic"] == topic)
