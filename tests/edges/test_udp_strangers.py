"""UDP addresses that may be forged: they get a key and nothing else, until they send it back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from bad_input_kit import START
from edge_kit import line, until

from polybus.edges.node import Node
from polybus.edges.udp import UdpEdge
from polybus.testing import run_bus

STRANGER = ("192.0.2.7", 1234)
OPEN = {"default": "open"}


class Wire:
    """What a UDP edge sends, in place of its socket."""

    def __init__(self, node: Node) -> None:
        self.edge: UdpEdge = node.server._udp_edges[0]
        self.sent: list[tuple[bytes, tuple[str, int]]] = []
        self.edge.send = self._send  # type: ignore[assignment,method-assign]

    def _send(self, data: bytes, address: tuple[str, int]) -> None:
        self.sent.append((bytes(data), address))

    def ask(self, request: bytes, address: tuple[str, int] = STRANGER) -> list[dict[str, object]]:
        """The answers that come at once."""
        self.sent.clear()
        self.edge.datagram_received(request, address)
        return [json.loads(data) for data, _ in self.sent]

    def prove(self, address: tuple[str, int] = STRANGER) -> None:
        (asked,) = self.ask(line("register", topics=["news"]), address)
        proof = line("prove", key=asked["key"])
        assert self.ask(proof, address) == [asked]


REQUESTS = [
    b"x",
    b"{" * 500,
    line("register", topics=["nix" * 80]),
    line("dance" * 20),
    line("register", topics=["news"], ack=True),
    line("send", topics=["news"], ack=True, data=""),
    line("register", topics=["news"], **{"from": "earliest"}),
    line("login", user="shop", password="secret"),
    line("prove", key="0123456789"),
    line("prove", key="\u00e9" * 20),
]


@pytest.fixture
def requests() -> Iterator[bytes]:
    return iter(REQUESTS * 3)


async def test_an_unproven_address_gets_a_key_that_is_not_larger_and_nothing_else(
    requests: Iterator[bytes],
) -> None:
    async with run_bus("news", accounts=OPEN) as node:
        wire = Wire(node)
        for request in requests:
            answers = wire.ask(request)
            # An ack would come later, from the committer.
            await asyncio.to_thread(node.bus.log.sync)
            await asyncio.sleep(0.01)
            assert [one["messagetype"] for one in answers] == ["prove"] * len(wire.sent)
            assert sum(len(data) for data, _ in wire.sent) <= len(request)
        assert not wire.edge._peers
        assert node.bus.log.bounds("news").stop == 0
        assert node.bad_peers.counts["udp.answer-withheld"] > 0


async def test_who_sends_the_key_back_is_a_client_until_it_is_silent() -> None:
    async with run_bus("news", accounts=OPEN, limits={"udp-idle-s": 0.3}) as node:
        wire = Wire(node)
        wire.prove()
        assert wire.ask(line("register", topics=["news"], ack=True)) == [
            {"messagetype": "reg-ack", "topics": ["news"]}
        ]
        # The key of one address is not valid for another.
        (asked,) = wire.ask(line("register", topics=["news"]), ("192.0.2.8", 1234))
        stolen = line("prove", key=asked["key"])
        wire.ask(stolen, ("192.0.2.9", 1234))
        assert list(wire.edge._peers) == [STRANGER]
        await asyncio.sleep(0.3)
        wire.edge._forget_idle()
        assert not wire.edge._peers
        assert wire.ask(line("logout" * 10))[0]["messagetype"] == "prove"


async def test_only_a_new_proof_keeps_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever forges a proven address cannot let the bus send to it forever."""
    async with run_bus("news", accounts=OPEN, limits={"udp-idle-s": 100}) as node:
        wire = Wire(node)
        wire.prove()
        register = line("register", topics=["news"])
        began_s = wire.edge._loop.time()
        now_s = began_s
        monkeypatch.setattr(wire.edge._loop, "time", lambda: now_s)
        assert wire.ask(register) == []
        now_s = began_s + 60
        # It is asked again, and is a client meanwhile.
        asked, repeated = wire.ask(register)
        assert (asked["messagetype"], repeated["error-code"]) == ("prove", "001002")
        wire.ask(line("prove", key="0123456789"))
        now_s = began_s + 101
        wire.edge._forget_idle()
        assert not wire.edge._peers
        wire.prove()
        wire.ask(register)
        for _ in range(5):
            now_s += 60
            asked, _ = wire.ask(register)
            # No answer: a client that sends each request back would send it again, forever.
            assert wire.ask(line("prove", key=asked["key"])) == []
            wire.edge._forget_idle()
            assert STRANGER in wire.edge._peers
        assert node.bus.topic("news").subscribers


async def test_a_proven_address_must_log_in_where_a_connection_must() -> None:
    async with run_bus("news") as node:
        await node.accounts.create("shop", "secret")
        node.bus.create_topic("shop/news")
        wire = Wire(node)
        wire.prove()
        (refused,) = wire.ask(line("register", topics=["news"], ack=True))
        assert refused["error-code"] == "000401"
        wire.ask(line("login", user="shop", password="secret"))
        await until(lambda: wire.sent)
        assert json.loads(wire.sent[0][0]) == {"messagetype": "login-ack", "account": "shop"}
        assert wire.ask(line("register", topics=["news"], ack=True)) == [
            {"messagetype": "reg-ack", "topics": ["news"]}
        ]
        assert node.bus.topic("shop/news").subscribers


async def test_forged_addresses_leave_nothing_behind() -> None:
    async with run_bus("news", accounts=OPEN, limits={"udp-peers-max": 10}) as node:
        wire = Wire(node)
        for number in range(1000):
            wire.ask(START["goms"], (f"192.0.2.{number % 250}", 1000 + number))
        assert not wire.edge._peers
        for number in range(20):
            wire.prove((f"192.0.2.{number}", 1000 + number))
        assert len(wire.edge._peers) == 10
        assert node.bad_peers.counts["udp.too-many"] == 10


async def test_one_machine_leaves_room_for_the_addresses_of_others() -> None:
    async with run_bus("news", accounts=OPEN, limits={"udp-peers-max": 30}) as node:
        wire = Wire(node)
        for port in range(10):
            wire.prove((f"2001:db8::{port:x}", 1000 + port))
        assert len(wire.edge._peers) == 3
        assert node.bad_peers.counts["udp.too-many"] == 7
        wire.prove()
        assert STRANGER in wire.edge._peers
        wire.edge.forget(("2001:db8::1", 1001))
        wire.prove(("2001:db8::9", 1009))
        assert len(wire.edge._peers) == 4
        for address in list(wire.edge._peers):
            wire.edge.forget(address)
        assert not wire.edge._by_source
