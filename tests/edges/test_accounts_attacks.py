"""Attacks on a bus with accounts: what happens, and that other accounts get all their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from accounts_http_kit import PASSWORDS, Bus, accounts_bus
from accounts_kit import SPEAKERS, peer_of
from bad_input_kit import ResidentGrowth
from edge_kit import TIMEOUT_S, UdpClient, frame, line, open_connections, until
from http_kit import recv
from warm_kit import WARM

from polybus.edges.node import Node
from polybus.services.accounts import accounts, passwords, throttle
from polybus.testing import ScriptedPeer

FRAMES = SPEAKERS["boson-frames"]
COUNT = 200
HALVES = [b"", frame("$login", b"shop\ntwo")[:9], b'{"messagetype":"login","us', b"GET / HT"]
HALF_OPEN = 10_000
HOLDER = """
import socket, sys
port, count, *halves = sys.argv[1:]
peers = []
for number in range(int(count)):
    peers.append(socket.create_connection(("127.0.0.1", int(port))))
    peers[-1].sendall(bytes.fromhex(halves[number % len(halves)]))
print("open", flush=True)
sys.stdin.read()
"""
"""Opens connections, and holds them until its input ends."""


@contextlib.asynccontextmanager
async def others_go_on(bus: Bus) -> AsyncIterator[None]:
    """The account `other` publishes while the block runs, and has a receipt for every message.

    It keeps its speed: a normal client is answered within a second, whatever others do. Of single
    answers a busy machine may delay some.
    """
    bus.node.bus.create_topic("other/calm")
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    async def publish() -> list[float]:
        async with peer_of(bus.node, FRAMES, "other", PASSWORDS["other"]) as peer:
            waited_s: list[float] = []
            while len(waited_s) < COUNT or not stop.is_set():
                began_s = loop.time()
                await peer.send(FRAMES.publish("calm", "x"))
                assert (await FRAMES.hear(peer))[0] == "receipt"
                waited_s.append(loop.time() - began_s)
            return waited_s

    publishing = asyncio.create_task(publish())
    try:
        yield
    finally:
        stop.set()
        waited_s = await publishing
    assert bus.node.bus.log.bounds("other/calm").stop == len(waited_s) >= COUNT
    assert sorted(waited_s)[len(waited_s) * 9 // 10] < 1.0


@pytest.fixture
def without_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (accounts, throttle):
        monkeypatch.setattr(module, "DELAY_S_MIN", 0.0)
    yield


@pytest.mark.slow
async def test_connections_that_never_log_in_are_closed_and_hold_little() -> None:
    """Half a frame, half a login, nothing at all: each is closed in its time."""
    limits = {"detect-timeout-s": 1.0, "message-timeout-s": 1.0}
    async with accounts_bus(limits=limits) as bus, contextlib.AsyncExitStack() as stack:
        async with others_go_on(bus):
            peers = [ScriptedPeer(bus.node.tcp_port, timeout_s=TIMEOUT_S) for _ in range(200)]
            for number, peer in enumerate(peers):
                await stack.enter_async_context(peer)
                if half := HALVES[number % len(HALVES)]:
                    await peer.send(half)
            # Those that have begun something; silence is closed after a minute.
            await until(lambda: len(bus.node.tcp.connections) <= 51)


@contextlib.asynccontextmanager
async def half_open(node: Node, count: int) -> AsyncIterator[None]:
    """Connections that have sent half of something, while the block runs."""
    before = len(node.tcp.connections)
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, str(node.tcp_port), str(count)),
        *(half.hex() for half in HALVES),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert await holder.stdout.readline() == b"open\n"
    await until(lambda: len(node.tcp.connections) >= before + count)
    yield
    holder.stdin.close()
    await holder.wait()


@pytest.mark.slow
async def test_ten_thousand_half_open_connections_hold_little_and_delay_nobody() -> None:
    async with accounts_bus() as bus, contextlib.AsyncExitStack() as stack:
        stack.enter_context(many_files())
        # Without the traffic of others, which fills caches.
        with ResidentGrowth() as growth:
            await stack.enter_async_context(half_open(bus.node, HALF_OPEN))
            held = [one.unfinished_bytes for one in open_connections(bus.node)]
            assert max(held) < 64 << 10 and sum(held) < HALF_OPEN * 64
        assert growth.peak_bytes < 64 << 20, growth.peak_bytes
        async with others_go_on(bus), half_open(bus.node, HALF_OPEN // 10):
            pass
        await stack.aclose()
        await until(lambda: len(bus.node.tcp.connections) < 5)


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """This process and its children may open as many files as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
async def test_a_flood_of_sign_ups_makes_few_accounts_and_few_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[str] = []
    hash_of = passwords.hash_of

    def counted(password: str) -> str:
        hashed.append(password)
        return hash_of(password)

    monkeypatch.setattr(passwords, "hash_of", counted)
    async with accounts_bus(accounts={"default": "off", "signup": True}) as bus:
        before = len(bus.node.accounts.store.accounts)
        hashed.clear()
        client = (await bus.client()).client
        async with others_go_on(bus):
            answers = []
            for number in range(300):
                body = {"name": f"new-{number % 20}", "password": "x"}
                answers.append((await client.post("/v1/signup", json=body)).status_code)
        assert sorted(set(answers)) == [201, 429]
        assert answers.count(201) == len(hashed) == 10
        assert len(bus.node.accounts.store.accounts) == before + 10


@pytest.mark.slow
@pytest.mark.parametrize("user", ["", "shop"])
async def test_a_million_parts_end_the_connection_of_who_sends_them(user: str) -> None:
    limits = {"parts-max": 10_000}
    async with accounts_bus(limits=limits) as bus, others_go_on(bus):
        async with peer_of(bus.node, FRAMES, user, PASSWORDS.get(user, "correct horse")) as peer:
            part = frame("news", b"x", 1)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    await peer.send(part * 10_000)
            with contextlib.suppress(ConnectionError):
                text = await peer.read_to_end()
                assert b"boson.parts-too-many" in text or (not user and b"auth.needed" in text)
            await until(lambda: len(bus.node.tcp.connections) <= 1)
        assert bus.node.bus.log.bounds("shop/news").stop == 0


async def test_a_config_that_breaks_again_and_again_concerns_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "SWEEP_S", 0.01)
    async with accounts_bus() as bus, others_go_on(bus):
        problems = bus.node.accounts.configs.problems
        path = bus.node.data / "accounts" / "shop" / "config.json"
        for broken in ("{", "[]", '{"limits":{"bytes-max":0}}', '{"x":' * 10_000, "\x00" * 100_000):
            path.write_text(broken)
            await until(lambda: "shop" in problems)
            path.write_text("{}")
            await until(lambda: not problems)
        path.unlink()
        toml = path.with_suffix(".toml")
        toml.write_text("x = " + "[" * 10_000)
        await until(lambda: "shop" in problems)


async def test_a_revoked_token_ends_what_it_opened_on_every_protocol(without_delays: None) -> None:
    async with accounts_bus() as bus, contextlib.AsyncExitStack() as stack:
        node = bus.node
        node.accounts.store.make_token("shop")
        token = node.accounts.store.make_token("shop")
        client = await bus.by_token(token)
        key = await client.open_session("news")
        udp = await stack.enter_async_context(UdpClient(node.udp_port))
        await udp.send(line("login", token=token))
        assert json.loads(await udp.read_line())["messagetype"] == "login-ack"
        await udp.send(line("register", topics=["news"], ack=True))
        await udp.read_line()
        peers = {}
        for name, speaker in SPEAKERS.items():
            peer = await stack.enter_async_context(peer_of(node, speaker, "", token))
            await peer.send(speaker.subscribe("news"))
            assert (await speaker.hear(peer))[0] == "subscribed"
            peers[name] = peer
        waiting = asyncio.create_task(client.client.get("/v1/topics/news/messages?wait-s=20"))
        await until(lambda: bool(node.http.waiters))
        node.accounts.revoke_token("shop", token.split("_")[1])
        for name, peer in peers.items():
            kind, code, _ = await SPEAKERS[name].hear(peer)
            assert (kind, code) in (("error", "auth.ended"), ("error", "000401"))
            assert await peer.read_to_end() == b""
        assert json.loads(await udp.read_line())["error-code"] == "000401"
        await udp.send(line("register", topics=["news"], ack=True))
        assert json.loads(await udp.read_line())["error-code"] == "000401"
        await (await bus.of("shop")).publish("news", b"1")
        assert (await waiting).status_code in (401, 404)
        assert (await client.client.get("/v1/topics")).status_code == 401
        # A session ends with the token that made it.
        async with client.websocket(key) as websocket:
            assert await recv(websocket) == {"0": [["session.unset", "noSession"]]}
        protocols = {one.protocol for one in node.bus.topic("shop/news").subscribers}
        assert protocols <= {"msgstream"}


PATHS = [
    "../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "..",
    "a\x00b",
    "shop/../other/news",
    "shop\\news",
    "<script>alert(1)</script>",
    "ⅷ" * 200,
]


async def test_names_that_are_paths_or_scripts_are_the_same_404_and_touch_no_file() -> None:
    async with accounts_bus() as bus:
        client = (await bus.of("other")).client
        before = sorted(path for path in bus.node.data.rglob("*"))
        for name in PATHS:
            quoted = "".join(f"%{byte:02X}" for byte in name.encode())
            answers = [
                await client.get(f"/v1/topics/{quoted}"),
                await client.get(f"/v1/topics/{quoted}/messages"),
                await client.delete(f"/v1/topics/{quoted}"),
                await client.post(f"/v1/topics/{quoted}/messages", content=b"1"),
            ]
            found = {(one.status_code, one.json()["code"]) for one in answers}
            assert found == {(404, "topic.unknown")}, name
            for answer in answers:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["x-content-type-options"] == "nosniff"
            staged = await client.post(f"/v1/staging/{quoted}/0-aaaaaaaa.arrows", content=b"x")
            assert staged.status_code in (400, 404), name
            staged = await client.post(f"/v1/staging/p/{quoted}", content=b"x")
            assert staged.status_code in (400, 404), name
            shown = await (await bus.admin()).client.get(f"/v1/accounts/{quoted}")
            assert shown.status_code == 404, name
        assert sorted(path for path in bus.node.data.rglob("*")) == before


def test_a_hash_that_was_stolen_is_expensive_to_guess() -> None:
    """In a process of its own: in this one passwords are hashed quickly."""
    program = "from polybus.services.accounts.passwords import hash_of; print(hash_of('secret'))"
    made = subprocess.run([sys.executable, "-c", WARM + program], capture_output=True, check=True)
    assert made.stdout.startswith(b"$argon2id$v=19$m=19456,t=2,p=1$")
