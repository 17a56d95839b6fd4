"""Buses and hand-overs that are forks: their exit codes, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polybus.torture.bus.child import BusChild
from polybus.torture.bus.handover_forker import is_forker
from polybus.torture.bus.warm import WarmProcess

pytestmark = pytest.mark.slow

USAGE = 2
FORKER = """
import os, socket
from polybus.torture.bus import handover_forker

bus, forker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
with open(os.devnull, "w") as output:
    socket.send_fds(bus, [b"[]"], [output.fileno()])
# The forker gets the request, and cannot answer.
bus.shutdown(socket.SHUT_RD)
socket.socketpair = lambda *_: (bus, forker)
handover_forker.start_forker()
os.wait()
"""


def test_a_bus_that_has_just_ended_has_no_children() -> None:
    """A power cut may end it at any moment of a start."""
    child = BusChild.__new__(BusChild)
    child.process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.process.communicate()
    assert child.children() == []


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


def own_children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(one) for one in found.split()]


def await_end(process: int) -> None:
    """A zombie has ended: its new parent may reap it later."""
    stat = Path(f"/proc/{process}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().rpartition(") ")[2][0] not in "ZX":
            time.sleep(0.01)


async def test_hand_overs_are_forks_and_nothing_outlives_its_bus(tmp_path: Path) -> None:
    child = BusChild(tmp_path)
    try:
        assert await child.start()
        assert child.process is not None
        (forker,) = [one for one in own_children(child.process.pid) if is_forker(one)]
        assert forker not in child.children(), "what is not a hand-over is not killed as one"
        history = child.data / "accounts" / "default" / "topics" / "alpha" / "history"
        handed_over = 0
        while handed_over < 2:
            await child.ask("POST", "/v1/topics/alpha/messages", "text")
            await asyncio.sleep(0.02)
            names = {path.name for path in history.glob("*/*.parquet")}
            handed_over = max([0, *(int(name[21:41]) for name in names)])
        assert "hand-over" not in child.log_text
        child.kill()
        child.await_orphans()
        await_end(forker)
    finally:
        child.kill()


def test_the_log_has_no_exception_if_a_bus_ends_while_its_hand_over_is_forked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKER], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stderr == ""
