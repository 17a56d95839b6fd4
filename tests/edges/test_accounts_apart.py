"""Accounts do not get into each other's way: system topics, quotas, retention, deleted names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from accounts_http_kit import Bus, accounts_bus
from accounts_kit import SPEAKERS, peer_of
from commit_kit import rows, staged
from edge_kit import until
from http_kit import http_bus

from polybus.edges.node import Node
from polybus.errors import UsageError
from polybus.log.layout import admin_token_path
from polybus.services.accounts import accounts as service
from polybus.services.accounts.access import AccountAccess
from polybus.testing import ScriptedPeer

FRAMES = SPEAKERS["boson-frames"]
TRUSTED = {"default": "loopback"}


@pytest.fixture(autouse=True)
def sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SWEEP_S", 0.05)


def told(node: Node, topic: str) -> list[dict[str, Any]]:
    batches = node.bus.log.read(topic, 0)
    messages = [json.loads(value) for batch in batches for value in batch.values()]
    return [event for message in messages for event in message["events"]]


def configure(node: Node, account: str, **settings: object) -> None:
    path = Path(node.config.data) / "accounts" / account / "config.json"
    path.write_text(json.dumps(settings))


# System topics


WHOLE = ("$audit", "$commits", "$metrics")
"""System topics that tell of all accounts."""


async def test_the_default_account_sees_the_bus_as_a_whole_only_while_it_is_alone() -> None:
    async with http_bus("news") as http:
        node = http.node
        accounts, client = node.accounts, http.client
        follower = await http.open_session("$audit")
        assert (await client.get("/v1/settings")).status_code == 200
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send_frame("$subscribe", b"$audit tell=position")
            assert (await peer.read_frame())[0] == "$position"
            await accounts.create("shop", "two")
            node.bus.create_topic("shop/secret")
            answer, text = await peer.read_frame()
            assert (answer, text.split()[0]) == ("$error", b"topic.deleted")
        for topic in WHOLE:
            denied = await client.get(f"/v1/topics/{topic}/messages")
            assert (denied.status_code, denied.json()["code"]) == (404, "topic.unknown")
        assert "secret" not in json.dumps(await http.packs(follower))
        shown = await client.get("/v1/topics", params={"system": "true"})
        assert {one["name"] for one in shown.json()["topics"]} == {
            *("news", "$events", "$stats", "$alerts")
        }
        for path in ("/v1/settings", "/v1/dead-letters", "/v1/tables", "/v1/pipelines"):
            assert (await client.get(path)).status_code == 403, path
        metrics = (await client.get("/metrics")).text
        assert 'topic="news"' in metrics and "polybus_connections" in metrics
        assert "secret" not in metrics and "shop" not in metrics
        token = admin_token_path(node.data).read_text().strip()
        known = await client.get("/metrics", headers={"authorization": f"Bearer {token}"})
        assert 'topic="shop/secret"' in known.text
        accounts.delete("shop")
        assert (await client.get("/v1/topics/$audit/messages")).status_code == 200
        assert (await client.get("/v1/settings")).status_code == 200


async def test_events_tell_each_account_of_its_own_sessions_only(tmp_path: Path) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        follower = await other.open_session("$events")
        key = await shop.open_session("news")
        await shop.publish("news", b"1")
        assert await shop.packs(key)
        node = bus.node
        await until(lambda: any(one["kind"] == "delivered" for one in told(node, "shop/$events")))
        assert {one["kind"] for one in told(node, "shop/$events")} == {
            "session-opened",
            "delivered",
        }
        # Of its own session, once: what it follows would otherwise cause more of it.
        assert [one["kind"] for one in told(node, "other/$events")] == ["session-opened"]
        assert told(node, "$events") == []
        assert "$events" in json.dumps(await other.packs(follower))
        answer = await shop.client.get("/v1/topics/$events/messages")
        assert answer.json()["topic"] == "$events" and "delivered" in answer.text
        for topic in ("other%2F$events", "default%2F$events", "$commits"):
            assert (await shop.client.get(f"/v1/topics/{topic}/messages")).status_code == 404
        assert (await shop.client.delete("/v1/topics/$events")).status_code == 403
    async with accounts_bus(str(tmp_path)) as bus:
        assert told(bus.node, "shop/$events")


@pytest.mark.parametrize("protocol", SPEAKERS)
async def test_an_account_subscribes_to_its_system_topics_and_writes_none(protocol: str) -> None:
    speaker = SPEAKERS[protocol]
    async with accounts_bus() as bus, peer_of(bus.node, speaker, "shop", "two") as peer:
        await peer.send(speaker.subscribe("$events"))
        assert await speaker.hear(peer) == ("subscribed", "$events", "")
        await (await bus.of("other")).open_session()
        await (await bus.of("shop")).open_session()
        kind, topic, text = await speaker.hear(peer)
        assert (kind, topic) == ("message", "$events") and text.count("session-opened") == 1
        before = bus.node.bus.log.bounds("shop/$events").stop
        for name in ("$events", "shop/$events", "other/$events"):
            await peer.send(speaker.publish(name, "x"))
            assert (await speaker.hear(peer))[0] == "error"
        assert bus.node.bus.log.bounds("shop/$events").stop == before


async def test_an_account_and_its_system_topics_go_together() -> None:
    async with accounts_bus() as bus:
        admin = (await bus.admin()).client
        assert (await admin.delete("/v1/accounts/shop")).status_code == 204
        assert not [one for one in bus.node.bus.topic_names(system=True) if "shop" in one]
        assert (await admin.post("/v1/accounts", json={"name": "Shop"})).status_code == 201
        assert bus.node.bus.has_topic("shop/$events")
        assert (await admin.delete("/v1/topics/shop%2F$events")).status_code == 403
        # They are the bus's: they do not count as topics of the account.
        configure(bus.node, "shop", limits={"topics-max": 1})
        await until(lambda: bus.node.accounts.configs.limits["shop"].topics_max == 1)
        answers = [
            (await admin.post("/v1/topics", json={"name": f"shop/{name}"})).status_code
            for name in "ab"
        ]
        assert answers == [201, 409]


# Quotas


async def stage(bus: Bus, account: str, producer: str, size: int) -> int:
    content = staged([rows("news", [b"x" * size])])
    path = f"/v1/staging/{producer}/0-aaaaaaaa.arrows?end=true"
    return (await (await bus.of(account)).client.post(path, content=content)).status_code


async def test_what_one_account_stages_reports_and_commits_leaves_room_for_others() -> None:
    limits = {
        "account-staging-bytes-max": 4000,
        "account-consumers-max": 2,
        "account-producers-max": 2,
        "staging-bytes-max": 100_000,
        "consumers-max": 10,
    }
    async with accounts_bus(limits=limits) as bus:
        assert [await stage(bus, "shop", name, 1000) for name in "abc"] == [200, 200, 507]
        assert await stage(bus, "default", "a", 5000) == 200
        shop, default = (await bus.of("shop")).client, (await bus.of("default")).client
        answers = [await shop.put(f"/v1/consumers/{name}", json={}) for name in "abc"]
        assert [one.status_code for one in answers] == [204, 204, 409]
        assert answers[2].json()["code"] == "consumer.too-many"
        assert (await default.put("/v1/consumers/c", json={})).status_code == 204
        at = {"epoch": 1, "offset": 0}
        node = bus.node
        many = {f"t{number}": at for number in range(600)}
        for name in many:
            node.bus.create_topic(f"shop/{name}")
        codes = [
            (await shop.put(f"/v1/consumers/{name}", json={"positions": many})).status_code
            for name in "ab"
        ]
        # A fifth of all positions is 10,000.
        assert codes == [204, 204]
        codes = []
        for name in "abc":
            body = {"producer": name, "query": "q", "batch": 0, "files": []}
            codes.append((await shop.post("/v1/commits", json=body)).status_code)
        assert codes == [200, 200, 409]
        body = {"producer": "c", "query": "q", "batch": 0, "files": []}
        assert (await default.post("/v1/commits", json=body)).status_code == 200


async def test_requests_at_the_same_time_open_no_more_sessions_than_allowed() -> None:
    limits = {"account-sessions-max": 3}
    async with accounts_bus(limits=limits) as bus:
        client = (await bus.of("shop")).client
        assert (await client.get("/v1/topics")).status_code == 200
        # A start in the past takes a thread, and others run meanwhile.
        body = {"topics": ["news"], "from": "2026-01-01T00:00:00Z"}
        answers = await asyncio.gather(*(client.post("/v1/sessions", json=body) for _ in range(12)))
        assert sorted(one.status_code for one in answers) == [201] * 3 + [409] * 9
        assert len(bus.node.services.inboxes) == 3


async def test_connections_of_http_and_websockets_count() -> None:
    limits = {"account-connections-max": 1}
    async with accounts_bus(limits=limits) as bus:
        first, second = await bus.of("shop"), await bus.of("shop")
        key = await first.open_session("news")
        answer = await second.client.get("/v1/topics")
        assert (answer.status_code, answer.json()["code"]) == (429, "account.connections")
        answer = await second.client.get(f"/msgstream?transport=shortpolling&sessionKey={key}")
        assert (answer.status_code, answer.json()["code"]) == (429, "account.connections")
        # The connection stays, and another account may use it.
        other = await second.client.get("/v1/topics", auth=("other", "three"))
        assert other.status_code == 200
        async with peer_of(bus.node, FRAMES) as peer:
            await peer.send(FRAMES.login("shop", "two"))
            assert (await FRAMES.hear(peer))[:2] == ("error", "account.connections")
        await first.client.aclose()
        await until(lambda: not bus.node.accounts._connections["shop"])
        async with second.websocket(key):
            await until(lambda: bus.node.accounts._connections["shop"] == 1)
            answer = await second.client.get("/v1/topics")
            assert answer.status_code == 429
        await until(lambda: not bus.node.accounts._connections["shop"])


# What others may hold, and inherit


async def test_who_may_only_read_a_topic_does_not_hold_its_retention() -> None:
    async with accounts_bus() as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        await shop.publish("shared", b"1", b"2")
        epoch = bus.node.bus.log.bounds("shop/shared").epoch
        held_from = bus.node.services.consumers.held_from

        async def report(client: Any, topic: str, offset: int) -> None:
            body = {"positions": {topic: {"epoch": epoch, "offset": offset}}}
            assert (await client.put("/v1/consumers/etl", json=body)).status_code == 204

        await report(other.client, "shop/shared", 0)
        assert held_from("shop/shared") is None
        # It is a consumer all the same.
        assert (await other.client.get("/v1/consumers")).json()["consumers"][0]["lag"] == 2
        read_only = bus.node.accounts.store.make_token("shop", rights=["subscribe"])
        await report((await bus.by_token(read_only)).client, "shared", 1)
        assert held_from("shop/shared") == 1
        bus.node.accounts.grant("shop", "other", "shared", ["subscribe", "administer"])
        await report(other.client, "shop/shared", 0)
        assert held_from("shop/shared") == 0


async def test_a_permission_in_a_file_is_not_inherited_by_an_account_of_that_name() -> None:
    permission = {"account": "other", "topics": "news", "rights": ["subscribe"]}
    async with accounts_bus(accounts=TRUSTED) as bus:
        node, admin = bus.node, (await bus.admin()).client
        configure(node, "shop", permissions=[permission])

        def may_read() -> bool:
            access = node.accounts.of("other")
            return access is not None and access.may_read("shop/news")

        await until(may_read)
        assert (await admin.delete("/v1/accounts/other")).status_code == 204
        assert (await admin.post("/v1/accounts", json={"name": "other"})).status_code == 201
        assert not may_read()
        health = (await admin.get("/healthz")).text
        assert "account shop: its permissions for other" in health
        configure(node, "shop", permissions=[permission], topics=["more"])
        await until(lambda: node.bus.has_topic("shop/more"))
        assert not may_read()
        configure(node, "shop")
        await until(lambda: not node.accounts.configs.problems)
        configure(node, "shop", permissions=[permission])
        await until(may_read)


async def test_whoever_signs_up_under_a_name_in_a_file_has_none_of_its_permissions() -> None:
    permissions = [{"account": "later", "topics": "news", "rights": ["publish"]}]
    async with accounts_bus(accounts={"default": "off", "signup": True}) as bus:
        # The sign-up comes before the bus has read the file by itself.
        configure(bus.node, "shop", permissions=permissions)
        given = {"name": "later", "password": "four"}
        stranger = await bus.client()
        assert (await stranger.client.post("/v1/signup", json=given)).status_code == 201
        later = await bus.client(auth=("later", "four"))
        refused = await later.client.post("/v1/topics/shop%2Fnews/messages", content=b"x")
        assert (refused.status_code, refused.json()["code"]) == (404, "topic.unknown")
        assert "later" in bus.node.accounts.configs.problems["shop"]
        # Nor does one that was deleted before the bus had read the file.
        configure(bus.node, "shop", permissions=permissions, topics=["more"])
        await bus.node.accounts.remove("later")
        await bus.node.accounts.create("later", "four")
        refused = await later.client.post("/v1/topics/shop%2Fnews/messages", content=b"x")
        assert refused.status_code == 404


async def test_a_config_that_cannot_be_used_is_named_by_the_health_of_the_bus() -> None:
    async with accounts_bus(accounts=TRUSTED) as bus:
        client, admin = (await bus.client()).client, (await bus.admin()).client
        assert (await client.get("/healthz")).text == "ok\n"
        configure(bus.node, "shop", limits={"bytes-max": -1})
        await until(lambda: bool(bus.node.accounts.configs.problems))
        for path in ("/healthz", "/readyz"):
            answer = await admin.get(path)
            assert answer.status_code == 200
            assert "account shop" in answer.text and "limits.bytes-max" in answer.text
            told = (await client.get(path)).text
            assert "config.invalid" in told and "shop" not in told
        assert "polybus_account_config_failures 1" in (await client.get("/metrics")).text


async def test_an_account_cannot_get_the_name_of_a_consumer_of_the_default_account() -> None:
    async with accounts_bus() as bus:
        default, admin = (await bus.of("default")).client, (await bus.admin()).client
        assert (await default.put("/v1/consumers/team%2Fetl", json={})).status_code == 204
        answer = await admin.post("/v1/accounts", json={"name": "team"})
        assert (answer.status_code, answer.json()["code"]) == (409, "account.taken")
        assert (await default.delete("/v1/consumers/team%2Fetl")).status_code == 204
        assert (await admin.post("/v1/accounts", json={"name": "team"})).status_code == 201


# What a change costs


async def test_a_grant_looks_at_the_topics_of_its_owner_for_one_account_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with accounts_bus() as bus:
        accounts = bus.node.accounts
        for number in range(20):
            bus.node.bus.create_topic(f"topic-{number}")
            name = f"account-{number}"
            await accounts.create(name)
            token = accounts.store.make_token(name)
            assert accounts.by_token(token) is not None
        asked: list[tuple[str, str]] = []
        rights = AccountAccess.rights

        def counted(access: AccountAccess, topic: str) -> set[Any]:
            asked.append((access.account, topic))
            return rights(access, topic)

        monkeypatch.setattr(AccountAccess, "rights", counted)
        accounts.grant("shop", "account-7", "news", ["subscribe"])
        assert {account for account, _ in asked} == {"account-7"}
        assert {topic.partition("/")[0] for _, topic in asked} == {"shop"}
        asked.clear()
        bus.node.bus.create_topic("shop/later")
        assert {account for account, _ in asked} <= {"shop", "other", "account-7"}


async def test_sessions_leave_what_is_revoked_even_if_nobody_is_logged_in_any_more() -> None:
    async with accounts_bus() as bus:
        other = await bus.of("other")
        key = await other.open_session("shop/shared")
        await bus.node.accounts.set_password("other", "changed")
        bus.node.accounts.revoke("shop", "other", "shared")
        session = bus.node.services.inboxes.find(key)
        assert session is not None and not session.follows
        with pytest.raises(UsageError, match=r"account\.no-grant"):
            bus.node.accounts.revoke("shop", "other", "shared")
