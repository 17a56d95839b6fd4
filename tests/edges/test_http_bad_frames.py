"""Bad WebSocket frames and handshakes: closed with their code, and nothing is lost."""

from __future__ import annotations

import struct

import pytest
from http_kit import http_bus, raw, recv
from raw_http_kit import (
    CLOSE,
    CONTINUATION,
    PING,
    TEXT,
    assert_untouched,
    close_code,
    frame,
    raw_websocket,
    two_sessions,
)

BAD_FRAMES: dict[str, tuple[bytes, int]] = {
    "binary": (frame(2, b"1"), 1003),
    "binary in fragments": (frame(2, b"1", fin=False) + frame(CONTINUATION, b"2"), 1003),
    "a length beyond the limit": (frame(TEXT, b"", claims=(64 << 10) + 1), 1009),
    "a length of 2**63-1": (frame(TEXT, b"", claims=(1 << 63) - 1), 1009),
    "fragments beyond the limit": (
        frame(TEXT, b"1," * 20_000, fin=False) + frame(CONTINUATION, b"1," * 20_000),
        1009,
    ),
    "not masked": (b"\x81\x011", 1002),
    "a reserved bit": (frame(TEXT | 0x40, b"1"), 1002),
    "an unknown opcode": (frame(3, b"1"), 1002),
    "a continuation of nothing": (frame(CONTINUATION, b"1"), 1002),
    "a text in a text": (frame(TEXT, b"1", fin=False) + frame(TEXT, b"2"), 1002),
    "a ping in fragments": (frame(PING, b"", fin=False), 1002),
    "a ping of 126 bytes": (frame(PING, b"x" * 126), 1002),
    "a close of one byte": (frame(CLOSE, b"x"), 1002),
    "invalid UTF-8": (frame(TEXT, b"\xff"), 1007),
    "UTF-8 cut off": (frame(TEXT, "é".encode()[:1]), 1007),
    "a surrogate": (frame(TEXT, b"\xed\xa0\x80"), 1007),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_frame_closes_the_connection_with_its_code_and_loses_nothing(name: str) -> None:
    data, code = BAD_FRAMES[name]
    async with http_bus() as http:
        one, two = await two_sessions(http)
        async with http.websocket(two) as bystander, raw_websocket(http, one) as peer:
            assert len(await recv(bystander)) == 2
            await peer.send(data)
            assert await close_code(peer) == code
            await http.post(two, ["still here"])
            assert await recv(bystander) == {"3": [["still here"]]}
        await assert_untouched(http, one)


async def test_a_confirmation_cut_anywhere_is_one_confirmation() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        for number in range(12):
            await http.post(key, ["n", number])
        # Only what was sent can be confirmed.
        assert len(await http.packs(key)) == 12
        # A letter of two bytes is cut too, a ping comes between, and some fragments are empty.
        text = "é,11".encode()
        cuts = [frame(CONTINUATION, text[at : at + 1], fin=False) for at in range(1, len(text))]
        async with raw_websocket(http, key) as peer:
            await peer.send(frame(TEXT, text[:1], fin=False) + b"".join(cuts))
            await peer.send(frame(CONTINUATION, b"", fin=False) * 1000 + frame(PING, b"?"))
            await peer.send(frame(CONTINUATION, b"") + frame(CLOSE, struct.pack("!H", 1000)))
            assert await close_code(peer) == 1000
        assert "11" not in await http.packs(key)
        assert len(await http.packs(key)) == 11


@pytest.mark.parametrize(
    "head",
    [
        "Sec-WebSocket-Version: 12\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        "Sec-WebSocket-Version: 13\r\n",
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: short\r\n",
    ],
)
async def test_a_bad_handshake_is_refused_and_takes_the_session_from_nobody(head: str) -> None:
    async with http_bus() as http:
        key, _ = await two_sessions(http)
        async with http.websocket(key) as websocket:
            await recv(websocket)
            request = f"GET /msgstream?sessionKey={key} HTTP/1.1\r\nHost: localhost\r\n"
            request += f"Connection: Upgrade\r\nUpgrade: websocket\r\n{head}\r\n"
            answer = await raw(http.node, request.encode())

            assert answer.split()[1] in (b"400", b"426")
            await http.post(key, ["c"])
            assert await recv(websocket) == {"3": [["c"]]}
