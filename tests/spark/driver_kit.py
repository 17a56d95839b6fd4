"""A real driver process, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spark_kit import environment, eventually

READY_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0


class RunningDriver:
    """`python -m polybus.spark.pipelines.running.driver`; its events are collected as they come."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self.events: list[dict[str, Any]] = []
        data.mkdir(parents=True, exist_ok=True)
        self._errors = (data.parent / "driver.log").open("ab")
        command = [
            sys.executable,
            "-m",
            "polybus.spark.pipelines.running.driver",
            "--data",
            str(data),
        ]
        self.process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def said(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]

    def wait_for(self, event: str, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        eventually(lambda: self.said(event) or self.process.poll() is not None, timeout_s=timeout_s)
        found = self.said(event)
        assert found, f"it ended with {self.process.returncode}: {self.events}"
        return found[-1]

    def flow(self, name: str) -> dict[str, Any]:
        """The newest figures of a flow."""
        flows = self.said("progress")[-1:] or [{"flows": []}]
        return next((one for one in flows[0]["flows"] if one["flow"] == name), {})

    def kill(self) -> None:
        self.process.kill()
        self.await_end()

    def close(self) -> int:
        """End it as a parent that dies does: its input ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.await_end()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.await_end()

    def await_end(self) -> int:
        code = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        self._errors.close()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return code


@contextlib.contextmanager
def running_driver(data: Path, *options: str) -> Iterator[RunningDriver]:
    driver = RunningDriver(data, *options)
    try:
        yield driver
    finally:
        if driver.process.poll() is None:
            driver.kill()


def descendants(pid: int) -> list[int]:
    """All processes below one, the nearest first."""
    found = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                waiting += [int(child) for child in children]
                found += [int(child) for child in children]
    return found


def is_java(pid: int) -> bool:
    try:
        return b"java" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False


def python_workers(driver_pid: int) -> list[int]:
    """Processes in which Spark runs Python: tasks' workers, and those that plan our source."""
    found = []
    for pid in descendants(driver_pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            above = Path(f"/proc/{parent}/cmdline").read_bytes()
            is_worker = b"pyspark.daemon" in words and b"pyspark.daemon" in above
            is_planner = any(b"streaming" in word and b"runner" in word for word in words)
            if is_worker or is_planner:
                found.append(pid)
    return found
