"""Clock jumps: the bus's clock goes forward and back, by minutes to decades, under load."""

import asyncio
import random
from pathlib import Path

from polybus.torture.bus.child import BusChild
from polybus.torture.bus.control import Shim
from polybus.torture.chances import split
from polybus.torture.checks import check_files, finish_round
from polybus.torture.load.load import LOADED, Load
from polybus.torture.report import Findings

_DAY_S = 86400.0
JUMPS_S = (60.0, 3600.0, _DAY_S, 40 * _DAY_S, 3653 * _DAY_S, 20_000 * _DAY_S)
STAY_S = (0.05, 0.4, 1.2)


async def clock_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Let the clock jump `count` times; some buses are killed, and start at another time."""
    findings = Findings()
    shim = Shim(folder)
    child = BusChild(folder, settings=LOADED, environment=shim.environment)
    load = Load(child, split(chance), findings)
    try:
        while findings.count < count and not findings.broken:
            if not await child.start():
                findings.violated("starts", f"no start; see {folder}/bus.log")
                return findings
            await load.check()
            running = asyncio.create_task(load.run())
            one = split(chance)
            for _ in range(one.randint(1, 5)):
                await asyncio.sleep(one.uniform(0.02, one.choice(STAY_S)))
                _jump(shim, one)
                findings.count += 1
            await asyncio.sleep(one.uniform(0.02, one.choice(STAY_S)))
            child.kill()
            await running
            await check_files(child, findings)
        await finish_round(child, load)
    finally:
        child.kill()
    return findings


def _jump(shim: Shim, chance: random.Random) -> None:
    """Anywhere, but not before 1970 or after 9999; now and then back to the real time."""
    seconds = chance.choice(JUMPS_S) * chance.uniform(0.5, 1.0)
    shim.shift_clock(chance.choice((0.0, seconds, seconds, -min(seconds, 3653 * _DAY_S * 2))))
