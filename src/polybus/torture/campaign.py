"""A campaign: rounds of faults, each with a folder and a seed of its own, and their findings.

A round depends on nothing but its seed and its number, so it can be run again alone, and rounds
run at the same time. The seed decides its plan: what is done, in which order and after which wait.
How far the bus is at that moment is up to the machine.
"""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from polybus.torture.clock import clock_round
from polybus.torture.flips import flip_round
from polybus.torture.fuzz import fuzz_round
from polybus.torture.kills import kill_round
from polybus.torture.mixes import mixed_round
from polybus.torture.outages import outage_round
from polybus.torture.power import cut_round
from polybus.torture.report import Findings
from polybus.torture.stalls import stall_round
from polybus.torture.storms import CLIENTS_MAX, reconnect_round, storm_round
from polybus.torture.warm import processes
from polybus.torture.writes import write_kill_round

RoundRun = Callable[[Path, random.Random, int], Coroutine[Any, Any, Findings]]
Tell = Callable[[str], None]


SHORT_S = 600.0
"""A campaign that is shorter than this has small rounds, so that every fault has its turn."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault: what a round does, and how often it does it."""

    run: RoundRun
    per_round: int
    meaning: str
    is_alone: bool = False
    """No other round runs beside it, because it measures time."""
    per_round_max: int = 0
    """A round does as many as this if a number of them is asked for."""
    unchecked: tuple[str, ...] = ()
    """Invariants of things that its load does not use."""

    @property
    def per_short_round(self) -> int:
        return max(1, self.per_round * 3 // 10)


@dataclass(frozen=True, slots=True)
class Round:
    """Some faults of one kind, on a folder of their own."""

    fault: str
    number: int
    count: int


_Running = dict[Connection, tuple[BaseProcess, Round, float]]
"""Rounds in processes of their own, by their results, with the time when each began."""
_NO_LOAD = ("transactions", "deleted")
_NO_SESSION = ("packs", *_NO_LOAD)
COMPILED = ("writes", "cuts", "errors", "clock")
"""Faults that need the library of control.py, and so a C compiler."""
FAULTS = {
    "kills": Fault(kill_round, 10, "Kills (-9) under load, during starts and hand-overs"),
    "writes": Fault(write_kill_round, 10, "Kills (-9) before or in the middle of exact writes"),
    "cuts": Fault(cut_round, 5, "Power cuts that lose what was not synced"),
    "errors": Fault(outage_round, 10, "I/O errors and full disks for every kind of file"),
    "clock": Fault(clock_round, 10, "Jumps of the clock, by minutes to decades"),
    "flips": Fault(flip_round, 20, "Flips, cuts, zeros and removals in the files of a stopped bus"),
    "frames": Fault(
        fuzz_round,
        8000,
        "Mutated frames for each parser of a live bus",
        per_round_max=160_000,
        unchecked=_NO_SESSION,
    ),
    "storms": Fault(
        storm_round, 1000, "Clients that vanish and reconnect at once", True, CLIENTS_MAX, _NO_LOAD
    ),
    "reconnects": Fault(
        reconnect_round,
        100,
        "Reconnects of a session with a long backlog",
        per_round_max=1000,
        unchecked=_NO_LOAD,
    ),
    "stalls": Fault(
        stall_round, 200, "Subscribers beside others that stop reading", True, 1000, _NO_SESSION
    ),
    "mixes": Fault(
        mixed_round, 10, "Kills in a storm, half of them with a flip", unchecked=_NO_SESSION
    ),
}


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
        self.run(
            Round(fault, done // step + 1, min(step, wanted - done))
            for fault, wanted in counts.items()
            for step in [FAULTS[fault].per_round_max or FAULTS[fault].per_round]
            for done in range(0, wanted, step)
        )

    def run_for(self, seconds: float, faults: tuple[str, ...]) -> None:
        """Do all faults in turn until the time is up; rounds that have begun are finished.

        A round that takes longer than what is left, as the last one of its kind did, is not begun.
        """
        self.run(self._until(time.monotonic() + seconds, faults, is_short=seconds < SHORT_S))

    def _until(self, end_s: float, faults: tuple[str, ...], *, is_short: bool) -> Iterator[Round]:
        # Before one that runs alone all others have to end: those come last.
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

    def run(self, rounds: Iterator[Round]) -> None:
        """Run rounds, as many at a time as there are jobs; a single job in this process."""
        if self.jobs == 1:
            for one in rounds:
                self._tell([one])
                began_s = time.monotonic()
                found = perform(self.folder, self.seed, one)
                self._note(one, found, time.monotonic() - began_s)
            return
        running: _Running = {}
        try:
            while True:
                while len(running) >= self.jobs or any(
                    FAULTS[one.fault].is_alone for _, one, _ in running.values()
                ):
                    self._collect(running)
                following = next(rounds, None)
                if following is None:
                    break
                while running and FAULTS[following.fault].is_alone:
                    self._collect(running)
                reader, writer = processes.Pipe(duplex=False)
                with writer:
                    arguments = (writer, self.folder, self.seed, following)
                    started = processes.Process(target=_perform_and_send, args=arguments)
                    started.start()
                running[reader] = (started, following, time.monotonic())
                self._tell([one for _, one, _ in running.values()])
            while running:
                self._collect(running)
        finally:
            for process, _, _ in running.values():
                assert process.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()

    def _collect(self, running: _Running) -> None:
        """Wait until a round ends, and take its findings."""
        for reader in wait(list(running)):
            assert isinstance(reader, Connection)
            process, one, began_s = running[reader]
            try:
                found = reader.recv()
            except EOFError:
                found = Findings()
                found.violated("errors", "the round itself failed: see its traceback above")
            process.join()
            reader.close()
            del running[reader]
            self._note(one, found, time.monotonic() - began_s)

    def _tell(self, rounds: list[Round]) -> None:
        names = ", ".join(f"{one.fault}:{one.number}" for one in rounds)
        self.tell(f"{sum(one.count for one in self.totals.values())} done; running {names}")

    def _note(self, one: Round, found: Findings, took_s: float) -> None:
        self._took_s[one.fault] = max(took_s, self._took_s.get(one.fault, 0.0))
        self.totals.setdefault(one.fault, Findings()).add(found)
        name = f"{one.fault}:{one.number}"
        self.notes += [f"{name}: {text}" for text in found.notes]
        if found.broken:
            if one.count != FAULTS[one.fault].per_round:
                name += f":{one.count}"
            self.failures += [
                *found.texts,
                f"kept: {_folder(self.folder, one)}",
                f"again: polybus torture --seed {self.seed} --round {name}",
            ]


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


def _perform_and_send(result: Connection, place: Path, seed: int, one: Round) -> None:
    """Runs in a process of its own, which has a group of its own: it ends with its buses."""
    os.setpgid(0, 0)
    result.send(perform(place, seed, one))
