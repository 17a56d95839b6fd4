"""Slow peers among many: they read a few bytes a second, or send a byte at a time.

Many subscribers follow one topic, as in stalls.py, in slices with and without slow peers of each
protocol. A slow reader gets every message in the end, from the first one on. Messages of a slow
sender with a receipt are stored, once and in order. Those that read a flood slowly are
disconnected.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import statistics
from collections.abc import Callable
from pathlib import Path

from polybus.torture.bus.child import GROWTH_BYTES_MAX, BusChild
from polybus.torture.chances import split
from polybus.torture.faults.clients.peers import UPGRADE, PlainPeer
from polybus.torture.faults.clients.stalls import Crowd, DelaysByKind, crowd_round, crowd_settings
from polybus.torture.report import Findings
from polybus.wire import boson_properties
from polybus.wire.boson_frames import encode_frame

SLICES = 2
SLICE_S = 3.0
PEERS = 2
TRICKLE_S = 0.1
READ_S = 0.1
READ_BYTES = (1, 3, 10)
SEND_S = 0.02
END_S_MAX = 20.0
READ, SENT = "slow", "sent"
_NUMBER = re.compile(rb"slow-(\d{6});")


class SlowReader:
    """Subscribes, and reads some bytes at a time."""

    def __init__(self, kind: str, port: int, request: bytes, chance: random.Random) -> None:
        self.kind = kind
        self._socket = socket.socket()
        # Small, so that the bus has to keep what the peer does not read.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        self._socket.connect(("127.0.0.1", port))
        self._socket.sendall(request)
        self._socket.setblocking(False)
        self._bytes = chance.choice(READ_BYTES)
        self._data = bytearray()

    async def run(self) -> None:
        """Until it is cancelled, or disconnected."""
        with contextlib.suppress(OSError):
            while True:
                if not await self._read(self._bytes):
                    return
                await asyncio.sleep(READ_S)

    async def _read(self, size: int) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        self._data += data
        return bool(data)

    async def check(self, last: int, findings: Findings) -> None:
        """Read the rest at once: all messages up to the last one, in order."""
        end = b"slow-%06d;" % last
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(END_S_MAX):
                while end not in self._data[-(1 << 16) :] and await self._read(1 << 14):
                    pass
        numbers = [int(one) for one in _NUMBER.findall(bytes(self._data))]
        right = list(range(1, last + 1))
        if numbers[: len(right)] != right:
            wrong = next((n for n, one in enumerate(right) if numbers[n : n + 1] != [one]), 0)
            text = f"a slow reader ({self.kind}) got {len(numbers)} of {last}, not {wrong + 1}"
            findings.violated("lost" if len(numbers) <= wrong else "order", text)

    def close(self) -> None:
        self._socket.close()


class SlowSender:
    """Publishes with receipts, and sends a byte at a time."""

    def __init__(
        self, name: str, port: int, encode: Callable[[str], bytes], receipt: bytes
    ) -> None:
        """`receipt` is in each answer of the bus that confirms a message, once."""
        self.name = name
        self._port = port
        self._encode = encode
        self._receipt = receipt
        self.tried = 0
        self.receipted: list[str] = []

    async def run(self, stopping: asyncio.Event) -> None:
        """Send until `stopping` is set; the message that was begun is finished."""
        async with PlainPeer.opened(self._port) as peer:
            answers = bytearray()
            while not stopping.is_set():
                value = f"{self.name}.{self.tried}."
                self.tried += 1
                for byte in self._encode(value):
                    peer.writer.write(bytes([byte]))
                    await asyncio.sleep(SEND_S)
                wanted = len(self.receipted) + 1
                async with asyncio.timeout(END_S_MAX):
                    while answers.count(self._receipt) < wanted:
                        part = await peer.reader.read(1 << 14)
                        if not part:
                            raise EOFError(f"{self.name} was disconnected: {bytes(answers)!r}")
                        answers += part
                self.receipted.append(value)

    def check(self, stored: list[str], findings: Findings) -> None:
        """Check that its messages are stored once, in order."""
        mine = [text for text in stored if text.startswith(f"{self.name}.")]
        if mine != [f"{self.name}.{number}." for number in range(len(mine))]:
            findings.violated("order", f"a slow sender's messages are {mine}"[:200])
        if lost := [text for text in self.receipted if text not in mine]:
            findings.violated("lost", f"a slow sender's message {lost[0]}")


class SlowPeers:
    """Slow readers and senders of each protocol, and the messages for the readers."""

    def __init__(self, child: BusChild, chance: random.Random) -> None:
        self._child = child
        self._chance = chance
        self._sent = 0
        self._made = 0
        self.senders: list[SlowSender] = []

    async def _trickle(self, stopping: asyncio.Event) -> None:
        """Publish some messages for the readers."""
        async with PlainPeer.opened(self._child.port) as peer:
            while not stopping.is_set():
                self._sent += 1
                await peer.publish(READ, f"slow-{self._sent:06d};")
                await asyncio.sleep(TRICKLE_S)

    async def slice(self, findings: Findings) -> None:
        """Slow peers come, continue for a while, and are checked."""
        stopping = asyncio.Event()
        readers = [one for _ in range(PEERS) for one in await self._readers()]
        senders = [one for _ in range(PEERS) for one in self._senders()]
        self.senders += senders
        reading = [asyncio.create_task(one.run()) for one in readers]
        sending = [asyncio.create_task(one.run(stopping)) for one in senders]
        sending.append(asyncio.create_task(self._trickle(stopping)))
        try:
            await asyncio.sleep(SLICE_S)
            stopping.set()
            for ended in await asyncio.gather(*sending, return_exceptions=True):
                if isinstance(ended, BaseException):
                    findings.violated("errors", f"a slow sender is not served: {ended!r}")
            await _cancel(reading)
            following = [one for one in readers if "flood" not in one.kind]
            await asyncio.gather(*(one.check(self._sent, findings) for one in following))
        finally:
            await _cancel([*reading, *sending])
            for one in readers:
                one.close()

    async def _readers(self) -> list[SlowReader]:
        child, register = self._child, {"messagetype": "register"}
        body = {"topics": [READ], "from": "earliest"}
        key = (await child.ask("POST", "/v1/sessions", body))["sessionKey"]
        http = "GET /v1/topics/flood/messages?limit=10000 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        asked = {
            "boson": encode_frame(b"$subscribe", f"{READ} from=earliest".encode()),
            "boson properties": boson_properties.encode_subscribe({READ: "earliest"}),
            "goms": json.dumps({**register, **body}).encode() + b"\n",
            "websocket": UPGRADE.format(key=key).encode(),
            "boson flood": encode_frame(b"$subscribe", b"flood"),
            "goms flood": json.dumps({**register, "topics": ["flood"]}).encode() + b"\n",
            "http flood": http.encode(),
        }
        made = [
            SlowReader(kind, child.port, request, split(self._chance))
            for kind, request in asked.items()
        ]
        return [*made, SlowReader("queue flood", child.queue_port, b"", split(self._chance))]

    def _senders(self) -> list[SlowSender]:
        self._made += 1
        ways = {
            "boson": (_boson, b"$receipt"),
            "properties": (_properties, b"hbfr"),
            "goms": (_goms, b"send-ack"),
            "http": (_http, b"HTTP/1.1 2"),
        }
        return [
            SlowSender(f"{kind}{self._made}", self._child.port, encode, receipt)
            for kind, (encode, receipt) in ways.items()
        ]

    async def check(self, findings: Findings) -> None:
        """Compare the stored messages with the senders' receipts."""
        stored = [text for _, text in (await self._child.messages(SENT))[1]]
        for sender in self.senders:
            sender.check(stored, findings)
        tried = sum(sender.tried for sender in self.senders)
        if len(stored) > tried:
            findings.violated("phantoms", f"{len(stored)} messages, {tried} were sent")


def _boson(value: str) -> bytes:
    return encode_frame(f"{SENT}?receipt=1".encode(), value.encode())


def _properties(value: str) -> bytes:
    return boson_properties.encode_publish(SENT, value.encode(), receipt_id=b"7")


def _goms(value: str) -> bytes:
    # goMS sends only to topics for which the peer is registered.
    register = {"messagetype": "register", "topics": [SENT]}
    send = {"messagetype": "send", "topics": [SENT], "data": value, "ack": True}
    asked = [register, send] if value.endswith(".0.") else [send]
    return b"".join(json.dumps(one).encode() + b"\n" for one in asked)


def _http(value: str) -> bytes:
    head = f"POST /v1/topics/{SENT}/messages HTTP/1.1\r\nhost: localhost\r\n"
    return f"{head}content-length: {len(value)}\r\n\r\n{value}".encode()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def slow_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Slices with and without slow peers beside `count` others."""
    findings = Findings()
    child = BusChild(folder, settings=crowd_settings(READ, SENT))
    slow = SlowPeers(child, split(chance))

    async def measure(crowd: Crowd) -> DelaysByKind:
        p99s: DelaysByKind = {False: [], True: []}
        for is_slow in (False, True) * SLICES:
            crowd.delays_s = []
            await (slow.slice(findings) if is_slow else asyncio.sleep(SLICE_S))
            p99s[is_slow].append(statistics.quantiles(crowd.delays_s, n=100)[98])
        await slow.check(findings)
        return p99s

    return await crowd_round(
        child, count, findings, measure, beside="slow peers", growth_bytes_max=GROWTH_BYTES_MAX
    )
