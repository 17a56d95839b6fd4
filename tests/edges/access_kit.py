"""What the tests of the access table share: a bus with its accounts, and every request to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from accounts_kit import SPEAKERS, Speaker
from edge_kit import TIMEOUT_S, frame, line, properties, until

from polybus.edges import access_matrix
from polybus.edges.access_matrix import DONE, PeerRole
from polybus.edges.node import Node
from polybus.services.accounts.records import RIGHTS
from polybus.testing import run_bus

TOPIC = "shop/shared"
OPEN = "open"
"""A topic of the default account."""
MARKER = "no-such-topic"
PASSWORD = "secret"
QUEUE = {"protocol": "tcp", "port": 0, "speaks": "queue"}
CONNECTORS = [
    {"protocol": "tcp", "port": 0},
    {"protocol": "udp", "port": 0, "speaks": "goms"},
    QUEUE | {"topic": "shared", "account": "shop", "token-required": True},
    QUEUE | {"topic": OPEN},
]


LIMITS: dict[str, dict[str, Any]] = {
    "token-publish": {"rights": ["publish"]},
    "token-subscribe": {"rights": ["subscribe"]},
    "token-administer": {"rights": ["administer"]},
    "token-elsewhere": {"topics": ["other"]},
}


def token_of(node: Node, role: PeerRole) -> str:
    """A new token of `shop`, limited as the role says; others have an end."""
    limits = LIMITS.get(role, {"expires": time.time() + 3600})
    return node.accounts.store.make_token("shop", **limits)


def end_token(node: Node, role: PeerRole, token: str) -> None:
    """Revoke a token, or let the time of all that have an end pass."""
    found = node.accounts
    if role == "revoked":
        found.revoke_token("shop", token.split("_")[1])
        return
    found._clock_s = lambda: time.time() + 7200
    assert found._sweep is not None
    found._sweep.cancel()
    found._on_sweep()
    found._clock_s = time.time


@contextlib.contextmanager
def held_logins(node: Node) -> Iterator[Callable[[], None]]:
    """Logins are not answered before the function is called."""
    gate = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("log_in", "log_in_by_token"):
            patch.setattr(node.accounts, name, _later(gate, getattr(node.accounts, name)))
        yield gate.set


def _later(gate: asyncio.Event, log_in: Any) -> Any:
    async def later(*given: str) -> Any:
        await gate.wait()
        return await log_in(*given)

    return later


@contextlib.contextmanager
def default_let_in(node: Node) -> Iterator[None]:
    settings = msgspec.structs.replace(node.accounts._settings, default="loopback")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.accounts, "_settings", settings)
        yield


class Place(NamedTuple):
    """What is asked for: a topic as the peer calls it, its full name, and a payload in it.

    `registers`: a goMS client registers before it sends, if it can.
    """

    shown: str
    full: str
    blob: str
    registers: bool = False


@contextlib.asynccontextmanager
async def table_bus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """An account for each role; `shop` owns the topic, and the others may do what they are named.

    The account of a queue connector must exist when the bus starts.
    """
    data = str(tmp_path_factory.mktemp("data"))
    async with run_bus(data=data) as node:
        for name in ("shop", "none", *RIGHTS):
            await node.accounts.create(name, PASSWORD)
        await node.accounts.set_password("default", PASSWORD)
        for topic in (TOPIC, OPEN):
            node.bus.create_topic(topic)
        for right in RIGHTS:
            node.accounts.grant("shop", right, "shared", [right])
    async with run_bus(data=data, accounts={"default": "off"}, connectors=CONNECTORS) as node:
        yield node


def bytes_of(name: str, protocol: str, topic: str, blob: str) -> bytes:
    """The bytes of a request."""
    speaker = SPEAKERS.get(protocol, SPEAKERS["goms"])
    first, end = ("hbff", b"\x03"), ("hbff", b"\x00")
    named = (("topic", topic.encode()), ("content", b"x"))
    by_frames = protocol == access_matrix.FRAMES
    match name:
        case "publish":
            return speaker.publish(topic, "x")
        case "publish in parts" if by_frames:
            return frame(topic, b"x", 3) + frame("", b"", 0)
        case "publish in parts":
            return properties(first, *named) + properties(end)
        case "subscribe, from any position":
            return speaker.subscribe(topic)
        case "subscribe to all topics that one may read":
            return frame("$subscribe", b"*") if by_frames else properties(("hbfs", b"*"))
        case "unsubscribe from all topics":
            nothing = {
                access_matrix.FRAMES: frame("$unsubscribe"),
                access_matrix.PROPERTIES: properties(("hbfu", b"")),
            }
            return nothing.get(protocol, line("logout"))
        case "close":
            return line("close")
        case "download a payload of the topic":
            return line("download", id=blob, **{"from": 0, "bytes": 16})
    raise AssertionError(name)


async def answer_of(peer: Any, speaker: Speaker, request: bytes) -> str:
    """The code of the first error that a request gets, or DONE if it gets none."""
    await peer.send(request)
    await peer.send(speaker.subscribe(MARKER))
    heard = [await speaker.hear(peer)]
    while heard[-1][0] != "error":
        heard.append(await speaker.hear(peer))
    kind, code, text = heard[-1]
    if kind == "error" and MARKER not in text and code not in ("auth.needed", "000401"):
        # The marker is still to come.
        await speaker.hear(peer)
        return code
    if MARKER in text:
        return DONE
    # Both are refused to a stranger.
    assert (await speaker.hear(peer))[1] == code
    return code


async def ask(node: Node, peer: Any, name: str, protocol: str, place: Place) -> str:
    """The answer to a request: DONE, or the code of the refusal."""
    speaker = SPEAKERS.get(protocol, SPEAKERS["goms"])
    if (
        name == "publish"
        and protocol in (access_matrix.GOMS, access_matrix.UDP)
        and place.registers
    ):
        await peer.send(speaker.subscribe(place.shown))
        assert (await speaker.hear(peer))[0] == "subscribed"
    request = bytes_of(name, protocol, place.shown, place.blob)
    if name.startswith("download"):
        # Its answer comes from the disk, and the marker's may come before.
        await peer.send(request)
        kind, code, _ = await speaker.hear(peer)
        return DONE if kind == "chunk" else code
    if name == "close":
        await peer.send(request)
        if protocol == access_matrix.UDP:
            address = peer._transport.get_extra_info("sockname")
            await until(lambda: address not in node.server._udp_edges[0]._peers)
        else:
            assert await peer.read_to_end() == b""
        return DONE
    before = node.bus.log.bounds(place.full).stop
    answer = await answer_of(peer, speaker, request)
    if name.startswith("publish"):
        # What is done is stored, and what is refused is not.
        expected = before + (answer == DONE)
        await until(lambda: node.bus.log.bounds(place.full).stop == expected)
    return answer


async def large_payload(node: Node, account: str, topic: str) -> str:
    """The id of a payload in a topic of an account."""
    base = f"http://127.0.0.1:{node.tcp_port}/v1/topics/{topic.replace('/', '%2F')}"
    async with httpx.AsyncClient(auth=(account, PASSWORD), timeout=TIMEOUT_S) as client:
        assert (await client.put(f"{base}/blob", content=b"x" * (2 << 20))).status_code == 200
        messages = (await client.get(f"{base}/messages")).json()["messages"]
    return str(messages[-1]["reference"]["id"])
