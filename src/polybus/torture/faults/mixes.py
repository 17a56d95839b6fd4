"""Simultaneous faults: a kill in a storm, and a flip in an expendable file.

Such a file is rebuilt from others, or has no messages: every message with a receipt exists
afterwards.
"""

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path

from polybus.errors import PolybusError
from polybus.log.journal.floor import NAME as FLOOR
from polybus.log.verify.verify import VerifyReport
from polybus.services.state_rows import NAME as STATE
from polybus.torture.bus.child import SETTINGS, BusChild
from polybus.torture.chances import split
from polybus.torture.checks import check_files
from polybus.torture.faults.clients.storms import Storm, rooms_of
from polybus.torture.faults.files.corruptions import Corruption, kinds
from polybus.torture.report import Findings

CLIENTS = 60
STORM_S = 10.0
# Positions and packs are promises of their own, and a flip may damage them.
PUBLISHING = ("publish", "goms", "http")
GIVEN_UP = re.compile(r"journal/N\.index|journal/floor\.json|state\.db.*|admin\.token")


async def mixed_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """`count` kills on one folder, each in a storm, half of them with a flip."""
    findings = Findings()
    rooms = [f"room{number}" for number in range(rooms_of(CLIENTS))]
    child = BusChild(folder, settings={"topics": [*SETTINGS["topics"], *rooms]})
    storm = Storm(child, split(chance), CLIENTS, PUBLISHING)
    flipped = ""
    try:
        for one in [split(chance) for _ in range(count)]:
            if not await _start(child, storm, flipped, findings):
                return findings
            coming = asyncio.create_task(_come_and_go(storm))
            await asyncio.sleep(one.uniform(0.02, 0.5))
            child.kill()
            await coming
            await check_files(child, findings)
            flipped = _flip(child.data, one) if one.random() < 0.5 else ""
            if flipped:
                _check_named(await child.verified(), flipped, findings)
            findings.count += 1
        if await _start(child, storm, flipped, findings):
            if await child.stop() != 0:
                findings.violated("starts", "no clean stop")
            await check_files(child, findings)
    except (PolybusError, OSError) as error:
        findings.violated("errors", f"the bus does not answer: {error!r} ({flipped})")
    finally:
        child.kill()
    return findings


async def _start(child: BusChild, storm: Storm, flipped: str, findings: Findings) -> bool:
    if not await child.start():
        findings.violated("starts", f"{flipped or 'no flip'}; see {child.folder}/bus.log")
        return False
    found = Findings()
    await storm.check(found)
    for text in found.texts:
        findings.violated(text.partition(":")[0], f"{text.partition(': ')[2]} ({flipped})")
    return True


async def _come_and_go(storm: Storm) -> None:
    """Until the bus dies."""
    while not storm.failed:
        await storm.come(STORM_S)
        for peer in storm.go():
            peer.vanish("close")
    storm.failed.clear()


def _check_named(report: VerifyReport | str, flipped: str, findings: Findings) -> None:
    """verify names nothing but the flipped file.

    Of the others than floor.json a flipped bit may be unused, or is not damage.
    """
    if isinstance(report, str):
        findings.violated("verify", f"{report} ({flipped})")
        return
    path = flipped.split()[0]
    expected = STATE if path.startswith(STATE) else Path(path).name
    for damage in report.damages:
        if Path(damage.file).name != expected:
            findings.violated("verify", f"{damage} is named, too ({flipped})")
    if expected == FLOOR and report.intact:
        findings.violated("verify", f"the damage is not named ({flipped})")


def _flip(data: Path, chance: random.Random) -> str:
    found = {kind: paths for kind, paths in kinds(data).items() if GIVEN_UP.fullmatch(kind)}
    flip = replace(Corruption.draw(chance), what="flip")
    path = flip.path(found) if found else None
    # An empty file has no bit.
    return flip.apply(data, path) if path is not None and path.stat().st_size else ""
