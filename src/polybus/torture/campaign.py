"""A campaign: rounds of faults, each with its own folder and seed, and their findings.

A round depends on nothing but its seed and its number, so it can be run again alone, and rounds
run at the same time. The seed decides its plan: what is done, in which order and after which wait.
The state of the bus at that moment depends on the machine.
"""

import asyncio
import functools
import itertools
import random
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polybus.torture.faults.clients.frames import PARSERS
from polybus.torture.faults.clients.fuzz import fuzz_round
from polybus.torture.faults.clients.slow import slow_round
from polybus.torture.faults.clients.stalls import stall_round
from polybus.torture.faults.clients.storms import CLIENTS_MAX, reconnect_round, storm_round
from polybus.torture.faults.cluster.nodes import node_round
from polybus.torture.faults.crashes.clock import clock_round
from polybus.torture.faults.crashes.kills import kill_round
from polybus.torture.faults.crashes.outages import outage_round
from polybus.torture.faults.crashes.power import cut_round
from polybus.torture.faults.crashes.writes import write_kill_round
from polybus.torture.faults.files.flips import flip_round
from polybus.torture.faults.mixes import mixed_round
from polybus.torture.report import Findings
from polybus.torture.rounds import Round
from polybus.torture.workers import Worker, first_ended

RoundRun = Callable[[Path, random.Random, int], Coroutine[Any, Any, Findings]]
Tell = Callable[[str], None]


SHORT_S = 600.0
"""A campaign shorter than this has small rounds, so that every fault gets its turn."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault: what a round does, and how often it does it."""

    run: RoundRun
    per_round: int
    meaning: str
    seconds: float
    """The duration of one fault on two cores of 2026, until a campaign has measured it."""
    is_alone: bool = False
    """No other round runs beside it, because it measures time."""
    share: float = 1.0
    """The share of a job: a round that mostly waits leaves the rest to others."""
    per_round_max: int = 0
    """How many faults a round does if a number of them is requested."""
    unchecked: tuple[str, ...] = ()
    """Invariants of features that its load does not use."""

    @property
    def per_short_round(self) -> int:
        return max(1, self.per_round * 3 // 10)


WAITING = 0.66
"""Three such rounds keep two cores busy, and two do not."""
_NO_LOAD = ("transactions", "deleted")
_NO_SESSION = ("packs", *_NO_LOAD)
COMPILED = ("writes", "cuts", "errors", "clock")
"""Faults that need the library of control.py, and so a C compiler."""
FAULTS = {
    "kills": Fault(
        kill_round,
        10,
        "Kills (-9) under load, during starts and hand-overs",
        2.3,
        share=WAITING,
    ),
    "writes": Fault(
        write_kill_round,
        10,
        "Kills (-9) before or in the middle of exact writes",
        2.3,
        share=WAITING,
    ),
    "cuts": Fault(cut_round, 5, "Power cuts that lose what was not synced", 3.0, share=WAITING),
    "errors": Fault(
        outage_round, 10, "I/O errors and full disks for every kind of file", 6.5, share=WAITING
    ),
    "clock": Fault(
        clock_round, 10, "Jumps of the clock, by minutes to decades", 1.5, share=WAITING
    ),
    "flips": Fault(
        flip_round,
        20,
        "Flips, cuts, zeros and removals in the files of a stopped bus",
        0.26,
        per_round_max=100,
    ),
    "frames": Fault(
        fuzz_round,
        8000,
        "Mutated frames for each parser of a live bus",
        0.0003,
        per_round_max=160_000,
        unchecked=_NO_SESSION,
    ),
    "storms": Fault(
        storm_round,
        1000,
        "Clients that vanish and reconnect at once",
        0.005,
        is_alone=True,
        per_round_max=CLIENTS_MAX,
        unchecked=_NO_LOAD,
    ),
    "reconnects": Fault(
        reconnect_round,
        100,
        "Reconnects of a session with a long backlog",
        0.04,
        per_round_max=1000,
        unchecked=_NO_LOAD,
    ),
    "stalls": Fault(
        stall_round,
        200,
        "Subscribers beside others that stop reading",
        0.05,
        is_alone=True,
        per_round_max=1000,
        unchecked=_NO_SESSION,
    ),
    "slow": Fault(
        slow_round,
        200,
        "Subscribers beside others that read or send a few bytes a second",
        0.05,
        is_alone=True,
        per_round_max=1000,
        unchecked=_NO_SESSION,
    ),
    "mixes": Fault(
        mixed_round,
        10,
        "Kills in a storm, half of them with a flip",
        1.5,
        share=WAITING,
        unchecked=_NO_SESSION,
    ),
    "nodes": Fault(
        node_round,
        10,
        "Kills (-9), pauses and cut links of nodes and brokers in a cluster (Java, Maven)",
        15.0,
        is_alone=True,
        per_round_max=25,
        unchecked=("verify", "memory"),
    ),
}
ON_ONE_MACHINE = tuple(name for name in FAULTS if name != "nodes")
"""The faults for a bus without a cluster."""
FULL = {
    **{"kills": 1000, "writes": 100, "cuts": 200, "errors": 1000, "clock": 100, "flips": 10_000},
    # A million for each parser.
    "frames": 1_000_000 * len(PARSERS),
    **{"storms": 10_000, "reconnects": 1000, "stalls": 1000, "slow": 1000, "mixes": 50},
}
"""The scale at which Polybus is tested before a release."""


@dataclass
class Campaign:
    """Runs rounds below `folder`; a round without findings leaves nothing there."""

    folder: Path
    seed: int
    tell: Tell
    jobs: int = 1
    totals: dict[str, Findings] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _took_s: dict[str, float] = field(default_factory=dict)
    """The longest round of each fault."""
    _spent_s: dict[str, float] = field(default_factory=dict)
    """The time of all rounds of each fault."""
    _wanted: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not self.failures

    def rows(self) -> list[list[object]]:
        """A row of the table for each fault that was done."""
        return [
            self.totals[name].row(name, fault.unchecked)
            for name, fault in FAULTS.items()
            if name in self.totals
        ]

    def run_counts(self, counts: dict[str, int]) -> None:
        """Do each fault as often as stated."""
        self._wanted = dict(counts)
        self.run(
            Round(fault, done // step + 1, min(step, wanted - done))
            for fault, wanted in counts.items()
            for step in [FAULTS[fault].per_round_max or FAULTS[fault].per_round]
            for done in range(0, wanted, step)
        )

    def run_for(self, seconds: float, faults: tuple[str, ...]) -> None:
        """Do all faults in turn until the time is up; rounds that have begun are finished.

        A round is not begun if the last one of its kind took longer than the remaining time.
        """
        self.run(self._until(time.monotonic() + seconds, faults, is_short=seconds < SHORT_S))

    def _until(self, end_s: float, faults: tuple[str, ...], *, is_short: bool) -> Iterator[Round]:
        # A round that runs alone must wait for all others, so these come last.
        faults = tuple(sorted(faults, key=lambda one: FAULTS[one].is_alone))
        for number in itertools.count(1):
            some = False
            for fault in faults:
                if time.monotonic() + self._took_s.get(fault, 0.0) >= end_s:
                    continue
                some = True
                of = FAULTS[fault]
                yield Round(fault, number, of.per_short_round if is_short else of.per_round)
            if not some:
                return

    def expected_s(self, counts: dict[str, int]) -> float:
        """About how long it takes until each fault was done as often as stated."""
        together_s = alone_s = 0.0
        for name, wanted in counts.items():
            fault, done = FAULTS[name], self.totals.get(name, Findings()).count
            one_s = self._spent_s[name] / done if done else fault.seconds
            left_s = max(0, wanted - done) * one_s
            if fault.is_alone:
                alone_s += left_s
            else:
                together_s += left_s * (fault.share if self.jobs > 1 else 1.0)
        return together_s / self.jobs + alone_s

    def run(self, rounds: Iterable[Round]) -> None:
        """Run rounds, as many at a time as there are jobs; a single job in this process."""
        if self.jobs > 1:
            self._run_together(rounds)
            return
        for one in rounds:
            self._tell([one])
            began_s = time.monotonic()
            found = perform(self.folder, self.seed, one)
            self._note(one, found, time.monotonic() - began_s)

    def _run_together(self, rounds: Iterable[Round]) -> None:
        work = functools.partial(perform, self.folder, self.seed)
        idle: list[Worker] = []
        busy: list[Worker] = []
        try:
            for one in rounds:
                while busy and (self._is_full(busy, one) or _is_alone(one, busy)):
                    self._collect(busy, idle)
                busy.append(idle.pop() if idle else Worker(work))
                busy[-1].begin(one)
                self._tell([worker.round for worker in busy if worker.round is not None])
                # The next round is chosen by what has ended by then.
                while busy and (self._is_full(busy, one) or _is_alone(one, busy)):
                    self._collect(busy, idle)
            while busy:
                self._collect(busy, idle)
        finally:
            for worker in busy + idle:
                worker.close()

    def _is_full(self, busy: list[Worker], one: Round) -> bool:
        """Whether a round like this has to wait for one of those that run."""
        running = [worker.round.fault for worker in busy if worker.round is not None]
        return sum(FAULTS[fault].share for fault in (*running, one.fault)) > self.jobs

    def _collect(self, busy: list[Worker], idle: list[Worker]) -> None:
        """Wait until a round ends, and take its findings."""
        for worker in first_ended(busy):
            one, found, took_s = worker.collect()
            busy.remove(worker)
            if found is not None:
                idle.append(worker)
            else:
                worker.close()
                found = Findings()
                found.violated("errors", "the round itself failed: see its traceback above")
            self._note(one, found, took_s)

    def _tell(self, rounds: list[Round]) -> None:
        names = ", ".join(one.name for one in rounds)
        left_s = self.expected_s(self._wanted)
        left = f"; about {left_s / 60:.0f} min left" if self._wanted else ""
        self.tell(f"{sum(one.count for one in self.totals.values())} done{left}; running {names}")

    def _note(self, one: Round, found: Findings, took_s: float) -> None:
        self._took_s[one.fault] = max(took_s, self._took_s.get(one.fault, 0.0))
        self._spent_s[one.fault] = took_s + self._spent_s.get(one.fault, 0.0)
        self.totals.setdefault(one.fault, Findings()).add(found)
        name = one.name
        self.notes += [f"{name}: {text}" for text in found.notes]
        if found.broken:
            if one.count != FAULTS[one.fault].per_round:
                name += f":{one.count}"
            self.failures += [
                *found.texts,
                f"kept: {_folder(self.folder, one)}",
                f"again: polybus torture --seed {self.seed} --round {name}",
            ]


def _is_alone(one: Round, busy: list[Worker]) -> bool:
    """Whether this round, or one that runs, must run alone."""
    running = [worker.round for worker in busy if worker.round is not None]
    return any(FAULTS[other.fault].is_alone for other in (one, *running))


def _folder(place: Path, one: Round) -> Path:
    return place / f"{one.fault}-{one.number}"


def perform(place: Path, seed: int, one: Round) -> Findings:
    """Run one round."""
    folder = _folder(place, one)
    shutil.rmtree(folder, ignore_errors=True)
    chance = random.Random(f"{seed} {one.fault} {one.number}")
    found = asyncio.run(FAULTS[one.fault].run(folder, chance, one.count))
    if not found.broken:
        shutil.rmtree(folder, ignore_errors=True)
    return found
