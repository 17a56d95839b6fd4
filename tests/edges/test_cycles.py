"""No connection leaves a reference cycle behind: `polybus serve` hardly ever looks for cycles.

The clients are plain sockets on a thread, which make no cycles themselves. So with the collector
off, everything it finds afterwards was left behind by the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import socket
import ssl
import struct
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest
from edge_kit import frame, line, properties, until
from uvloop import new_event_loop

from polybus.edges.http.upper import Upper
from polybus.edges.node import Node
from polybus.edges.protocols.translator import Translator
from polybus.edges.tcp.connection import Connection
from polybus.edges.tcp.outbox import Outbox
from polybus.edges.udp import UdpPeer
from polybus.services.accounts import accounts, throttle
from polybus.testing import run_bus

TLS = Path(__file__).parents[1] / "client" / "tls"
ROUNDS = 5
# The bus closes a connection after this many bytes of head, or of waiting messages.
SETTINGS: dict[str, Any] = {
    "http": {"head-bytes-max": 4096},
    "limits": {"outbox-bytes-max": 1 << 16, "connections-max": 8},
    "msgstream": {"websocket-message-bytes-max": 4096},
}
CONNECTORS = [
    {"protocol": "tcp", "port": 0},
    {"protocol": "udp", "port": 0, "speaks": "goms"},
    {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "news"},
    {
        "protocol": "tcp",
        "port": 0,
        "tls": {"cert": str(TLS / "cert.pem"), "key": str(TLS / "key.pem")},
    },
]
NOT_HTTP = b"GET /\x00 HTTP/9.9\r\n\r\n"
SERVING = (
    *("polybus.edges.", "polybus.services.", "polybus.bus.", "polybus.wire.", "polybus.scan."),
    *("uvicorn.", "websockets.", "uvloop.", "asyncio.", "ssl."),
)
PARTS = (Connection, Outbox, Translator, Upper, UdpPeer)
RESET = struct.pack("ii", 1, 0)
# In a request: the bus closes after its answer.
LAST = "Connection: close"


@dataclass
class Bus:
    """The ports of a bus, and a session with packs that nobody confirms."""

    tcp: int
    udp: int
    queue: int
    tls: int
    key: str = ""

    def request(self, path: str, *lines: str, method: str = "GET", body: str = "") -> bytes:
        head = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.tcp}", *lines]
        if body:
            head.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*head, "", body]).encode()

    def upgrade(self, key: str = "") -> bytes:
        return self.request(
            f"/msgstream?sessionKey={key or self.key}",
            *("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        )

    def poll(self, transport: str, key: str = "") -> bytes:
        return self.request(f"/msgstream?sessionKey={key or self.key}&transport={transport}")


@contextlib.contextmanager
def open_socket(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        yield sock


def talk(port: int, data: bytes, *, until: bytes = b"") -> bytes:
    """Send, read until the bytes came, end our side, and read until the bus has closed."""
    said = b""
    # The bus may have reset the connection already.
    with open_socket(port) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        while until not in said:
            piece = sock.recv(1 << 16)
            assert piece, said
            said += piece
        if LAST.encode() not in data:
            sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(1 << 16):
            said += piece
    return said


def reset(port: int, data: bytes, until: bytes) -> None:
    """Send, read until the bytes came, and break off."""
    said = b""
    with open_socket(port) as sock:
        sock.sendall(data)
        while until not in said:
            said += sock.recv(1 << 16)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


SUBSCRIBED = frame("$subscribe", b"news tell=position") + frame("news?receipt=7", b"x")
REPLAYED = frame("$subscribe", b"news from=earliest")
PUBLISHED = properties(("hbfs", b"news")) + properties(
    ("topic", b"news"), ("content", b"x"), ("hbfr", b"7")
)
REGISTERED = line("register", topics=["news"], ack=True) + line(
    "send", topics=["news"], data="x", ack=True
)


def gzipped(bus: Bus) -> None:
    talk(bus.tcp, gzip.compress(SUBSCRIBED))


def refused_by_number(bus: Bus) -> None:
    """More connections than `connections-max`."""
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            sock = stack.enter_context(open_socket(bus.tcp))
            with contextlib.suppress(ConnectionError):
                sock.sendall(frame("news", b"x"))


def over_tls(bus: Bus, data: bytes, until: bytes) -> None:
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    context.check_hostname = False
    with open_socket(bus.tls) as plain, context.wrap_socket(plain) as sock:
        sock.sendall(data)
        said = b""
        while until not in said:
            said += sock.recv(1 << 16)


def over_udp(bus: Bus) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(20)
        sock.connect(("127.0.0.1", bus.udp))
        for data, until in (
            (line("register", topics=["news"], ack=True), b"reg-ack"),
            (b"{]", b"error"),
            (line("send", topics=["news"], data="x", ack=True), b"send-ack"),
            (line("logout", topics=["news"]) + b"{]", b"error"),
        ):
            sock.send(data)
            while until not in sock.recv(1 << 16):
                pass


def never_reads(bus: Bus) -> None:
    """A subscriber that the bus disconnects, and a publisher that is held back for it."""
    with socket.socket() as slow, open_socket(bus.tcp) as fast:
        slow.settimeout(20)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", bus.tcp))
        slow.sendall(frame("$subscribe", b"flood tell=position"))
        slow.recv(1)
        for _ in range(32):
            fast.sendall(frame("flood", bytes(1 << 18)))
        fast.sendall(frame("flood?receipt=7", b""))
        fast.recv(1)


def stalled_replay(bus: Bus) -> None:
    with socket.socket() as slow:
        slow.settimeout(20)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", bus.tcp))
        slow.sendall(frame("$subscribe", b"large from=earliest"))
        slow.recv(1)


def hanging(bus: Bus, request: bytes) -> None:
    """A request that waits for what never comes, until its client is gone."""
    with open_socket(bus.tcp) as sock:
        sock.sendall(request)
        sock.settimeout(0.02)
        with contextlib.suppress(TimeoutError):
            sock.recv(1)


def new_session(bus: Bus, body: str = "{}") -> str:
    made = bus.request("/v1/sessions", LAST, method="POST", body=body)
    said = talk(bus.tcp, made)
    return str(json.loads(said.partition(b"\r\n\r\n")[2])["sessionKey"])


def websocket(bus: Bus, *frames: bytes, until: bytes = b'"1":') -> bytes:
    """Open the session's WebSocket, read a pack, and send frames that end it."""
    with open_socket(bus.tcp) as sock:
        sock.sendall(bus.upgrade())
        said = b""
        while until not in said:
            said += sock.recv(1 << 16)
        sock.sendall(b"".join(frames))
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(1 << 16):
                said += piece
    return said


def two_websockets(bus: Bus) -> None:
    """The second takes the session over."""
    with open_socket(bus.tcp) as first:
        first.sendall(bus.upgrade())
        first.recv(1 << 16)
        websocket(bus, ws_frame(8, b"\x03\xe8"))


def ended_session(bus: Bus) -> None:
    key = new_session(bus)
    with open_socket(bus.tcp) as sock:
        sock.sendall(bus.upgrade(key))
        sock.recv(1 << 16)
        talk(bus.tcp, bus.request(f"/v1/sessions/{key}", LAST, method="DELETE"))
        assert sock.recv(1 << 16)


def ws_frame(opcode: int, data: bytes, *, fin: int = 0x80) -> bytes:
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return bytes([opcode | fin]) + size + bytes(4) + data


RIGHT = f"Basic {b64encode(b'default:right').decode()}"
WRONG = f"Basic {b64encode(b'default:wrong').decode()}"
BEHIND = '{"topics":["large"],"from":"earliest"}'
Scenario = Callable[[Bus], object]
SCENARIOS: dict[str, Scenario] = {
    "nothing said": lambda bus: talk(bus.tcp, b""),
    "no protocol": lambda bus: talk(bus.tcp, b"\xff" * 64),
    "half a first byte": lambda bus: talk(bus.tcp, b"\0\0"),
    "refused by number": refused_by_number,
    "frames": lambda bus: talk(bus.tcp, SUBSCRIBED, until=b"$receipt"),
    "frames, broken off": lambda bus: reset(bus.tcp, SUBSCRIBED, b"$receipt"),
    "frames, unfinished": lambda bus: talk(bus.tcp, frame("news", bytes(1 << 20))[:-1]),
    "frames, everything": lambda bus: talk(
        bus.tcp, frame("$subscribe", b"* tell=position"), until=b"news"
    ),
    "frames, replay": lambda bus: talk(bus.tcp, REPLAYED, until=b"first"),
    "frames, replay broken off": stalled_replay,
    "frames, unknown topic": lambda bus: talk(bus.tcp, frame("none", b"x"), until=b"$error"),
    "frames, bad": lambda bus: talk(bus.tcp, SUBSCRIBED + b"\xff" * 64, until=b"$error"),
    "frames, bad words": lambda bus: talk(
        bus.tcp,
        frame("$subscribe", b"news from=never") + frame("$subscribe", b"\xff") + frame("$x"),
        until=b"$error",
    ),
    "frames, gzip": gzipped,
    "gzip, bad": lambda bus: talk(bus.tcp, gzip.compress(SUBSCRIBED)[:12] + b"\xff" * 64),
    "gzip, nothing in it": lambda bus: talk(bus.tcp, gzip.compress(b"\xff" * 64)),
    "a subscriber that never reads": never_reads,
    "properties": lambda bus: talk(bus.tcp, PUBLISHED, until=b"hbfr"),
    "properties, bad": lambda bus: talk(
        bus.tcp, PUBLISHED + properties(("hbff", b"9"), ("hbfr", b"8")) + b"\xff" * 64
    ),
    "goms": lambda bus: talk(bus.tcp, REGISTERED, until=b"send-ack"),
    "goms, broken off": lambda bus: reset(bus.tcp, REGISTERED, b"send-ack"),
    "goms, bad": lambda bus: talk(
        bus.tcp, REGISTERED + b'{]\n{"messagetype":"?"}\n{"messagetype":7}\n\xff{"', until=b"error"
    ),
    "goms, replay": lambda bus: talk(
        bus.tcp, line("register", topics=["news"], **{"from": "earliest"}), until=b"first"
    ),
    "goms, udp": over_udp,
    "queue": lambda bus: talk(bus.queue, struct.pack(">i", 1) + b"x"),
    "queue, bad": lambda bus: talk(bus.queue, b"\xff" * 64),
    "tls": lambda bus: over_tls(bus, SUBSCRIBED, b"$receipt"),
    "tls, gzip": lambda bus: over_tls(bus, gzip.compress(SUBSCRIBED), b""),
    "tls, http": lambda bus: over_tls(bus, bus.request("/healthz"), b"200"),
    "tls, bad": lambda bus: talk(bus.tls, b"\x16\x03\x01\x00\x05" + b"\xff" * 64),
    "tls, bad inside": lambda bus: over_tls(bus, b"\xff" * 64, b""),
    "http": lambda bus: talk(
        bus.tcp, bus.request("/v1/topics") + bus.request("/healthz"), until=b"ok"
    ),
    "http, last request": lambda bus: talk(bus.tcp, bus.request("/", LAST)),
    "http, broken off": lambda bus: reset(bus.tcp, bus.request("/v1/topics"), b"news"),
    "http, publish": lambda bus: talk(
        bus.tcp, bus.request("/v1/topics/news/messages", LAST, method="POST", body="x")
    ),
    "http, fetch": lambda bus: talk(bus.tcp, bus.request("/v1/topics/news/messages", LAST)),
    "http, arrow": lambda bus: talk(
        bus.tcp, bus.request("/v1/topics/news/messages?format=arrow", LAST)
    ),
    "http, fetch that waits": lambda bus: hanging(
        bus, bus.request("/v1/topics/quiet/messages?offset=0&wait-s=0.01")
    ),
    "http, problems": lambda bus: [
        talk(bus.tcp, bus.request(path, LAST, method=method, body=body))
        for method, path, body in (
            ("GET", "/none", ""),
            ("PATCH", "/v1/topics", ""),
            ("GET", "/v1/topics/none", ""),
            ("GET", "/v1/topics/news/messages?offset=x", ""),
            ("GET", "/v1/topics/news/messages?offset=999999", ""),
            ("POST", "/v1/sessions", "{]"),
            ("POST", "/v1/sessions", '{"topics":["none"]}'),
            ("POST", "/v1/topics/none/messages", "x"),
            ("DELETE", "/v1/sessions/none", ""),
            ("GET", "/v1/commits/none", ""),
        )
    ],
    "http, logins": lambda bus: [
        talk(bus.tcp, bus.request(path, LAST, f"Authorization: {header}", method=method, body=body))
        for header in (RIGHT, WRONG, "Bearer none", "Basic ?")
        for method, path, body in (
            ("GET", "/v1/topics", ""),
            ("GET", "/v1/accounts", ""),
            ("POST", "/v1/topics/news/messages", "x"),
            ("POST", "/v1/signup", "{}"),
        )
    ],
    "http, bad": lambda bus: talk(bus.tcp, NOT_HTTP),
    "http, head too large": lambda bus: talk(bus.tcp, bus.request("/" + "x" * 10_000)),
    "http, body unfinished": lambda bus: talk(
        bus.tcp, bus.request("/v1/sessions", method="POST", body="{}")[:-1]
    ),
    "sessions": ended_session,
    "poll": lambda bus: talk(bus.tcp, bus.poll("shortpolling"), until=b'"1":'),
    "poll, long": lambda bus: talk(bus.tcp, bus.poll("longpolling"), until=b'"1":'),
    "poll, hanging": lambda bus: hanging(bus, bus.poll("longpolling", new_session(bus))),
    "poll, unknown session": lambda bus: talk(bus.tcp, bus.poll("longpolling", "none")),
    "websocket": lambda bus: websocket(bus, ws_frame(8, b"\x03\xe8")),
    "websocket, broken off": lambda bus: reset(bus.tcp, bus.upgrade(), b'"1":'),
    # Its packs are not in memory: the bus reads the log for them.
    "websocket, broken off early": lambda bus: reset(
        bus.tcp, bus.upgrade(new_session(bus, BEHIND)), b"101"
    ),
    "poll, broken off early": lambda bus: reset(
        bus.tcp, bus.poll("longpolling", new_session(bus, BEHIND)), b""
    ),
    "websocket, no goodbye": lambda bus: websocket(bus),
    "websocket, bad": lambda bus: [
        websocket(bus, *frames)
        for frames in (
            (b"\xff" * 64,),
            (ws_frame(1, b"\xff\xff", fin=0), ws_frame(2, b"x")),
            (ws_frame(1, b"\xff\xff"),),
            (ws_frame(2, b"x"),),
            (ws_frame(1, b"x" * 5000),),
            (ws_frame(1, b"[]"), ws_frame(9, b"x"), b"\x81\x05hello"),
        )
    ],
    "websocket, refused": lambda bus: [
        talk(bus.tcp, bus.upgrade("none")),
        talk(bus.tcp, bus.upgrade().replace(b"Version: 13", b"Version: 7")),
        talk(bus.tcp, bus.upgrade().replace(b"/msgstream", b"/elsewhere")),
    ],
    "websocket, taken over": two_websockets,
}


World = tuple[asyncio.Runner, Node, Bus]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One bus for all scenarios, on the loop of `polybus serve`."""
    bus = run_bus("news", "flood", "large", "quiet", connectors=CONNECTORS, **SETTINGS)
    with (
        asyncio.Runner(loop_factory=new_event_loop) as runner,
        pytest.MonkeyPatch.context() as patch,
    ):
        for module in (accounts, throttle):
            patch.setattr(module, "DELAY_S_MIN", 0.0)
        node = runner.run(bus.__aenter__())
        runner.run(node.accounts.set_password("default", "right"))
        tcp, udp, queue, tls = (int(one.rpartition(":")[2]) for one in node.addresses)
        ports = Bus(tcp, udp, queue, tls)
        runner.run(asyncio.to_thread(prepare, ports))
        yield runner, node, ports
        runner.run(bus.__aexit__(None, None, None))


def prepare(bus: Bus) -> None:
    bus.key = new_session(bus, '{"topics":["news"]}')
    talk(bus.tcp, frame("news?receipt=1", b"first"), until=b"$receipt")
    for _ in range(8):
        talk(bus.tcp, frame("large?receipt=1", bytes(1 << 20)), until=b"$receipt")


async def left_behind(node: Node, bus: Bus, scenario: Scenario) -> Counter[str]:
    """What the collector finds after ROUNDS rounds, by type; only what each round leaves."""

    async def rounds(count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(scenario, bus)
        await until(lambda: not node.tcp.connections)

    await rounds(1)
    gc.collect()
    # What exists already is of no interest, and takes the collector long.
    gc.freeze()
    gc.disable()
    found: Counter[str] = Counter()
    try:
        await rounds(ROUNDS)
        # Requests under way and timers may keep a connection for some turns of the loop.
        await until(lambda: not count_garbage(found))
    finally:
        gc.enable()
        gc.unfreeze()
    return Counter({name: count for name, count in found.items() if count >= ROUNDS})


def count_garbage(found: Counter[str]) -> int:
    """Add what only the collector finds; return how many parts of connections are still in use."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found.update(filter(None, map(of_a_connection, gc.garbage)))
    gc.garbage.clear()
    gc.collect()
    return sum(isinstance(one, PARTS) for one in gc.get_objects())


def of_a_connection(one: Any) -> str | None:
    """The name of what a connection may have left; None for garbage of other threads.

    A connection's cycle has an object or a frame of the bus in it, or of what it serves with.
    """
    if isinstance(one, TracebackType):
        one = one.tb_frame
    if isinstance(one, FrameType):
        name = f"{one.f_globals.get('__name__')}.{one.f_code.co_name}"
    else:
        name = f"{getattr(one, '__module__', None)}.{type(one).__qualname__}"
    return name if name.startswith(SERVING) else None


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_connection_leaves_no_cycle(world: World, name: str) -> None:
    """Nor does anything else keep it: it is gone soon after its socket."""
    runner, node, bus = world
    assert not runner.run(left_behind(node, bus, SCENARIOS[name]))
