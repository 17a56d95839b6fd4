"""For tests, also your own: a bus on a free port, raw peers, a manual clock, a faulty disk."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from polybus.config import Config
from polybus.config_file import check
from polybus.edges.node import Node
from polybus.scan.binary_py import HEADER, HEADER_BYTES
from polybus.structs import convert


@contextlib.asynccontextmanager
async def run_bus(*topics: str, data: str | None = None, **settings: Any) -> AsyncIterator[Node]:
    """Run a bus on free loopback ports until the `with` block ends.

    `settings` are keys of a config file, with underscores: `limits={"outbox-bytes-max": 1 << 20}`.
    Without `data` the log is in a temporary folder.
    """
    with contextlib.ExitStack() as stack:
        if data is None:
            data = stack.enter_context(tempfile.TemporaryDirectory(prefix="polybus-"))
        raw = {name.replace("_", "-"): value for name, value in settings.items()}
        raw.setdefault(
            "connectors",
            [{"protocol": "tcp", "port": 0}, {"protocol": "udp", "port": 0, "speaks": "goms"}],
        )
        raw["data"] = data
        raw["topics"] = [*topics, *raw.get("topics", [])]
        config = convert(raw, Config)
        check(config)
        node = Node(config)
        await node.start()
        try:
            yield node
        finally:
            await node.stop()


class ManualClock:
    """A clock for the log and the bus: a callable that returns microseconds since 1970."""

    def __init__(self, start_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = start_us

    def __call__(self) -> int:
        return self.now_us

    def advance(self, *, s: float) -> None:
        """Move the clock; a negative time moves it back."""
        self.now_us += round(s * 1_000_000)


class ScriptedPeer:
    """A TCP connection to the bus, for exact bytes.

    Use it as `async with ScriptedPeer(port) as peer`. Every read has a time limit.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", *, timeout_s: float = 20.0) -> None:
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> "ScriptedPeer":
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 26)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    @property
    def name(self) -> str:
        """The sender name the bus gives this connection."""
        host, port = self._writer.get_extra_info("sockname")[:2]
        return f"{host}:{port}"

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def send_eof(self) -> None:
        self._writer.write_eof()

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes."""
        return await asyncio.wait_for(self._reader.readexactly(size), self._timeout_s)

    async def read_to_end(self) -> bytes:
        """Everything until the bus closes the connection, or resets it."""
        data = bytearray()
        async with asyncio.timeout(self._timeout_s):
            with contextlib.suppress(ConnectionResetError):
                while piece := await self._reader.read(1 << 16):
                    data += piece
        return bytes(data)

    async def hears_nothing(self, seconds: float = 0.2) -> bool:
        """Whether nothing arrives for a while."""
        try:
            data = await asyncio.wait_for(self._reader.read(1), seconds)
        except TimeoutError:
            return True
        return data == b""

    # Boson frames

    async def send_frame(self, topic: str | bytes, content: bytes = b"", flag: int = 0) -> None:
        name = topic.encode() if isinstance(topic, str) else topic
        await self.send(HEADER.pack(len(content), flag, len(name)) + name + content)

    async def read_frame(self) -> tuple[str, bytes]:
        """Topic and content of the next frame, whose flag must be 0."""
        length, flag, topic_bytes = HEADER.unpack(await self.read(HEADER_BYTES))
        assert flag == 0, f"the bus sent flag {flag}"
        topic = await self.read(topic_bytes)
        return topic.decode(), await self.read(length)

    # goMS

    async def send_json(self, message: Any) -> None:
        await self.send(json.dumps(message).encode() + b"\n")

    async def read_line(self) -> bytes:
        return await asyncio.wait_for(self._reader.readline(), self._timeout_s)

    async def read_json(self) -> Any:
        return json.loads(await self.read_line())
