"""What the tests of accounts share: the words of each stream protocol, spoken to a bus."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from edge_kit import TIMEOUT_S, frame, line, properties, read_properties

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus

Heard = tuple[str, str, str]
"""What a peer hears: kind (`login`, `message`, `receipt` or `error`), topic or code, and text."""


class Speaker(ABC):
    """One protocol: what to send, and what was heard."""

    needed: str
    failed: str
    unknown: str
    """The code of a topic that cannot be subscribed to."""
    not_sent: str
    """The code of a topic that cannot be published to."""

    @abstractmethod
    def login(self, user: str, secret: str) -> bytes: ...

    @abstractmethod
    def subscribe(self, topic: str) -> bytes: ...

    @abstractmethod
    def publish(self, topic: str, value: str) -> bytes:
        """With a request for a receipt."""

    @abstractmethod
    async def hear(self, peer: ScriptedPeer) -> Heard: ...

    async def hear_all(self, peer: ScriptedPeer, count: int) -> list[Heard]:
        """As many, in any order: a receipt may come before or after its message."""
        return sorted([await self.hear(peer) for _ in range(count)])


class SpeaksFrames(Speaker):
    needed, failed = "auth.needed", "auth.failed"
    unknown = not_sent = "topic.unknown"

    def login(self, user: str, secret: str) -> bytes:
        return frame("$login", f"{user}\n{secret}".encode() if user else secret.encode())

    def subscribe(self, topic: str) -> bytes:
        return frame("$subscribe", f"{topic} tell=position".encode())

    def publish(self, topic: str, value: str) -> bytes:
        return frame(f"{topic}?receipt=1", value.encode())

    async def hear(self, peer: ScriptedPeer) -> Heard:
        topic, content = await peer.read_frame()
        first, _, rest = content.decode().partition(" ")
        if topic == "$position":
            return "subscribed", rest, ""
        if topic in ("$error", "$login", "$receipt"):
            return topic[1:], first, rest
        return "message", topic, content.decode()


class SpeaksProperties(Speaker):
    needed, failed = "auth.needed", "auth.failed"
    unknown = not_sent = "topic.unknown"

    def login(self, user: str, secret: str) -> bytes:
        return properties(("hbfl", f"{user}\n{secret}".encode() if user else secret.encode()))

    def subscribe(self, topic: str) -> bytes:
        return properties(("hbfs", f"{topic} tell=position".encode()))

    def publish(self, topic: str, value: str) -> bytes:
        return properties(("hbfr", b"1"), ("topic", topic.encode()), ("content", value.encode()))

    async def hear(self, peer: ScriptedPeer) -> Heard:
        received = await read_properties(peer)
        found = {key: value.decode() for key, value in received.items() if key != "hbfv"}
        if "hbfe" in found:
            code, _, text = found["hbfe"].partition(" ")
            return "error", code, text
        if "hbfl" in found:
            return "login", found["hbfl"], ""
        if "content" in found:
            return "message", found["topic"], found["content"]
        return ("receipt", "1", "") if "hbfr" in found else ("subscribed", found["topic"], "")


class SpeaksGoms(Speaker):
    needed = failed = "000401"
    unknown, not_sent = "001001", "002001"

    def login(self, user: str, secret: str) -> bytes:
        given = {"user": user, "password": secret} if user else {"token": secret}
        return line("login", **given)

    def subscribe(self, topic: str) -> bytes:
        return line("register", topics=[topic], ack=True)

    def publish(self, topic: str, value: str) -> bytes:
        return line("send", topics=[topic], ack=True, data=value)

    async def hear(self, peer: ScriptedPeer) -> Heard:
        found = json.loads(await peer.read_line())
        kind = found["messagetype"]
        if kind == "error":
            return "error", found["error-code"], found["error"]
        if kind == "chunk":
            return kind, found["id"], ""
        if kind == "login-ack":
            return "login", found["account"], ""
        if kind == "message":
            return "message", ",".join(found["topics"]), found["data"]
        kinds = {"send-ack": "receipt", "reg-ack": "subscribed"}
        return kinds[kind], ",".join(found["topics"]), ""


SPEAKERS: dict[str, Speaker] = {
    "boson-frames": SpeaksFrames(),
    "boson-properties": SpeaksProperties(),
    "goms": SpeaksGoms(),
}


PASSWORD = "correct horse"
OFF = {"default": "off"}


@contextlib.asynccontextmanager
async def bus_with_accounts(data: str | None = None) -> AsyncIterator[Node]:
    """Accounts `shop` and `office`; both have a topic `news`, as the default account has."""
    async with run_bus("news", accounts=OFF, data=data) as node:
        for name in ("shop", "office"):
            if name not in node.accounts.store.accounts:
                await node.accounts.create(name, PASSWORD)
                node.bus.create_topic(f"{name}/news")
        yield node


@contextlib.asynccontextmanager
async def peer_of(
    node: Node, speaker: Speaker, user: str = "", secret: str = PASSWORD
) -> AsyncIterator[ScriptedPeer]:
    """A peer that is logged in, unless it has no user."""
    async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        if user or secret != PASSWORD:
            await peer.send(speaker.login(user, secret))
            kind, _, _ = await speaker.hear(peer)
            assert kind == "login"
        yield peer
