"""Storms: many clients of all protocols connect, do a little, vanish and are back at once.

And one session with a long backlog, whose client reconnects again and again and confirms nothing.
"""

import asyncio
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polybus.errors import PolybusError
from polybus.torture.bus.child import SETTINGS, BusChild, shown
from polybus.torture.faults.clients.peers import PlainPeer
from polybus.torture.faults.clients.watch import BROKEN, BusWatch, watched_round
from polybus.torture.load.ledger import MessageLedger
from polybus.torture.report import Findings

BACK_S_MAX = 30.0
CLIENTS_MAX = 10_000
# More than once: their share of the clients.
KINDS = ("publish", "publish", "publish", "subscribe", "subscribe", "goms", "http", "http",
         "websocket", "poll")  # fmt: skip
WAYS = ("reset", "close", "silence")
OPENING = 64
ROOM_CLIENTS = 50
PACKS = [["direct", 1], ["direct", "two"]]
BACKLOG_BYTES = 18 << 20
BACKLOG_MESSAGE_BYTES = 9 << 10


def files_needed(clients: int) -> int:
    """Open files of this process, and of the bus: those that fell silent are still connected."""
    return round(min(clients, CLIENTS_MAX) * 1.5) + 200


def raise_files_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class StormClient:
    """One of the clients: its actions at each connect, and the promises that it got."""

    def __init__(
        self, number: int, chance: random.Random, rooms: int, kinds: Sequence[str]
    ) -> None:
        self.kind = chance.choice(kinds)
        self.way = chance.choice(WAYS)
        self.writer = f"client{number}"
        self.topic = f"room{number % rooms}" if self.kind == "goms" else "alpha"
        self.position = "latest"
        self.key = ""
        self.peer: PlainPeer | None = None

    async def act(self, child: BusChild, messages: MessageLedger) -> None:
        """Connect, send a request, and compare the answer with the expected one."""
        peer = self.peer = await PlainPeer.open(child.port)
        if self.kind == "subscribe":
            told = await peer.subscribe("beta", self.position)
            if self.position not in ("latest", told):
                raise ValueError(f"resumed at {told}, asked for {self.position}")
            self.position = told
        elif self.kind in ("websocket", "poll"):
            packs = await (peer.follow if self.kind == "websocket" else peer.poll)(self.key)
            if packs != {"1": PACKS}:
                raise ValueError(f"packs are {json.dumps(packs)[:80]}")
        else:
            (value,) = messages.take(self.topic, self.writer, 1)
            how = {"publish": peer.publish, "http": peer.post, "goms": peer.register_and_send}
            offset = await how[self.kind](self.topic, value)
            messages.receipt(self.topic, [value], offset)


class Storm:
    """All clients of one bus."""

    def __init__(
        self, child: BusChild, chance: random.Random, count: int, kinds: Sequence[str] = KINDS
    ) -> None:
        self.child = child
        self.messages = MessageLedger()
        self.rooms = rooms_of(count)
        self.clients = [StormClient(number, chance, self.rooms, kinds) for number in range(count)]
        self.failed: Counter[str] = Counter()

    async def open_sessions(self) -> None:
        """Each client with a session of its own, with one pack."""
        waiting = [one for one in self.clients if one.kind in ("websocket", "poll")]

        async def work() -> None:
            async with PlainPeer.opened(self.child.port) as peer:
                while waiting:
                    client = waiting.pop()
                    answer = await peer.ask("POST", "/v1/sessions", b'{"topics":[]}')
                    client.key = answer["sessionKey"]
                    path = f"/v1/sessions/{client.key}/packs"
                    await peer.ask("POST", path, json.dumps(PACKS).encode())

        await asyncio.gather(*(work() for _ in range(OPENING)))

    async def come(self, timeout_s: float) -> float:
        """All clients connect at once and are answered; the seconds until the last one was."""
        began_s = time.monotonic()
        await asyncio.gather(*(self._come(one, timeout_s) for one in self.clients))
        return time.monotonic() - began_s

    async def _come(self, client: StormClient, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await client.act(self.child, self.messages)
        except BROKEN as error:
            told = shown(error) if isinstance(error, PolybusError) else repr(error)
            self.failed[f"{client.kind}: {told}"[:200]] += 1

    def go(self) -> list[PlainPeer]:
        """All clients vanish; those that fell silent are still connected."""
        silent = []
        for client in self.clients:
            if client.peer is not None:
                client.peer.vanish(client.way)
                if client.way == "silence":
                    silent.append(client.peer)
                client.peer = None
        return silent

    def report(self, findings: Findings, *, when: str) -> None:
        for told, times in self.failed.most_common(3):
            invariant = "packs" if "packs are" in told else "errors"
            findings.violated(invariant, f"{when}: {times} clients: {told}")
        self.failed.clear()

    async def check(self, findings: Findings) -> None:
        """Check that every receipted message is stored."""
        for topic in ("alpha", *(f"room{number}" for number in range(self.rooms))):
            self.messages.check(topic, (await self.child.messages(topic))[1], findings)


def rooms_of(count: int) -> int:
    """goMS clients get each other's messages: few share a topic."""
    return max(1, count // ROOM_CLIENTS)


def storm_settings(count: int) -> dict[str, Any]:
    rooms = [f"room{number}" for number in range(rooms_of(count))]
    return {"topics": [*SETTINGS["topics"], *rooms], "journal": {}}


async def storm_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """`count` clients come, vanish, and are back at once."""
    assert count > 0
    raise_files_limit()
    findings = Findings()
    child = BusChild(folder, settings=storm_settings(count))
    storm = Storm(child, chance, count)

    async def come_and_go(watch: BusWatch) -> None:
        await storm.open_sessions()
        watch.begin()
        await storm.come(BACK_S_MAX)
        storm.report(findings, when="at first")
        silent = storm.go()
        took_s = await storm.come(BACK_S_MAX)
        storm.report(findings, when="when they were back")
        findings.count = count
        for peer in [*silent, *storm.go()]:
            peer.vanish("close")
        await storm.check(findings)
        await watch.end()
        findings.notes.append(f"{count} clients were back in {took_s:.1f} s; {watch.told}")

    return await watched_round(child, findings, come_and_go)


async def reconnect_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """A session with a backlog of 18 MiB is opened `count` times, and nothing is confirmed."""
    findings = Findings()
    child = BusChild(folder, settings={"journal": {}})

    async def reconnect(watch: BusWatch) -> None:
        answer = await child.ask("POST", "/v1/sessions", {"topics": ["alpha"]})
        key = answer["sessionKey"]
        await _fill(child)
        await _reconnect(child, key, "close", findings)
        watch.begin()
        for _ in range(count):
            await _reconnect(child, key, chance.choice(WAYS[:2]), findings)
            findings.count += 1
        await watch.end()
        findings.notes.append(f"{count} connections of one session; {watch.told}")

    return await watched_round(child, findings, reconnect)


async def _fill(child: BusChild) -> None:
    async with PlainPeer.opened(child.port) as peer:
        for number in range(BACKLOG_BYTES // BACKLOG_MESSAGE_BYTES):
            await peer.publish("alpha", f"{number} ".ljust(BACKLOG_MESSAGE_BYTES, "x"))


async def _reconnect(child: BusChild, key: str, way: str, findings: Findings) -> None:
    """Take the first packs, which are the same each time."""
    peer = await PlainPeer.open(child.port)
    async with asyncio.timeout(BACK_S_MAX):
        packs = await peer.follow(key)
    if not packs.get("1", [["", ""]])[0][1].startswith("0 "):
        findings.violated("packs", f"the first packs are {json.dumps(packs)[:80]}")
    peer.vanish(way)
