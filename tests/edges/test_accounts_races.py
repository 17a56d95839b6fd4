"""Accounts while things happen at the same time: logins in a row, revocation, mixed audiences."""

from __future__ import annotations

import asyncio

import pytest
from accounts_http_kit import accounts_bus
from accounts_kit import PASSWORD, SPEAKERS, bus_with_accounts, peer_of
from edge_kit import TIMEOUT_S, frame, line, until
from test_udp_strangers import Wire

from polybus.client.options import parse
from polybus.errors import UsageError
from polybus.services.accounts.records import matches
from polybus.testing import ScriptedPeer, run_bus

FRAMES, GOMS = SPEAKERS["boson-frames"], SPEAKERS["goms"]


@pytest.mark.parametrize("audience", ["boson-frames", "goms"])
async def test_a_topic_of_the_default_account_is_never_taken_for_an_own_one(audience: str) -> None:
    """Whoever listens: the names of plain messages are translated once."""
    reads = SPEAKERS[audience]
    async with bus_with_accounts() as node, peer_of(node, FRAMES, "shop") as shop:
        node.accounts.grant("default", "office", "news", ["subscribe"])
        node.accounts.grant("default", "shop", "news", ["publish"])
        async with peer_of(node, reads, "office") as office:
            await office.send(reads.subscribe("default/news"))
            assert await reads.hear(office) == ("subscribed", "default/news", "")
            for number in range(3):
                await shop.send(FRAMES.publish("default/news", str(number)))
                assert await reads.hear(office) == ("message", "default/news", str(number))
        assert node.bus.log.bounds("news").stop == 3
        assert node.bus.log.bounds("shop/news").stop == 0


async def test_subscribers_see_an_own_topic_under_its_short_name_however_it_was_typed() -> None:
    async with (
        bus_with_accounts() as node,
        peer_of(node, FRAMES, "shop") as one,
        peer_of(node, FRAMES, "shop") as other,
    ):
        await other.send(FRAMES.subscribe("news"))
        await FRAMES.hear(other)
        for typed in ("news", "shop/news"):
            await one.send(frame(typed, b"x"))
            assert await FRAMES.hear(other) == ("message", "news", "x")


async def test_logins_in_a_row_keep_what_follows_waiting() -> None:
    async with bus_with_accounts() as node, peer_of(node, FRAMES, "shop") as peer:
        logins = FRAMES.login("office", "wrong") + FRAMES.login("office", PASSWORD)
        await peer.send(logins)
        await until(lambda: node.bad_peers.counts["auth.failed"] == 1)
        # The first has failed, the second is under way.
        await peer.send(FRAMES.publish("news", "x"))
        assert (await FRAMES.hear(peer))[:2] == ("error", "auth.failed")
        assert await FRAMES.hear(peer) == ("login", "office", "")
        assert (await FRAMES.hear(peer))[0] == "receipt"
        assert node.bus.log.bounds("office/news").stop == 1
        assert node.bus.log.bounds("shop/news").stop == 0


async def test_a_stranger_fills_no_memory_during_its_logins() -> None:
    async with bus_with_accounts() as node, peer_of(node, FRAMES) as peer:
        await peer.send(FRAMES.login("shop", "wrong") * 3)
        await until(lambda: node.bad_peers.counts["auth.failed"] >= 1)
        (connection,) = node.tcp.connections
        translator = connection.translator
        assert translator is not None and translator.is_logging_in
        assert connection._held_by  # type: ignore[attr-defined]


async def test_datagrams_during_a_login_are_dropped() -> None:
    async with run_bus("news", accounts={"default": "off"}) as node:
        await node.accounts.create("shop", PASSWORD)
        wire = Wire(node)
        address = ("127.0.0.1", 999)
        wire.ask(line("login", user="shop", password="wrong"), address)
        for _ in range(10):
            wire.ask(line("register", topics=["x" * 100]), address)
        assert node.bad_peers.counts["udp.dropped"] == 10


async def test_a_request_under_way_ends_with_its_token() -> None:
    async with accounts_bus() as bus:
        token = bus.node.accounts.store.make_token("shop")
        client = (await bus.by_token(token)).client
        waiting = asyncio.create_task(
            client.get("/v1/topics/news/messages?from=latest&wait-s=20", timeout=TIMEOUT_S)
        )
        await until(lambda: bus.node.http.waiters)
        bus.node.accounts.revoke_token("shop", token.split("_")[1])
        owner = (await bus.of("shop")).client
        assert (await owner.post("/v1/topics/news/messages", content=b"secret")).status_code == 200
        answer = await waiting
        assert answer.status_code in (401, 404)
        assert b"secret" not in answer.content


async def test_a_wrong_token_before_a_queue_stores_nothing() -> None:
    queue = {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "jobs"}
    async with run_bus(connectors=[queue | {"token-required": True}]) as node:
        async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
            await peer.send(b"\x00\x00\x00\x05wrong" + b"\x00\x00\x00\x04work")
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await peer.read(1)
        assert node.bus.log.bounds("jobs").stop == 0


async def test_who_may_only_publish_can_do_so_on_every_protocol() -> None:
    async with bus_with_accounts() as node:
        token = node.accounts.store.make_token("shop", rights=["publish"])
        for number, speaker in enumerate(SPEAKERS.values(), 1):
            async with peer_of(node, speaker, secret=token) as peer:
                await peer.send(speaker.publish("news", "x"))
                assert (await speaker.hear(peer))[0] == "receipt"
                assert node.bus.log.bounds("shop/news").stop == number


async def test_unknown_accounts_answer_as_known_ones() -> None:
    async with bus_with_accounts() as node, peer_of(node, FRAMES, "shop") as peer:
        answers = set()
        for name in ("office/x", "ghost/x", "office/news"):
            for sent in (FRAMES.subscribe(name), FRAMES.publish(name, "x")):
                await peer.send(sent)
                kind, code, text = await FRAMES.hear(peer)
                answers.add((kind, code, text.replace(name, "NAME")))
        assert answers == {("error", "topic.unknown", "there is no topic 'NAME'")}


async def test_a_changed_password_of_the_default_account_ends_who_used_it() -> None:
    async with bus_with_accounts() as node:
        await node.accounts.set_password("default", "one")
        async with peer_of(node, FRAMES, "default", "one") as peer:
            await node.accounts.set_password("default", "two")
            assert (await FRAMES.hear(peer))[:2] == ("error", "auth.ended")


async def test_the_default_account_cannot_be_deleted_even_if_its_record_is_damaged() -> None:
    async with bus_with_accounts() as node:
        node.accounts.store.damaged["default"] = "its checksum is wrong"
        with pytest.raises(UsageError, match="account.invalid"):
            node.accounts.delete("default")
        with pytest.raises(UsageError, match="account.damaged"):
            node.accounts.grant("default", "shop", "news", ["publish"])
        assert node.bus.has_topic("news")


def test_a_stored_token_is_not_sent_to_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBUS_TOKEN", "pbt_1_2")
    assert parse("goms://127.0.0.1").credentials is not None
    assert parse("queue://127.0.0.1:1").credentials is None
    assert parse("queue://pbt_3_4@127.0.0.1:1").credentials is not None


@pytest.mark.parametrize(
    "url", ["boson://shop:hunter2/x@host", "boson://shop:1#hunter2@host", "boson://a:1?hunter2@h"]
)
def test_a_password_in_a_bad_url_is_in_no_error(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(url)
    assert "hunter2" not in str(refused.value)


def test_patterns_match_in_linear_time() -> None:
    cases = {
        ("news", "news"): True,
        ("news", "new"): False,
        ("*", ""): True,
        ("n*s", "news"): True,
        ("n*s", "ns"): True,
        ("ns*s", "ns"): False,
        ("*a*b*", "xaxbx"): True,
        ("*b*a*", "xaxbx"): False,
        ("a*a", "a"): False,
        ("*" + "a*" * 100 + "b", "a" * 5000): False,
    }
    for (pattern, name), wanted in cases.items():
        assert matches([pattern], name) is wanted, pattern[:20]
