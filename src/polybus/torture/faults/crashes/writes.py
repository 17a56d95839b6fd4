"""kill -9 before or in the middle of an exact write: of the start, under load, in a hand-over."""

import asyncio
import random
import signal
from pathlib import Path

from polybus.torture.bus.child import BusChild
from polybus.torture.bus.control import KILL_SELF, Shim
from polybus.torture.chances import split
from polybus.torture.checks import check_files, finish_round
from polybus.torture.load.load import LOADED, Load
from polybus.torture.report import Findings

# Writes, opens, renames …: a start does 44 to 186, the load a thousand in a second.
START_OPERATIONS_MAX = 200
OPERATIONS_MAX = (100, 1500, 4000)
# The state thread writes rarely: few of all writes are its own.
STATE_FILES = "state.db*"
STATE_SHARE = 0.3
STATE_OPERATIONS_MAX = (10, 150)
LOAD_S_MAX = 4.0


async def write_kill_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Kill a bus `count` times on one folder; each bus is checked against all earlier promises."""
    findings = Findings()
    shim = Shim(folder)
    child = BusChild(folder, settings=LOADED, environment=shim.environment)
    load = Load(child, split(chance), findings)
    try:
        for one in [split(chance) for _ in range(count)]:
            # Otherwise only the process that does the write ends, perhaps the hand-over.
            is_whole = one.random() < 0.7
            torn = one.random() < 0.5
            if one.random() < 0.4:
                shim.end_before(one.randint(1, START_OPERATIONS_MAX), KILL_SELF, torn=torn)
            child.spawn()
            killed = child.process
            assert killed is not None
            how = killed.pid if is_whole else KILL_SELF
            # The bus writes already, but it has no hand-over yet that could end without it.
            shim.end_with(how)
            is_ready = await child.ready()
            shim.go_on()
            if is_ready and killed.poll() is None:
                await load.check()
                pattern = STATE_FILES if one.random() < STATE_SHARE else ""
                highest = one.choice(STATE_OPERATIONS_MAX if pattern else OPERATIONS_MAX)
                shim.end_before(one.randint(1, highest), how, torn=torn, pattern=pattern)
                await _load_until_dead(load)
            elif killed.poll() != -signal.SIGKILL:
                findings.violated("starts", f"no start; see {folder}/bus.log")
                return findings
            child.kill()
            shim.reset()
            findings.count += 1
            if one.random() < 0.5:
                await check_files(child, findings)
        await finish_round(child, load)
    finally:
        child.kill()
    return findings


async def _load_until_dead(load: Load) -> None:
    running = asyncio.create_task(load.run())
    await asyncio.wait([running], timeout=LOAD_S_MAX)
    load.child.kill()
    await running
