"""The driver is killed, with kill -9, at the worst moments: every line is published once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from driver_kit import descendants, is_java
from sink_kit import Proxy, proxied, staged_files, values
from spark_kit import environment, running_bus
from warm_kit import WARM_SPARK

from polybus.client.http.blocking import request_json

DRIVER = Path(__file__).with_name("sink_driver.py")
BATCHES, LINES = 4, 50


class Driver:
    """The driver and all of its processes, a group of their own."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        self._errors = folder / "driver.log"
        arguments = [str(folder / "lines"), str(folder / "checkpoint"), proxy.url, "out"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", WARM_SPARK + DRIVER.read_text(), *arguments],
            env=environment(),
            start_new_session=True,
            stderr=self._errors.open("wb"),
        )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def kill_java(self) -> None:
        for pid in descendants(self._process.pid):
            if is_java(pid):
                os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        return self._errors.read_text()

    def wait(self) -> int:
        return self._process.wait(120)


@pytest.mark.timeout(400)
def test_a_driver_killed_around_its_commits_publishes_every_line_once(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    for number in range(BATCHES):
        lines = [f"{number * LINES + line}\n" for line in range(LINES)]
        path = tmp_path / "lines" / f"{number}.txt"
        path.write_text("".join(lines))
        os.utime(path, (number, number))
    with running_bus(tmp_path, ["out"]) as bus, proxied(bus) as proxy:
        # First between write and commit: all is staged, and the bus is never notified.
        driver = Driver(tmp_path, proxy)

        def kill_before_the_commit(method: str, path: str) -> bool:
            if path == "/v1/commits":
                driver.kill()
                return False
            return True

        proxy.before = kill_before_the_commit
        assert driver.wait() == -signal.SIGKILL
        assert values(bus, "out") == []
        assert staged_files(bus) != []

        # Then Java alone, between the commit on the bus and the one in Spark's checkpoint, in a
        # later batch: the driver ends at once and says why.
        # A Python worker of the first driver may outlive it and repeat its commit: the batches on
        # the bus count, not the calls.
        def kill_after_the_second_batch(method: str, path: str) -> bool:
            if path == "/v1/commits" and len(values(bus, "out")) == 2 * LINES:
                driver.kill_java()
                return False
            return True

        proxy.before = lambda method, path: True
        proxy.after = kill_after_the_second_batch
        driver = Driver(tmp_path, proxy)
        assert driver.wait() == 1
        assert "spark.ended: the Java process" in driver.said()
        assert "was killed by signal 9" in driver.said()
        assert len(values(bus, "out")) == 2 * LINES

        proxy.after = lambda method, path: True
        assert Driver(tmp_path, proxy).wait() == 0
        assert sorted(values(bus, "out")) == list(range(BATCHES * LINES))
        assert request_json(bus.url, "GET", "/v1/commits/out")["batch"] == BATCHES - 1
        assert staged_files(bus) == []
