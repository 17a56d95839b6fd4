"""Power cuts: under load, before an exact write, during a start, and after a clean stop."""

import asyncio
import random
import signal
from pathlib import Path

from polybus.torture.bus.child import BusChild
from polybus.torture.bus.control import CUT_POWER, Shim
from polybus.torture.chances import split
from polybus.torture.checks import check_files, finish_round
from polybus.torture.faults.crashes.cuts import PowerCut
from polybus.torture.load.load import LOADED, Load
from polybus.torture.report import Findings

MOMENTS = ("load", "write", "write", "start", "stop")
LOAD_S = (0.3, 0.8, 2.5)
OPERATIONS_MAX = 3000
START_OPERATIONS_MAX = 200


async def cut_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Cut the power `count` times on one folder; each bus is checked against all promises before
    it.
    """
    findings = Findings()
    shim = Shim(folder, records=True)
    durability = chance.choice(("fsync", "interval"))
    child = BusChild(
        folder, settings=LOADED | {"durability": durability}, environment=shim.environment
    )
    load = Load(child, split(chance), findings)
    power = PowerCut(shim)
    try:
        for one in [split(chance) for _ in range(count)]:
            moment = one.choice(MOMENTS)
            if moment == "start":
                shim.end_before(one.randint(1, START_OPERATIONS_MAX), CUT_POWER)
            if await start_until_off(child, shim):
                await load.check()
                await _load_until(moment, load, shim, one)
            elif not shim.is_off:
                findings.violated("starts", f"no start; see {folder}/bus.log")
                return findings
            child.kill_all()
            await asyncio.to_thread(power.cut, one)
            findings.count += 1
            await check_files(child, findings)
            if findings.broken:
                return findings
        await finish_round(child, load)
    finally:
        shim.reset()
        child.kill_all()
    return findings


async def start_until_off(child: BusChild, shim: Shim) -> bool:
    """Start a bus; False if it does not, or if the power is cut before it is ready."""
    child.spawn()
    starting = asyncio.create_task(child.ready())
    while not starting.done():
        if shim.is_off:
            child.signal(signal.SIGKILL)
            break
        await asyncio.sleep(0.01)
    is_ready = await starting
    shim.go_on()
    return is_ready and not shim.is_off


async def _load_until(moment: str, load: Load, shim: Shim, chance: random.Random) -> None:
    running = asyncio.create_task(load.run())
    if moment == "write":
        shim.end_before(chance.randint(1, OPERATIONS_MAX), CUT_POWER)
    await until_off(shim, chance.uniform(0.02, chance.choice(LOAD_S)))
    if moment == "stop":
        await load.child.stop()
    else:
        shim.cut_power()
        load.child.kill_all()
    await running


async def until_off(shim: Shim, seconds: float) -> None:
    for _ in range(round(seconds / 0.005)):
        if shim.is_off:
            return
        await asyncio.sleep(0.005)
