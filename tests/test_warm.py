"""A command that is forked from a warm process is a process like any other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from warm_kit import WARM

COMMAND = [sys.executable, "-m", "polybus.cli"]
SERVE = [*COMMAND, "serve", "--port", "0"]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        yield process
        process.kill()


def test_it_has_its_own_streams_and_exit_code() -> None:
    fine = subprocess.run([*COMMAND, "--version"], capture_output=True, check=False)
    assert (fine.returncode, fine.stderr) == (0, b"")
    assert fine.stdout.startswith(b"polybus")
    wrong = subprocess.run([*COMMAND, "fly"], capture_output=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert b"fly" in wrong.stderr


def test_commands_of_different_parents_start_at_the_same_time() -> None:
    program = [sys.executable, "-c", f"{WARM}print('done')"]

    def run(command: list[str]) -> int:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode

    with ThreadPoolExecutor(4) as threads:
        codes = [*threads.map(run, [[*COMMAND, "--version"], program] * 20)]
    assert codes == [0] * 40


def test_it_has_the_environment_that_it_was_given() -> None:
    show = [*COMMAND, "config", "show"]
    environment = os.environ | {"POLYBUS_DATA": "/somewhere"}
    given = subprocess.run(show, capture_output=True, env=environment, check=True)
    assert b"/somewhere" in given.stdout
    without = subprocess.run(show, capture_output=True, check=True)
    assert b"/somewhere" not in without.stdout


def test_it_is_a_child_of_the_test_and_runs_in_its_own_folder(
    bus: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert parent(bus.pid) == os.getpid()
    assert b"warm_parent.py" in command_line(bus.pid)
    assert Path(f"/proc/{bus.pid}/cwd").resolve() == tmp_path.resolve()
    assert (tmp_path / "polybus-data").is_dir()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_signals_reach_it(bus: subprocess.Popen[bytes], number: signal.Signals, code: int) -> None:
    bus.send_signal(number)
    assert bus.wait(20) == code


def test_it_may_lead_a_group_of_its_own(tmp_path: Path) -> None:
    with subprocess.Popen(
        SERVE, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        assert os.getpgid(process.pid) == process.pid
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 0


async def test_asyncio_starts_and_awaits_it_as_well() -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--version", stdout=asyncio.subprocess.PIPE
    )
    assert b"polybus" in (await process.communicate())[0]
    assert process.returncode == 0


def test_what_decides_about_imports_starts_it_anew() -> None:
    environment = os.environ | {"POLYBUS_PURE": "1"}
    with subprocess.Popen(
        [*COMMAND, "tail"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert b"warm_parent.py" not in command_line(process.pid)
