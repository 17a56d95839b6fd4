"""Stalled readers among many: the others get messages in time, and memory stays bounded.

Many subscribers follow one topic, on which a message with its time is published at a fixed rate.
Another topic is flooded all the while. In every second slice of time some peers subscribe to the
flood, and stop reading: one of each protocol, and a stopped process. Slices with and without them
alternate, and medians over the slices are compared, so that a noisy machine affects both alike.
"""

import asyncio
import contextlib
import json
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from polybus.scan.binary_py import HEADER, HEADER_BYTES
from polybus.torture.bus.child import GROWTH_BYTES_MAX, BusChild
from polybus.torture.faults.clients.peers import UPGRADE, PlainPeer
from polybus.torture.faults.clients.storms import raise_files_limit
from polybus.torture.faults.clients.watch import BusWatch, watched_round
from polybus.torture.report import Findings
from polybus.wire.boson_frames import encode_frame

SLICES = 3
SLICE_S = 2.5
INTERVAL_S = 0.1
CONTENT_BYTES = 32
FLOOD_BYTES = 32 << 10
FLOOD_INTERVAL_S = 0.004
QUEUE_EVERY = 4
OUTBOX_BYTES_MAX = 1 << 20
# Each has an outbox, and about a mebibyte in its transport.
STALLED = 7
DELIVERED_S_MAX = 10.0
DRAIN_S_MAX = 10.0
TIMES_MAX = 2.0
# Below this, a doubled delay may be caused by the machine.
P99_S_MIN = 0.01

DelaysByKind = dict[bool, list[float]]
"""The p99 of slices without such peers, and with them."""


class Crowd:
    """Many subscribers of one topic in one thread, which note how long each message took.

    A message is its number and the time when it was sent. Each subscriber must get all.
    """

    def __init__(self, port: int, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._peers = []
        line = encode_frame(b"$subscribe", b"alpha tell=position")
        for _ in range(count):
            peer = socket.create_connection(("127.0.0.1", port))
            peer.sendall(line)
            self._peers.append(peer)
        self.received = [0] * count
        """The number of the last message."""
        self.wrong: list[str] = []
        self.delays_s: list[float] = []
        for number, peer in enumerate(self._peers):
            # The answer says that the subscription began.
            assert b"$position" in peer.recv(1 << 10)
            self._selector.register(peer, selectors.EVENT_READ, number)
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for peer in self._peers:
            peer.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(0.1):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                data = peer.recv(1 << 16)
                now_s = time.monotonic()
                if not data:
                    self.wrong.append(f"subscriber {key.data} was disconnected")
                    self._selector.unregister(peer)
                    continue
                # Messages are small and come one at a time: a read has whole ones.
                for text in data.split(b"alpha")[1:]:
                    number, sent_s = text[:CONTENT_BYTES].split()
                    self.delays_s.append(now_s - float(sent_s))
                    if int(number) != self.received[key.data] + 1:
                        self.wrong.append(f"{int(number)} after {self.received[key.data]}")
                    self.received[key.data] = int(number)


class CrowdTraffic:
    """The messages for the crowd, and the flood."""

    def __init__(self, child: BusChild) -> None:
        self._child = child
        self.sent = 0
        self.flooded = 0
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        self._tasks = [asyncio.create_task(job()) for job in (self._tick, self._flood)]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _tick(self) -> None:
        async with PlainPeer.opened(self._child.port) as peer:
            while True:
                self.sent += 1
                content = f"{self.sent} {time.monotonic():.6f}".ljust(CONTENT_BYTES).encode()
                peer.writer.write(encode_frame(b"alpha", content))
                await asyncio.sleep(INTERVAL_S)

    async def _flood(self) -> None:
        """To the topics that the stalled peers follow; numbered, so that a gap is seen."""
        child = self._child
        async with (
            PlainPeer.opened(child.port) as boson,
            PlainPeer.opened(child.queue_port) as queue,
        ):
            while True:
                content = f"{self.flooded} ".ljust(FLOOD_BYTES, "x").encode()
                self.flooded += 1
                boson.writer.write(encode_frame(b"flood", content))
                if self.flooded % QUEUE_EVERY == 0:
                    queue.writer.write(len(content).to_bytes(4) + content)
                await boson.writer.drain()
                await queue.writer.drain()
                await asyncio.sleep(FLOOD_INTERVAL_S)


class Stalled:
    """Peers that subscribe to the flood and do not read: one of each protocol."""

    def __init__(self, child: BusChild, key: str) -> None:
        register = {"messagetype": "register", "topics": ["flood"]}
        replay = {**register, "from": "earliest"}
        asked = {
            "boson": encode_frame(b"$subscribe", b"flood"),
            "goms": json.dumps(register).encode() + b"\n",
            "replay": json.dumps(replay).encode() + b"\n",
            "websocket": UPGRADE.format(key=key).encode(),
            "http": b"GET /v1/topics/flood/messages?from=earliest&limit=10000 HTTP/1.1\r\n"
            b"host: 127.0.0.1\r\n\r\n",
            "queue": b"",
        }
        self.peers: dict[str, socket.socket] = {}
        for kind, request in asked.items():
            port = child.queue_port if kind == "queue" else child.port
            peer = socket.socket()
            # Small, so that the bus has to keep what the peer does not read.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            peer.connect(("127.0.0.1", port))
            peer.sendall(request)
            peer.settimeout(DRAIN_S_MAX)
            self.peers[kind] = peer
        url = f"boson://127.0.0.1:{child.port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "polybus.cli", "tail", "flood", "--url", url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop_process(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self._process.kill()
        self._process.wait()

    def drain(self, findings: Findings) -> None:
        """Read the rest as a subscriber: messages without a gap, and the end of the stream.

        `outbox.full` is sent, too, but the bus waits only two seconds until it is read.
        """
        data = bytearray()
        try:
            while part := self.peers["boson"].recv(1 << 20):
                data += part
        except TimeoutError:
            findings.violated("errors", "a stalled subscriber was not disconnected")
        except OSError:
            pass
        numbers = list(_flood_numbers(bytes(data)))
        if numbers != list(range(min(numbers, default=0), max(numbers, default=-1) + 1)):
            findings.violated("order", f"a stalled subscriber got {numbers[:5]} …, with gaps")


def _flood_numbers(data: bytes) -> Iterator[int]:
    at = 0
    while at + HEADER_BYTES <= len(data):
        content_bytes, _, topic_bytes = HEADER.unpack_from(data, at)
        start = at + HEADER_BYTES + topic_bytes
        at = start + content_bytes
        if data[start - topic_bytes : start] == b"flood" and at <= len(data):
            yield int(data[start:at].partition(b" ")[0])


def crowd_settings(*topics: str) -> dict[str, Any]:
    """Settings of a bus with a crowd and a flood."""
    return {
        "topics": ["alpha", "beta", "flood", *topics],
        # A hand-over takes a core for a moment, and would be measured.
        "journal": {"handover-interval-s": 3600},
        "limits": {"outbox-bytes-max": OUTBOX_BYTES_MAX},
    }


async def crowd_round(
    child: BusChild,
    count: int,
    findings: Findings,
    measure: Callable[[Crowd], Awaitable[DelaysByKind]],
    *,
    beside: str,
    growth_bytes_max: int,
) -> Findings:
    """Let `count` subscribers follow a topic while `measure` runs slices with and without peers."""
    raise_files_limit()

    async def inject(watch: BusWatch) -> None:
        crowd = await asyncio.to_thread(Crowd, child.port, count)
        try:
            traffic = CrowdTraffic(child)
            traffic.begin()
            await asyncio.sleep(1.0)
            watch.begin()
            p99s = await measure(crowd)
            await traffic.end()
            await _delivered(crowd, traffic, findings)
            findings.count = count
            await watch.end()
            _compare_delays(p99s, watch, findings, beside=beside)
            if watch.peak_bytes > growth_bytes_max:
                findings.violated("memory", f"{watch.peak_bytes >> 20} MiB beside {beside}")
        finally:
            await asyncio.to_thread(crowd.close)

    return await watched_round(child, findings, inject)


async def stall_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Slices with and without stalled peers beside `count` others."""
    findings = Findings()
    child = BusChild(folder, settings=crowd_settings())
    return await crowd_round(
        child,
        count,
        findings,
        lambda crowd: _slices(child, crowd, findings),
        beside="stalled readers",
        growth_bytes_max=GROWTH_BYTES_MAX + STALLED * 2 * OUTBOX_BYTES_MAX,
    )


async def _slices(child: BusChild, crowd: Crowd, findings: Findings) -> DelaysByKind:
    """The p99 of each slice, without and with stalled peers."""
    p99s: DelaysByKind = {False: [], True: []}
    for number in range(2 * SLICES):
        is_stalled = number % 2 == 1
        stalled = None
        try:
            if is_stalled:
                answer = await child.ask("POST", "/v1/sessions", {"topics": ["flood"]})
                stalled = await asyncio.to_thread(Stalled, child, answer["sessionKey"])
                # The process needs to import and subscribe, before the slice begins.
                await asyncio.sleep(1.0)
                stalled.stop_process()
            crowd.delays_s = []
            await asyncio.sleep(SLICE_S)
            p99s[is_stalled].append(statistics.quantiles(crowd.delays_s, n=100)[98])
            if stalled is not None:
                await asyncio.to_thread(stalled.drain, findings)
                await child.ask("DELETE", f"/v1/sessions/{answer['sessionKey']}")
        finally:
            if stalled is not None:
                stalled.close()
    return p99s


async def _delivered(crowd: Crowd, traffic: CrowdTraffic, findings: Findings) -> None:
    """Wait until the crowd has all messages."""
    for _ in range(round(DELIVERED_S_MAX / 0.05)):
        if min(crowd.received) == traffic.sent:
            break
        await asyncio.sleep(0.05)
    missing = sum(1 for number in crowd.received if number < traffic.sent)
    if missing:
        findings.violated("lost", f"{missing} subscribers did not get message {traffic.sent}")
    for text in crowd.wrong[:3]:
        findings.violated("order", f"in the crowd: {text}")


def _compare_delays(
    p99s: DelaysByKind, watch: BusWatch, findings: Findings, *, beside: str
) -> None:
    """The crowd's p99 at most doubles beside some peers."""
    alone_s, beside_s = (statistics.median(p99s[key]) for key in (False, True))
    findings.notes.append(
        f"p99 {alone_s * 1000:.1f} ms, {beside_s * 1000:.1f} ms with {beside}; {watch.told}"
    )
    if beside_s > TIMES_MAX * max(alone_s, P99_S_MIN):
        text = f"p99 {beside_s:.3f} s beside {beside}, {alone_s:.3f} s without"
        findings.violated("errors", text)
