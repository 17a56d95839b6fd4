"""The whole process under attack: its memory is bounded and normal clients are answered."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import struct
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from sim_kit import Process, served

from polybus.services.transactions.staging import SCHEMA
from polybus.testing import ScriptedPeer
from polybus.wire.boson_frames import encode_frame
from polybus.wire.boson_properties import encode_publish

MEBI = 1 << 20
GROWTH_BYTES_MAX = 64 * MEBI


def resident_bytes(bus: Process, field: str = "VmRSS") -> int:
    status = Path(f"/proc/{bus.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


async def answer_s(bus: Process) -> float:
    """How long a normal client waits for a receipt."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with ScriptedPeer(bus.port, timeout_s=30) as peer:
        await peer.send_frame("blue?receipt=1", b"x")
        assert (await peer.read_frame())[0] == "$receipt"
    return loop.time() - began


async def warmed(bus: Process) -> int:
    """Memory after normal work: buffers and caches are there."""
    async with ScriptedPeer(bus.port, timeout_s=30) as reader, ScriptedPeer(bus.port) as peer:
        await reader.send_frame("$subscribe", b"red tell=position")
        await reader.read_frame()
        for _ in range(8):
            for _ in range(32):
                await peer.send_frame("red", b"x" * (1 << 18))
            for _ in range(32):
                await reader.read_frame()
        await peer.send_frame("red?receipt=1", b"")
        await peer.read_frame()
    async with ScriptedPeer(bus.port, timeout_s=30) as reader:
        await reader.send_frame("$subscribe", b"red from=earliest")
        for _ in range(256):
            await reader.read_frame()
    return resident_bytes(bus)


class Watch:
    """The largest growth seen, and the longest a normal client waited."""

    def __init__(self, bus: Process, before: int) -> None:
        self.bus = bus
        self.before = before
        self.growth_bytes = 0
        self.wait_s = 0.0

    async def look(self) -> None:
        self.wait_s = max(self.wait_s, await answer_s(self.bus))
        self.growth_bytes = max(self.growth_bytes, resident_bytes(self.bus) - self.before)

    def check(self) -> None:
        assert self.growth_bytes < GROWTH_BYTES_MAX, f"{self.growth_bytes >> 20} MiB"
        # A second is the promise; the machine the tests run on may be four times as slow.
        assert self.wait_s < 4, self.wait_s


OPTIONS = ("--topic", "red", "--topic", "blue")


@pytest.mark.slow
@pytest.mark.parametrize("headers", [(), (("h", b"v"),)], ids=["plain", "with a header"])
async def test_one_huge_message_takes_its_own_size_and_little_more(
    tmp_path: Path, headers: tuple[tuple[str, bytes], ...]
) -> None:
    """From its first byte to its receipt it is in memory once."""
    value = b"x" * 48 * MEBI
    async with served(tmp_path, *OPTIONS) as bus, ScriptedPeer(bus.port, timeout_s=30) as peer:
        await answer_s(bus)
        before = resident_bytes(bus)
        await peer.send(encode_publish("red", value, dict(headers), b"1"))
        await peer.read(4)
        # Read buffers, and the holes that its growth left in the heap.
        assert resident_bytes(bus, "VmHWM") - before < len(value) + 20 * MEBI


async def stalled(stack: contextlib.AsyncExitStack, bus: Process, request: bytes) -> None:
    loop = asyncio.get_running_loop()
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", bus.port))
    await loop.sock_sendall(sock, request)


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_text",
    [b"red", b"red from=earliest"],
    ids=["live", "replaying"],
)
async def test_two_hundred_subscribers_that_do_not_read(
    tmp_path: Path, request_text: bytes
) -> None:
    async with served(tmp_path, *OPTIONS) as bus, contextlib.AsyncExitStack() as stack:
        watch = Watch(bus, await warmed(bus))
        for _ in range(200):
            await stalled(stack, bus, encode_frame(b"$subscribe", request_text))
        async with ScriptedPeer(bus.port) as writer:
            for _ in range(20):
                for _ in range(16):
                    await writer.send_frame("red", b"x" * (1 << 18))
                await watch.look()
        watch.check()


@pytest.mark.slow
async def test_a_hundred_messages_that_are_never_finished(tmp_path: Path) -> None:
    head = struct.pack(">ibH", 32 * MEBI, 0, 3) + b"red"
    async with served(tmp_path, *OPTIONS) as bus:
        watch = Watch(bus, await warmed(bus))
        peers = [ScriptedPeer(bus.port) for _ in range(100)]
        sending = []
        for peer in peers:
            await peer.__aenter__()
            sending.append(asyncio.create_task(peer.send(head + b"x" * 2 * MEBI)))
        for _ in range(10):
            await watch.look()
            await asyncio.sleep(0.1)
        for task in sending:
            task.cancel()
        for peer in peers:
            peer._writer.transport.abort()
        watch.check()


@pytest.mark.slow
async def test_gzip_bombs(tmp_path: Path) -> None:
    """Each a megabyte that inflates to a gigabyte, as messages and as one message."""
    chunk = encode_frame(b"red", bytes(MEBI))
    bombs = [
        gzip.compress(chunk * 64, 9) * 16,
        gzip.compress(struct.pack(">ibH", 64 * MEBI, 0, 3) + b"red" + bytes(60 * MEBI), 9),
        gzip.compress(encode_frame(b"$x", b"") * MEBI, 9) * 8,
    ]
    async with served(tmp_path, *OPTIONS) as bus:
        watch = Watch(bus, await warmed(bus))
        for bomb in bombs:
            async with ScriptedPeer(bus.port, timeout_s=30) as peer:
                with contextlib.suppress(ConnectionError):
                    sending = asyncio.create_task(peer.send(bomb))
                    await watch.look()
                    await sending
                    await watch.look()
        watch.check()


def staged(kind: str) -> bytes:
    """A file of many record batches, as heavy as the bus takes them."""
    count = {"large values": 1, "small values": 9000, "no values": 20_000}.get(kind, 2500)
    value = {"large values": b"x" * MEBI, "no values": b""}.get(kind, b"x" * 100)
    columns: list[list[object]] = [["red"] * count, [None] * count, [value] * count, [None] * count]
    if kind == "keys":
        columns[1] = [b"key %d" % number for number in range(count)]
    if kind == "headers":
        columns[3] = [[("name", b"value"), ("other", b"value")]] * count
    rows = pa.record_batch(
        [pa.array(one, field.type) for one, field in zip(columns, SCHEMA, strict=True)], SCHEMA
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for _ in range(60):
            writer.write_batch(rows)
    return bytes(sink.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["large values", "small values", "no values", "keys", "headers"])
async def test_transactions_of_many_parts(tmp_path: Path, kind: str) -> None:
    content = staged(kind)
    async with served(tmp_path, *OPTIONS) as bus, contextlib.AsyncExitStack() as stack:
        base = f"http://127.0.0.1:{bus.port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60))
        watch = Watch(bus, await warmed(bus))
        for batch in range(2):
            name = f"{batch}-abcdefgh.arrows"
            for position in range(0, len(content), 8 * MEBI):
                piece = content[position : position + 8 * MEBI]
                path = f"/v1/staging/attacker/{name}?position={position}"
                assert (await http.post(path, content=piece)).status_code == 200
            wanted = {"producer": "attacker", "query": "q", "batch": batch, "files": [name]}
            committing = asyncio.create_task(http.post("/v1/commits", json=wanted))
            while not committing.done():
                await watch.look()
            assert committing.result().status_code == 200, committing.result().text
            await watch.look()
        watch.check()


@pytest.mark.slow
async def test_a_hundred_uploads_at_once(tmp_path: Path) -> None:
    piece = bytes(8 * MEBI)
    async with served(tmp_path, *OPTIONS) as bus, contextlib.AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=100)
        base = f"http://127.0.0.1:{bus.port}"
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=base, timeout=60, limits=limits)
        )
        watch = Watch(bus, await warmed(bus))
        names = [f"/v1/staging/attacker/0-abcdefg{number}.arrows" for number in range(100)]
        uploads = asyncio.gather(*[http.post(name, content=piece) for name in names])
        while not uploads.done():
            await watch.look()
        assert {one.status_code for one in uploads.result()} == {200}
        watch.check()
