"""Cheap clients for storms: one request and its answer on a plain connection, for each protocol.

The real clients reconnect and buffer; ten thousand of them would measure the clients instead. All
functions raise OSError, EOFError or ValueError if the bus does not answer as it must.
"""

import asyncio
import contextlib
import json
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from struct import pack
from typing import Any

from polybus.scan.binary_py import HEADER, HEADER_BYTES
from polybus.wire.boson_frames import encode_frame

UPGRADE = (
    "GET /msgstream?sessionKey={key} HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\n"
    "connection: upgrade\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    "sec-websocket-version: 13\r\n\r\n"
)


class PlainPeer:
    """One connection."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> "PlainPeer":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, port: int) -> AsyncIterator["PlainPeer"]:
        peer = await cls.open(port)
        try:
            yield peer
        finally:
            peer.writer.close()

    def vanish(self, how: str) -> None:
        """Disconnect by a reset or cleanly, or stay connected and never read again."""
        if how == "silence":
            self.writer.transport.pause_reading()  # type: ignore[attr-defined]
        elif how == "reset":
            sock = self.writer.get_extra_info("socket")
            # It is closed already if the bus has died.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()

    # Boson frames.

    async def publish(self, topic: str, value: str) -> int:
        """Publish with a receipt; its offset."""
        self.writer.write(encode_frame(f"{topic}?receipt=1".encode(), value.encode()))
        return int((await self._frame("$receipt")).rpartition(":")[2])

    async def subscribe(self, topic: str, start: str) -> str:
        """Subscribe; the position that the bus returns."""
        line = f"{topic} from={start} tell=position"
        self.writer.write(encode_frame(b"$subscribe", line.encode()))
        return (await self._frame("$position")).partition(" ")[0]

    async def _frame(self, wanted: str) -> str:
        """The content of the next frame of this topic; messages before it are skipped."""
        while True:
            head = await self.reader.readexactly(HEADER_BYTES)
            content_bytes, _, topic_bytes = HEADER.unpack(head)
            topic = (await self.reader.readexactly(topic_bytes)).decode()
            content = (await self.reader.readexactly(content_bytes)).decode()
            if topic == wanted:
                return content
            if topic == "$error":
                raise ValueError(content)

    # goMS.

    async def register_and_send(self, topic: str, value: str) -> int:
        """Register, send with a receipt; its offset."""
        ack: dict[str, Any] = {"topics": [topic], "ack": True}
        await self._ask_goms({"messagetype": "register", **ack}, "reg-ack")
        answer = await self._ask_goms({"messagetype": "send", **ack, "data": value}, "send-ack")
        return int(answer["offsets"][0].rpartition(":")[2])

    async def _ask_goms(self, request: dict[str, Any], wanted: str) -> dict[str, Any]:
        self.writer.write(json.dumps(request).encode() + b"\n")
        while line := await self.reader.readline():
            answer: dict[str, Any] = json.loads(line)
            if answer["messagetype"] == wanted:
                return answer
            if answer["messagetype"] == "error":
                raise ValueError(answer["error"])
        raise EOFError("the connection was closed")

    # HTTP.

    async def ask(self, method: str, path: str, body: bytes = b"") -> Any:
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        status, length = await self._head()
        content = await self.reader.readexactly(length)
        if status >= 300:
            raise ValueError(f"{method} {path}: {status} {content[:200]!r}")
        return json.loads(content) if content else None

    async def _head(self) -> tuple[int, int]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        lines = head.split("\r\n")
        lengths = [line for line in lines if line.startswith("content-length:")]
        return int(lines[0].split()[1]), int(lengths[0].split()[1]) if lengths else 0

    async def post(self, topic: str, value: str) -> int:
        """Publish over HTTP; its offset."""
        answer = await self.ask("POST", f"/v1/topics/{topic}/messages", value.encode())
        return int(answer["offsets"][-1])

    # Sessions.

    async def poll(self, key: str) -> dict[str, Any]:
        """The unconfirmed packs of a session, by a long poll."""
        path = f"/msgstream?sessionKey={key}&transport=longpolling"
        answer: dict[str, Any] = await self.ask("GET", path) or {}
        return answer

    async def follow(self, key: str) -> dict[str, Any]:
        """The first packs of a session on a WebSocket."""
        self.writer.write(UPGRADE.format(key=key).encode())
        status, _ = await self._head()
        if status != 101:
            raise ValueError(f"the upgrade was refused: {status}")
        while True:
            first, length = await self.reader.readexactly(2)
            if length >= 126:
                length = int.from_bytes(await self.reader.readexactly(2 if length == 126 else 8))
            payload = await self.reader.readexactly(length)
            if first & 15 == 1:
                packs: dict[str, Any] = json.loads(payload)
                return packs
