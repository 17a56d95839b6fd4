"""Buses that are forks: their exit codes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from polybus.torture.warm import WarmProcess

pytestmark = pytest.mark.slow

USAGE = 2


def test_every_thread_gets_the_exit_code_while_others_start(tmp_path: Path) -> None:
    """At each start `multiprocessing` asks all processes for their exit code."""
    config = tmp_path / "bus.json"
    config.write_text("{")
    codes: list[int] = []
    for _ in range(20):
        process = WarmProcess(config, tmp_path / "log", {})
        waiting = [
            threading.Thread(target=lambda one=process: codes.append(one.wait(30)))
            for _ in range(4)
        ]
        for thread in waiting:
            thread.start()
        other = WarmProcess(config, tmp_path / "log", {})
        for thread in waiting:
            thread.join()
        codes.append(other.wait(30))
        process.stdout.close()
        other.stdout.close()
    assert codes == [USAGE] * 100
