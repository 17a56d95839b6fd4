"""What the edges' tests share: peers over every transport, and each protocol's bytes by hand.

The bytes are put together here with struct and json, not with the library's own encoders, so that a
test compares what is on the wire with the protocol's text.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import zlib
from collections.abc import AsyncIterator, Mapping
from typing import Protocol, cast

from polybus.edges.node import Node
from polybus.edges.tcp.connection import Connection
from polybus.testing import ScriptedPeer

Headers = Mapping[str, bytes]
NO_HEADERS: Headers = {}
TIMEOUT_S = 20.0


def open_connections(node: Node) -> list[Connection]:
    """The bus's TCP connections, with all their attributes."""
    return [cast(Connection, one) for one in node.tcp.connections]


# Bytes by hand


def frame(topic: bytes | str, content: bytes = b"", flag: int = 0) -> bytes:
    name = topic.encode() if isinstance(topic, str) else topic
    return struct.pack(">ibH", len(content), flag, len(name)) + name + content


def properties(*pairs: tuple[str, bytes], version: bytes = b"\x3f\x80\x00\x00") -> bytes:
    """A message of Boson properties: `hbfv` first, then the pairs."""
    message = struct.pack(">i", 1 + len(pairs))
    for key, value in (("hbfv", version), *pairs):
        name = key.encode()
        message += struct.pack(">H", len(name)) + name + struct.pack(">i", len(value)) + value
    return message


def line(messagetype: str, **fields: object) -> bytes:
    """A goMS object as the bus writes it: compact, one a line."""
    compact = json.dumps(
        {"messagetype": messagetype} | fields, ensure_ascii=False, separators=(",", ":")
    )
    return compact.encode() + b"\n"


def error_line(code: str, text: str) -> bytes:
    return line("error", **{"error-code": code, "errorcode": code, "error": text})


def goms_value(value: bytes) -> dict[str, str]:
    """The fields that carry a value: text, or base64 of what is not UTF-8."""
    try:
        return {"data": value.decode()}
    except UnicodeDecodeError:
        return {"encoding": "base64", "data": base64.b64encode(value).decode()}


def goms_headers(headers: Headers) -> dict[str, object]:
    if not headers:
        return {}
    shown: dict[str, object] = {}
    for name, value in headers.items():
        try:
            shown[name] = value.decode()
        except UnicodeDecodeError:
            shown[name] = {"base64": base64.b64encode(value).decode()}
    return {"headers": shown}


# Transports


class GzipPeer(ScriptedPeer):
    """A peer whose whole stream is gzip, sync-flushed, both ways."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(port, host, timeout_s=timeout_s)
        self._deflater = zlib.compressobj(wbits=31)
        self._inflater = zlib.decompressobj(wbits=31)
        self._plain = bytearray()

    async def send(self, data: bytes) -> None:
        await super().send(self._deflater.compress(data) + self._deflater.flush(zlib.Z_SYNC_FLUSH))

    async def read(self, size: int) -> bytes:
        while len(self._plain) < size:
            data = await asyncio.wait_for(self._reader.read(1 << 16), self._timeout_s)
            if not data:
                raise asyncio.IncompleteReadError(bytes(self._plain), size)
            self._plain += self._inflater.decompress(data)
        found = bytes(self._plain[:size])
        del self._plain[:size]
        return found

    async def read_to_end(self) -> bytes:
        rest = self._inflater.decompress(await super().read_to_end())
        found = bytes(self._plain) + rest
        self._plain.clear()
        return found


class UdpClient(asyncio.DatagramProtocol):
    """A goMS peer over UDP; each send is one datagram."""

    def __init__(self, port: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = ("127.0.0.1", port)
        self._timeout_s = timeout_s
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._plain = b""
        self._transport: asyncio.DatagramTransport

    async def __aenter__(self) -> UdpClient:
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, remote_addr=self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._received.put_nowait(data)

    async def send(self, data: bytes) -> None:
        self._transport.sendto(data)

    async def datagram(self) -> bytes:
        return await asyncio.wait_for(self._received.get(), self._timeout_s)

    async def read(self, size: int) -> bytes:
        while len(self._plain) < size:
            self._plain += await self.datagram()
        found, self._plain = self._plain[:size], self._plain[size:]
        return found

    async def read_line(self) -> bytes:
        while b"\n" not in self._plain:
            self._plain += await self.datagram()
        found, _, self._plain = self._plain.partition(b"\n")
        return found + b"\n"


class Pipe(Protocol):
    """What a dialect needs of a transport."""

    async def send(self, data: bytes) -> None: ...

    async def read(self, size: int) -> bytes: ...


async def read_properties(pipe: Pipe) -> dict[str, bytes]:
    """The next message's properties."""
    found = {}
    for _ in range(int.from_bytes(await pipe.read(4))):
        key = await pipe.read(int.from_bytes(await pipe.read(2)))
        found[key.decode()] = await pipe.read(int.from_bytes(await pipe.read(4)))
    return found


# Dialects: a protocol's words over any transport


class Dialect(Protocol):
    has_headers: bool

    def publish(self, topic: str, value: bytes, headers: Headers) -> bytes: ...

    def delivered(
        self, topic: str, value: bytes, headers: Headers, epoch: int, offset: int
    ) -> bytes: ...

    async def subscribe(self, pipe: Pipe, topic: str, epoch: int) -> None:
        """Subscribe, and know that it is done when this returns. The topic is empty."""
        ...


class Frames:
    has_headers = False

    def publish(self, topic: str, value: bytes, headers: Headers) -> bytes:
        return frame(topic, value)

    def delivered(
        self, topic: str, value: bytes, headers: Headers, epoch: int, offset: int
    ) -> bytes:
        return frame(topic, value)

    async def subscribe(self, pipe: Pipe, topic: str, epoch: int) -> None:
        await pipe.send(frame("$subscribe", f"{topic} tell=position".encode()))
        told = frame("$position", f"{epoch}:0 {topic}".encode())
        assert await pipe.read(len(told)) == told


class Properties:
    has_headers = True

    def publish(self, topic: str, value: bytes, headers: Headers) -> bytes:
        return properties(("topic", topic.encode()), ("content", value), *headers.items())

    def delivered(
        self, topic: str, value: bytes, headers: Headers, epoch: int, offset: int
    ) -> bytes:
        return properties(
            ("hbfo", f"{epoch}:{offset}".encode()),
            ("topic", topic.encode()),
            ("content", value),
            *headers.items(),
        )

    async def subscribe(self, pipe: Pipe, topic: str, epoch: int) -> None:
        await pipe.send(properties(("hbfs", f"{topic} tell=position".encode())))
        told = properties(("hbfp", f"{epoch}:0".encode()), ("topic", topic.encode()))
        assert await pipe.read(len(told)) == told


class Goms:
    has_headers = True

    def publish(self, topic: str, value: bytes, headers: Headers) -> bytes:
        return line("send", topics=[topic], **goms_headers(headers), **goms_value(value))

    def delivered(
        self, topic: str, value: bytes, headers: Headers, epoch: int, offset: int
    ) -> bytes:
        return line("message", topics=[topic], **goms_headers(headers), **goms_value(value))

    async def subscribe(self, pipe: Pipe, topic: str, epoch: int) -> None:
        await pipe.send(line("register", topics=[topic], ack=True))
        told = line("reg-ack", topics=[topic])
        assert await pipe.read(len(told)) == told


FRAMES, PROPERTIES, GOMS = Frames(), Properties(), Goms()
WAYS: dict[str, Dialect] = {
    "boson-frames": FRAMES,
    "boson-frames-gzip": FRAMES,
    "boson-properties": PROPERTIES,
    "goms-tcp": GOMS,
    "goms-udp": GOMS,
}


@contextlib.asynccontextmanager
async def connected(node: Node, way: str) -> AsyncIterator[Pipe]:
    """A pipe to the bus of the transport that the way names."""
    if way == "goms-udp":
        async with UdpClient(node.udp_port) as udp:
            yield udp
    elif way.endswith("gzip"):
        async with GzipPeer(node.tcp_port) as gzipped:
            yield gzipped
    else:
        async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as tcp:
            yield tcp


async def prepared(node: Node, pipe: Pipe, way: str, topic: str) -> None:
    """Make a publisher ready to publish: goMS publishers must be registered."""
    if WAYS[way] is GOMS:
        await GOMS.subscribe(pipe, topic, epoch_of(node, topic))


def epoch_of(node: Node, topic: str) -> int:
    return node.bus.log.bounds(topic).epoch


async def until(condition: object, *, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a callable is true: for what no peer is notified of."""
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.01)


async def is_alive(node: Node, topic: str = "alive") -> float:
    """Publish with a receipt as somebody else, and get it; return how long that took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        await peer.send_frame(f"{topic}?receipt=alive", b"are you there")
        name, content = await peer.read_frame()
    assert name == "$receipt" and content.startswith(b"alive ")
    return loop.time() - began
