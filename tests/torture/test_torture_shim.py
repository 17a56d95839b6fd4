"""The library between a bus and its disk: what it does to it, and what a power cut leaves."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polybus.bench import BenchError
from polybus.torture.bus.control import (
    CUT_POWER,
    EVERY_CHANGE,
    KILL_SELF,
    SYNC,
    WRITE,
    Shim,
    library,
)
from polybus.torture.faults.crashes.cuts import BLOCK_BYTES, PowerCut, read_changes

HEAD = """
import os
from pathlib import Path
root = Path({root!r})

def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

def append(name, data, synced=True):
    with (root / name).open("ab", buffering=0) as file:
        file.write(data)
        if synced:
            os.fsync(file.fileno())
"""
CUTS = 100


def run(shim: Shim, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may change files below the folder that the shim watches."""
    command = [sys.executable, "-S", "-c", HEAD.format(root=str(shim.root)) + program]
    environment = {**os.environ, **shim.environment}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=20, check=False
    )


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="needs a C compiler: apt-get install gcc"):
        library({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    found = Shim(tmp_path, records=True)
    found.root.mkdir()
    return found


def after_cuts(shim: Shim, program: str, *names: str) -> set[tuple[bytes | None, ...]]:
    """Everything that power cuts after a program leave of some files."""
    shutil.rmtree(shim.root)
    shim.root.mkdir()
    shim.forget()
    power = PowerCut(shim)
    done = run(shim, program)
    assert done.returncode == 0, done.stderr
    chance = random.Random(1)
    cuts = [power.left(chance) for _ in range(CUTS)]
    return {tuple(left.get(name) for name in names) for left in cuts}


def test_a_cut_makes_the_folder_as_it_is_left(shim: Shim) -> None:
    power = PowerCut(shim)
    run(shim, '(root / "f").mkdir(); append("f/a", b"one"); append("f/b", b"two", synced=False)')
    left = power.left(random.Random(4))
    power.cut(random.Random(4))
    found = {
        str(path.relative_to(shim.root)): path.read_bytes() if path.is_file() else None
        for path in shim.root.rglob("*")
    }
    assert found == left
    # From here on it is durable.
    assert PowerCut(shim).left(random.Random(5)) == left


def test_a_file_with_two_names_is_still_one_file_after_a_cut(shim: Shim) -> None:
    power = PowerCut(shim)
    run(shim, 'append("a", b"one"); os.link(root / "a", root / "b"); sync(root)')
    power.cut(random.Random(6))
    assert (shim.root / "a").samefile(shim.root / "b")
    assert (shim.root / "b").read_bytes() == b"one"


def test_what_is_synced_with_its_folder_survives(shim: Shim) -> None:
    program = 'append("a", b"one"); sync(root)'
    assert after_cuts(shim, program, "a") == {(b"one",)}


def test_an_fsync_of_a_file_does_not_cover_its_name(shim: Shim) -> None:
    assert after_cuts(shim, 'append("a", b"one")', "a") == {(b"one",), (None,)}
    # Nor that of the folder its parent.
    program = '(root / "f").mkdir(); append("f/a", b"one"); sync(root / "f")'
    assert after_cuts(shim, program, "f/a") == {(b"one",), (None,)}


def test_appended_bytes_without_an_fsync_may_be_lost_in_part(shim: Shim) -> None:
    size = 3 * BLOCK_BYTES
    program = f'append("a", b"s" * 100); sync(root); append("a", b"u" * {size}, synced=False)'
    left = {found for (found,) in after_cuts(shim, program, "a")}
    assert all(found is not None and found.startswith(b"s" * 100) for found in left)
    assert b"s" * 100 in left and b"s" * 100 + b"u" * size in left
    assert len(left) > 4, "holes, garbage"


def test_overwritten_blocks_are_old_or_new_each(shim: Shim) -> None:
    size = 4 * BLOCK_BYTES
    program = f"""
append("a", b"o" * {size})
sync(root)
descriptor = os.open(root / "a", os.O_RDWR)
os.pwrite(descriptor, b"n" * {size}, 0)
"""
    left = {found for (found,) in after_cuts(shim, program, "a")}
    blocks = {
        found[at : at + BLOCK_BYTES]
        for found in left
        if found
        for at in range(0, size, BLOCK_BYTES)
    }
    assert blocks == {b"o" * BLOCK_BYTES, b"n" * BLOCK_BYTES}
    assert len(left) > 4


def test_a_truncation_may_be_undone_with_all_that_follows(shim: Shim) -> None:
    program = """
append("a", b"old old")
sync(root)
(root / "a").write_bytes(b"new")
"""
    left = {found for (found,) in after_cuts(shim, program, "a")}
    assert {b"old old", b"new"} <= left <= {b"old old", b"new", b"", b"\0\0\0"}


@pytest.mark.parametrize("again", [True, False])
def test_after_a_failed_fsync_the_next_covers_only_what_is_written_again(
    shim: Shim, again: bool
) -> None:
    program = f"""
append("a", b"sure ")
sync(root)
append("a", b"lost", synced=False)
try:
    sync(root / "a")
except OSError:
    if {again}:
        with (root / "a").open("r+b") as file:
            file.write(b"sure lost")
    sync(root / "a")
"""

    shim.fail(errno.EIO, SYNC, "a", after=1, count=1)
    left = after_cuts(shim, program, "a")
    assert left == ({(b"sure lost",)} if again else {(b"sure lost",), (b"sure \0\0\0\0",)})


def test_of_the_changes_in_a_folder_a_prefix_survives(shim: Shim) -> None:
    program = """
append("a", b"old")
sync(root)
append("a.tmp", b"new")
(root / "a.tmp").rename(root / "a")
append("b", b"later")
"""
    assert after_cuts(shim, program, "a", "a.tmp", "b") == {
        (b"old", None, None),
        (b"old", b"new", None),
        (b"new", None, None),
        (b"new", None, b"later"),
    }


def test_removed_files_and_moved_folders_come_back(shim: Shim) -> None:
    program = """
(root / "f").mkdir()
append("f/a", b"one")
sync(root / "f")
sync(root)
(root / "f").rename(root / "g")
(root / "g/a").unlink()
(root / "g").rmdir()
"""
    left = after_cuts(shim, program, "f/a", "g/a")
    assert left == {(b"one", None), (None, b"one"), (None, None)}


def test_a_folder_whose_maker_was_killed_before_its_record_is_where_it_was_made(shim: Shim) -> None:
    power = PowerCut(shim)
    # Not by the library, so that it has no record of it.
    (shim.root / "made" / "below").mkdir(parents=True)
    done = run(shim, 'append("made/below/file", b"x"); sync(root / "made" / "below")')
    assert done.returncode == 0, done.stderr
    for seed in range(20):
        left = power.left(random.Random(seed))
        assert left == {"made": None, "made/below": None, "made/below/file": b"x"}


def test_operations_fail_only_where_and_as_often_as_stated(shim: Shim) -> None:
    program = """
for name in ("a.x", "b.y", "c.x", "d.x"):
    try:
        append(name, b"12345678")
        print("ok")
    except OSError as error:
        print(error.errno)
"""
    shim.fail(errno.ENOSPC, WRITE, "*.x", after=1, count=1)
    assert run(shim, program).stdout.split() == ["ok", "ok", str(errno.ENOSPC), "ok"]
    assert shim.failures == 1
    shim.fail(errno.EIO, WRITE, "*", partial=True)
    run(shim, 'os.write(os.open(root / "short", os.O_CREAT | os.O_WRONLY), b"12345678")')
    assert (shim.root / "short").read_bytes() == b"1234"


def test_it_kills_before_or_within_an_exact_write(shim: Shim) -> None:
    program = 'append("a", b"12", False); append("b", b"34", False); append("c", b"56", False)'
    shim.end_before(4, KILL_SELF)
    assert run(shim, program).returncode == -signal.SIGKILL
    assert [(shim.root / name).read_bytes() for name in "ab"] == [b"12", b""]
    shim.end_before(4, KILL_SELF, torn=True)
    run(shim, program)
    assert (shim.root / "b").read_bytes() == b"3"
    shim.end_before(2, CUT_POWER)
    command = [sys.executable, "-S", "-c", HEAD.format(root=str(shim.root)) + program]
    child = subprocess.Popen(command, env={**os.environ, **shim.environment})
    while not shim.is_off:
        time.sleep(0.001)
    child.kill()
    child.wait()
    assert (shim.root / "a").read_bytes() == b"1212"


def test_it_kills_before_an_exact_write_of_some_files(shim: Shim) -> None:
    program = """
for _ in range(3):
    append("a", b"1", False)
    append("state.db", b"2", False)
    append("state.db-wal", b"3", False)
"""
    # Each is opened and written: the eighth change of them is the second write of the last.
    shim.end_before(8, KILL_SELF, pattern="state.db*")
    assert run(shim, program).returncode == -signal.SIGKILL
    left = [(shim.root / name).read_bytes() for name in ("a", "state.db", "state.db-wal")]
    assert left == [b"11", b"22", b"3"]


def test_only_the_wall_clock_is_shifted(shim: Shim) -> None:
    shim.shift_clock(-86400.5)
    program = "import time; print(time.time(), time.monotonic())"
    wall, monotonic = map(float, run(shim, program).stdout.split())
    assert abs(wall + 86400.5 - time.time()) < 20
    assert abs(monotonic - time.monotonic()) < 20


def test_files_elsewhere_and_pipes_are_left_alone(shim: Shim, tmp_path: Path) -> None:
    shim.fail(errno.EIO, EVERY_CHANGE, "*")
    elsewhere = tmp_path / "elsewhere"
    program = f"Path({str(elsewhere)!r}).write_bytes(b'1'); os.write(1, b'said')"
    assert run(shim, program).stdout == "said"
    assert elsewhere.read_bytes() == b"1"
    assert list(read_changes(shim.log)) == []
