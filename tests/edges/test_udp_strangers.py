"""UDP addresses that may be forged: they are told, sent and remembered little."""

from __future__ import annotations

import asyncio
import json

import pytest
from bad_input_kit import START
from edge_kit import frame, line, until

from polybus.testing import ScriptedPeer, run_bus


async def test_an_answer_to_an_unproven_address_is_never_larger_than_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_bus("news") as node:
        edge = node.server._udp_edges[0]
        sent: list[bytes] = []
        monkeypatch.setattr(edge, "send", lambda data, address: sent.append(bytes(data)))
        stranger = ("192.0.2.7", 1234)
        requests = [
            b"x",
            line("register", topics=["nix" * 80]),
            line("dance"),
            line("register", topics=["news"], ack=True),
            line("send", topics=["news"], ack=True, data=""),
            line("register", topics=["news"], **{"from": "earliest"}),
        ]
        requests_bytes = answers_bytes = 0
        for request in requests * 3:
            edge.datagram_received(request, stranger)
            assert sum(map(len, sent)) <= len(request)
            # An ack comes later, from the committer.
            await asyncio.to_thread(node.bus.log.sync)
            await asyncio.sleep(0.01)
            requests_bytes += len(request)
            answers_bytes += sum(map(len, sent))
            assert answers_bytes <= requests_bytes
            sent.clear()
        assert node.bad_peers.counts["udp.answer-withheld"] > 0


async def test_nothing_is_replayed_to_an_address_that_may_be_forged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as writer:
        await writer.send(frame("news?receipt=1", b"x" * 1000))
        await writer.read_frame()
        edge = node.server._udp_edges[0]
        sent: list[bytes] = []
        monkeypatch.setattr(edge, "send", lambda data, address: sent.append(bytes(data)))
        request = line("register", topics=["news"], **{"from": "earliest"}, padding="p" * 200)
        edge.datagram_received(request, ("192.0.2.7", 1234))
        await until(lambda: sent)
        await asyncio.sleep(0.1)
        (answer,) = sent
        assert json.loads(answer)["error-code"] == "000403"


async def test_forged_addresses_leave_nothing_behind() -> None:
    async with run_bus("news", limits={"udp-peers-max": 10}) as node:
        edge = node.server._udp_edges[0]
        for n in range(1000):
            edge.datagram_received(b"garbage", (f"192.0.2.{n % 250}", 1000 + n))
        assert not edge._peers
        for n in range(20):
            edge.datagram_received(START["goms"], ("192.0.2.1", 1000 + n))
        assert len(edge._peers) == 10
        assert node.bad_peers.counts["udp.too-many"] == 10
