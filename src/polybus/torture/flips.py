"""Flips, cuts, zeros and removals in every kind of file of a stopped bus.

Afterwards the bus must start and serve nothing wrong. `verify` must name exactly what is missing:
the topic and its offsets, the session's packs or the producer. What a file does not concern is
complete, and a session is notified of what it misses.
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

from polybus import names
from polybus.client.http.sources import WebSocketSource
from polybus.errors import PolybusError
from polybus.log.verify import VerifyReport
from polybus.services.state_rows import NAME as STATE
from polybus.services.transactions.commits import TOPIC as COMMITS
from polybus.torture.chances import ranked, split
from polybus.torture.child import TOPICS, BusChild, shown
from polybus.torture.kills import check_log
from polybus.torture.ledger import DIRECT
from polybus.torture.load import PRODUCER, Load
from polybus.torture.report import Findings

LOAD_S = 1.5
# Each copy is verified, read and compared as a whole: few messages, in all kinds of file.
LOAD_PAUSE_S = 0.5
# A bus that lost packs is waited for. Others do their work meanwhile.
COPIES = 4
ZERO_BYTES_MAX = 4096
PACKS_S_MAX = 3.0
# A hand-over takes much longer than the rest of a flip: one bus in this many has them.
HANDOVERS_EVERY = 10
HARMS = ("flip", "flip", "cut", "zero", "remove")
# Locks have no content, and the next start writes run.json again.
_UNHARMED = ("lock", "history.lock", "history.queue", "run.json")


@dataclass
class Holdings:
    """What a bus has: topics' messages, the session's packs, the last transaction's number."""

    messages: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    packs: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    """The packs that a client has seen: only their numbers may not change their meaning."""
    batch: int | None = None
    refused: dict[str, str] = field(default_factory=dict)
    """Topics that the bus refuses to serve, system topics too, with its reason."""
    notices: set[tuple[str, str | None]] = field(default_factory=set)
    """What the session was told, with the topic that it concerns."""


class NamedDamages:
    """What `verify` says of a folder."""

    def __init__(self, report: VerifyReport) -> None:
        self.notes = report.notes
        self._log = [one for one in report.damages if one.file != STATE]
        self._state = [one.reason.split()[0] for one in report.damages if one.file == STATE]
        self.topics = {one.topic for one in self._log if one.topic is not None}
        # It is unknown whose messages were in damaged bytes of the journal.
        self.has_unknown = any("topics unknown" in one.reason for one in self._log)

    def has_topic(self, topic: str) -> bool:
        return topic in self.topics or self.has_unknown

    def has_offset(self, topic: str, offset: int) -> bool:
        return self.has_unknown or any(
            one.topic == topic
            and (one.first is None or one.first <= offset <= (one.last or one.first))
            for one in self._log
        )

    def has_state(self, *kinds: str) -> bool:
        """Whether it names one of these, or a part of state.db that may have had some."""
        others = {"session", "pack", "direct", "consumer", "producer"}
        return any(kind in kinds or kind not in others for kind in self._state)


async def flip_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Fill a data folder once, then harm `count` copies of it, one file each."""
    findings = Findings()
    child = BusChild(folder)
    load = Load(child, split(chance), findings, pause_s=LOAD_PAUSE_S)
    is_killed = chance.random() < 0.5
    try:
        if not await child.start():
            findings.violated("starts", f"no start; see {folder}/bus.log")
            return findings
        await _fill(load)
        if is_killed:
            child.kill()
        else:
            await child.stop()
    finally:
        child.kill()
    await asyncio.to_thread(child.await_orphans)
    _copy(child.data, folder / "whole" / "data")
    expected = await _serve_copy(load, "whole", "", Holdings())
    _check_whole(load, expected)
    expected.seen = set() if load.session is None else set(load.session.contents)
    waiting = list(enumerate([split(chance) for _ in range(count)]))[::-1]

    async def work() -> None:
        while waiting:
            number, one = waiting.pop()
            copy = folder / f"harmed-{number}"
            _copy(child.data, copy / "data")
            harmed = harm(copy / "data", one)
            handovers = number % HANDOVERS_EVERY == 0
            await _serve_copy(load, copy.name, harmed, expected, handovers=handovers)
            findings.count += 1

    await asyncio.gather(*(work() for _ in range(COPIES)))
    return findings


def _check_whole(load: Load, stored: Holdings) -> None:
    """What was not harmed has everything that was promised."""
    for topic, messages in stored.messages.items():
        load.messages.check(topic, messages, load.findings)
    # The load has stopped: at most the answer to its last transaction did not come.
    last = load.batch - 1 if load.batch else None
    if stored.batch not in (last, load.batch):
        text = f"the last batch is {stored.batch} and was {last} in an unharmed copy"
        load.findings.violated("transactions", text)


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


@dataclass(frozen=True, slots=True)
class Harm:
    """What is done to which file; all places are fractions, as sizes depend on the machine."""

    salt: int
    """Decides the kind of file."""
    file: float
    what: str
    position: float
    zero_bytes: int
    bit: int

    @classmethod
    def draw(cls, chance: random.Random) -> "Harm":
        return cls(
            salt=chance.getrandbits(64),
            file=chance.random(),
            what=chance.choice(HARMS),
            position=chance.random(),
            zero_bytes=chance.randint(1, ZERO_BYTES_MAX),
            bit=chance.randrange(8),
        )

    def path(self, found: dict[str, list[Path]]) -> Path:
        """The file, of any kind with the same chance."""
        paths = found[ranked(found, self.salt)[0]]
        return paths[int(self.file * len(paths))]

    def apply(self, data: Path, path: Path) -> str:
        """Harm a file, and say what was done."""
        name, size = path.relative_to(data), path.stat().st_size
        if self.what == "remove" or size == 0:
            path.unlink()
            return f"{name} removed"
        position = int(self.position * size)
        if self.what == "cut":
            os.truncate(path, position)
            return f"{name} cut at byte {position} of {size}"
        with path.open("r+b") as file:
            file.seek(position)
            if self.what == "zero":
                length = min(size - position, self.zero_bytes)
                file.write(bytes(length))
                return f"{name} bytes {position} to {position + length} of {size} set to 0"
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ (1 << self.bit)]))
        return f"{name} bit {self.bit} of byte {position} of {size} flipped"


def harm(data: Path, chance: random.Random) -> str:
    """Harm one file, of any kind with the same chance, and say what was done."""
    planned = Harm.draw(chance)
    return planned.apply(data, planned.path(kinds(data)))


async def _serve_copy(
    load: Load, name: str, harmed: str, expected: Holdings, *, handovers: bool = True
) -> Holdings:
    """Verify a copy, serve it, and compare what it has with what it should have."""
    findings = Findings()
    folder = load.child.folder / name
    child = BusChild(folder, handovers=handovers)
    report = await child.verified()
    stored = Holdings()
    try:
        if isinstance(report, str):
            findings.violated("verify", report)
        if not await child.start():
            findings.violated("starts", child.log_text[-300:].replace("\n", " | "))
            return stored
        stored = await _stored(child, load, expected)
        named = NamedDamages(VerifyReport() if isinstance(report, str) else report)
        if harmed:
            compare(stored, expected, named, harmed, findings)
        elif stored.refused or isinstance(report, str) or not report.intact:
            findings.violated("verify", f"damage in an unharmed copy: {report} {stored.refused}")
        await load.check_deleted(child, findings, named.topics)
        code = await child.stop()
        if code != 0:
            findings.violated("starts", f"exit code {code} after SIGTERM")
        await check_log(child, findings)
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
    listed = (await child.ask("GET", "/v1/topics?system=true"))["topics"]
    stored.refused = {one["name"]: one["damaged"] for one in listed if one.get("damaged")}
    for topic in TOPICS:
        stored.messages[topic] = []
        try:
            stored.messages[topic] = (await child.messages(topic))[1]
        except PolybusError as error:
            stored.refused[topic] = shown(error)
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
                        if pack.pack_id:
                            events = [(event.name, event.value.decode()) for event in pack.events]
                            stored.packs[pack.pack_id] = events
                            continue
                        for event in pack.events:
                            about = event.data if event.raw[:1] == b"{" else {}
                            stored.notices.add((event.name, about.get("topic")))
        finally:
            await source.close()
    return stored


def owner_of(harmed: str) -> str | None:
    """The topic to which a harmed file belongs; None if it belongs to none or to several."""
    found = re.match(r"accounts/default/topics/([^/]+)/", harmed)
    return None if found is None else names.topic_in(found[1])


def compare(
    stored: Holdings, expected: Holdings, named: NamedDamages, harmed: str, findings: Findings
) -> None:
    """Nothing may be wrong, and exactly what is missing must be `named`."""
    owner = owner_of(harmed)
    for topic in stored.refused.keys() | named.topics:
        if owner not in (None, topic) or harmed.startswith(STATE):
            findings.violated("verify", f"{topic} is damaged too: {stored.refused.get(topic)}")
    for topic, reason in stored.refused.items():
        if not named.has_topic(topic):
            findings.violated(
                "verify", f"{topic} is refused, and verify does not report it: {reason}"
            )
    for topic, right in expected.messages.items():
        _compare_topic(topic, stored, dict(right), named, findings)
    _compare_packs(stored, expected, named, findings)
    is_named = named.has_state("producer") or named.has_topic(COMMITS)
    if stored.batch != expected.batch and not is_named:
        text = f"the last batch is {stored.batch} and was {expected.batch}"
        findings.violated("transactions", text)


def _compare_topic(
    topic: str, stored: Holdings, right: dict[int, str], named: NamedDamages, findings: Findings
) -> None:
    found = dict(stored.messages[topic])
    for offset, text in found.items():
        if right.get(offset) != text:
            findings.violated("phantoms", f"{topic} {offset}: {text[:40]!r} is wrong")
    missing = sorted(right.keys() - found.keys())
    # A commit that a crash left without an index record looks like one that was cut short.
    is_torn = any("an unfinished write" in note for note in named.notes)
    if topic in stored.refused:
        return
    # Only what comes after all that is there.
    torn = max(found, default=-1) + 1 if is_torn else max(right, default=-1) + 1
    silent = [one for one in missing if one < torn and not named.has_offset(topic, one)]
    if silent:
        text = f"{len(silent)} messages of {topic} are missing in silence, {silent[0]} first"
        findings.violated("verify", text)


def _compare_packs(
    stored: Holdings, expected: Holdings, named: NamedDamages, findings: Findings
) -> None:
    sent = {event for events in expected.packs.values() for event in events}
    for number, events in stored.packs.items():
        before = expected.packs.get(number)
        if events and before is not None and number in expected.seen and events != before:
            findings.violated("packs", f"pack {number} has changed")
        elif not sent.issuperset(events):
            findings.violated("phantoms", f"pack {number} has what nobody sent")
    lost = sent - {event for events in stored.packs.values() for event in events}
    told = {topic for _, topic in stored.notices}
    is_gone = ("session.unset", None) in stored.notices
    for topic in sorted({topic for topic, _ in lost}):
        is_named = named.has_state("session", "pack", "direct")
        is_named |= topic != DIRECT and named.has_topic(topic)
        if not is_named:
            findings.violated("packs", f"events of {topic} are missing, and verify is silent")
        if not is_gone and (None if topic == DIRECT else topic) not in told and None not in told:
            findings.violated("packs", f"events of {topic} are missing, and the session is silent")
