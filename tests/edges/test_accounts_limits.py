"""Quotas of accounts, their own config files, and queue connectors of accounts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from accounts_http_kit import accounts_bus
from accounts_kit import PASSWORD, SPEAKERS, Speaker, bus_with_accounts, peer_of
from edge_kit import TIMEOUT_S, until

from polybus.edges.node import Node
from polybus.errors import UsageError
from polybus.log.interface import TopicSettings
from polybus.services.accounts import accounts as service
from polybus.services.accounts import store as store_module
from polybus.services.accounts.store import AccountStore
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


async def test_an_account_has_a_number_of_bytes_a_second() -> None:
    speaker = SPEAKERS["boson-frames"]
    async with (
        bus_with_accounts() as node,
        peer_of(node, speaker, "shop") as shop,
        peer_of(node, speaker, "office") as office,
    ):
        configure(node, "shop", limits={"bytes-per-s-max": 1000})
        await until(lambda: node.accounts.configs.quotas["shop"].bytes_per_s == 1000)
        # A batch is taken whole while the account owes nothing: this one owes nine seconds.
        for peer in (shop, office):
            await peer.send(speaker.publish("news", "x" * 10_000))
            assert (await speaker.hear(peer))[0] == "receipt"
        await shop.send(speaker.publish("news", "y"))
        kind, code, text = await speaker.hear(shop)
        assert (kind, code) == ("error", "account.rate")
        assert "bytes-per-s-max" in text
        await office.send(speaker.publish("news", "y"))
        assert (await speaker.hear(office))[0] == "receipt"
        assert node.bus.log.bounds("shop/news").stop == 1


async def test_a_full_account_publishes_nothing_until_there_is_room() -> None:
    speaker = SPEAKERS["boson-frames"]
    async with bus_with_accounts() as node, peer_of(node, speaker, "shop") as peer:
        size = 2000

        def stored(topic: str, messages: int = 0, value_bytes: int = 0) -> int:
            return size

        node.bus.log.stored_bytes = stored  # type: ignore[method-assign]
        configure(node, "shop", limits={"bytes-max": 1000})
        await until(lambda: "shop" in node.bus.full_accounts)
        await peer.send(speaker.publish("news", "x"))
        assert (await speaker.hear(peer))[:2] == ("error", "account.bytes")
        size = 10
        await until(lambda: "shop" not in node.bus.full_accounts)
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
            for broken in (
                *({"topics": ["a/b"]}, {"limits": {"x": 1}}, {"limits": {"bytes-max": 0}}),
                {"retention": {"age-s": -1}},
                {"topics": [{"name": "sport", "retention": {"bytes": 0}}]},
                {"topics": [{"name": "sport", "schema": "id BIGNT"}]},
            ):
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


async def test_a_changed_retention_in_the_file_applies_to_topics_that_exist(
    tmp_path: Path,
) -> None:
    def kept(node: Node, topic: str) -> tuple[float | None, int | None]:
        settings = node.bus.log.settings(f"shop/{topic}")
        return settings.retention_age_s, settings.retention_bytes

    topics = ["news", {"name": "short", "retention": {"age-s": 60}}]
    async with bus_with_accounts(str(tmp_path)) as node:
        assert kept(node, "news") == (None, None)
        configure(node, "shop", topics=topics, retention={"bytes": 99})
        await until(lambda: kept(node, "news") == (None, 99))
        assert kept(node, "short") == (60, None)
        topics[1] = {"name": "short", "retention": {"age-s": 70}}
        configure(node, "shop", topics=topics)
        await until(lambda: kept(node, "short") == (70, None))
        assert kept(node, "news") == (None, None)
        # What the file does not say otherwise stays as an administrator has set it.
        node.bus.log.change_settings("shop/short", TopicSettings(retention_bytes=5))
        configure(node, "shop", topics=[*topics, "more"])
        await until(lambda: node.bus.has_topic("shop/more"))
        assert kept(node, "short") == (None, 5)
    configure(node, "shop", topics=topics, retention={"age-s": 7})
    async with bus_with_accounts(str(tmp_path)) as node:
        assert (kept(node, "news"), kept(node, "short")) == ((7, None), (70, None))


async def test_packs_and_broadcasts_count_for_the_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = [["chat", "x" * 100]]
    async with accounts_bus() as bus:
        node, shop, other = bus.node, await bus.of("shop"), await bus.of("other")
        keys = [await shop.open_session("news") for _ in range(3)]
        quotas, packs = node.accounts.configs.quotas, f"/v1/sessions/{keys[0]}/packs"
        configure(node, "shop", limits={"messages-per-s-max": 2})
        await until(lambda: quotas["shop"].messages_per_s == 2)
        # A broadcast is one message for each session: this one leaves a debt.
        assert (await shop.client.post("/v1/broadcast", json=pack)).json() == {"sessions": 3}
        for path in (packs, "/v1/broadcast"):
            refused = await shop.client.post(path, json=pack)
            assert (refused.status_code, refused.json()["code"]) == (429, "account.rate")
        assert (await other.client.post("/v1/broadcast", json=pack)).status_code == 202
        await asyncio.sleep(1.1)
        assert (await shop.client.post(packs, json=pack)).status_code == 202
        configure(node, "shop", limits={"bytes-per-s-max": 50})
        await until(lambda: quotas["shop"].bytes_per_s == 50)
        await until(lambda: quotas["shop"].refusal(node.context.clock_us()) is None)
        answers = [await shop.client.post(packs, json=pack) for _ in range(2)]
        assert [one.status_code for one in answers] == [202, 429]
        await shop.client.post("/v1/topics/news/messages", content=b"x" * 2000)
        configure(node, "shop", limits={"bytes-max": 10})
        monkeypatch.setattr(node.bus.log, "stored_bytes", lambda *_: 10)
        await until(lambda: "shop" in node.bus.full_accounts)
        refused = await shop.client.post(packs, json=pack)
        assert (refused.status_code, refused.json()["code"]) == (507, "account.bytes")


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
        configure(node, "shop", limits={"messages-per-s-max": 1})
        await until(lambda: node.accounts.configs.quotas["shop"].messages_per_s == 1)
        async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
            # Accepted as a whole, and over the limit for later ones. A reset is the only error.
            await peer.send(length_and(b"x") * 100)
            await until(lambda: node.bus.log.bounds("shop/jobs").stop == 103)
            await peer.send(length_and(b"refused"))
            with pytest.raises(ConnectionResetError):
                await peer.read(1)
        assert node.bad_peers.counts["account.rate"] == 1
        assert node.bus.log.bounds("shop/jobs").stop == 103


def test_expired_tokens_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "TOKENS_MAX", 2)
    store = AccountStore(tmp_path)
    store.create("shop", None, ())
    for _ in range(5):
        store.make_token("shop", expires=1.0)
    for _ in range(2):
        store.make_token("shop")

    assert len(store.accounts["shop"].tokens) == 2
    with pytest.raises(UsageError, match=r"account\.too-many"):
        store.make_token("shop")


def test_there_is_an_end_to_the_number_of_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AccountStore(tmp_path)
    monkeypatch.setattr(store_module, "ACCOUNTS_MAX", len(store.accounts) + 1)
    store.create("shop", None, ())
    with pytest.raises(UsageError, match=r"account\.too-many"):
        store.create("office", None, ())
    assert not (tmp_path / "accounts" / "office").exists()
