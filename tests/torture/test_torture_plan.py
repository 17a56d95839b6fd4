"""A seed plans a round: what the load does meanwhile changes nothing of it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from polybus.torture.chances import ranked, split
from polybus.torture.faults.crashes import kills
from polybus.torture.faults.files import flips
from polybus.torture.faults.files.corruptions import Corruption, kinds
from polybus.torture.report import Findings


class NoBus:
    """A bus that starts and dies at once."""

    def __init__(self, folder: Path, **more: object) -> None:
        self.folder = folder
        self.data = folder / "data"

    async def start(self) -> bool:
        return True

    async def stop(self) -> int:
        return 0

    def spawn(self, *, warm: bool = True) -> None: ...

    def kill(self) -> None: ...

    def await_orphans(self) -> None: ...


class HungryLoad:
    """A load that draws as often as the machine lets it."""

    session = None

    def __init__(
        self, child: NoBus, chance: random.Random, findings: Findings, **more: float
    ) -> None:
        self.child, self.findings, self._chance = child, findings, chance

    async def run(self) -> None:
        for _ in range(random.SystemRandom().randrange(1000)):
            self._chance.random()

    check = finish = run


def kills_of(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> list[Any]:
    """What a round of kills does, with all its waits."""
    planned: list[Any] = []

    async def load_until(moment: str, load: HungryLoad, chance: random.Random) -> None:
        await load.run()
        planned.append((moment, [chance.random() for _ in range(5)]))

    async def check_files(child: NoBus, findings: Findings) -> None:
        planned.append("verify")

    async def finish_round(child: NoBus, load: HungryLoad) -> None: ...

    class Clock:
        create_task = asyncio.create_task

        @staticmethod
        async def sleep(seconds: float) -> None:
            planned.append(seconds)

    for name, fake in {
        "BusChild": NoBus,
        "Load": HungryLoad,
        "_load_until": load_until,
        "check_files": check_files,
        "finish_round": finish_round,
        "asyncio": Clock,
    }.items():
        monkeypatch.setattr(kills, name, fake)
    asyncio.run(kills.kill_round(folder, random.Random(seed), 12))
    return planned


def test_the_moments_of_kills_are_those_of_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = (kills_of(monkeypatch, tmp_path, seed) for seed in (7, 7, 8))
    assert first == again != other


def corruptions_of(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int) -> list[Corruption]:
    planned: list[Corruption] = []

    async def fill(load: HungryLoad) -> None:
        await load.run()

    async def serve_copy(*rest: object, **more: object) -> flips.Holdings:
        return flips.Holdings()

    async def corrupt_copy(
        load: object, name: str, done: list[tuple[Corruption, Path]], *rest: object
    ) -> bool:
        planned.extend(corruption for corruption, _ in done)
        return True

    for name, fake in {
        "BusChild": NoBus,
        "Load": HungryLoad,
        "_write_table": lambda data: None,
        "_fill": fill,
        "_copy": lambda data, to: None,
        "_serve_copy": serve_copy,
        "_check_whole": lambda load, stored: None,
        "_corrupt_copy": corrupt_copy,
        "kinds": lambda data: {"state.db": [data / "state.db"]},
    }.items():
        monkeypatch.setattr(flips, name, fake)
    asyncio.run(flips.flip_round(folder, random.Random(seed), 12))
    return planned


def test_the_corruptions_of_flips_are_those_of_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again, other = (corruptions_of(monkeypatch, tmp_path, seed) for seed in (7, 7, 8))
    assert first == again != other
    assert len(set(first)) == 12


def test_a_corruption_is_the_same_in_files_of_another_size(tmp_path: Path) -> None:
    for seed in range(20):
        told = []
        for number, size in enumerate((1000, 3000)):
            data = tmp_path / f"{seed}-{number}"
            for name in ("state.db", "polybus.json", "floor.json", "extra")[: 3 + number]:
                data.mkdir(exist_ok=True)
                (data / name).write_bytes(b"\1" * size)
            planned = Corruption.draw(random.Random(seed))
            path = planned.path(kinds(data))
            told.append((path.name, planned.apply(data, path).split()))
        if told[1][0] == "extra":
            continue
        assert told[0][0] == told[1][0], "a kind that only one of them has changes nothing else"
        small, large = ([int(one) for one in words if one.isdigit()] for _, words in told)
        assert len(small) == len(large)


def test_a_generator_that_was_split_off_disturbs_nobody() -> None:
    one, other = random.Random(3), random.Random(3)
    first = split(one)
    for _ in range(100):
        first.random()
    split(other)
    assert one.random() == other.random()


def test_each_option_is_ranked_first_as_often() -> None:
    firsts = [ranked("abcd", salt)[0] for salt in range(2000)]
    assert all(400 < firsts.count(one) < 600 for one in "abcd")
