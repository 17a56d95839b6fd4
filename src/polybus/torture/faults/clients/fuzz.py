"""Fuzzed frames for every parser on the ports of a live bus, which must keep working."""

import asyncio
import contextlib
import json
import random
import selectors
import socket
import struct
import time
from pathlib import Path
from typing import Any

from polybus.errors import PolybusError
from polybus.torture.bus.child import BusChild
from polybus.torture.faults.clients.frames import KEY, PARSERS, PAYLOAD, QUERIES, encoded, mutated
from polybus.torture.faults.clients.peers import UPGRADE
from polybus.torture.faults.clients.watch import BusWatch, watched_round
from polybus.torture.load.load import LOADED
from polybus.torture.report import Findings

# The bus closes a connection at the first frame that it cannot skip; goMS can skip any.
FRAMES_PER_CONNECTION = {"goms": 64, "udp": 64}
FRAMES_PER_OTHER_CONNECTION = 16
MUTATED_SHARE = 0.3
MIXED_SHARE = 0.25
CONNECTIONS = 16
DATAGRAM_BYTES_MAX = 60_000
# Fits into the bus's receive buffer.
DATAGRAMS_BYTES_MAX = 60_000
# A peer that has subscribed, and sends no more, stays connected: some never end.
CLOSE_S_MAX = 0.2
HEADS = {"websocket": UPGRADE, "live": UPGRADE.replace("/msgstream?sessionKey={key}", "/v1/live")}
SEND_S_MAX = 5.0
DRAIN_S_MAX = 5.0
LISTENING = "0A"
"""The state of a socket in /proc/net/tcp."""
# A closed connection that the kernel remembers is a line there.
NO_LINGER = struct.pack("ii", 1, 0)


async def fuzz_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Send `count` frames, as many to each parser; some of them are mutated."""
    findings = Findings()
    child = BusChild(folder, settings=LOADED)

    async def fuzz(watch: BusWatch) -> None:
        # Memory for the first connections and queries does not count as growth.
        await child.ask("PUT", "/v1/topics/alpha/blob", PAYLOAD)
        for method, path, query, body in QUERIES:
            target = (path + query).decode()
            await child.ask(method.decode(), target, json.loads(body) if body else None)
        # Seeded by name, so that parsers do not influence each other's frames.
        seed = chance.getrandbits(64)
        chances = {parser: random.Random(f"{seed} {parser}") for parser in PARSERS}
        for parser in PARSERS:
            await _send_with_session(child, parser, chances[parser])
        watch.begin()
        per_parser = max(1, count // len(PARSERS))
        for parser in PARSERS:
            sent = 0
            while sent < per_parser:
                sent += await _send_with_session(child, parser, chances[parser])
            findings.count += sent
        await watch.end()
        findings.notes.append(f"{findings.count} frames; {watch.told}")

    return await watched_round(child, findings, fuzz)


async def _send_with_session(child: BusChild, parser: str, chance: random.Random) -> int:
    """Send some frames, which may know the key of a session, change or even delete it."""
    if parser not in ("http", "websocket"):
        return await asyncio.to_thread(_send, child, parser, "", chance)
    # Without topics: the cost of a session with a long backlog is not tested here.
    key = (await child.ask("POST", "/v1/sessions", {"topics": []}))["sessionKey"]
    await child.ask("POST", f"/v1/sessions/{key}/packs", [["direct", 1]])
    try:
        return await asyncio.to_thread(_send, child, parser, key, chance)
    finally:
        with contextlib.suppress(PolybusError):
            await child.ask("DELETE", f"/v1/sessions/{key}")


def frames_of(parser: str, chance: random.Random) -> list[bytes]:
    """The frames of one connection."""
    made: list[tuple[bool, bytes]] = []
    for _ in range(FRAMES_PER_CONNECTION.get(parser, FRAMES_PER_OTHER_CONNECTION)):
        frame = PARSERS[parser](chance)
        is_bad = chance.random() < MUTATED_SHARE
        made.append((is_bad, encoded(mutated(frame, chance) if is_bad else frame)))
    if parser not in FRAMES_PER_CONNECTION and chance.random() >= MIXED_SHARE:
        # The bad ones last: the bus reads the good ones, and what comes after a bad one is lost.
        made.sort(key=lambda one: one[0])
    return [frame for _, frame in made]


def _send(child: BusChild, parser: str, key: str, chance: random.Random) -> int:
    """Send some frames and read what comes until the bus ends the connections; their number."""
    if parser == "udp":
        return _send_datagrams(child.udp_port, frames_of(parser, chance))
    port = child.queue_port if parser == "queue" else child.port
    head = HEADS.get(parser, "").format(key=key).encode()
    count = 0
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(CONNECTIONS):
            frames = [one.replace(KEY, key.encode()) for one in frames_of(parser, chance)]
            count += len(frames)
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            peers.append(peer)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            peer.settimeout(SEND_S_MAX)
            # The bus may end the connection at any frame, while the rest is being sent.
            with contextlib.suppress(OSError):
                peer.sendall(head + b"".join(frames))
                peer.shutdown(socket.SHUT_WR)
        _read_to_end(peers, port)
    return count


def _read_to_end(peers: list[socket.socket], port: int) -> None:
    """Read until the bus ends the connections, or at least has read all that they sent.

    More connections before that would test how the bus bears too many of them.
    """
    begun_s = time.monotonic()
    with selectors.DefaultSelector() as open_peers:
        for peer in peers:
            open_peers.register(peer, selectors.EVENT_READ)
        while open_peers.get_map():
            for key, _ in open_peers.select(0.01):
                if _has_ended(key.fileobj):
                    open_peers.unregister(key.fileobj)
            took_s = time.monotonic() - begun_s
            if took_s > DRAIN_S_MAX or (took_s > CLOSE_S_MAX and not _unread("tcp", port)[0]):
                break


def _has_ended(peer: Any) -> bool:
    """Read once."""
    try:
        return not peer.recv(1 << 16)
    except OSError:
        return True


def _send_datagrams(port: int, datagrams: list[bytes]) -> int:
    """Datagrams have no backpressure, and a lost one tests nothing: wait until each was read."""
    waiting_bytes = 0
    lost_before = _unread("udp", port)[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        for datagram in datagrams:
            if waiting_bytes + len(datagram) > DATAGRAMS_BYTES_MAX:
                _await_read(port)
                waiting_bytes = 0
            peer.sendto(datagram[:DATAGRAM_BYTES_MAX], ("127.0.0.1", port))
            waiting_bytes += len(datagram)
        _await_read(port)
    return len(datagrams) - (_unread("udp", port)[1] - lost_before)


def _await_read(port: int) -> None:
    end_s = time.monotonic() + DRAIN_S_MAX
    while _unread("udp", port)[0] and time.monotonic() < end_s:
        time.sleep(0.0005)


def _unread(protocol: str, port: int) -> tuple[int, int]:
    """Bytes in the receive buffers of a port of the bus, and datagrams that it has dropped."""
    waiting_bytes = dropped = 0
    for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] != LISTENING:
            waiting_bytes += int(fields[4].partition(":")[2], 16)
            dropped += int(fields[-1]) if protocol == "udp" else 0
    return waiting_bytes, dropped
