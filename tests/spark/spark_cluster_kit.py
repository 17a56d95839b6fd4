"""Processes of Spark's own on loopback, which have Polybus only as our zip."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import quick_java  # noqa: F401
from spark_kit import environment, eventually

from polybus.spark import shipping
from polybus.spark.session import archive
from polybus.spark.session.gateway import java_command
from polybus.spark.session.java import find_java

INSTALLED = "installed"
# The workers run the tests' own Python; this hides the Polybus that is installed there, as long as
# no file says that it is.
HIDE_POLYBUS = """
import os, sys
from importlib.machinery import PathFinder

class Installed:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "polybus" and os.path.exists({installed!r}):
            return PathFinder.find_spec(name, [{source!r}])

sys.path[:] = [one for one in sys.path if one.rstrip("/") != {source!r}]
sys.meta_path.append(Installed)
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
    hide = HIDE_POLYBUS.format(source=source, installed=str(folder / INSTALLED))
    (hidden / "sitecustomize.py").write_text(hide)
    java = find_java()
    command = java_command(java, memory="512m", scratch=folder, log=folder / "spark.log")
    process = subprocess.Popen(
        [*command, program, *arguments],
        cwd=folder,
        env=environment(
            SPARK_HOME=str(archive.jars_folder().parent),
            SPARK_SCALA_VERSION="2.13",
            JAVA_HOME=str(java.path.parents[1]),
            PYTHONPATH=str(hidden),
            PYSPARK_PYTHON=sys.executable,
            # Seconds that Spark has to answer a Python process of its own, on a busy machine.
            SPARK_AUTH_SOCKET_TIMEOUT="60",
        ),
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def standalone_cluster(folder: Path) -> Iterator[str]:
    """The address of a standalone master with one worker of two cores."""
    port = free_port()
    here = ("--host", "127.0.0.1", "--webui-port", "0")
    master = ("org.apache.spark.deploy.master.Master", *here, "--port", str(port))
    with spark_process(folder / "master", *master):
        eventually(lambda: answers(port))
        address = f"spark://127.0.0.1:{port}"
        worker = ("org.apache.spark.deploy.worker.Worker", *here, "--port", "0")
        limits = ("--cores", "2", "--memory", "1200m", "--work-dir", str(folder / "work"))
        with spark_process(folder / "worker", *worker, *limits, address):
            yield address
