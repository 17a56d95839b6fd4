"""A real cluster: master and worker processes on loopback, which have Polybus only as our zip."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from spark_kit import RunningBus, environment, eventually, running_bus

from polybus.log.reader import LogReader
from polybus.spark import archive, shipping
from polybus.spark.gateway import java_command
from polybus.spark.java import find_java

ROWS = 500
# The workers run the tests' own Python; this hides the Polybus that is installed there.
HIDE_POLYBUS = """
import sys
sys.path[:] = [one for one in sys.path if one.rstrip("/") != {source!r}]
"""
# What a user's program does, in a process of its own: this one has a local session already.
PROGRAM = """
import json, sys
import pyarrow as pa
from pathlib import Path
from polybus.spark.session import session

master, data, checkpoint = sys.argv[1:]
spark = session(
    master=master,
    data=Path(data),
    conf={"spark.executor.memory": "512m", "spark.executor.cores": "2"},
)

def homes(batches):
    import polybus
    for batch in batches:
        yield pa.record_batch({"home": [polybus.__file__] * batch.num_rows})

found = spark.range(4).mapInArrow(homes, "home string").distinct().collect()
rows = spark.read.format("polybus").option("subscribe", "orders").load()
stream = spark.readStream.format("polybus").option("subscribe", "orders")
query = (
    stream.option("startingOffsets", "earliest").load()
    .selectExpr("upper(decode(value, 'UTF-8')) AS value", "key")
    .writeStream.format("polybus").option("topic", "shouted").option("producer", "cluster")
    .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
)
query.awaitTermination()
rows.limit(10).selectExpr("'batch' AS value").write.format("polybus").mode("append").options(
    topic="copied", producer="cluster-batch"
).save()
json.dump({
    "master": spark.sparkContext.master,
    "homes": [row.home for row in found],
    "count": rows.count(),
    "executors": spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size(),
}, sys.stdout)
spark.stop()
"""

# The same over Spark Connect, where only settings of queries can be made.
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def spark_process(folder: Path, program: str, *arguments: str) -> Iterator[None]:
    """A process of Spark's own for the time of a block; it is ended by its id."""
    folder.mkdir()
    hidden = folder / "python"
    hidden.mkdir()
    source = str(Path(shipping.__file__).parents[2])
    (hidden / "sitecustomize.py").write_text(HIDE_POLYBUS.format(source=source))
    java = find_java()
    command = java_command(java, memory="512m", scratch=folder, log=folder / "spark.log")
    process = subprocess.Popen(
        [*command, program, *arguments],
        cwd=folder,
        env=environment(
            SPARK_HOME=str(archive.jars_folder().parent),
            SPARK_SCALA_VERSION="2.13",
            JAVA_HOME=str(java.home),
            PYTHONPATH=str(hidden),
            PYSPARK_PYTHON=sys.executable,
        ),
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a standalone master with one worker of two cores."""
    port = free_port()
    here = ("--host", "127.0.0.1", "--webui-port", "0")
    master = ("org.apache.spark.deploy.master.Master", *here, "--port", str(port))
    with spark_process(tmp_path / "master", *master):
        eventually(lambda: answers(port))
        address = f"spark://127.0.0.1:{port}"
        worker = ("org.apache.spark.deploy.worker.Worker", *here, "--port", "0")
        limits = ("--cores", "2", "--memory", "1g", "--work-dir", str(tmp_path / "work"))
        with spark_process(tmp_path / "worker", *worker, *limits, address):
            yield address


def values(bus: RunningBus, topic: str) -> list[str]:
    reader = LogReader(bus.data)
    bounds = reader.bounds(topic)
    batches = reader.read(topic, bounds.start, bounds.stop, columns=["value"])
    return [value.decode() for batch in batches for value in batch["value"].to_pylist()]


def test_source_and_sink_run_on_a_cluster_that_has_polybus_only_as_the_zip(
    cluster: str, tmp_path: Path
) -> None:
    with running_bus(tmp_path, topics=["orders", "shouted", "copied"]) as bus:
        bus.publish("orders", [f"order {number}" for number in range(ROWS)])
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, cluster, str(bus.data), str(tmp_path / "checkpoint")],
            capture_output=True,
            env=environment(),
            timeout=240,
            check=False,
        )
        assert run.returncode == 0, run.stderr.decode()
        said = json.loads(run.stdout)
        assert said["master"] == cluster
        assert said["executors"] == 2, "the driver's own and one of the worker"
        assert said["count"] == ROWS
        assert [Path(home).parts[-3:-1] for home in said["homes"]] == [
            (shipping.package().name, "polybus")
        ]
        assert sorted(values(bus, "shouted")) == sorted(f"ORDER {number}" for number in range(ROWS))
        assert values(bus, "copied") == ["batch"] * 10


def test_a_spark_connect_server_that_has_polybus_not_reads_a_topic(tmp_path: Path) -> None:
    port = free_port()
    options = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
    }
    confs = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
    server = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer")
    command = ("--master", "local[2]", *confs, *server, "spark-internal")
    with (
        running_bus(tmp_path, topics=["orders"]) as bus,
        spark_process(tmp_path / "server", "org.apache.spark.deploy.SparkSubmit", *command),
    ):
        bus.publish("orders", [f"order {number}" for number in range(ROWS)])
        eventually(lambda: answers(port), timeout_s=120)
        run = subprocess.run(
            [sys.executable, "-c", CONNECT_PROGRAM, f"sc://127.0.0.1:{port}", str(bus.data)],
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


def test_the_zip_holds_all_that_a_worker_imports_and_is_made_once() -> None:
    path = shipping.package()
    assert shipping.package() == path
    with zipfile.ZipFile(path) as packed:
        names = set(packed.namelist())
    assert {"pyspark_polybus.py", "polybus/__init__.py", "polybus/spark/source.py"} <= names
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
