"""`polybus torture` here: a short campaign keeps every promise, a broken one is reported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from seeds_kit import seed_of_source

from polybus.cli.torture import torture as command
from polybus.torture import campaign
from polybus.torture.bus.warm import start_server
from polybus.torture.campaign import FAULTS, FULL, ON_ONE_MACHINE, Campaign
from polybus.torture.report import INVARIANTS, Findings
from polybus.torture.rounds import Round
from polybus.torture.workers import Worker, first_ended

# What a campaign finds has the command that repeats it, with the seed.
SEED = int(os.environ.get("TORTURE_SEED", seed_of_source()))
SHORT = {"kills": 1, "frames": 800, "storms": 50}
# About a minute of faults, of all kinds; test_torture_storms.py has stalled and slow peers.
CAMPAIGN = {
    **{"kills": 2, "writes": 2, "cuts": 2, "errors": 2, "clock": 2, "flips": 5},
    **{"frames": 2000, "storms": 150, "reconnects": 15, "mixes": 2},
}


@pytest.fixture(autouse=True)
def told_seed() -> None:
    sys.stdout.write(f"play it again with TORTURE_SEED={SEED} pytest {Path(__file__).name}\n")


def torture(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polybus.cli", "torture", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_short_campaign_finds_nothing(tmp_path: Path) -> None:
    counts = [text for fault, count in SHORT.items() for text in (f"--{fault}", str(count))]
    wanted = ["--seed", str(SEED), *counts, "--jobs", "2", "--folder", str(tmp_path), "--json"]
    ended = torture(*wanted)
    told = json.loads(ended.stdout)
    assert told["failures"] == [], ended.stdout
    rows = {row["fault"]: row for row in told["faults"]}
    assert rows.keys() == SHORT.keys()
    for fault, count in SHORT.items():
        assert rows[fault]["count"] >= count
        unchecked = {name for name in INVARIANTS if rows[fault][name] is None}
        assert unchecked == set(FAULTS[fault].unchecked)
        assert all(rows[fault][name] == 0 for name in INVARIANTS.keys() - unchecked)
    assert ended.returncode == 0
    assert f"seed {SEED}" in ended.stderr
    assert list(tmp_path.iterdir()) == [], "a clean campaign leaves nothing behind"


@pytest.mark.parametrize("fault", CAMPAIGN)
def test_every_fault_finds_nothing(fault: str, tmp_path: Path) -> None:
    run = Campaign(tmp_path, SEED, lambda text: None)
    run.run_counts({fault: CAMPAIGN[fault]})
    # It has the command, and so the seed.
    assert run.is_clean, "\n".join(run.failures)
    assert run.totals[fault].count >= CAMPAIGN[fault]


def test_the_campaign_has_every_fault() -> None:
    assert CAMPAIGN.keys() | {"stalls", "slow"} == set(ON_ONE_MACHINE) == FULL.keys()
    assert set(ON_ONE_MACHINE) | {"nodes"} == FAULTS.keys()


def test_a_time_is_shared_by_all_faults_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds take a second, and those of stalls three."""
    now_s = 0.0
    done: list[Round] = []

    def perform(place: Path, seed: int, one: Round) -> Findings:
        nonlocal now_s
        now_s += 3.0 if one.fault == "stalls" else 1.0
        done.append(one)
        return Findings(count=one.count)

    monkeypatch.setattr(campaign, "perform", perform)
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: now_s))
    run = Campaign(tmp_path, 7, lambda text: None)
    run.run_for(14.5, ON_ONE_MACHINE)
    assert run.totals.keys() == set(ON_ONE_MACHINE)
    assert [row[0] for row in run.rows()] == list(ON_ONE_MACHINE), "in the usual order"
    assert 14.5 - 1 <= now_s <= 14.5
    assert all(one.count < FAULTS[one.fault].per_round for one in done), "small rounds"
    now_s, done[:] = 0.0, []
    run.run_for(campaign.SHORT_S, ON_ONE_MACHINE)
    assert all(one.count == FAULTS[one.fault].per_round for one in done)


def users(folder: Path) -> set[str]:
    """The processes that have a file below the folder open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link).startswith(f"{folder}/"):
                        found.add(process.name)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_campaign_that_is_interrupted_leaves_no_bus_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    options = ["--seed", str(SEED), "--kills", "20", "--jobs", "2", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "polybus.cli", "torture", *options]
    # Tests that run in the background of a shell ignore Ctrl-C, and so would their children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    campaign = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    signal.signal(signal.SIGINT, before)
    with campaign:
        # Both rounds have a bus.
        while len({path.parents[1] for path in tmp_path.glob("*/*/data/lock")}) < 2:
            assert campaign.poll() is None
            time.sleep(0.01)
        campaign.send_signal(number)
        assert campaign.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert campaign.stdout is not None
        told = campaign.stdout.read()
        assert b"Traceback" not in told
        assert b"fault " in told, "what was done until then is shown"
    # The hand-over of a killed bus notices it within some milliseconds.
    while users(tmp_path):
        time.sleep(0.01)


def test_a_round_that_fails_itself_is_a_finding(tmp_path: Path) -> None:
    run = Campaign(tmp_path, 7, lambda text: None, jobs=2)
    run.run([Round("storms", 1, -1), Round("storms", 2, 20)])
    assert run.totals["storms"].broken == {"errors": 1}
    assert run.totals["storms"].count == 20, "another process runs the next round"
    assert run.failures[-1] == "again: polybus torture --seed 7 --round storms:1:-1"


def test_a_fork_server_serves_all_rounds_of_a_worker(tmp_path: Path) -> None:
    """Else each round would import everything again."""
    worker = Worker(servers_of)
    try:
        found = []
        for number in (1, 2):
            worker.begin(Round("kills", number, 1))
            assert first_ended([worker]) == [worker]
            found.append(worker.collect()[1])
        assert found[0] is not None and found[1] is not None
        assert found[0].notes == found[1].notes != ["None"]
    finally:
        worker.close()


def servers_of(one: Round) -> Findings:
    """The fork server of this process, as a note."""
    start_server()
    return Findings(notes=[str(forkserver._forkserver._forkserver_pid)])  # type: ignore[attr-defined]


def test_the_time_that_is_left_is_that_of_the_rounds_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill takes two seconds; what a stall takes is not known yet."""
    now_s = 0.0

    def perform(place: Path, seed: int, one: Round) -> Findings:
        nonlocal now_s
        now_s += 2.0 * one.count
        return Findings(count=one.count)

    monkeypatch.setattr(campaign, "perform", perform)
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: now_s))
    said: list[str] = []
    run = Campaign(tmp_path, 7, said.append)
    assert run.expected_s({"kills": 100}) == 100 * FAULTS["kills"].seconds
    run.run_counts({"kills": 70})
    assert said[1] == "10 done; about 2 min left; running kills:2"
    assert run.expected_s({"kills": 100}) == 60.0
    run.jobs = 2
    alone_s = 10 * FAULTS["stalls"].seconds
    shared_s = 60.0 * FAULTS["kills"].share / 2
    assert run.expected_s({"kills": 100, "stalls": 10}) == shared_s + alone_s


def test_a_broken_promise_names_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bad(folder, chance, count):  # type: ignore[no-untyped-def]
        folder.mkdir()
        found = Findings(count=count)
        found.violated("lost", f"message {chance.random()}")
        return found

    monkeypatch.setitem(FAULTS, "kills", campaign.Fault(bad, 10, "bad", 1.0))
    said: list[str] = []
    run = Campaign(tmp_path, 7, said.append)
    run.run_counts({"kills": 12})
    assert not run.is_clean
    assert run.totals["kills"].row("kills")[:4] == ["kills", 12, 0, 2]
    first, kept, again = run.failures[:3]
    assert again == "again: polybus torture --seed 7 --round kills:1"
    assert kept == f"kept: {tmp_path}/kills-1" and (tmp_path / "kills-1").is_dir()
    assert run.failures[-1] == "again: polybus torture --seed 7 --round kills:2:2", "fewer"
    repeated = Campaign(tmp_path, 7, said.append)
    repeated.run([Round("kills", 1, 10)])
    assert repeated.failures[0] == first


@pytest.mark.parametrize(
    "options",
    [
        ("--for", "soon"),
        ("--round", "kills"),
        ("--round", "tea:1"),
        ("--round", "storms:1:0"),
        ("--for", "1s", "--kills", "1"),
        ("--for", "1s", "--full"),
        ("--round", "kills:1", "--full"),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...]) -> None:
    assert CliRunner().invoke(command, options).exit_code == 2


def test_full_asks_for_all_faults_and_may_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(Campaign, "run_counts", lambda self, counts: asked.append(counts))
    monkeypatch.setattr("polybus.cli.torture.library", lambda: None)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (10**6, 10**6))
    for more in ([], ["--flips", "7"]):
        done = CliRunner().invoke(command, ["--full", *more, "--folder", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert "about" in done.output and "min" in done.output
    assert asked == [FULL, FULL | {"flips": 7}]


def test_a_limit_of_open_files_that_is_too_low_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (256, 4096))
    refused = CliRunner().invoke(command, ["--storms", "10000"])
    assert refused.exit_code == 2
    assert "15200" in refused.output and "ulimit -Hn" in refused.output
