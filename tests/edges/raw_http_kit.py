"""WebSockets whose frames are made by hand, and sessions that must not notice."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator

from http_kit import TIMEOUT_S, Http

from polybus.testing import ScriptedPeer

UPGRADE = (
    "GET /msgstream?sessionKey={key} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, CONTINUATION, CLOSE, PING = 1, 0, 8, 9


def frame(opcode: int, data: bytes, *, fin: bool = True, claims: int | None = None) -> bytes:
    """A client's frame, masked with zeros; `claims` is the length it says it has."""
    size = len(data) if claims is None else claims
    head = bytes([opcode | (0x80 if fin else 0)])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += b"\xfe" + struct.pack("!H", size)
    else:
        head += b"\xff" + struct.pack("!Q", size)
    return head + b"\0\0\0\0" + data


@contextlib.asynccontextmanager
async def raw_websocket(http: Http, key: str) -> AsyncIterator[ScriptedPeer]:
    """A WebSocket whose frames are ours to break."""
    async with ScriptedPeer(http.node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        await peer.send(UPGRADE.format(key=key).encode())
        while await peer.read_line() != b"\r\n":
            pass
        yield peer


async def close_code(peer: ScriptedPeer) -> int:
    """The code of the close frame that ends everything the bus still sends."""
    said = await peer.read_to_end()
    at = said.rindex(b"\x88")
    return int.from_bytes(said[at + 2 : at + 4], "big")


async def two_sessions(http: Http) -> tuple[str, str]:
    """A session to be attacked with two packs, and one that must not notice."""
    keys = await http.open_session(), await http.open_session()
    for key in keys:
        await http.post(key, ["a"])
        await http.post(key, ["b"])
    return keys


async def assert_untouched(http: Http, *keys: str) -> None:
    for key in keys:
        assert await http.packs(key) == {"1": [["a"]], "2": [["b"]]}
