"""Sessions of accounts: whose they are, what they show, and what ends them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from accounts_http_kit import PASSWORDS, Bus, accounts_bus
from edge_kit import until
from http_kit import Http, recv

from polybus.edges.node import Node
from polybus.errors import UsageError
from polybus.services.accounts.accounts import Accounts
from polybus.services.sessions.session import Session

DELETED = "topic.deleted"


def session_of(node: Node, key: str) -> Session:
    session = node.services.inboxes.find(key)
    assert session is not None
    return session


async def publish(bus: Bus, topic: str, *values: bytes) -> None:
    path = f"/v1/topics/{topic.replace('/', '%2F')}/messages"
    client = (await bus.admin()).client
    for value in values:
        assert (await client.post(path, content=value)).status_code == 200


async def test_two_accounts_have_topics_and_sessions_of_the_same_name(tmp_path: Path) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        default, shop = await bus.of("default"), await bus.of("shop")
        keys = [await default.open_session("news"), await shop.open_session("news")]
        async with shop.websocket(keys[1]) as websocket:
            await default.publish("news", b'"of default"')
            await shop.publish("news", b'"of shop"')
            assert await recv(websocket) == {"1": [["news", "of shop"]]}
        assert await default.packs(keys[0]) == {"1": [["news", "of default"]]}
        assert list(session_of(bus.node, keys[1]).follows) == ["shop/news"]
    async with accounts_bus(str(tmp_path)) as bus:
        await publish(bus, "shop/news", b'"later"')
        shop = await bus.of("shop")
        # What was read from the log, and what is live, have the same name.
        packs = await shop.packs(keys[1])
        assert packs == {"1": [["news", "of shop"]], "2": [["news", "later"]]}
        assert (await shop.packs(keys[0]))["1"] == [["news", "of default"]]


async def test_a_shared_topic_has_the_name_of_its_owner_for_others_and_a_cache_for_each() -> None:
    async with accounts_bus() as bus:
        own, granted, all_of = await bus.of("shop"), await bus.of("other"), await bus.admin()
        keys = [
            await own.open_session("shared"),
            await granted.open_session("shop/shared"),
            await all_of.open_session("shop/shared"),
        ]
        async with own.websocket(keys[0]) as one, granted.websocket(keys[1]) as two:
            await own.publish("shared", b"1")
            assert await recv(one) == {"1": [["shared", 1]]}
            assert await recv(two) == {"1": [["shop/shared", 1]]}
        assert await all_of.packs(keys[2]) == {"1": [["shop/shared", 1]]}
        late = await granted.open_session("shop/shared", **{"from": "earliest"})
        assert await granted.packs(late) == {"1": [["shop/shared", 1]]}
        # One message, one topic, three sessions.
        assert bus.node.services.inboxes.delivered["shop/shared"].messages == 4


async def test_topics_of_the_default_account_are_shown_with_its_name() -> None:
    async with accounts_bus() as bus:
        bus.node.accounts.grant("default", "other", "news", ["subscribe"])
        other = await bus.of("other")
        key = await other.open_session("default/news")
        answer = await other.client.put(
            f"/v1/sessions/{key}/topics", json={"topics": ["Default/News", "shop/shared"]}
        )
        assert answer.json() == {"topics": ["default/news", "shop/shared"]}
        await publish(bus, "news", b"1")
        assert await other.packs(key) == {"1": [["default/news", 1]]}


async def test_the_session_of_another_account_is_unknown() -> None:
    async with accounts_bus() as bus:
        shop, other, admin = await bus.of("shop"), await bus.of("other"), await bus.admin()
        key = await shop.open_session("news")
        answers = []
        for one in (key, "none"):
            path = f"/v1/sessions/{one}"
            some = [
                await other.client.put(f"{path}/topics", json={"topics": []}),
                await other.client.post(f"{path}/packs", json=[["x"]]),
                await other.client.delete(path),
            ]
            answers.append([(answer.status_code, answer.json()["code"]) for answer in some])
        assert answers[0] == answers[1] == [(404, "session.unknown")] * 3
        assert await shop.packs(key) == {}
        # Who has the key may poll, whoever that is.
        assert (await (await bus.client()).poll(key)).status_code == 204
        path = f"/v1/sessions/{key}"
        assert (await admin.client.post(f"{path}/packs", json=[["x"]])).status_code == 202
        assert (await admin.client.delete(path)).status_code == 204


async def test_administrators_give_a_session_no_topic_that_its_account_may_not_read() -> None:
    async with accounts_bus() as bus:
        shop, admin = await bus.of("shop"), await bus.admin()
        key = await shop.open_session("news")
        path = f"/v1/sessions/{key}/topics"
        answer = await admin.client.put(path, json={"topics": ["news"]})
        assert (answer.status_code, answer.json()["code"]) == (404, "topic.unknown")
        answer = await admin.client.put(path, json={"topics": ["shop/shared"]})
        assert answer.json() == {"topics": ["shop/shared"]}
        await publish(bus, "shop/shared", b"1")
        assert await shop.packs(key) == {"1": [["shared", 1]]}


async def test_a_broadcast_reaches_the_own_account_and_all_as_an_administrator() -> None:
    async with accounts_bus() as bus:
        clients = [await bus.of(name) for name in PASSWORDS] + [await bus.admin()]
        keys = [await client.open_session() for client in clients]
        shop, admin = clients[1].client, clients[3].client
        assert (await shop.post("/v1/broadcast", json=[["shop"]])).json() == {"sessions": 1}
        assert (await admin.post("/v1/broadcast", json=[["all"]])).json() == {"sessions": 4}
        found = [list((await clients[0].packs(key)).values()) for key in keys]
        assert found == [[[["all"]]], [[["shop"]], [["all"]]], [[["all"]]], [[["all"]]]]


@pytest.mark.parametrize("restarts", [False, True])
async def test_sessions_leave_a_topic_whose_grant_is_revoked(
    restarts: bool, tmp_path: Path
) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        own = await shop.open_session("shared")
        key = await other.open_session("shop/shared")
        if not restarts:
            async with other.websocket(key) as websocket:
                await shop.publish("shared", b"1")
                assert await recv(websocket) == {"1": [["shop/shared", 1]]}
                await websocket.send("1")
                bus.node.accounts.revoke("shop", "other", "shared")
                assert await recv(websocket) == {"2": [[DELETED, {"topic": "shop/shared"}]]}
                await shop.publish("shared", b"2")
        else:
            await shop.publish("shared", b"1", b"2")
            assert await other.packs(key, "1,2")
            # As a stopped bus does it.
            bus.node.accounts.store.revoke("shop", "other", "shared")
    async with accounts_bus(str(tmp_path)) as bus:
        other = await bus.of("other")
        await publish(bus, "shop/shared", b"3")
        packs = (await other.packs(key)).values()
        assert [one for pack in packs for one in pack if one[0] != DELETED and len(one) > 1] in (
            [],
            [["shop/shared", 1], ["shop/shared", 2]],
        )
        assert [[DELETED, {"topic": "shop/shared"}]] in packs
        assert [["shared", 3]] in (await other.packs(own)).values()
        answer = await other.client.post("/v1/sessions", json={"topics": ["shop/shared"]})
        assert answer.status_code == 404


async def token_of(bus: Bus, **limits: Any) -> tuple[Http, str]:
    """A client by a new token of `shop`, and the token's id."""
    token = bus.node.accounts.store.make_token("shop", **limits)
    return await bus.by_token(token), token.split("_")[1]


async def until_events(bus: Bus, kind: str, count: int) -> list[dict[str, Any]]:
    """The events of `shop`, once there are this many of a kind."""
    log = bus.node.bus.log

    def found() -> list[dict[str, Any]]:
        batches = log.read("shop/$events", 0)
        messages = [json.loads(value) for batch in batches for value in batch.values()]
        return [one for message in messages for one in message["events"] if one["kind"] == kind]

    await until(lambda: len(found()) >= count)
    return found()


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_sessions_end_with_the_token_that_made_them(end: str) -> None:
    async with accounts_bus() as bus:
        accounts, shop = bus.node.accounts, await bus.of("shop")
        client, token = await token_of(bus, topics=["news"], expires=time.time() + 3600)
        other, _ = await token_of(bus)
        key, idle = await client.open_session("news"), await client.open_session("news")
        kept = [await shop.open_session("news"), await other.open_session("news")]
        async with shop.websocket(key) as websocket:
            await publish(bus, "shop/news", b"1")
            assert await recv(websocket) == {"1": [["news", 1]]}
            if end == "revoked":
                accounts.revoke_token("shop", token)
            else:
                accounts._clock_s = lambda: time.time() + 7200
                accounts._on_sweep()
            assert await recv(websocket) == {"0": [["session.unset", "noSession"]]}
        await publish(bus, "shop/news", b"2")
        assert await shop.packs(idle) == {"0": [["session.unset", "noSession"]]}
        for one in kept:
            assert [["news", 2]] in (await shop.packs(one)).values()
        events = await until_events(bus, "session-ended", 2)
        assert {one["reason"] for one in events} == {"token-ended"}
        missed = await until_events(bus, "undelivered", 2)
        # Its client had not confirmed the message that it was shown.
        assert {(one["reason"], one["first"], one["stop"]) for one in missed} == {
            ("session-token-ended", 0, 1)
        }


async def test_a_session_belongs_to_the_token_that_set_its_topics_last(tmp_path: Path) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        before, old = await token_of(bus, topics=["news"])
        after, new = await token_of(bus, topics=["shared"])
        key = await before.open_session("news")
        sent = {"topics": ["shared"]}
        answer = await after.client.put(f"/v1/sessions/{key}/topics", json=sent)
        assert (answer.status_code, answer.json()) == (200, sent)
        bus.node.accounts.revoke_token("shop", old)
        await publish(bus, "shop/shared", b"1")
        assert await after.packs(key) == {"1": [["shared", 1]]}
        # Administrators move it to nobody.
        admin = (await bus.admin()).client
        sent = {"topics": ["shop/shared"]}
        assert (await admin.put(f"/v1/sessions/{key}/topics", json=sent)).status_code == 200
        answer = await admin.put(f"/v1/sessions/{key}/topics", json={"topics": ["shop/news"]})
        assert (answer.status_code, answer.json()["code"]) == (404, "topic.unknown")
    async with accounts_bus(str(tmp_path)) as bus:
        assert session_of(bus.node, key).token == new
        bus.node.accounts.revoke_token("shop", new)
        assert len(bus.node.services.inboxes) == 0


@pytest.mark.parametrize("end", ["revoked", "expired", "damaged"])
async def test_a_start_ends_the_sessions_of_tokens_that_are_over(end: str, tmp_path: Path) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        expires = time.time() + 3600
        client, token = await token_of(bus, topics=["news"], expires=expires)
        key, kept = await client.open_session("news"), await (await bus.of("shop")).open_session()
        if end == "revoked":
            # As if the bus was killed before it ended the session: the revocation is durable first.
            bus.node.accounts.store.changed = lambda before, after: None
            bus.node.accounts.store.revoke_token("shop", token)
    if end == "damaged":
        (tmp_path / "accounts" / "shop" / "account.json").write_bytes(b"{}")
    with pytest.MonkeyPatch.context() as patch:
        if end == "expired":
            patch.setattr(Accounts, "_is_expired", lambda self, token: True)
        for _ in range(2):
            async with accounts_bus(str(tmp_path)) as bus:
                found = {one.token for one in bus.node.services.inboxes.sessions()}
                # Of a damaged account it is not known which tokens it has.
                assert found == ({token, ""} if end == "damaged" else {""})
                client = await bus.client()
                is_unset = "session.unset" in (await client.poll(key)).text
                assert is_unset == (end != "damaged")
                assert (await client.poll(kept)).status_code == 204


async def test_a_request_whose_token_is_revoked_meanwhile_opens_and_changes_no_session() -> None:
    async with accounts_bus() as bus:
        accounts, inboxes = bus.node.accounts, bus.node.services.inboxes
        text = accounts.store.make_token("shop")
        access = accounts.by_token(text)
        assert access is not None
        key = await (await bus.of("shop")).open_session("news")
        accounts.revoke_token("shop", text.split("_")[1])
        for attempt in (
            inboxes.create([], None, "latest", access),
            inboxes.replace_topics(session_of(bus.node, key), [], access),
        ):
            with pytest.raises(UsageError) as caught:
                await attempt
            assert caught.value.code == "auth.ended"
        assert list(session_of(bus.node, key).follows) == ["shop/news"]


async def test_sessions_end_with_their_account_and_not_with_its_password(tmp_path: Path) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        shop, other, admin = await bus.of("shop"), await bus.of("other"), await bus.admin()
        key, kept = await shop.open_session("news"), await other.open_session("shop/shared")
        changed = await admin.client.put("/v1/accounts/shop/password", json={"password": "new"})
        assert changed.status_code == 204
        await publish(bus, "shop/news", b"1")
        async with shop.websocket(key) as websocket:
            assert await recv(websocket) == {"1": [["news", 1]]}
            assert (await admin.client.delete("/v1/accounts/shop")).status_code == 204
            assert await recv(websocket) == {"0": [["session.unset", "noSession"]]}
        assert list((await other.packs(kept)).values()) == [[[DELETED, {"topic": "shop/shared"}]]]
    async with accounts_bus(str(tmp_path)) as bus:
        # It was created again, and the session is not the new one's.
        unset = await (await bus.of("shop")).packs(key)
        assert unset == {"0": [["session.unset", "noSession"]]}


async def test_a_start_ends_the_sessions_of_accounts_that_are_gone(tmp_path: Path) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        key = await (await bus.of("shop")).open_session("news")
        kept = await (await bus.of("other")).open_session()
        for topic in bus.node.accounts._registry.topics_of("shop"):
            bus.node.bus.delete_account_topic(topic)
        # As a stopped bus does it.
        bus.node.accounts.store.delete("shop")
    for _ in range(2):
        async with accounts_bus(str(tmp_path)) as bus:
            found = [one.account for one in bus.node.services.inboxes.sessions()]
            assert found == ["other"]
            assert (await (await bus.client()).poll(kept)).status_code == 204
            assert "session.unset" in (await (await bus.client()).poll(key)).text


async def test_the_sessions_of_a_damaged_account_stay_and_nobody_else_gets_its_topics(
    tmp_path: Path,
) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        key = await (await bus.of("shop")).open_session("news")
    (tmp_path / "accounts" / "shop" / "account.json").write_bytes(b"{}")
    async with accounts_bus(str(tmp_path)) as bus:
        await publish(bus, "shop/news", b"1")
        client = await bus.client()
        assert await client.packs(key) == {"1": [["news", 1]]}
        default, admin = await bus.of("default"), await bus.admin()
        listed: Any = (await default.client.get("/v1/topics")).json()
        assert [one["name"] for one in listed["topics"]] == ["news"]
        shown = (await admin.client.get("/v1/accounts/shop")).json()
        assert "account.json" in shown["damaged"]
        assert (await (await bus.of("shop")).client.get("/v1/topics")).status_code == 401


async def test_notices_of_losses_have_the_names_of_the_account() -> None:
    limits = {"session-packs-max": 2}
    async with accounts_bus(msgstream=limits) as bus:
        shop = await bus.of("shop")
        key = await shop.open_session("news")
        await shop.publish("news", b"1", b"2", b"3")
        notice = (await shop.packs(key))["0"]
        assert notice[0][0] == "session.overflow" and notice[0][1]["topic"] == "news"


async def test_an_expired_token_cannot_open_a_session() -> None:
    async with accounts_bus() as bus:
        token = bus.node.accounts.store.make_token("shop", expires=1.0)
        client = (await bus.by_token(token)).client
        assert (await client.post("/v1/sessions", json={})).status_code == 401


async def test_a_request_whose_account_is_deleted_meanwhile_opens_no_session() -> None:
    async with accounts_bus() as bus:
        access = bus.node.accounts.of("other")
        bus.node.accounts.delete("other")
        with pytest.raises(UsageError) as caught:
            await bus.node.services.inboxes.create([], None, "latest", access)
        assert caught.value.code == "auth.ended"
        assert len(bus.node.services.inboxes) == 0
