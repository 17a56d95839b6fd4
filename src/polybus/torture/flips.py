"""Flips, cuts, zeros and removals in every kind of file of a stopped bus.

Afterwards the bus must start. Either everything is there and right, or `verify` or the bus itself
names the damage; nothing wrong is ever served.
"""

import asyncio
import contextlib
import os
import random
import re
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from polybus.client.http.sources import WebSocketSource
from polybus.errors import PolybusError
from polybus.torture.child import TOPICS, BusChild, shown
from polybus.torture.kills import check_log
from polybus.torture.load import PRODUCER, Load
from polybus.torture.report import Findings

LOAD_S = 1.5
ZERO_BYTES_MAX = 4096
PACKS_S_MAX = 2.0
# A hand-over takes much longer than the rest of a flip: one bus in so many has them.
HANDOVERS_EVERY = 5
HARMS = ("flip", "flip", "cut", "zero", "remove")
# Locks have no content, and the next start writes run.json again.
_UNHARMED = ("lock", "history.lock", "run.json")


@dataclass
class Holdings:
    """What a bus has: topics' messages, the session's packs, the last transaction's number."""

    messages: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    packs: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    batch: int | None = None
    refused: list[str] = field(default_factory=list)
    """What the bus itself says that it cannot serve."""


async def flip_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Fill a data folder once, then harm `count` copies of it, one file each."""
    findings = Findings()
    child = BusChild(folder)
    load = Load(child, chance, findings)
    try:
        if not await child.start():
            findings.violated("starts", f"no start; see {folder}/bus.log")
            return findings
        await _fill(load)
        if chance.random() < 0.5:
            child.kill()
        else:
            await child.stop()
    finally:
        child.kill()
    await asyncio.to_thread(child.await_orphans)
    expected = await _serve_copy(load, "whole", "", Holdings())
    for number in range(count):
        copy = folder / f"harmed-{number}"
        _copy(child.data, copy / "data")
        harmed = harm(copy / "data", chance)
        await _serve_copy(load, copy.name, harmed, expected)
        findings.count += 1
    return findings


def _copy(data: Path, to: Path) -> None:
    # A killed bus leaves its socket, which cannot be copied.
    shutil.copytree(data, to, ignore=shutil.ignore_patterns("*.sock"))


async def _fill(load: Load) -> None:
    running = asyncio.create_task(load.run())
    await asyncio.sleep(LOAD_S)
    load.stopping.set()
    await running
    # Every message is in a pack, and no more packs come later.
    await load.drain(confirm=False)


def kinds(data: Path) -> dict[str, list[Path]]:
    """All files by their kind: journal/N.arrows, accounts/default/topics/T/topic.json …"""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(data.rglob("*")):
        name = str(path.relative_to(data))
        if path.is_file() and name not in _UNHARMED:
            kind = re.sub(r"topics/[^/]+", "topics/T", name)
            found[re.sub(r"[0-9a-f-]*\d[0-9a-f-]*", "N", kind)].append(path)
    return found


def harm(data: Path, chance: random.Random) -> str:
    """Harm one file, of any kind with the same chance, and say what was done."""
    found = kinds(data)
    path = chance.choice(found[chance.choice(sorted(found))])
    size = path.stat().st_size
    what = chance.choice(HARMS) if size else "remove"
    name = path.relative_to(data)
    if what == "remove":
        path.unlink()
        return f"{name} removed"
    position = chance.randrange(size)
    if what == "cut":
        os.truncate(path, position)
        return f"{name} cut at byte {position} of {size}"
    with path.open("r+b") as file:
        file.seek(position)
        if what == "zero":
            length = min(size - position, chance.randint(1, ZERO_BYTES_MAX))
            file.write(bytes(length))
            return f"{name} bytes {position} to {position + length} of {size} set to 0"
        bit = chance.randrange(8)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
    return f"{name} bit {bit} of byte {position} of {size} flipped"


async def _serve_copy(load: Load, name: str, harmed: str, expected: Holdings) -> Holdings:
    """Verify a copy, serve it, and compare what it has with what it should have."""
    original, findings = load.child, Findings()
    folder = original.folder / name
    if not harmed:
        _copy(original.data, folder / "data")
    child = BusChild(folder, handovers=load.findings.count % HANDOVERS_EVERY == 0)
    report = await child.verified()
    stored = Holdings()
    try:
        if isinstance(report, str):
            findings.violated("verify", report)
        if not await child.start():
            findings.violated("starts", child.log_text[-300:].replace("\n", " | "))
            return stored
        stored = await _stored(child, load, expected)
        named = bool(stored.refused) or isinstance(report, str) or not report.intact
        if harmed:
            compare(stored, expected, named, findings)
        elif named:
            findings.violated("verify", f"damage in an unharmed copy: {report} {stored.refused}")
        await load.check_deleted(child, findings)
        code = await child.stop()
        if code != 0:
            findings.violated("starts", f"exit code {code} after SIGTERM")
        check_log(child, findings)
    except PolybusError as error:
        findings.violated("errors", f"the bus does not answer: {shown(error)}")
    finally:
        child.kill()
        findings.texts = [f"{text} ({harmed or 'unharmed'}, {name})" for text in findings.texts]
        load.findings.add(findings)
        load.findings.texts += findings.texts
        if not findings.broken:
            shutil.rmtree(folder)
    return stored


async def _stored(child: BusChild, load: Load, expected: Holdings) -> Holdings:
    """Read everything. What the bus refuses is noted and left out."""
    stored = Holdings()
    for topic in TOPICS:
        stored.messages[topic] = []
        try:
            stored.messages[topic] = (await child.messages(topic))[1]
        except PolybusError as error:
            stored.refused.append(f"{topic}: {shown(error)}")
    with contextlib.suppress(PolybusError):
        stored.batch = (await child.ask("GET", f"/v1/commits/{PRODUCER}"))["batch"]
    assert load.session is not None
    wanted = set(expected.packs or load.session.contents)
    with contextlib.suppress(PolybusError, TimeoutError):
        source = await WebSocketSource.open(child.options("ws"), load.session.key)
        try:
            async with asyncio.timeout(PACKS_S_MAX):
                while wanted - stored.packs.keys():
                    for pack in await source.receive():
                        events = [(event.name, event.value.decode()) for event in pack.events]
                        if pack.pack_id:
                            stored.packs[pack.pack_id] = events
        finally:
            await source.close()
    return stored


def compare(stored: Holdings, expected: Holdings, named: bool, findings: Findings) -> None:
    """Nothing may be wrong, and what is missing must be `named`."""
    for topic, right in expected.messages.items():
        known = dict(right)
        for offset, text in stored.messages[topic]:
            if known.get(offset) != text:
                findings.violated("phantoms", f"{topic} {offset}: {text[:40]!r} is wrong")
        missing = len(known) - len(stored.messages[topic])
        if missing > 0 and not named:
            findings.violated("verify", f"{missing} messages of {topic} are missing in silence")
    sent = {event for events in expected.packs.values() for event in events}
    for number, events in stored.packs.items():
        before = expected.packs.get(number)
        if events and before is not None and events != before:
            findings.violated("packs", f"pack {number} has changed")
        elif not sent.issuperset(events):
            findings.violated("phantoms", f"pack {number} has what nobody sent")
    lost = sent - {event for events in stored.packs.values() for event in events}
    if lost and not named:
        findings.violated("packs", f"{len(lost)} events of the session are missing in silence")
    if stored.batch != expected.batch and not named:
        text = f"the last batch is {stored.batch} and was {expected.batch}"
        findings.violated("transactions", text)
