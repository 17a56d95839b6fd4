"""Sessions of accounts: whose they are, what they show, and what ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accounts_http_kit import PASSWORDS, Bus, accounts_bus
from http_kit import recv

from polybus.edges.node import Node
from polybus.errors import UsageError
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
        for topic in ("shop/news", "shop/shared"):
            bus.node.bus.delete_topic(topic)
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
