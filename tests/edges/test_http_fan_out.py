"""One message to many sessions, and their confirmations: compiled, and the same from its source."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from http_kit import Http, http_bus, recv

from polybus import scan
from polybus.edges.http import sending
from polybus.scan import plain
from polybus.services import tallies
from polybus.services.sessions import contents, delivery, sequence, session
from polybus.services.sessions.session import Session
from polybus.testing import ScriptedPeer

TESTS = Path(__file__).parents[1]
MODULES = (sending, tallies, contents, delivery, sequence, session)
UPGRADE = (
    b"GET /msgstream?sessionKey=%b HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n"
)


def said(text: bytes) -> bytes:
    """A client's text frame; its mask is zero."""
    return b"\x81%c\0\0\0\0%b" % (0x80 | len(text), text)


def session_of(http: Http, key: str) -> Session:
    found = http.node.services.inboxes.find(key)
    assert found is not None
    return found


def test_the_compiled_modules_are_installed() -> None:
    assert {module.__name__ for module in MODULES} < set(plain.AS_THEY_ARE)
    compiled = {not str(module.__file__).endswith(".py") for module in MODULES}
    assert compiled == {scan.COMPILED}


@pytest.mark.slow
@pytest.mark.skipif(plain.PURE, reason="this is the source")
def test_the_source_does_the_same() -> None:
    tests = [f"edges/test_http_{name}.py" for name in ("fan_out", "frames", "sessions")]
    tests += ["bus/test_sessions_model.py", "bus/test_bus_events.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=TESTS,
        env=os.environ | {"POLYBUS_PURE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout[-5000:]


async def test_sessions_at_different_numbers_get_the_same_message() -> None:
    async with http_bus("news", "more") as http:
        keys = [await http.open_session("news", "more") for _ in range(3)]
        for count, key in enumerate(keys):
            for number in range(count):
                await http.post(key, ["direct", number])
        sockets = [await http.websocket(key) for key in keys]
        for count, socket in enumerate(sockets):
            packs: dict[str, object] = {}
            while len(packs) < count:
                packs |= await recv(socket)

        await http.publish("news", b"1")

        got = [await recv(socket) for socket in sockets]
        assert got == [{str(number): [["news", 1]]} for number in (1, 2, 3)]
        for number, (socket, key) in enumerate(zip(sockets, keys, strict=True), 1):
            await socket.send(",".join(str(one) for one in range(1, number + 1)))
            await http.until(lambda key=key: not session_of(http, key).pack_count)
            await socket.close()
        assert http.node.services.inboxes.packs_out == 6
        assert http.node.services.inboxes.delivered["news"].messages == 3


async def test_a_session_that_is_saved_first_gets_its_packs_in_order() -> None:
    """Each has shown nothing yet: the mark of the second number is raised by a save."""
    async with http_bus("news") as http:
        keys = [await http.open_session("news") for _ in range(5)]
        sockets = [await http.websocket(key) for key in keys]
        for number in range(30):
            await http.publish("news", b"%d" % number)
        for socket in sockets:
            got: list[tuple[str, object]] = []
            while len(got) < 30:
                got += (await recv(socket)).items()
            assert got == [(str(number + 1), [["news", number]]) for number in range(30)]
            await socket.close()


async def test_the_answer_to_the_handshake_comes_before_a_message_of_the_same_turn() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        one = session_of(http, key)
        async with ScriptedPeer(http.node.tcp_port) as peer:
            await peer.send(UPGRADE % key.encode())
            while one.receiver is None:  # noqa: ASYNC110 - in the turn that it is set
                await asyncio.sleep(0)
            one.receiver.wake()
            await http.publish("news", b"1")
            assert await peer.read(12) == b"HTTP/1.1 101"
            while (await peer.read(1)) != b"\x81":
                pass
            text = b'{"1":[["news",1]]}'
            assert await peer.read(1 + len(text)) == bytes([len(text)]) + text


async def test_confirmations_and_other_frames_of_one_turn_are_all_handled() -> None:
    """Reads lie behind one another in one buffer: each peer's are its own."""
    async with http_bus("news") as http:
        keys = [await http.open_session("news") for _ in range(4)]
        sessions = [session_of(http, key) for key in keys]
        peers = [ScriptedPeer(http.node.tcp_port) for _ in keys]
        for peer, key in zip(peers, keys, strict=True):
            await peer.__aenter__()
            await peer.send(UPGRADE % key.encode())
        await http.publish("news", b"1", b"2", b"3")
        await http.until(lambda: all(one.shown_to == 3 for one in sessions))
        frames = [said(b"1"), said(b" 2 , 3"), said(b"1,2") + said(b"3"), said(b"7,x,0")]

        for peer, data in zip(peers, frames, strict=True):
            os.write(peer._writer.get_extra_info("socket").fileno(), data)

        await http.until(lambda: [one.pack_count for one in sessions] == [2, 1, 0, 3])
        for peer in peers:
            await peer.__aexit__()


async def test_polls_that_get_the_same_pack_share_nothing_but_its_bytes() -> None:
    async with http_bus("news") as http:
        keys = [await http.open_session("news") for _ in range(10)]
        await http.post(keys[0], ["direct"])
        assert await http.packs(keys[0]) == {"1": [["direct"]]}
        assert await http.packs(keys[0], "1") == {}
        polls = [await http.hanging_poll(key) for key in keys]

        await http.publish("news", b"1")

        answers = [await poll for poll in polls]
        assert [one.json() for one in answers] == [
            {str(2 - bool(index)): [["news", 1]]} for index in range(10)
        ]
        assert {one.headers["content-type"] for one in answers} == {"application/json"}
        for key, number in zip(keys, "2111111111", strict=True):
            assert await http.packs(key, number) == {}
