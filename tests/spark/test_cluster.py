"""Spark Connect: a server that has Polybus only as our zip, and one on which it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import quick_java  # noqa: F401
from spark_cluster_kit import INSTALLED, answers, free_port, spark_process
from spark_kit import RunningBus, environment, eventually, running_bus
from warm_kit import WARM_SPARK

from polybus.client.http.blocking import read_token, request_json
from polybus.errors import UsageError
from polybus.lake.table import open_table
from polybus.log.reading.reader import LogReader
from polybus.spark import shipping
from polybus.spark.session import connect

ROWS = 500
# What a user's program does, in a process of its own. Only settings of queries can be made.
CONNECT_PROGRAM = """
import json, sys
from pathlib import Path
from polybus.spark.session import session

spark = session(master=sys.argv[1], data=Path(sys.argv[2]))
rows = spark.read.format("polybus").option("data", sys.argv[2]).option("subscribe", "orders").load()
json.dump({
    "kind": type(spark).__module__,
    "zone": spark.conf.get("spark.sql.session.timeZone"),
    "count": rows.count(),
}, sys.stdout)
spark.stop()
"""


def values(bus: RunningBus, topic: str) -> list[str]:
    reader = LogReader(bus.data)
    bounds = reader.bounds(topic)
    batches = reader.read(topic, bounds.start, bounds.stop, columns=["value"])
    return [value.decode() for batch in batches for value in batch["value"].to_pylist()]


@dataclass
class ConnectServer:
    """A Spark Connect server; `installed` is there once it has Polybus."""

    address: str
    installed: Path


@pytest.fixture(scope="module")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """One for all tests: it takes long to start. At first it has Polybus not."""
    folder = tmp_path_factory.mktemp("connect") / "server"
    port = free_port()
    options = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
    }
    confs = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
    server = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer")
    command = ("--master", "local[2]", *confs, *server, "spark-internal")
    with spark_process(folder, "org.apache.spark.deploy.SparkSubmit", *command):
        eventually(lambda: answers(port), timeout_s=120)
        yield ConnectServer(f"sc://127.0.0.1:{port}", folder / INSTALLED)


def test_a_spark_connect_server_without_polybus_reads_a_topic(
    connect_server: ConnectServer, tmp_path: Path
) -> None:
    with running_bus(tmp_path, topics=["orders"]) as bus:
        bus.publish("orders", [f"order {number}" for number in range(ROWS)])
        run = subprocess.run(
            [
                sys.executable,
                "-c",
                WARM_SPARK + CONNECT_PROGRAM,
                connect_server.address,
                str(bus.data),
            ],
            capture_output=True,
            env=environment(),
            timeout=240,
            check=False,
        )
        assert run.returncode == 0, run.stderr.decode()
        said = json.loads(run.stdout)
    assert said["kind"] == "pyspark.sql.connect.session"
    assert said["zone"] == "UTC"
    assert said["count"] == ROWS


SHOP = """
from polybus.spark.expectations import expect_or_drop
from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()

@dp.table
@expect_or_drop("has an amount", "amount >= 0")
def clean():
    row = F.from_json(F.col("value").cast("string"), "id INT, amount INT")
    rows = spark.readStream.table("orders").select(row.alias("row")).select("row.*")
    return rows.withColumn("even", F.expr("id % 2 = 0"))

@dp.materialized_view
def totals():
    return spark.read.table("clean").agg(F.sum("amount").alias("sum"))

dp.create_sink("large", format="polybus", options={"topic": "large"})

@dp.append_flow(target="large", name="send_large")
def send_large():
    rows = spark.readStream.table("clean").where("amount >= 40")
    return rows.select(F.to_json(F.struct("id")).alias("value"))

dp.create_streaming_table("largest")
dp.create_auto_cdc_flow(
    target="largest", source="clean", keys=["even"], sequence_by=F.col("amount"),
    except_column_list=["id"], apply_as_deletes=F.expr("id = 5"), stored_as_scd_type=1)
"""


WORDS = """
CREATE STREAMING TABLE ids AS
WITH parsed AS (SELECT parse_json(string(value)) AS row FROM STREAM(orders))
SELECT INT(row:id) AS id, INT(row:id) DIV 4 AS part FROM parsed;

CREATE MATERIALIZED VIEW last AS
SELECT max(id) AS last, (SELECT count(*) FROM ids) AS n FROM ids;

CREATE STREAMING TABLE periods;

CREATE FLOW parts AS AUTO CDC INTO periods FROM STREAM(ids)
KEYS (part) SEQUENCE BY id STORED AS SCD TYPE 2;
"""


def test_a_pipeline_runs_over_spark_connect_where_polybus_is_installed(
    connect_server: ConnectServer, tmp_path: Path
) -> None:
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "shop.py").write_text(SHOP)
    (folder / "words.sql").write_text(WORDS)

    def run() -> tuple[int, list[dict[str, Any]], str]:
        command = [sys.executable, "-m", "polybus.cli", "pipeline", "run", "--json"]
        command += ["--data", str(bus.data), "--folder", str(folder)]
        done = subprocess.run(
            [*command, "--master", connect_server.address],
            capture_output=True,
            env=environment(),
            timeout=240,
            check=False,
        )
        events = [json.loads(line) for line in done.stdout.splitlines()]
        return done.returncode, events, done.stderr.decode()

    with running_bus(tmp_path, topics=["orders", "large"]) as bus:
        bus.publish("orders", [json.dumps({"id": n, "amount": n * 10}) for n in range(6)])
        code, _, errors = run()
        assert code == 1
        assert "spark.server: the Spark Connect server has no Polybus" in errors

        connect_server.installed.touch()
        code, events, errors = run()
        assert (code, errors) == (0, ""), events[-1]
        flows = {one["flow"]: (one["state"], one["rows"]) for one in events[-1]["flows"]}
        assert flows == {
            **{"clean": ("done", 6), "totals": ("done", 1), "send_large": ("done", 6)},
            **{"ids": ("done", 6), "last": ("done", 1)},
            **{"largest": ("done", 6), "parts": ("done", 6)},
        }, [one["error"] for one in events[-1]["flows"]]
        assert open_table(bus.data, "words.last").read().to_pylist() == [{"last": 5, "n": 6}]
        found = request_json(bus.url, "GET", "/v1/consumers", token=read_token(bus.data))
        offsets = {
            one["group"]: [at["offset"] for at in one["topics"]] for one in found["consumers"]
        }
        names = ("shop.clean", "shop.send_large", "words.ids", "shop.largest", "words.parts")
        assert offsets == dict.fromkeys(names, [6]), "retention waits for the flows"
        assert open_table(bus.data, "shop.clean").rows == 6
        assert open_table(bus.data, "shop.totals").read().to_pylist() == [{"sum": 150}]
        assert sorted(values(bus, "large")) == ['{"id":4}', '{"id":5}']
        changed = open_table(bus.data, "shop.largest").read().to_pylist()
        assert changed == [{"amount": 40, "even": True}], "the deletion wins for odd ids"
        periods = open_table(bus.data, "words.periods").read().to_pylist()
        ends = sorted((row["part"], row["id"], row["__END_AT"]) for row in periods)[-2:]
        assert ends == [(1, 4, 5), (1, 5, None)]
    connect_server.installed.unlink()


def test_a_spark_connect_server_without_the_data_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        """Runs what is sent to it on a machine that has none of our files."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_: self

        def mapInArrow(self, look: Any, schema: str) -> Any:
            (rows,) = look(iter([pa.record_batch({"id": [0]})]))
            return SimpleNamespace(collect=lambda: [SimpleNamespace(**rows.to_pylist()[0])])

    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(UsageError, match=r"spark.server: .* cannot access .*/data/pipeline"):
        connect.check_server(Elsewhere(), tmp_path / "data")
    assert list((tmp_path / "data" / "pipeline").iterdir()) == []


def test_the_zip_has_all_that_a_worker_imports_and_is_written_once() -> None:
    path = shipping.package()
    assert shipping.package() == path
    with zipfile.ZipFile(path) as packed:
        names = set(packed.namelist())
    assert {
        "pyspark_polybus.py",
        "polybus/__init__.py",
        "polybus/spark/source/__init__.py",
    } <= names
    assert not any(name.startswith("polybus/cli/") for name in names)
    code = "import polybus, pyspark_polybus; print(polybus.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(path)),
        check=True,
    )
    assert run.stdout.startswith(str(path) + os.sep)
