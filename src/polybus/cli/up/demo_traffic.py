"""The demo's traffic: a sender on every protocol the bus speaks, and somebody who listens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from polybus.cli.up.config import CHAT, ORDERS, READINGS, TELEMETRY
from polybus.cli.up.demo_messages import Messages, Piece
from polybus.client import Client, connect
from polybus.errors import PolybusError
from polybus.wire.goms.encode import encode_send

AGAIN_AFTER_S = 1.0
BURST_FIRST_S = 40.0
BURST_EVERY_S = 90.0
BURST_COUNT = 1500
BURST_BATCH = 100
BURST_PAUSE_S = 0.1
NEWS_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where the bus listens; `queue` is None if it has no queue connector."""

    tcp: int
    udp: int | None
    queue: int | None

    @classmethod
    def of(cls, addresses: list[str], config_queue_index: int | None) -> Ports:
        """From the addresses of the bus's ready line, which are in the connectors' order."""
        ports = [int(one.rpartition(":")[2]) for one in addresses]
        streams = [
            port
            for index, (one, port) in enumerate(zip(addresses, ports, strict=True))
            if one.startswith("tcp://") and index != config_queue_index
        ]
        datagrams = [
            port for one, port in zip(addresses, ports, strict=True) if one.startswith("udp://")
        ]
        return cls(
            tcp=streams[0],
            udp=datagrams[0] if datagrams else None,
            queue=None if config_queue_index is None else ports[config_queue_index],
        )


class Traffic:
    """Sends until `run` is cancelled: some tens of messages a second, and a burst now and then.

    Attributes:
        sent: messages by the name of their protocol.
    """

    def __init__(self, ports: Ports, *, seed: int = 7) -> None:
        self.sent: dict[str, int] = {}
        self._ports = ports
        self._messages = Messages(seed)
        self._random = random.Random(seed)

    async def run(self) -> None:
        make = self._messages
        ways: list[Callable[[], Awaitable[None]]] = [
            lambda: self._send("boson", ORDERS, make.orders(), 5.0),
            lambda: self._send("boson+properties", TELEMETRY, make.telemetry(), 8.0),
            lambda: self._send("goms", CHAT, make.chat(), 3.0),
            lambda: self._send("http", ORDERS, make.orders(), 4.0),
            lambda: self._send("ws", CHAT, make.chat(), 1.0),
            self._session,
            self._listen,
            self._bursts,
        ]
        if self._ports.udp is not None:
            ways.append(self._datagrams)
        if self._ports.queue is not None:
            ways.append(lambda: self._send("queue", READINGS, make.readings(), 3.0))
        await asyncio.gather(*(_for_ever(way) for way in ways))

    def _url(self, scheme: str) -> str:
        port = self._ports.queue if scheme == "queue" else self._ports.tcp
        return f"{scheme}://127.0.0.1:{port}"

    async def _send(self, scheme: str, topic: str, pieces: Iterator[Piece], per_s: float) -> None:
        async with connect(self._url(scheme)) as client:
            for piece in pieces:
                headers = (
                    piece.headers if scheme in ("boson+properties", "goms", "http", "ws") else None
                )
                await client.publish(topic, piece.value, headers=headers)
                self._count(scheme)
                await self._pause(per_s)

    async def _datagrams(self) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=("127.0.0.1", self._ports.udp or 0)
        )
        with contextlib.closing(transport):
            for piece in self._messages.beacons():
                transport.sendto(encode_send([TELEMETRY], piece.value))
                self._count("goms-udp")
                await self._pause(3.0)

    async def _session(self) -> None:
        """A browser's part: a session that follows the chat, confirms, and gets news of its own."""
        async with connect(self._url("ws")) as client:
            key = await client.sessions.create([CHAT], ttl_s=120.0)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(client.events(session_key=key).run())
                    tasks.create_task(self._news(client, key))
            finally:
                with contextlib.suppress(PolybusError):
                    await client.sessions.delete(key)

    async def _news(self, client: Client, key: str) -> None:
        for number in itertools.count():
            await client.sessions.push(key, [("demo.news", {"number": number})])
            self._count("msgstream")
            await asyncio.sleep(NEWS_EVERY_S)

    async def _listen(self) -> None:
        async with connect(self._url("boson")) as client:
            async for _ in client.subscribe([ORDERS, TELEMETRY, CHAT, READINGS]):
                pass

    async def _bursts(self) -> None:
        await asyncio.sleep(BURST_FIRST_S)
        async with connect(self._url("boson")) as client:
            while True:
                for _ in range(BURST_COUNT // BURST_BATCH):
                    await client.publish_many(ORDERS, self._messages.burst(BURST_BATCH))
                    self._count("boson", BURST_BATCH)
                    await asyncio.sleep(BURST_PAUSE_S)
                await asyncio.sleep(BURST_EVERY_S)

    def _count(self, scheme: str, count: int = 1) -> None:
        self.sent[scheme] = self.sent.get(scheme, 0) + count

    async def _pause(self, per_s: float) -> None:
        """Life is irregular."""
        await asyncio.sleep(self._random.expovariate(per_s))


async def _for_ever(way: Callable[[], Awaitable[None]]) -> None:
    """Begin again when the bus went away; only a cancelled demo ends."""
    while True:
        try:
            await way()
        except* (PolybusError, OSError):
            pass
        await asyncio.sleep(AGAIN_AFTER_S)
