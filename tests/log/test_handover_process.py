"""The hand-over as a process: what it says, and that a kill at any moment costs nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from segments_kit import (
    DAY_US,
    NOON_US,
    expected_values,
    make_segment,
    make_topic,
    parquet_files,
    rows_batch,
    values_across,
)
from warm_kit import WARM

from polybus.log import layout
from polybus.log.history import manifest as manifests
from polybus.log.history.handover import hand_over
from polybus.log.history.manifest import HistoryLock
from polybus.log.journal.segment import delete_segments


def handover_process(data: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "polybus.log.history.handover", "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_process_says_in_json_which_segments_are_done(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    segment = make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    with handover_process(tmp_path) as process:
        output, errors = process.communicate(timeout=30)
    lines = [msgspec.json.decode(line) for line in output.splitlines()]
    assert (process.returncode, errors) == (0, b"")
    assert {"segment": str(segment)} in lines
    with HistoryLock(tmp_path), handover_process(tmp_path) as process:
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"log.history-busy" in errors


KILLED_AT_STEP = (
    WARM
    + """
import os, sys
from polybus.log.history.handover import hand_over
step = int(sys.argv[2])
def count(event, arguments):
    global step
    writes = event == "open" and isinstance(arguments[1], str) and "r" not in arguments[1]
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime") or writes:
        step -= 1
        if step < 0:
            os._exit(9)
sys.addaudithook(count)
from pathlib import Path
hand_over(Path(sys.argv[1]), grace_s=0)
"""
)


@pytest.mark.slow
def test_killed_before_any_step_on_the_disk_it_completes_when_run_again(tmp_path: Path) -> None:
    """A merge and a new day, killed before each rename, removal and new file, one after another."""
    killed = 0
    while True:
        data = tmp_path / str(killed)
        folder = make_topic(data, "news")
        make_segment(data, 1, [[rows_batch("news", 0, 10)]])
        delete_segments(hand_over(data))
        commits = [
            [rows_batch("news", 10, 10), rows_batch("news", 20, 10, timestamp_us=NOON_US + DAY_US)]
        ]
        segment = make_segment(data, 2, commits)
        process = subprocess.run(
            [sys.executable, "-c", KILLED_AT_STEP, str(data), str(killed)], timeout=30, check=False
        )
        assert values_across(data, "news") == expected_values("news", 30)
        assert hand_over(data, grace_s=0) == [segment]
        assert values_across(data, "news") == expected_values("news", 30)
        names = [path.name for path in parquet_files(folder)]
        assert names == [f"{0:020d}-{19:020d}.parquet", f"{20:020d}-{29:020d}.parquet"]
        assert not (folder / "scratch").exists()
        if process.returncode == 0:
            break
        assert process.returncode == 9
        killed += 1
    assert killed >= 8


@pytest.mark.slow
def test_killed_at_any_moment_each_message_is_there_exactly_once(tmp_path: Path) -> None:
    """kill -9 at random moments, run again, new segments now and then; all from one seed."""
    seed = int(os.environ.get("POLYBUS_SEED", time.time_ns() % 1_000_000))
    sys.stdout.write(f"POLYBUS_SEED={seed}\n")
    chance = random.Random(seed)
    topics = ["news", "sport", "a/b"]
    for topic in topics:
        make_topic(tmp_path, topic)
    counts = dict.fromkeys(topics, 0)
    next_commit = 1
    for _ in range(6):
        commits = []
        for _ in range(10):
            batches = []
            for topic in topics:
                when = NOON_US + chance.choice([0, 0, 0, DAY_US])
                batches.append(rows_batch(topic, counts[topic], 500, timestamp_us=when))
                counts[topic] += 500
            commits.append(batches)
        make_segment(tmp_path, next_commit, commits)
        next_commit += 10
        with handover_process(tmp_path) as process:
            # The process takes about 0.4 s to start and as long to work.
            time.sleep(chance.uniform(0.3, 0.9))
            process.kill()
            process.communicate(timeout=30)
        for topic in topics:
            assert values_across(tmp_path, topic) == expected_values(topic, counts[topic]), seed
        if chance.random() < 0.5:
            delete_segments(hand_over(tmp_path, grace_s=0))
    delete_segments(hand_over(tmp_path, grace_s=0))
    assert layout.segments(tmp_path) == []
    for topic in topics:
        folder = layout.topic_folder(tmp_path, topic)
        assert values_across(tmp_path, topic) == expected_values(topic, counts[topic]), seed
        found = manifests.load(folder)
        assert found is not None
        assert {str(path.relative_to(folder)) for path in parquet_files(folder)} == {
            file.path for file in found.files
        }
        assert not (folder / "scratch").exists()


def test_a_hand_over_ends_when_its_bus_is_gone() -> None:
    child = (
        "import os; from polybus.log.history.handover import _end_with_parent;"
        "parent = os.getppid();"
        "print('started', flush=True); _end_with_parent(parent)"
    )
    code = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as bus:
        assert bus.stdout is not None
        assert bus.stdout.readline() == b"started\n"
        bus.kill()
        assert bus.stdout.read() == b"", "the pipe ends when the last process that has it does"


def test_a_hand_over_ends_whose_bus_was_killed_during_its_start(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as bus:
        bus.wait()
    # Its work never ends by itself.
    code = (
        "import sys, threading; from polybus.log.history import handover;"
        "handover.hand_over = lambda *_, **__: threading.Event().wait();"
        "sys.exit(handover.main(sys.argv[1:]))"
    )
    options = ["--data", str(tmp_path), "--parent", str(bus.pid)]
    ended = subprocess.run([sys.executable, "-c", code, *options], timeout=30, check=False)
    assert ended.returncode == 1
