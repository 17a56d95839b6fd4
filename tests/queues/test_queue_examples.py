"""The examples run, and print what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "queues"
BOTH = pytest.mark.parametrize("options", [[], ["--tcp"]], ids=["local", "tcp"])


def printed(name: str, options: list[str]) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@BOTH
def test_the_echo_server_gives_every_client_its_words_back(options: list[str]) -> None:
    assert printed("echo.py", options).splitlines() == [
        f"client {number}: 4 echoes, in order: True" for number in (1, 2, 3)
    ]


@BOTH
def test_the_dispatcher_gets_every_answer_though_a_worker_leaves(options: list[str]) -> None:
    assert printed("dispatcher.py", options).splitlines() == [
        "20 of 20 jobs done, all right: True",
        "given to another worker: 1",
    ]


@pytest.mark.slow
def test_the_bridge_carries_a_queue_program_to_goms_and_a_browser_and_back() -> None:
    assert printed("bridge.py", []).splitlines() == [
        "goMS hears: 21.5",
        "goMS hears: 21.7",
        "goMS hears: 22.0",
        "browser hears: 21.5",
        "browser hears: 21.7",
        "browser hears: 22.0",
        "sensor hears: thanks",
        "sensor hears: enough",
    ]
