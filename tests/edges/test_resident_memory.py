"""The resident memory of a real bus under attacks: bounded while they last, and given back.

Each attack runs on the same bus, which got what it takes for its first connections before. The
numbers are large enough for a leak of one kilobyte per connection to be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edge_kit import frame, line
from raw_http_kit import UPGRADE

from polybus.torture.bus.child import BusChild
from polybus.torture.faults.clients.frames import PARSERS, encoded, mutated
from polybus.torture.faults.clients.fuzz import HEADS

MIB = 1 << 20
# What an attack may take while it lasts: waiting messages (memory-bytes-max), caches of the log and
# of sessions, read buffers, history files that several threads decode.
PEAK_BYTES_MAX = 160 * MIB
KEPT_BYTES_MAX = 64 * MIB
SLOPE_BYTES_MAX = 4 * MIB
SETTLE_S_MAX = 20.0
RESET = struct.pack("ii", 1, 0)


class Bus:
    """A real bus."""

    def __init__(self, child: BusChild) -> None:
        self.child = child
        self.port = child.port

    @property
    def folder(self) -> Path:
        assert self.child.process is not None
        return Path(f"/proc/{self.child.process.pid}")

    def forget_peak(self) -> None:
        (self.folder / "clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", (self.folder / "status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def open(self, data: bytes = b"", port: int | None = None) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port or self.port), timeout=20)
        with contextlib.suppress(OSError):
            sock.sendall(data)
        return sock

    def ask(self, method: str, path: str, body: object = None) -> dict[str, str]:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        with self.open(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content) as sock:
            answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 2"), answer[:300]
        body = answer.partition(b"\r\n\r\n")[2]
        return dict(json.loads(body)) if body else {}

    def open_session(self, **fields: str) -> str:
        return self.ask("POST", "/v1/sessions", {"topics": ["alpha"], **fields})["sessionKey"]

    def publish(self, content: bytes, count: int = 1) -> None:
        with self.open(frame("alpha", content) * (count - 1)) as sock:
            sock.sendall(frame("alpha?receipt=7", content))
            assert sock.recv(1 << 16)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def read_some(sock: socket.socket, wanted: int) -> None:
    with contextlib.suppress(OSError):
        while wanted > 0 and (piece := sock.recv(1 << 16)):
            wanted -= len(piece)


def reconnects(bus: Bus) -> None:
    """One session with a backlog of 18 MB that is never confirmed."""
    key = bus.open_session()
    for _ in range(18):
        bus.publish(b"x" * 1000, 1000)
    upgrade = UPGRADE.format(key=key).encode()
    silent = []
    for number in range(60):
        sock = bus.open(upgrade)
        read_some(sock, 100_000)
        if number % 3 == 0:
            silent.append(sock)
        else:
            (reset if number % 3 == 1 else socket.socket.close)(sock)
    for sock in silent:
        sock.close()
    poll = f"GET /msgstream?sessionKey={key}&transport=longpolling HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    polls = [bus.open(f"{poll}\r\n".encode()) for _ in range(30)]
    for sock in polls:
        read_some(sock, 1000)
        reset(sock)
    bus.ask("DELETE", f"/v1/sessions/{key}")


def stalled_sessions(bus: Bus) -> None:
    """Many sessions with a backlog in the log, on WebSockets that nobody reads."""
    keys = [bus.open_session(**{"from": "earliest"}) for _ in range(30)]
    for sock in [bus.open(UPGRADE.format(key=key).encode()) for key in keys]:
        read_some(sock, 1000)
        sock.close()
    for key in keys:
        bus.ask("DELETE", f"/v1/sessions/{key}")


def stalled_replays(bus: Bus) -> None:
    replay = frame("$subscribe", b"alpha from=earliest")
    register = line("register", topics=["alpha"], **{"from": "earliest"})
    socks = [bus.open(register if number % 2 else replay) for number in range(300)]
    time.sleep(1.0)  # What they hold does not grow; no event says that it is reached.
    for sock in socks:
        reset(sock)


def vanishing(bus: Bus) -> None:
    heads = (b"GET / HTT", frame("$subscribe", b"alpha")[:9], b'{"messagetype":', b"")
    for number in range(3000):
        sock = bus.open(heads[number % 4])
        (reset if number % 8 < 4 else socket.socket.close)(sock)


def slow_heads(bus: Bus) -> None:
    head = b"GET /v1/topics HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 2000
    for sock in [bus.open(head) for _ in range(1000)]:
        sock.close()


def sessions(bus: Bus) -> None:
    for _ in range(50):
        bus.ask("DELETE", f"/v1/sessions/{bus.open_session()}")


def large_and_cut(bus: Bus) -> None:
    """Messages of 30 MB, of which the last bytes never come."""
    content = bytes(30 * MIB)
    for data in (frame("alpha", content), line("send", topics=["alpha"], data="x" * 30 * MIB)):
        for _ in range(3):
            reset(bus.open(data[:-10]))


def bombs(bus: Bus) -> None:
    bomb = gzip.compress(struct.pack(">ibH", 1 << 30, 0, 5) + b"alpha" + bytes(100 * MIB))
    empty = gzip.compress(frame("alpha", b"") * 50_000)
    for data in (bomb, empty) * 5:
        with bus.open(data) as sock, contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def request(method: str, path: str, length: int = 0) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {length}\r\n\r\n"
    return head.encode()


def blobs(bus: Bus) -> None:
    """Large payloads that are interrupted on their way in, some to be continued, and out."""
    content = bytes(4 * MIB)
    blob_id = hashlib.sha256(content).hexdigest()
    put = f"/v1/topics/alpha/blob?sha256={blob_id}"
    with bus.open(request("PUT", put, len(content)) + content) as sock:
        assert b" 200 " in sock.recv(1 << 16)
    for number in range(60):
        other = "/v1/topics/alpha/blob" if number % 2 else put.replace(blob_id, f"{number:064x}")
        reset(bus.open(request("PUT", other, len(content)) + content[number << 10 :]))
    for sock in [bus.open(request("GET", f"/v1/blobs/{blob_id}")) for _ in range(200)]:
        read_some(sock, 1000)
        reset(sock)


def live_pages(bus: Bus) -> None:
    """Pages that follow all there is, and read nothing."""
    asked = [{"op": "subscribe", "id": 1, "channel": "tail", "topic": "alpha"}]
    asked += [{"op": "subscribe", "id": 2, "channel": "figures"}]
    texts = [json.dumps(one).encode() for one in asked]
    frames = b"".join(bytes([0x81, 0x80 | len(text)]) + bytes(4) + text for text in texts)
    pages = [bus.open(HEADS["live"].encode() + frames) for _ in range(100)]
    bus.publish(b"x" * 1000, 5000)
    for sock in pages:
        read_some(sock, 1000)
        reset(sock)


def queries(bus: Bus) -> None:
    """Queries, of which most are refused or interrupted: their processes are the bus's, too."""
    sql = json.dumps({"query": "SELECT count(*) FROM alpha"}).encode()
    ways = [request("POST", "/v1/sql", len(sql)) + sql]
    ways += [request("GET", f"/v1/topics/alpha/{way}") for way in ("search?text=x", "export")]
    for sock in [bus.open(data) for data in ways * 20]:
        reset(sock)
    answer = b""
    # Processes of queries that were interrupted are still stopping.
    while b" 200 " not in answer:
        with bus.open(ways[0]) as sock:
            answer = sock.recv(1 << 16)
    with bus.open(ways[2]) as sock:
        read_some(sock, 100_000)


def fuzz(parser: str) -> Callable[[Bus], None]:
    def connection(chance: random.Random, key: str) -> bytes:
        data = HEADS.get(parser, "").format(key=key).encode()
        for _ in range(8):
            made = PARSERS[parser](chance)
            data += encoded(mutated(made, chance) if chance.random() < 0.3 else made)
        return data

    def run(bus: Bus) -> None:
        chance = random.Random(parser)
        key = bus.open_session()
        port = bus.child.queue_port if parser == "queue" else bus.port

        def attack(data: bytes) -> None:
            with bus.open(data, port) as sock, contextlib.suppress(OSError):
                sock.settimeout(0.05)
                if parser not in HEADS:
                    sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 16)

        # Some at once: to most of them the bus answers nothing.
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(attack, [connection(chance, key) for _ in range(200)]):
                pass
        bus.ask("DELETE", f"/v1/sessions/{key}")

    run.__name__ = f"fuzz {parser}"
    return run


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Bus]:
    child = BusChild(folder)
    try:
        assert await child.start(warm=False), child.log_text
        yield Bus(child)
    finally:
        child.kill()


async def settled_bytes(bus: Bus, wanted: int) -> int:
    """The bus's memory, once it is not more than wanted, or for good."""
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while bus.child.memory_bytes() > wanted and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return bus.child.memory_bytes()


ATTACKS = (
    *(reconnects, stalled_sessions, stalled_replays, slow_heads, large_and_cut, bombs),
    *(blobs, live_pages, queries),
)
FUZZED = tuple(fuzz(parser) for parser in PARSERS if parser != "udp")


async def test_no_attack_fills_the_memory_or_keeps_it(tmp_path: Path) -> None:
    async with running(tmp_path) as bus:
        await asyncio.to_thread(sessions, bus)
        for attack in (*ATTACKS, *FUZZED):
            before = bus.child.memory_bytes()
            bus.forget_peak()
            await asyncio.to_thread(attack, bus)
            peak = bus.peak_bytes() - before
            assert peak < PEAK_BYTES_MAX, f"{attack.__name__}: {peak / MIB:.1f} MiB at its peak"
            kept = await settled_bytes(bus, before + KEPT_BYTES_MAX) - before
            assert kept < KEPT_BYTES_MAX, f"{attack.__name__} keeps {kept / MIB:.1f} MiB"


async def test_the_memory_does_not_grow_with_the_number_of_connections(tmp_path: Path) -> None:
    async with running(tmp_path) as bus:
        for _ in range(2):
            await asyncio.to_thread(vanishing, bus)
        first = bus.child.memory_bytes()
        for _ in range(2):
            await asyncio.to_thread(vanishing, bus)
        more = await settled_bytes(bus, first + SLOPE_BYTES_MAX) - first
        assert more < SLOPE_BYTES_MAX, f"{more / MIB:.1f} MiB more for 6,000 connections"
