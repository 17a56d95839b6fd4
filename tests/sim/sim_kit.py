"""A real `polybus serve` process to be stopped and killed, and publishers that keep count."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from polybus.batch import Batch
from polybus.config import Config
from polybus.edges.node import open_log
from polybus.testing import ScriptedPeer
from polybus.wire import boson_properties

TOPICS = ("red", "blue")
WINDOW = 40
# A disk makes them wait. In memory they would send all that the processors can.
PACE_S = 0.01
READY = re.compile(r"ready.*?tcp://127\.0\.0\.1:(\d+).*?udp://127\.0\.0\.1:(\d+)")


class Process:
    """`polybus serve` on free ports."""

    def __init__(self, process: asyncio.subprocess.Process, line: str) -> None:
        found = READY.search(line)
        assert found, f"no ready line: {line!r}"
        self.process = process
        self.port = int(found[1])
        self.udp_port = int(found[2])

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 30)


async def serve(data: Path, *options: str) -> Process:
    """Start the bus and wait until it is ready."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("POLYBUS_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polybus.cli", "serve", "--port", "0", "--data", str(data)),
        *options,
        stdout=asyncio.subprocess.PIPE,
        env=clean,
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    return Process(process, line.decode())


@asynccontextmanager
async def served(data: Path, *options: str) -> AsyncIterator[Process]:
    """A bus that is killed at the end, if it still runs."""
    process = await serve(data, *options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            await process.kill()


@dataclass
class Publisher:
    """Sends numbers, never one twice, and remembers which were said to be safe, and where."""

    name: str
    sent: int = 0
    receipts: dict[int, tuple[str, str]] = field(default_factory=dict)
    first_receipt: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, port: int) -> None:
        """Publish until the connection breaks."""
        with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            async with ScriptedPeer(port) as peer:
                await self.begin(peer)
                waiting = 0
                while True:
                    while waiting < WINDOW:
                        await self.publish(peer, self.sent)
                        self.sent += 1
                        waiting += 1
                    number, topic, position = await self.receipt(peer)
                    self.receipts[number] = (topic, position)
                    self.first_receipt.set()
                    waiting -= 1
                    if len(self.receipts) % WINDOW == 0:
                        await asyncio.sleep(PACE_S)

    def topic_of(self, number: int) -> str:
        return TOPICS[number % len(TOPICS)]

    def value_of(self, number: int) -> bytes:
        return f"{self.name} {number}".encode()

    async def begin(self, peer: ScriptedPeer) -> None:
        """Say what must be said first."""

    async def publish(self, peer: ScriptedPeer, number: int) -> None:
        raise NotImplementedError

    async def receipt(self, peer: ScriptedPeer) -> tuple[int, str, str]:
        """The next receipt: number, topic, position."""
        raise NotImplementedError


class FramesPublisher(Publisher):
    async def publish(self, peer: ScriptedPeer, number: int) -> None:
        topic = f"{self.topic_of(number)}?receipt={number}"
        await peer.send_frame(topic, self.value_of(number))

    async def receipt(self, peer: ScriptedPeer) -> tuple[int, str, str]:
        name, content = await peer.read_frame()
        assert name == "$receipt", content
        number, _, position = content.decode().partition(" ")
        return int(number), self.topic_of(int(number)), position


class PropertiesPublisher(Publisher):
    async def publish(self, peer: ScriptedPeer, number: int) -> None:
        value, receipt_id = self.value_of(number), str(number).encode()
        await peer.send(
            boson_properties.encode_publish(self.topic_of(number), value, None, receipt_id)
        )

    async def receipt(self, peer: ScriptedPeer) -> tuple[int, str, str]:
        found = {}
        for _ in range(int.from_bytes(await peer.read(4))):
            key = await peer.read(int.from_bytes(await peer.read(2)))
            found[key.decode()] = await peer.read(int.from_bytes(await peer.read(4)))
        assert "hbfe" not in found, found
        return int(found["hbfr"]), found["topic"].decode(), found["hbfo"].decode()


class GomsPublisher(Publisher):
    async def begin(self, peer: ScriptedPeer) -> None:
        # Sends are acked in their order, and those of the last connection never will be.
        self._due = iter(range(self.sent, sys.maxsize))
        await peer.send_json({"messagetype": "register", "topics": list(TOPICS)})

    async def publish(self, peer: ScriptedPeer, number: int) -> None:
        topics, data = [self.topic_of(number)], self.value_of(number).decode()
        await peer.send_json({"messagetype": "send", "topics": topics, "data": data, "ack": True})

    async def receipt(self, peer: ScriptedPeer) -> tuple[int, str, str]:
        while True:
            line = await peer.read_line()
            if not line.endswith(b"\n"):
                raise ConnectionError("the bus is gone")
            said: dict[str, Any] = msgspec.json.decode(line)
            assert said["messagetype"] != "error", said
            if said["messagetype"] == "send-ack":
                return next(self._due), said["topics"][0], said["offsets"][0]


class UdpPublisher(GomsPublisher):
    """goMS over UDP, where the end of the bus is nothing but silence."""

    async def run(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        transport, answers = await loop.create_datagram_endpoint(
            Answers, remote_addr=("127.0.0.1", port)
        )
        try:
            transport.sendto(msgspec.json.encode({"messagetype": "register", "topics": TOPICS}))
            while True:
                number = self.sent
                send = {
                    "messagetype": "send",
                    "topics": [self.topic_of(number)],
                    "data": self.value_of(number).decode(),
                    "ack": True,
                }
                transport.sendto(msgspec.json.encode(send))
                self.sent += 1
                topic, position = await answers.next_ack()
                # One at a time: an ack can be nobody else's.
                self.receipts[number] = (topic, position)
                await asyncio.sleep(PACE_S)
        finally:
            transport.close()


class Answers(asyncio.DatagramProtocol):
    """What the bus says over UDP."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: object) -> None:
        for line in data.splitlines():
            self._lines.put_nowait(line)

    async def next_ack(self) -> tuple[str, str]:
        while True:
            said: dict[str, Any] = msgspec.json.decode(await self._lines.get())
            if said["messagetype"] == "send-ack":
                return said["topics"][0], said["offsets"][0]


def stored(data: Path) -> dict[str, list[tuple[str, str]]]:
    """Every topic's values and positions, in order, as a new start of the bus finds them."""
    log = open_log(Config(data=str(data)))
    try:
        return {topic: list(_rows(log.bounds(topic).start, topic, log)) for topic in log.topics()}
    finally:
        log.close()


def _rows(offset: int, topic: str, log: Any) -> list[tuple[str, str]]:
    rows = []
    batches: list[Batch]
    while batches := log.read(topic, offset):
        for batch in batches:
            for value in batch.values():
                rows.append((value.decode(), f"{batch.epoch}:{offset}"))
                offset += 1
    return rows


def check(publishers: list[Publisher], found: dict[str, list[tuple[str, str]]]) -> None:
    """No receipted message lost or elsewhere, none out of order, none that nobody sent."""
    for publisher in publishers:
        for topic in TOPICS:
            numbers = [
                int(value.partition(" ")[2])
                for value, _ in found[topic]
                if value.partition(" ")[0] == publisher.name
            ]
            assert numbers == sorted(set(numbers)), f"{publisher.name} in {topic}: order"
            sent = {n for n in range(publisher.sent) if publisher.topic_of(n) == topic}
            assert set(numbers) <= sent, f"{publisher.name} in {topic}: not sent"
        places = {value: (topic, position) for topic in TOPICS for value, position in found[topic]}
        for number, place in publisher.receipts.items():
            value = publisher.value_of(number).decode()
            assert places.get(value) == place, f"{value} had a receipt for {place}"
    names = {publisher.name for publisher in publishers}
    values = [value for topic in TOPICS for value, _ in found[topic]]
    assert {value.partition(" ")[0] for value in values} <= names
