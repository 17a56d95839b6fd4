"""A campaign: rounds of faults, each with a folder and a seed of its own, and their findings.

A round depends on nothing but its seed and its number, so it can be run again alone. The seed
decides what is done and in which order; how far the bus is at that moment is up to the machine.
"""

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polybus.torture.flips import flip_round
from polybus.torture.fuzz import fuzz_round
from polybus.torture.kills import kill_round
from polybus.torture.report import Findings

RoundRun = Callable[[Path, random.Random, int], Coroutine[Any, Any, Findings]]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault: what a round does, and how often it does it."""

    run: RoundRun
    per_round: int
    meaning: str


FAULTS = {
    "kills": Fault(kill_round, 10, "Kills (-9) under load, during starts and hand-overs"),
    "flips": Fault(flip_round, 20, "Flips, cuts, zeros and removals in the files of a stopped bus"),
    "frames": Fault(fuzz_round, 8000, "Mutated frames for each parser of a live bus"),
}


@dataclass
class Campaign:
    """Runs rounds below `folder`; a round without findings leaves nothing there."""

    folder: Path
    seed: int
    tell: Tell
    totals: dict[str, Findings] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.failures

    def run_counts(self, counts: dict[str, int]) -> None:
        """Do each fault as often as stated."""
        for fault, wanted in counts.items():
            done = number = 0
            while done < wanted:
                number += 1
                found = self.run_round(fault, number, min(FAULTS[fault].per_round, wanted - done))
                # A round that ends early is not repeated, or a bus that never starts would be.
                done += max(found.count, 1)

    def run_for(self, seconds: float, faults: tuple[str, ...]) -> None:
        """Do all faults in turn until the time is up; the last round is finished."""
        end_s = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end_s:
            number += 1
            for fault in faults:
                if time.monotonic() < end_s:
                    self.run_round(fault, number, FAULTS[fault].per_round)

    def run_round(self, fault: str, number: int, count: int) -> Findings:
        folder = self.folder / f"{fault}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        chance = random.Random(f"{self.seed} {fault} {number}")
        self.tell(f"{fault}, round {number}, {sum(one.count for one in self.totals.values())} done")
        found = asyncio.run(FAULTS[fault].run(folder, chance, count))
        self.totals.setdefault(fault, Findings()).add(found)
        if found.broken:
            again = f"polybus torture --seed {self.seed} --round {fault}:{number}"
            self.failures += [*found.texts, f"kept: {folder}", f"again: {again}"]
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return found
