"""The demo of `polybus up`: its topics and settings, and a sender on every protocol of the bus."""

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from polybus.client import Client, connect
from polybus.config import Config, Connector, DeclaredTopic, Pipeline
from polybus.errors import PolybusError
from polybus.wire.goms import encode_send

ORDERS = "demo.orders"
TELEMETRY = "demo.telemetry"
CHAT = "demo.chat"
READINGS = "demo.readings"
TOPICS = (
    DeclaredTopic(
        name=ORDERS,
        format="json",
        schema="id STRING, customer STRING, item STRING, quantity INT, amount DOUBLE, at TIMESTAMP",
        message_id="$.id",
        event_time="$.at",
    ),
    DeclaredTopic(name=TELEMETRY),
    DeclaredTopic(name=CHAT),
    DeclaredTopic(name=READINGS),
)
CUSTOMERS = ("acme", "globex", "initech", "umbrella", "hooli", "stark", "wayne", "tyrell")
PRICES = {
    **{"bolt": 0.2, "bearing": 4.5, "gearbox": 310.0},
    **{"sensor": 35.0, "cable": 2.4, "motor": 120.0},
}
CHAT_LINES = (
    "line 3 is back up",
    "who moved the torque wrench?",
    "shift change in ten minutes",
    "pallet 14 is ready for the truck",
    "coffee machine needs descaling again",
    "inspection passed, thanks all",
)
DUPLICATE_SHARE = 0.05
BROKEN_SHARE = 0.04
LATE_SHARE = 0.02
WAY_IN = "http"
LATE_BY = timedelta(minutes=30)
RETRY_S = 1.0
BURST_FIRST_S = 40.0
BURST_EVERY_S = 90.0
BURST_BATCHES = 15
BURST_BATCH = 100
BURST_PAUSE_S = 0.1
NEWS_EVERY_S = 5.0

DemoMessage = tuple[bytes, dict[str, str]]
"""A value and headers."""


def with_demo(config: Config) -> Config:
    """Add what the demo needs to the settings: topics, a queue connector, alerts within minutes."""
    declared = {topic.name for topic in config.topic_list()}
    connectors = list(config.connectors)
    if not any("queue" in one.protocols for one in connectors):
        connectors.append(Connector(port=0, speaks="queue", topic=READINGS))
    pipeline = config.pipeline
    if pipeline == Pipeline():
        pipeline = msgspec.structs.replace(
            pipeline, alert_history_s=30.0, alert_messages_min=60, alert_pause_s=60.0
        )
    topics = [*config.topics, *(one for one in TOPICS if one.name not in declared)]
    return msgspec.structs.replace(config, connectors=connectors, topics=topics, pipeline=pipeline)


@dataclass(frozen=True, slots=True)
class BusPorts:
    """The ports of a bus; None for a kind of connector that it does not have."""

    tcp: int
    udp: int | None
    queue: int | None

    @classmethod
    def of(cls, addresses: list[str], config: Config) -> "BusPorts":
        """Read the addresses of the ready line, which are in the order of the connectors."""
        found: dict[str, int] = {}
        for connector, address in zip(config.connectors, addresses, strict=True):
            kind: str = "queue" if "queue" in connector.protocols else connector.protocol
            kind = WAY_IN if is_way_in(connector) else kind
            found.setdefault(kind, int(address.rpartition(":")[2]))
        return cls(found[WAY_IN], found.get("udp"), found.get("queue"))


def is_way_in(connector: Connector) -> bool:
    """Whether the display and the pipeline can reach the bus there."""
    return connector.protocol == "tcp" and not connector.tls and "http" in connector.protocols


class DemoTraffic:
    """Sends until `run` is cancelled: some tens of messages a second, and regular bursts.

    Each kind of message is endless and has flaws; a seed decides everything except their times.
    """

    def __init__(self, ports: BusPorts, *, seed: int = 7) -> None:
        self._ports = ports
        self._random = random.Random(seed)
        self._run = f"{self._random.getrandbits(32):08x}"
        self._number = 0

    async def run(self) -> None:
        tasks: list[Callable[[], Awaitable[None]]] = [
            lambda: self._send("boson", ORDERS, self.orders(), 5.0),
            lambda: self._send("boson+properties", TELEMETRY, self.telemetry(), 8.0),
            lambda: self._send("goms", CHAT, self.chat(), 3.0),
            lambda: self._send("http", ORDERS, self.orders(), 4.0),
            lambda: self._send("ws", CHAT, self.chat(), 1.0),
            self._session,
            self._listen,
            self._bursts,
        ]
        if self._ports.udp is not None:
            tasks.append(self._datagrams)
        if self._ports.queue is not None:
            tasks.append(lambda: self._send("queue", READINGS, self.readings(), 3.0))
        await asyncio.gather(*map(_repeat, tasks))

    def _connect(self, scheme: str) -> Client:
        port = self._ports.queue if scheme == "queue" else self._ports.tcp
        return connect(f"{scheme}://127.0.0.1:{port}")

    async def _send(
        self, scheme: str, topic: str, messages: Iterator[DemoMessage], per_s: float
    ) -> None:
        carries_headers = scheme not in ("boson", "queue")
        async with self._connect(scheme) as client:
            for value, headers in messages:
                await client.publish(topic, value, headers=headers if carries_headers else None)
                await self._pause(per_s)

    async def _datagrams(self) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=("127.0.0.1", self._ports.udp or 0)
        )
        with contextlib.closing(transport):
            for value in self.beacons():
                transport.sendto(encode_send([TELEMETRY], value))
                await self._pause(3.0)

    async def _session(self) -> None:
        """Act as a browser: follow the chat in a session, confirm, and receive pushed news."""
        async with self._connect("ws") as client:
            key = await client.sessions.create([CHAT], ttl_s=120.0)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(client.events(session_key=key).run())
                    tasks.create_task(_push_news(client, key))
            finally:
                with contextlib.suppress(PolybusError):
                    await client.sessions.delete(key)

    async def _listen(self) -> None:
        async with self._connect("boson") as client:
            async for _ in client.subscribe([topic.name for topic in TOPICS]):
                pass

    async def _bursts(self) -> None:
        """Valid orders at an unusual rate."""
        await asyncio.sleep(BURST_FIRST_S)
        async with self._connect("boson") as client:
            while True:
                for _ in range(BURST_BATCHES):
                    orders = [self.order() for _ in range(BURST_BATCH)]
                    await client.publish_many(ORDERS, orders)
                    await asyncio.sleep(BURST_PAUSE_S)
                await asyncio.sleep(BURST_EVERY_S)

    async def _pause(self, per_s: float) -> None:
        """Wait for the next message of a Poisson process."""
        await asyncio.sleep(self._random.expovariate(per_s))

    # The messages.

    def orders(self) -> Iterator[DemoMessage]:
        """JSON orders: some duplicated, some late, some truncated."""
        while True:
            yield from self._sometimes_twice(self.order(), {})
            if self._random.random() < BROKEN_SHARE:
                broken = self.order()
                yield broken[: len(broken) // 2], {}

    def order(self) -> bytes:
        draw = self._random
        item = draw.choice(list(PRICES))
        quantity = draw.randint(1, 40)
        at = datetime.now(UTC) - (LATE_BY if draw.random() < LATE_SHARE else timedelta())
        order = {
            "id": self._id("o"),
            "customer": draw.choice(CUSTOMERS),
            "item": item,
            "quantity": quantity,
            "amount": round(quantity * PRICES[item], 2),
            "at": at.isoformat(timespec="milliseconds"),
        }
        return json.dumps(order).encode()

    def telemetry(self) -> Iterator[DemoMessage]:
        """Properties of a device: an empty value, and everything in the headers."""
        while True:
            headers = {
                "message-id": self._id("t"),
                "device": f"press-{self._random.randint(1, 6)}",
                "temperature": f"{self._random.gauss(62, 4):.1f}",
                "rpm": str(self._random.randint(880, 940)),
            }
            yield from self._sometimes_twice(b"", headers)

    def beacons(self) -> Iterator[bytes]:
        """Small JSON objects, as a device sends in one datagram."""
        while True:
            device = f"gate-{self._random.randint(1, 3)}"
            yield json.dumps({"device": device, "open": self._random.random() < 0.3}).encode()

    def chat(self) -> Iterator[DemoMessage]:
        while True:
            line = self._random.choice(CHAT_LINES).encode()
            yield from self._sometimes_twice(line, {"message-id": self._id("c")})

    def readings(self) -> Iterator[DemoMessage]:
        """One number as text."""
        while True:
            yield f"{self._random.gauss(21, 0.8):.2f}".encode(), {}

    def _sometimes_twice(self, value: bytes, headers: dict[str, str]) -> Iterator[DemoMessage]:
        yield value, headers
        if self._random.random() < DUPLICATE_SHARE:
            yield value, headers

    def _id(self, kind: str) -> str:
        self._number += 1
        return f"{kind}-{self._run}-{self._number}"


async def _push_news(client: Client, key: str) -> None:
    for number in itertools.count():
        await client.sessions.push(key, [("demo.news", {"number": number})])
        await asyncio.sleep(NEWS_EVERY_S)


async def _repeat(task: Callable[[], Awaitable[None]]) -> None:
    """Start the task again whenever the bus goes away, until cancelled."""
    while True:
        try:
            await task()
        except* (PolybusError, OSError):
            pass
        await asyncio.sleep(RETRY_S)
