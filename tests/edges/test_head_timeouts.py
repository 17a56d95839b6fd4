"""Who begins and stops is cut off: not before the time that the limits say, and not after.

The clock of the loop stands still and is moved by hand, so a slow machine changes nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable
from typing import Any

import pytest
from certificate_kit import Authority
from edge_kit import frame, line, properties

from polybus.edges.tcp import context
from polybus.testing import ScriptedPeer, run_bus

STEP_S = context.TICK_S
LATE_S = context.TICK_S * (context.TICKS_PER_OVERDUE_CHECK + 1)
REAL_S_MAX = 20.0
# What the default limits allow.
DETECT_S, MESSAGE_S, LOGIN_S = 10.0, 30.0, 60.0
HEAD = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: "
BODY = b"POST /v1/signup HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{"
STATES = {
    "silence": (b"", LOGIN_S),
    "an unknown protocol": (b"\0\0", DETECT_S),
    "a TLS handshake": (b"\x16\x03\x01\x02\x00\x01", DETECT_S),
    "gzip": (gzip.compress(b"")[:4], DETECT_S),
    "gzip around an unknown protocol": (gzip.compress(b"")[:10], DETECT_S),
    "a path": (b"GET /", DETECT_S),
    "a request line": (b"GET / HT", DETECT_S),
    "a head": (HEAD, DETECT_S),
    "a body": (BODY, MESSAGE_S),
    "a login of Boson frames": (frame("$login", b"shop\ntwo")[:9], MESSAGE_S),
    "a login of Boson properties": (properties(("topic", b"$login"))[:20], MESSAGE_S),
    "a login of goMS": (line("login", user="shop")[:20], MESSAGE_S),
    "no login of Boson frames": (frame("$unknown", b""), LOGIN_S),
    "no login of goMS": (line("logout", topics=["news"]), LOGIN_S),
}
DRIPPING = ("a path", "a head")


class HeldLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still from `hold` to `release`, and is moved by hand."""

    _held_s: float | None = None
    _offset_s = 0.0

    def time(self) -> float:
        return super().time() + self._offset_s if self._held_s is None else self._held_s

    def hold(self) -> None:
        self._held_s = self.time()

    def release(self) -> None:
        assert self._held_s is not None
        self._offset_s, self._held_s = self._held_s - super().time(), None

    async def advance(self, seconds: float) -> None:
        """Move the clock in small steps, and let everything that is due run after each."""
        assert self._held_s is not None
        end_s = self._held_s + seconds
        while self._held_s < end_s:
            self._held_s = min(end_s, self._held_s + STEP_S)
            # A timer, what it calls, and what that calls.
            for _ in range(5):
                await asyncio.sleep(0)


async def reached(condition: Callable[[], Any]) -> None:
    """Wait without the loop's clock."""
    until_s = time.monotonic() + REAL_S_MAX
    while not condition():
        assert time.monotonic() < until_s
        await asyncio.sleep(0)


async def check(loop: HeldLoop, tls: dict[str, str], state: str, *, drips: bool) -> None:
    begun, limit_s = STATES[state]
    settings: dict[str, Any] = {
        "accounts": {"default": "off", "signup": True},
        "connectors": [{"protocol": "tcp", "port": 0, "tls": tls}],
    }
    async with run_bus("news", **settings) as node:
        loop.hold()
        open_ones = node.tcp.connections
        async with ScriptedPeer(node.tcp_port) as peer:
            await reached(lambda: open_ones)
            (connection,) = open_ones
            silent_s = node.tcp.assembly.deadline_s(connection)
            await peer.send(begun)
            await reached(lambda: not begun or node.tcp.assembly.deadline_s(connection) != silent_s)
            passed_s = 0.0
            while passed_s < limit_s - 1:
                await loop.advance(1.0)
                passed_s += 1.0
                assert open_ones, f"closed after {passed_s} s"
                if drips:
                    await peer.send(b"x")
            # What must be prompt is; the others are looked at every two ticks.
            await loop.advance(1.0 + (0.0 if limit_s == DETECT_S else LATE_S))
            assert not open_ones or connection.is_closing()  # type: ignore[attr-defined]
        loop.release()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    certificate, key = Authority(tmp_path_factory.mktemp("tls"), "authority").sign("localhost")
    return {"cert": str(certificate), "key": str(key)}


@pytest.mark.parametrize("state", STATES)
def test_who_has_not_logged_in_is_cut_off_in_time(state: str, tls: dict[str, str]) -> None:
    loop = HeldLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(check(loop, tls, state, drips=False))


@pytest.mark.parametrize("state", DRIPPING)
def test_a_byte_now_and_then_buys_no_time(state: str, tls: dict[str, str]) -> None:
    loop = HeldLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(check(loop, tls, state, drips=True))
