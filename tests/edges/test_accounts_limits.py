"""Quotas of accounts, their own config files, and queue connectors of accounts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from accounts_kit import PASSWORD, SPEAKERS, Speaker, bus_with_accounts, peer_of
from edge_kit import TIMEOUT_S, until

from polybus.edges.node import Node
from polybus.services.accounts import accounts as service
from polybus.testing import ScriptedPeer, run_bus

RATE = {"boson-frames": "account.rate", "boson-properties": "account.rate", "goms": "000429"}


def configure(node: Node, account: str, **settings: object) -> None:
    path = Path(node.config.data) / "accounts" / account / "config.json"
    path.write_text(json.dumps(settings))


@pytest.fixture(autouse=True)
def sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SWEEP_S", 0.05)
    monkeypatch.setattr(service, "MEASURE_SWEEPS", 1)


@pytest.mark.parametrize("protocol", SPEAKERS)
async def test_an_account_over_its_rate_is_refused_and_others_are_not(protocol: str) -> None:
    speaker = SPEAKERS[protocol]
    async with (
        bus_with_accounts() as node,
        peer_of(node, speaker, "shop") as shop,
        peer_of(node, speaker, "office") as office,
    ):
        configure(node, "shop", limits={"messages-per-s-max": 5})
        await until(lambda: node.accounts.configs.quotas["shop"].messages_per_s == 5)
        for peer in (shop, office):
            await peer.send(speaker.subscribe("news"))
            assert await speaker.hear(peer) == ("subscribed", "news", "")
            # In single writes: a batch is taken whole.
            for number in range(30):
                await peer.send(speaker.publish("news", str(number)))
                await asyncio.sleep(0.002)
        heard = [await speaker.hear(shop)]
        while heard[-1][0] != "error":
            heard.append(await speaker.hear(shop))
        assert heard[-1][1] == RATE[protocol]
        await until(lambda: node.bus.log.bounds("office/news").stop == 30)
        assert 5 <= node.bus.log.bounds("shop/news").stop < 20
        await asyncio.sleep(0.5)
        before = node.bus.log.bounds("shop/news").stop
        await shop.send(speaker.publish("news", "later"))
        await until(lambda: node.bus.log.bounds("shop/news").stop == before + 1)


async def test_a_full_account_publishes_nothing_until_there_is_room() -> None:
    speaker = SPEAKERS["boson-frames"]
    async with bus_with_accounts() as node, peer_of(node, speaker, "shop") as peer:
        describe = node.bus.log.describe
        size = 2000

        def described(topic: str) -> dict[str, int]:
            return describe(topic) | {"history-bytes": size}

        node.bus.log.describe = described  # type: ignore[method-assign]
        configure(node, "shop", limits={"bytes-max": 1000})
        await until(lambda: node.accounts.configs.quotas["shop"].full is not None)
        await peer.send(speaker.publish("news", "x"))
        assert (await speaker.hear(peer))[:2] == ("error", "account.bytes")
        size = 10
        await until(lambda: node.accounts.configs.quotas["shop"].full is None)
        await peer.send(speaker.publish("news", "x"))
        assert (await speaker.hear(peer))[0] == "receipt"


async def test_an_account_has_a_number_of_connections() -> None:
    speaker: Speaker = SPEAKERS["goms"]
    async with bus_with_accounts() as node:
        configure(node, "shop", limits={"connections-max": 1})
        await until(lambda: node.accounts.configs.limits["shop"].connections_max == 1)
        async with peer_of(node, speaker, "shop"), peer_of(node, speaker) as second:
            await second.send(speaker.login("shop", PASSWORD))
            assert (await speaker.hear(second))[:2] == ("error", "000429")
            async with peer_of(node, speaker, "office"):
                pass
        await until(lambda: not node.tcp.connections)
        async with peer_of(node, speaker, "shop"):
            pass


async def test_a_config_that_breaks_changes_nothing_and_is_told() -> None:
    speaker = SPEAKERS["boson-frames"]
    async with bus_with_accounts() as node:
        permission = {"account": "office", "topics": "sport", "rights": ["subscribe"]}
        topics = ["Sport", {"name": "short", "retention": {"age-s": 60}}]
        configure(node, "shop", topics=topics, permissions=[permission], retention={"bytes": 99})
        await until(lambda: node.bus.has_topic("shop/short"))
        assert node.bus.log.settings("shop/sport").retention_bytes == 99
        assert node.bus.log.settings("shop/short").retention_age_s == 60
        async with peer_of(node, speaker, "office") as peer:
            await peer.send(speaker.subscribe("shop/sport"))
            assert await speaker.hear(peer) == ("subscribed", "shop/sport", "")
            problems = node.accounts.configs.problems
            for broken in ({"topics": ["a/b"]}, {"limits": {"x": 1}}, {"limits": {"bytes-max": 0}}):
                configure(node, "shop", **broken)
                await until(lambda: "shop" in problems)
                configure(node, "shop", permissions=[permission])
                await until(lambda: not problems)
            (Path(node.config.data) / "accounts" / "shop" / "config.json").write_text("{")
            await until(lambda: "shop" in problems)
            assert node.bus.topic("shop/sport").subscribers
            (Path(node.config.data) / "accounts" / "shop" / "config.json").unlink()
            # The permission goes with the file.
            assert (await speaker.hear(peer))[:2] == ("error", "topic.deleted")


def length_and(value: bytes) -> bytes:
    return len(value).to_bytes(4) + value


QUEUE = {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "jobs", "account": "shop"}


async def test_a_queue_belongs_to_its_account_and_may_require_a_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = str(tmp_path_factory.mktemp("data"))
    async with run_bus(data=data) as node:
        await node.accounts.create("shop", PASSWORD)
        await node.accounts.create("office", PASSWORD)
        node.bus.create_topic("shop/jobs")
        token = node.accounts.store.make_token("shop")
        foreign = node.accounts.store.make_token("office")
    connectors = [QUEUE | {"token-required": True}]
    async with run_bus(data=data, connectors=connectors) as node:
        good, bad = (ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) for _ in range(2))
        async with good, bad:
            await good.send(length_and(token.encode()) + length_and(b"one") + length_and(b"two"))
            await until(lambda: node.bus.log.bounds("shop/jobs").stop == 2)
            await bad.send(length_and(foreign.encode()) + length_and(b"three"))
            with pytest.raises(ConnectionResetError):
                await bad.read(1)
        assert node.bus.log.bounds("shop/jobs").stop == 2
    async with run_bus(data=data, connectors=[QUEUE]) as node:
        async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
            await peer.send(length_and(b"four"))
            await until(lambda: node.bus.log.bounds("shop/jobs").stop == 3)
