"""kill -9 at random moments: under load, during a start, in a hand-over, and of the hand-over."""

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

from polybus.torture.bus.child import BusChild
from polybus.torture.chances import split
from polybus.torture.checks import check_files, finish_round
from polybus.torture.load.load import LOADED, Load
from polybus.torture.report import Findings

MOMENTS = ("load", "load", "start", "hand-over", "hand-over process", "stopped")
# Bookkeeping of sessions is saved every second: some kills come after that.
LOAD_S = (0.3, 0.8, 2.5)
HANDOVER_S_MAX = 1.5
WARM_SHARE = 0.8
START_S, COLD_START_S = 0.25, 0.9


async def kill_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Kill a bus `count` times on one folder; each bus is checked against all earlier promises."""
    findings = Findings()
    child = BusChild(folder, settings=LOADED)
    load = Load(child, split(chance), findings)
    try:
        for one in [split(chance) for _ in range(count)]:
            moment = one.choice(MOMENTS)
            if moment == "start":
                # A bus that imports everything first is mostly killed during imports.
                is_warm = one.random() < WARM_SHARE
                child.spawn(warm=is_warm)
                await asyncio.sleep(one.uniform(0, START_S if is_warm else COLD_START_S))
            elif not await child.start():
                findings.violated("starts", f"no start; see {folder}/bus.log")
                return findings
            else:
                await load.check()
                await _load_until(moment, load, one)
            child.kill()
            findings.count += 1
            # Otherwise the next bus starts while the hand-over of the last one may still run.
            if one.random() < 0.5:
                await check_files(child, findings)
        await finish_round(child, load)
    finally:
        child.kill()
    return findings


async def _load_until(moment: str, load: Load, chance: random.Random) -> None:
    """Run the load up to the moment, and leave the bus dead."""
    running = asyncio.create_task(load.run())
    await asyncio.sleep(chance.uniform(0.02, chance.choice(LOAD_S)))
    child = load.child
    if moment.startswith("hand-over"):
        ids = await _handover(child)
        await asyncio.sleep(chance.uniform(0, 0.1))
        if moment == "hand-over process":
            for number in ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            await asyncio.sleep(chance.uniform(0, 0.3))
    elif moment == "stopped":
        child.signal(signal.SIGSTOP)
        await asyncio.sleep(chance.uniform(0, 0.2))
        child.signal(signal.SIGCONT)
        await asyncio.sleep(chance.uniform(0, 0.2))
    child.kill()
    await running


async def _handover(child: BusChild) -> list[int]:
    """Wait for a hand-over process; its id, or nothing if none comes."""
    for _ in range(round(HANDOVER_S_MAX / 0.01)):
        if ids := child.children():
            return ids
        await asyncio.sleep(0.01)
    return []
