"""Accounts on the stream protocols: logins, names, grants, and what happens when they end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from accounts_kit import OFF, PASSWORD, SPEAKERS, Speaker, bus_with_accounts, peer_of
from edge_kit import until

from polybus.errors import ConfigError
from polybus.services.accounts import accounts, throttle
from polybus.testing import run_bus


@pytest.fixture(params=SPEAKERS)
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return SPEAKERS[request.param]


@pytest.fixture
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong login is answered at once; test_accounts_abuse.py measures how late it usually is."""
    for module in (accounts, throttle):
        monkeypatch.setattr(module, "DELAY_S_MIN", 0.0)


async def test_before_a_login_everything_is_refused_and_stores_nothing(speaker: Speaker) -> None:
    async with bus_with_accounts() as node, peer_of(node, speaker) as peer:
        for sent in (speaker.subscribe("news"), speaker.publish("news", "x")):
            await peer.send(sent)
            assert (await speaker.hear(peer))[:2] == ("error", speaker.needed)
        assert node.bus.log.bounds("news").stop == 0
        assert not node.bus.topic("news").subscribers


async def test_what_follows_a_login_at_once_waits_for_it(speaker: Speaker) -> None:
    async with bus_with_accounts() as node, peer_of(node, speaker) as peer:
        sent = (speaker.login("SHOP", PASSWORD), speaker.subscribe("news"))
        await peer.send(b"".join(sent) + speaker.publish("news", "hello"))
        assert await speaker.hear(peer) == ("login", "shop", "")
        assert await speaker.hear(peer) == ("subscribed", "news", "")
        heard = {kind for kind, _, _ in await speaker.hear_all(peer, 1)}
        assert heard <= {"message", "receipt"}
        assert node.bus.log.bounds("shop/news").stop == 1
        assert node.bus.log.bounds("news").stop == 0


async def test_a_wrong_login_leaves_the_connection_and_may_be_repeated(
    speaker: Speaker, quick_refusals: None
) -> None:
    async with bus_with_accounts() as node, peer_of(node, speaker) as peer:
        for user, secret in (("shop", "tr0ub4dor"), ("nobody", "tr0ub4dor"), ("", "pbt_1_2")):
            await peer.send(speaker.login(user, secret) + speaker.publish("news", "x"))
            kind, code, text = await speaker.hear(peer)
            assert (kind, code) == ("error", speaker.failed)
            assert secret not in text
            assert (await speaker.hear(peer))[:2] == ("error", speaker.needed)
        await peer.send(speaker.login("shop", PASSWORD))
        assert await speaker.hear(peer) == ("login", "shop", "")


@pytest.mark.parametrize("other", SPEAKERS)
async def test_equal_names_are_different_topics_and_a_grant_shares_one(
    speaker: Speaker, other: str
) -> None:
    reads = SPEAKERS[other]
    async with (
        bus_with_accounts() as node,
        peer_of(node, speaker, "shop") as shop,
        peer_of(node, reads, "office") as office,
    ):
        await shop.send(speaker.subscribe("news"))
        await speaker.hear(shop)
        await office.send(reads.subscribe("news") + reads.subscribe("shop/news"))
        assert await reads.hear(office) == ("subscribed", "news", "")
        kind, code, text = await reads.hear(office)
        assert (kind, code) == ("error", reads.unknown)
        if other == "goms":
            assert await reads.hear(office) == ("subscribed", "", "")
        await office.send(reads.subscribe("shop/nothing"))
        missing = await reads.hear(office)
        # The same as for a topic that does not exist.
        assert missing == (kind, code, text.replace("shop/news", "shop/nothing"))
        if other == "goms":
            await reads.hear(office)
        node.accounts.grant("shop", "office", "ne*", ["subscribe"])
        await office.send(reads.subscribe("shop/news"))
        assert await reads.hear(office) == ("subscribed", "shop/news", "")
        await shop.send(speaker.publish("news", "hello"))
        assert await reads.hear(office) == ("message", "shop/news", "hello")
        await office.send(reads.publish("shop/news", "no"))
        assert (await reads.hear(office))[:2] == ("error", reads.not_sent)
        assert node.bus.log.bounds("shop/news").stop == 1
        node.accounts.revoke("shop", "office", "ne*")
        assert (await reads.hear(office))[0] == "error"
        await shop.send(speaker.publish("news", "again"))
        await until(lambda: node.bus.log.bounds("shop/news").stop == 2)
        await office.send(reads.publish("news", "own"))
        kinds = [heard[:2] for heard in await reads.hear_all(office, 1)]
        assert kinds in ([("message", "news")], [("receipt", "news")], [("receipt", "1")])


async def test_a_token_is_limited_and_ends_when_it_is_revoked_or_expires(
    speaker: Speaker, quick_refusals: None
) -> None:
    async with bus_with_accounts() as node:
        store = node.accounts.store
        token = store.make_token("shop", topics=["n*"], rights=["subscribe"])
        node.bus.create_topic("shop/sport")
        async with peer_of(node, speaker, secret=token) as peer:
            await peer.send(speaker.subscribe("news"))
            assert await speaker.hear(peer) == ("subscribed", "news", "")
            for refused in (speaker.publish("news", "x"), speaker.subscribe("sport")):
                await peer.send(refused)
                assert (await speaker.hear(peer))[0] == "error"
                if refused.startswith(b"{") and b"register" in refused:
                    await speaker.hear(peer)
            node.accounts.revoke_token("shop", token.split("_")[1])
            assert (await speaker.hear(peer))[0] == "error"
            assert await peer.read_to_end() == b""
        short = store.make_token("shop", expires=time.time() + 1.2)
        async with peer_of(node, speaker, secret=short) as peer:
            assert (await speaker.hear(peer))[0] == "error"
            assert await peer.read_to_end() == b""
        async with peer_of(node, speaker) as peer:
            for gone in (token, short):
                await peer.send(speaker.login("", gone))
                assert (await speaker.hear(peer))[:2] == ("error", speaker.failed)


async def test_a_changed_password_or_deleted_account_ends_its_connections(speaker: Speaker) -> None:
    async with (
        bus_with_accounts() as node,
        peer_of(node, speaker, "shop") as shop,
        peer_of(node, speaker, "office") as office,
    ):
        await node.accounts.set_password("shop", "new")
        assert (await speaker.hear(shop))[:2] == ("error", SPEAKERS_ENDED[type(speaker).__name__])
        assert await shop.read_to_end() == b""
        async with peer_of(node, speaker, "shop", "new") as again:
            node.accounts.delete("shop")
            assert (await speaker.hear(again))[0] == "error"
        assert node.bus.topic_names() == ["news", "office/news"]
        await office.send(speaker.subscribe("news"))
        assert await speaker.hear(office) == ("subscribed", "news", "")


SPEAKERS_ENDED = {
    "SpeaksFrames": "auth.ended",
    "SpeaksProperties": "auth.ended",
    "SpeaksGoms": "000401",
}


async def test_a_login_switches_the_account_and_leaves_its_topics(speaker: Speaker) -> None:
    async with bus_with_accounts() as node, peer_of(node, speaker, "shop") as peer:
        await peer.send(speaker.subscribe("news"))
        await speaker.hear(peer)
        await peer.send(speaker.login("office", PASSWORD) + speaker.subscribe("news"))
        assert await speaker.hear(peer) == ("login", "office", "")
        assert await speaker.hear(peer) == ("subscribed", "news", "")
        assert not node.bus.topic("shop/news").subscribers
        assert len(node.bus.topic("office/news").subscribers) == 1


async def test_a_peer_that_is_gone_during_its_login_leaves_nothing(speaker: Speaker) -> None:
    async with bus_with_accounts() as node:
        async with peer_of(node, speaker) as peer:
            await peer.send(speaker.login("shop", "wrong"))
        await until(lambda: not node.tcp.connections)
        await asyncio.sleep(0)
        assert not [one for one in asyncio.all_tasks() if "_log_in" in repr(one)]


async def test_a_stranger_holds_little(speaker: Speaker) -> None:
    async with bus_with_accounts() as node, peer_of(node, speaker) as peer:
        # The beginning of a large message.
        await peer.send(speaker.publish("news", "x" * 60_000)[:-20])
        assert (await speaker.hear(peer))[:2] == ("error", speaker.needed)
        assert await peer.read_to_end() == b""


async def test_accounts_and_their_topics_survive_a_restart(
    speaker: Speaker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = str(tmp_path_factory.mktemp("data"))
    async with bus_with_accounts(data) as node, peer_of(node, speaker, "shop") as peer:
        await peer.send(speaker.subscribe("news") + speaker.publish("news", "kept"))
        await until(lambda: node.bus.log.bounds("shop/news").stop == 1)
    async with bus_with_accounts(data) as node, peer_of(node, speaker, "shop") as peer:
        assert node.bus.log.bounds("shop/news").stop == 1
        await peer.send(speaker.subscribe("news"))
        assert await speaker.hear(peer) == ("subscribed", "news", "")


async def test_without_a_login_loopback_is_the_default_account_unless_it_is_off(
    speaker: Speaker,
) -> None:
    async with run_bus("news") as node:
        await node.accounts.create("shop", PASSWORD)
        node.bus.create_topic("shop/news")
        async with peer_of(node, speaker) as peer:
            await peer.send(speaker.subscribe("news") + speaker.subscribe("shop/news"))
            assert await speaker.hear(peer) == ("subscribed", "news", "")
            assert (await speaker.hear(peer))[:2] == ("error", speaker.unknown)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({}, "accounts.none"),
        ({"accounts": {"default": "off"}}, "accounts.none"),
        ({"accounts": {"default": "open"}}, "accounts.open"),
    ],
)
async def test_a_bus_for_strangers_or_nobody_does_not_start(
    settings: dict[str, Any], code: str
) -> None:
    connectors = [{"protocol": "tcp", "ip": "0.0.0.0", "port": 0}]
    with pytest.raises(ConfigError) as refused:
        async with run_bus("news", connectors=connectors, **settings):
            pass
    assert refused.value.code == code
    assert "127.0.0.1" in refused.value.text or "--insecure" in refused.value.text


async def test_who_does_not_log_in_in_time_is_told_and_closed(speaker: Speaker) -> None:
    limits = {"login-timeout-s": 2.0}
    async with run_bus("news", accounts=OFF, limits=limits) as node:
        await node.accounts.create("shop", PASSWORD)
        async with peer_of(node, speaker, "shop") as known, peer_of(node, speaker) as stranger:
            await stranger.send(speaker.subscribe("news"))
            for _ in range(2):
                assert (await speaker.hear(stranger))[:2] == ("error", speaker.needed)
            assert await stranger.read_to_end() == b""
            await known.send(speaker.subscribe("none"))
            assert (await speaker.hear(known))[1] == speaker.unknown
