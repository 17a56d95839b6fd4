"""A real bus takes payloads that are larger than what it may grow by."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from bad_input_kit import MEBI

from polybus.torture.bus.child import BusChild

pytestmark = pytest.mark.slow

PIECE = bytes(range(256)) * 4096
WANTED = b"alpha tell=position"
HEADER = struct.Struct(">ibH")


class Measured:
    """A bus whose first port speaks Boson frames, and whose second goMS, and its memory."""

    def __init__(self, child: BusChild) -> None:
        self.boson, self.goms = child.port, child.queue_port
        assert child.process is not None
        self._folder = Path(f"/proc/{child.process.pid}")
        self._before = 0

    def begin(self) -> None:
        (self._folder / "clear_refs").write_text("5")
        self._before = self._bytes("VmRSS")

    @property
    def growth_bytes(self) -> int:
        """How much the bus has grown at most."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", (self._folder / "status").read_text())
        assert found is not None
        return int(found[1]) << 10


@contextlib.asynccontextmanager
async def bus(folder: Path) -> AsyncIterator[Measured]:
    settings: dict[str, Any] = {
        "connectors": [
            {"protocol": "tcp", "port": 0, "speaks": "boson-frames"},
            {"protocol": "udp", "port": 0, "speaks": "goms"},
            {"protocol": "tcp", "port": 0, "speaks": "goms"},
        ],
        "limits": {"message-bytes-max": (1 << 31) - 1},
        "journal": {},
    }
    child = BusChild(folder, settings=settings)
    assert await child.start(), child.log_text
    try:
        yield Measured(child)
    finally:
        child.kill_all()


async def send(writer: asyncio.StreamWriter, count: int) -> None:
    for _ in range(count):
        writer.write(PIECE)
        await writer.drain()


async def pass_frame(measured: Measured, count: int) -> None:
    """Send a frame of this many MiB, and read it at a subscriber."""
    reader, subscriber = await asyncio.open_connection("127.0.0.1", measured.boson)
    subscriber.write(HEADER.pack(len(WANTED), 0, 10) + b"$subscribe" + WANTED)
    head = HEADER.unpack(await reader.readexactly(HEADER.size))
    assert await reader.readexactly(head[2]) == b"$position"
    await reader.readexactly(head[0])
    _, writer = await asyncio.open_connection("127.0.0.1", measured.boson)
    writer.write(HEADER.pack(count * len(PIECE), 0, 5) + b"alpha")
    sending = asyncio.create_task(send(writer, count))
    size, found = 0, 0
    while True:
        length, flag, topic_bytes = HEADER.unpack(await reader.readexactly(HEADER.size))
        assert await reader.readexactly(topic_bytes) == b"alpha"
        found = zlib.crc32(await reader.readexactly(length), found)
        size += length
        if not flag:
            break
    await sending
    expected = 0
    for _ in range(count):
        expected = zlib.crc32(PIECE, expected)
    assert (size, found) == (count * len(PIECE), expected)
    subscriber.close()
    writer.close()


async def pass_string(measured: Measured, count: int) -> None:
    """Send a goMS string of this many MiB, and wait until it is durable."""
    reader, writer = await asyncio.open_connection("127.0.0.1", measured.goms)
    writer.write(b'{"messagetype":"register","topics":["alpha"]}\n')
    writer.write(b'{"messagetype":"send","topics":["alpha"],"ack":true,"data":"')
    text = b"0123456789abcdef" * (MEBI // 16)
    digest = hashlib.sha256()
    for _ in range(count):
        digest.update(text)
        writer.write(text)
        await writer.drain()
    writer.write(b'"}\n')
    ack = json.loads(await reader.readline())
    assert ack["messagetype"] == "send-ack"
    writer.close()


async def pass_parts(measured: Measured, count: int) -> None:
    """Send this many MiB as messages of 2.5 MiB that are published when the last has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", measured.boson)
    size, left = 5 * MEBI // 2, count * MEBI
    while left:
        part = min(size, left)
        writer.write(HEADER.pack(part, 2, 15) + b"alpha?receipt=7")
        writer.write(PIECE * (part // len(PIECE)) + PIECE[: part % len(PIECE)])
        await writer.drain()
        left -= part
    writer.write(HEADER.pack(0, 0, 5) + b"alpha")
    head = HEADER.unpack(await reader.readexactly(HEADER.size))
    assert await reader.readexactly(head[2]) == b"$receipt"
    writer.close()


@pytest.mark.parametrize(
    ("pass_on", "count", "growth_max"),
    [
        (pass_frame, 2047, 64 * MEBI),
        (pass_string, 80, 8 * MEBI),
        (pass_parts, 60, 8 * MEBI),
    ],
)
async def test_a_payload_is_never_in_memory_as_a_whole(
    pass_on: Callable[[Measured, int], Any], count: int, growth_max: int, tmp_path: Path
) -> None:
    async with bus(tmp_path) as measured:
        # What the first payload of all takes: modules, threads, buffers.
        await pass_on(measured, 4)
        # The bus may do something else meanwhile, for the first time: then once more.
        for _ in range(2):
            measured.begin()
            await pass_on(measured, count)
            grown = measured.growth_bytes
            if grown < growth_max:
                break
        assert grown < growth_max, f"{count} MiB took {grown / MEBI:.1f} MiB"
