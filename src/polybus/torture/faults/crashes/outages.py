"""I/O errors: operations on one kind of file fail for a while, under load or during a start.

The bus continues without a restart, but what it could not read counts as damaged until the next. No
receipt is given for unstored messages, and health turns green again by itself. A start may be
refused while the disk fails, but not afterwards.
"""

import asyncio
import errno
import random
import signal
from pathlib import Path

from polybus.errors import PolybusError
from polybus.torture.bus import control
from polybus.torture.bus.child import BusChild, shown
from polybus.torture.bus.control import Shim
from polybus.torture.chances import split
from polybus.torture.checks import check_files, check_log, finish_round
from polybus.torture.faults.crashes.cuts import PowerCut
from polybus.torture.load.load import LOADED, Load
from polybus.torture.report import Findings

FILES = (
    *("journal/*.arrows", "journal/*.index", "journal", "journal/floor.json*", "journal/*"),
    *("state.db*", "state.db", "state.db-w*", "staging/*", "trash*", "polybus.json*", "run.json*"),
    *("accounts/*/topic.json*", "accounts/*/manifest.json*", "accounts/*/scratch*"),
    *("accounts/*.parquet", "accounts/*/history*", "accounts/*", "accounts/*/table*"),
    *("accounts/*/account.json*", "accounts/*/blobs*", "accounts/*/content", "trash/new-account*"),
    # Those that are used all the time.
    *("*", "*", "*", "journal/*", "state.db*", "accounts/*", "staging/*"),
)
OPERATIONS = (
    *(control.OPEN, control.WRITE, control.WRITE, control.SYNC, control.SYNC, control.NAME),
    *(control.EVERY_CHANGE, control.EVERY_CHANGE, control.EVERY_CHANGE),
    *(control.READ, control.READ, control.READ | control.EVERY_CHANGE),
)
ERRORS = (errno.EIO, errno.ENOSPC)
HEALTHY_S_MAX = 10.0
FIRST_S_MAX = 0.6
CHOICES_MAX = 4
STARTS_OF_TEN = 2
# Outages that follow each other before everything is read and compared.
TOGETHER_MAX = 4


async def outage_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Make the disk fail `count` times, then kill the bus or cut the power, and check all data."""
    findings = Findings()
    shim = Shim(folder, records=True)
    child = BusChild(folder, settings=LOADED, environment=shim.environment)
    load = Load(child, split(chance), findings)
    power = PowerCut(shim)
    try:
        while findings.count < count and not findings.broken:
            one = split(chance)
            faults = [split(one) for _ in range(one.randint(1, TOGETHER_MAX))]
            if one.randrange(10) < STARTS_OF_TEN:
                await _failing_start(load, shim, one)
            elif child.process is None and not await child.start():
                findings.violated("starts", f"no start; see {folder}/bus.log")
            else:
                await _outages(load, shim, faults)
            if one.random() < 0.3:
                # The next bus is checked against all promises before it.
                child.kill_all()
                if one.random() < 0.5:
                    await asyncio.to_thread(power.cut, one)
                await check_files(child, findings)
        child.kill_all()
        if not findings.broken:
            await finish_round(child, load)
    finally:
        child.kill_all()
    return findings


def _fail(shim: Shim, chance: random.Random) -> str:
    error, operations = chance.choice(ERRORS), chance.choice(OPERATIONS)
    files = chance.choice(FILES)
    after = chance.choice((0, 0, 0, 1, 5, 50))
    count = chance.choice((1, 2, 10, 1 << 40))
    partial = chance.random() < 0.5
    shim.fail(error, operations, files, after=after, count=count, partial=partial)
    short = ", first a short write" if partial else ""
    name = errno.errorcode[error]
    return f"{name} for operations {operations} on {files}, {count} after {after}{short}"


async def _failing_start(load: Load, shim: Shim, chance: random.Random) -> None:
    child, findings = load.child, load.findings
    child.kill_all()
    fault = _fail(shim, chance)
    child.spawn()
    started = child.process
    assert started is not None
    if await child.ready():
        shim.heal()
        await _after_reads(load, shim, fault)
    else:
        if started.returncode == -signal.SIGKILL:
            findings.violated("starts", f"the start hangs: {fault}")
        shim.heal()
        if not await child.start():
            findings.violated("starts", f"no start after the disk has recovered: {fault}")
            return
    _count(findings, shim)
    await _until_healthy(load, fault)
    await load.check()
    await check_log(child, findings)


def _count(findings: Findings, shim: Shim) -> None:
    # The chosen files may not have been used meanwhile.
    findings.count += shim.failures > 0


async def _outages(load: Load, shim: Shim, chances: list[random.Random]) -> None:
    """One outage after the other, each under a load of its own; then everything is checked."""
    child, findings = load.child, load.findings
    faults: list[str] = []
    for chance in chances:
        faults.append(await _outage(load, shim, chance))
        if findings.broken:
            break
    if not findings.broken:
        await load.check()
        await check_log(child, findings)
    findings.texts = [f"{text} ({'; '.join(faults)})" for text in findings.texts]


async def _outage(load: Load, shim: Shim, chance: random.Random) -> str:
    """Make the disk fail under load, and recover; return what was done."""
    child, findings = load.child, load.findings
    load.stopping.clear()
    running = asyncio.create_task(load.run())
    await asyncio.sleep(chance.uniform(0.02, 0.3))
    lasts_s = chance.choice((0.0, 0.1, 0.6))
    # The chosen files may be unused: then others are chosen, under the same load.
    for _ in range(CHOICES_MAX):
        fault = _fail(shim, chance)
        if await _has_failed(shim):
            break
        shim.heal()
        if shim.failures:
            break  # Just now.
    await asyncio.sleep(lasts_s)
    shim.heal()
    await _until_healthy(load, fault)
    load.stopping.set()
    await running
    if child.process is None or child.process.poll() is not None:
        findings.violated("starts", "the bus has ended")
    _count(findings, shim)
    await _after_reads(load, shim, fault)
    return fault


async def _has_failed(shim: Shim) -> bool:
    """Wait until an operation fails, but not for long."""
    for _ in range(round(FIRST_S_MAX / 0.01)):
        if shim.failures:
            return True
        await asyncio.sleep(0.01)
    return False


async def _after_reads(load: Load, shim: Shim, fault: str) -> None:
    """Restart: unreadable data counted as damaged, and only the next bus must have all of it."""
    if shim.fails & control.READ:
        load.child.kill_all()
        if not await load.child.start():
            load.findings.violated("starts", f"no start after the disk has recovered: {fault}")


async def _until_healthy(load: Load, fault: str) -> None:
    end_s = asyncio.get_running_loop().time() + HEALTHY_S_MAX
    while True:
        try:
            await load.child.ask("GET", "/healthz")
            return
        except PolybusError as error:
            if asyncio.get_running_loop().time() > end_s:
                text = f"health stays red: {shown(error)} after {fault}"
                load.findings.violated("errors", text)
                return
        await asyncio.sleep(0.05)
