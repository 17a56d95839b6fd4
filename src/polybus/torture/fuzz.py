"""Fuzzed frames for every parser on the ports of a live bus, which has to stay as it was."""

import asyncio
import contextlib
import random
import socket
from pathlib import Path

from polybus.client import connect
from polybus.errors import PolybusError
from polybus.torture.child import BusChild
from polybus.torture.frames import PARSERS, encoded, mutated
from polybus.torture.kills import check_log
from polybus.torture.report import Findings

# The bus ends a connection at the first frame that it cannot read past.
FRAMES_PER_CONNECTION = 8
MUTATED_SHARE = 0.3
CONNECTIONS = 8
ANSWER_S_MAX = 1.0
CLOSE_S_MAX = 0.2
GROWTH_BYTES_MAX = 64 << 20
SETTLE_S = 5.0
_UPGRADE = (
    "GET /msgstream?sessionKey={key} HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\n"
    "connection: upgrade\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    "sec-websocket-version: 13\r\n\r\n"
)


async def fuzz_round(folder: Path, chance: random.Random, count: int) -> Findings:
    """Send `count` frames, as many to each parser; some of them are mutated."""
    findings = Findings()
    child = BusChild(folder)
    try:
        if not await child.start(warm=False):
            findings.violated("starts", f"no start; see {folder}/bus.log")
            return findings
        body = {"topics": ["alpha"]}
        key = (await child.ask("POST", "/v1/sessions", body))["sessionKey"]
        # What every bus takes for its first connections is not growth.
        for parser in PARSERS:
            await _send(child, parser, key, chance)
        before = child.memory_bytes()
        probing = asyncio.create_task(_probe(child, findings))
        per_parser = max(1, count // len(PARSERS))
        for parser in PARSERS:
            sent = 0
            while sent < per_parser:
                jobs = [_send(child, parser, key, chance) for _ in range(CONNECTIONS)]
                sent += sum(await asyncio.gather(*jobs))
            findings.count += sent
        probing.cancel()
        await asyncio.wait([probing])
        await _check_memory(child, before, findings)
        code = await child.stop()
        if code != 0:
            findings.violated("starts", f"exit code {code} after SIGTERM")
        check_log(child, findings)
    except (PolybusError, OSError) as error:
        findings.violated("errors", f"the bus is gone or does not answer: {error}")
    finally:
        child.kill()
    return findings


async def _send(child: BusChild, parser: str, key: str, chance: random.Random) -> int:
    """Send some frames on one connection and read what comes; the number of frames."""
    make = PARSERS[parser]
    frames = []
    for _ in range(FRAMES_PER_CONNECTION):
        frame = make(chance)
        frames.append(encoded(mutated(frame, chance) if chance.random() < MUTATED_SHARE else frame))
    if parser == "udp":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            for datagram in frames:
                peer.sendto(datagram[:60_000], ("127.0.0.1", child.udp_port))
        # Datagrams have no backpressure, and a lost one tests nothing.
        await asyncio.sleep(0.005)
        return len(frames)
    port = child.queue_port if parser == "queue" else child.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if parser == "websocket":
            writer.write(_UPGRADE.format(key=key).encode())
        # The bus may end the connection at any frame, while the rest is being sent.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                writer.write(b"".join(frames))
                if parser != "websocket":
                    writer.write_eof()
                while await reader.read(1 << 16):
                    pass
    finally:
        writer.transport.abort()
    return len(frames)


async def _probe(child: BusChild, findings: Findings) -> None:
    """A normal client is answered in time, all the while; one late answer may be the machine's."""
    loop = asyncio.get_running_loop()
    late = 0
    async with connect(f"boson://127.0.0.1:{child.port}", reconnect=False) as client:
        while True:
            began_s = loop.time()
            await client.publish("beta", "probe", receipt=True)
            await child.ask("GET", "/v1/topics")
            took_s = loop.time() - began_s
            late = late + 1 if took_s > ANSWER_S_MAX else 0
            if late == 2:
                findings.violated("errors", f"a normal client waited {took_s:.1f} s")
            await asyncio.sleep(0.1)


async def _check_memory(child: BusChild, before: int, findings: Findings) -> None:
    """Memory comes back; closed connections may take a moment."""
    for _ in range(round(SETTLE_S / 0.1)):
        grown = child.memory_bytes() - before
        if grown <= GROWTH_BYTES_MAX:
            return
        await asyncio.sleep(0.1)
    findings.violated("memory", f"{grown >> 20} MiB more than before")
