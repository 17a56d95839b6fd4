"""Scratch folders outlive no process for long; memory is reported as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polybus import processes


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_scratch_folder_is_gone_after_the_block(scratch: Path) -> None:
    with processes.scratch_folder("test") as folder:
        (folder / "file").write_text("x")
    assert list(scratch.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_nothing_else(scratch: Path) -> None:
    code = "import os; from polybus.processes import new_scratch; new_scratch('test'); os._exit(9)"
    environment = os.environ | {"TMPDIR": str(scratch)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    mine = processes.new_scratch("other")
    young = scratch / "polybus-test-young"
    young.mkdir()
    assert len(list(scratch.glob("polybus-test-*"))) == 2
    processes.sweep("test")
    processes.sweep("other")
    assert sorted(scratch.iterdir()) == sorted([mine, young])
    os.utime(young, (0, 0))
    with processes.scratch_folder("test"):
        assert not young.exists()
    processes.remove_scratch(mine)


def test_the_memory_of_this_process_grows_with_what_it_holds() -> None:
    # In a process of its own: in this one other memory may be freed at the same time.
    code = """
from polybus.processes import memory_bytes
reserved, resident = memory_bytes()
held = b"x" * (64 << 20)
assert memory_bytes()[1] - resident > len(held) // 2, memory_bytes()
assert reserved >= resident > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_is_known_by_its_start_until_it_ends() -> None:
    started = processes.started_ticks(os.getpid())
    with subprocess.Popen(["sleep", "600"]) as other:
        assert processes.started_ticks(other.pid) >= started > 0
        other.kill()
        # One that has ended keeps its id until its parent asks for its code.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert processes.started_ticks(other.pid) == 0
    assert processes.started_ticks(other.pid) == 0
