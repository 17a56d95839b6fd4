"""The training run of the class archive: a bus, some messages, and the real pipeline on them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from polybus.lake.table import LakeTable
from polybus.processes import is_alive
from polybus.spark.pipelines.running import service

RESULT_TIMEOUT_S = 240.0
EXIT_TIMEOUT_S = 240.0
POLL_S = 0.2
TOPIC = "training"
MESSAGES = (b'{"n": 1, "at": "2026-01-01T00:00:00Z"}', b"text", b'{"broken": ', b"\xff\xfe")
TABLES = ("silver", "quarantine", "traffic")


def run(folder: Path, environment: dict[str, str]) -> None:
    """Run the pipeline under `environment` until it has results, and return when its JVM is gone.

    Raises:
        TimeoutError: there were no results, or the JVM did not end.
        OSError, subprocess.SubprocessError: bus or pipeline did not start.
    """
    data = folder / "data"
    with _bus(data) as port:
        for message in MESSAGES:
            url = f"http://127.0.0.1:{port}/v1/topics/{TOPIC}/messages"
            with urllib.request.urlopen(urllib.request.Request(url, message), timeout=30):
                pass
        with subprocess.Popen(
            [sys.executable, "-m", "polybus.spark.pipelines.running.driver", "--data", str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
        ) as driver:
            try:
                tables = [LakeTable(data / "tables" / name) for name in TABLES]
                _await(
                    lambda: driver.poll() is not None or all(table.rows for table in tables),
                    RESULT_TIMEOUT_S,
                )
                note = service.read_note(data)
            finally:
                # It ends with its standard input, and so does its JVM, which then writes.
                driver.communicate()
    if note is not None:
        _await(lambda: not is_alive(note.jvm), EXIT_TIMEOUT_S)


@contextlib.contextmanager
def _bus(data: Path) -> Iterator[int]:
    """A bus for the time of a block; gives its port."""
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "polybus.cli", "serve", "--stop-with-stdin"),
            *("--port", "0", "--data", str(data), "--topic", TOPIC),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            found = re.search(rb"tcp://127\.0\.0\.1:(\d+)", process.stdout.readline())
            if found is None:
                raise OSError("the bus of the training run did not start")
            yield int(found[1])
        finally:
            process.communicate()


def _await(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the training run takes too long")
        time.sleep(POLL_S)
