"""Transactions and consumers of accounts: their names, and the topics they may use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from accounts_http_kit import accounts_bus
from commit_kit import rows, staged

from polybus.services.transactions.transactions import Transactions


async def commit(
    client: httpx.AsyncClient, topics: dict[str, list[bytes]], batch: int = 0, producer: str = "etl"
) -> httpx.Response:
    file = f"{batch}-aaaaaaaa.arrows"
    content = staged([rows(topic, values) for topic, values in topics.items()])
    path = f"/v1/staging/{producer.replace('/', '%2F')}/{file}?end=true"
    assert (await client.post(path, content=content)).status_code == 200
    body = {"producer": producer, "query": "q", "batch": batch, "files": [file]}
    return await client.post("/v1/commits", json=body)


@pytest.mark.parametrize(
    ("account", "topics", "status", "code"),
    [
        ("shop", ["news", "shared"], 200, ""),
        ("shop", ["shop/news"], 200, ""),
        ("shop", ["news", "default/news"], 404, "topic.unknown"),
        ("other", ["shop/shared"], 403, "auth.denied"),
        ("other", ["shop/news"], 404, "topic.unknown"),
        ("other", ["news"], 404, "topic.unknown"),
        ("default", ["news"], 200, ""),
        ("default", ["shop/news"], 404, "topic.unknown"),
        ("shop", ["$events"], 403, "topic.reserved"),
    ],
)
async def test_a_commit_needs_the_right_to_publish_to_every_topic(
    account: str, topics: list[str], status: int, code: str
) -> None:
    async with accounts_bus() as bus:
        client = (await bus.of(account)).client
        answer = await commit(client, {topic: [b"1"] for topic in topics})
        assert (answer.status_code, answer.json().get("code", "")) == (status, code)
        if status == 200:
            shown = {topic.removeprefix(f"{account}/") for topic in topics}
            assert set(answer.json()["offsets"]) == shown
            assert answer.json()["producer"] == "etl"
            last = (await client.get("/v1/commits/etl")).json()
            assert last == answer.json() | {"already": True}
        written = bus.node.bus.log.bounds("shop/news").stop + bus.node.bus.log.bounds("news").stop
        assert written == (status == 200)


async def test_producers_of_the_same_name_do_not_meet() -> None:
    async with accounts_bus() as bus:
        shop, default = (await bus.of("shop")).client, (await bus.of("default")).client
        admin = (await bus.admin()).client
        assert (await commit(shop, {"news": [b"1"]})).json()["already"] is False
        assert (await default.get("/v1/commits/etl")).status_code == 404
        assert (await default.get("/v1/commits/shop%2Fetl")).status_code == 404
        assert (await commit(default, {"news": [b"1"]})).json()["already"] is False
        assert (await commit(shop, {"news": [b"1"]})).json()["already"] is True
        seen = (await admin.get("/v1/commits/shop%2Fetl")).json()
        assert (seen["producer"], list(seen["offsets"])) == ("shop/etl", ["shop/news"])
        # Administrators commit for an account by its full name, with full names of topics.
        answer = await commit(admin, {"shop/news": [b"2"]}, batch=1, producer="shop/etl")
        assert (answer.status_code, answer.json()["producer"]) == (200, "shop/etl")
        assert not [*(bus.node.data / "staging").glob("*/*")]
        for name in ("shop%2Fetl", "..%2Fetl"):
            path = f"/v1/staging/{name}/0-aaaaaaaa.arrows"
            assert (await default.post(path, content=b"")).json()["code"] == "commit.producer"


async def test_a_new_account_of_the_same_name_has_nothing_of_the_old_one(tmp_path: Path) -> None:
    async with accounts_bus(str(tmp_path)) as bus:
        shop, admin = (await bus.of("shop")).client, (await bus.admin()).client
        other = (await bus.of("default")).client
        for client in (shop, other):
            assert (await commit(client, {"news": [b"1"]})).status_code == 200
        path = "/v1/staging/etl/1-aaaaaaaa.arrows"
        assert (await shop.post(path, content=b"x")).status_code == 200
        assert (await admin.delete("/v1/accounts/shop")).status_code == 204
        assert not [*(tmp_path / "staging").iterdir()]
    async with accounts_bus(str(tmp_path)) as bus:
        shop, other = (await bus.of("shop")).client, (await bus.of("default")).client
        assert (await shop.get("/v1/commits/etl")).status_code == 404
        assert (await commit(shop, {"news": [b"1"]})).json()["already"] is False
        assert (await commit(other, {"news": [b"1"]})).json()["already"] is True


async def test_a_start_finishes_a_large_transaction_under_the_names_of_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"transaction-part-bytes": 1}

    async def killed(*_: Any) -> Any:
        raise OSError("killed")

    async with accounts_bus(str(tmp_path), limits=limits) as bus:
        shop = (await bus.of("shop")).client
        with monkeypatch.context() as patched:
            patched.setattr(Transactions, "_finish", killed)
            answer = await commit(shop, {"news": [b"1"], "shared": [b"2"]})
            assert answer.status_code == 503
        assert bus.node.bus.log.bounds("shop/news").stop == 0
    async with accounts_bus(str(tmp_path), limits=limits) as bus:
        assert bus.node.bus.log.bounds("shop/news").stop == 1
        assert bus.node.bus.log.bounds("shop/shared").stop == 1
        assert bus.node.bus.log.bounds("news").stop == 0
        last = (await (await bus.of("shop")).client.get("/v1/commits/etl")).json()
        assert set(last["offsets"]) == {"news", "shared"}


def position(offset: int = 0) -> dict[str, int]:
    return {"epoch": 1, "offset": offset}


async def test_an_account_sees_its_own_consumers_under_its_own_names() -> None:
    async with accounts_bus() as bus:
        shop, other = (await bus.of("shop")).client, (await bus.of("other")).client
        default, admin = (await bus.of("default")).client, (await bus.admin()).client
        for client, topic in [(shop, "shared"), (other, "shop/shared"), (default, "news")]:
            report = {"positions": {topic: position()}}
            assert (await client.put("/v1/consumers/etl", json=report)).status_code == 204
        found = {}
        for name, client in {"shop": shop, "other": other, "default": default}.items():
            (one,) = (await client.get("/v1/consumers")).json()["consumers"]
            found[name] = (one["group"], one["topics"][0]["topic"])
        assert found == {
            "shop": ("etl", "shared"),
            "other": ("etl", "shop/shared"),
            "default": ("etl", "news"),
        }
        every = (await admin.get("/v1/consumers")).json()["consumers"]
        assert [one["group"] for one in every] == ["etl", "other/etl", "shop/etl"]
        seen = (await shop.get("/v1/topics/shared")).json()["consumers"]
        assert [one["group"] for one in seen] == ["etl"]
        both = (await admin.get("/v1/topics/shop%2Fshared")).json()["consumers"]
        assert [one["group"] for one in both] == ["other/etl", "shop/etl"]

        bus.node.accounts.revoke("shop", "other", "shared")
        (one,) = (await other.get("/v1/consumers")).json()["consumers"]
        assert (one["topics"], one["lag"]) == ([], 0)
        assert (await default.put("/v1/consumers/shop%2Fetl", json={})).status_code == 403
        assert (await default.delete("/v1/consumers/shop%2Fetl")).status_code == 404
        assert (await shop.delete("/v1/consumers/etl")).status_code == 204
        assert (await admin.delete("/v1/accounts/other")).status_code == 204
        (one,) = (await admin.get("/v1/consumers")).json()["consumers"]
        assert one["group"] == "etl"


@pytest.mark.parametrize("topic", ["shop/news", "shop/none", "default/news"])
async def test_a_report_needs_the_right_to_read(topic: str) -> None:
    async with accounts_bus() as bus:
        client = (await bus.of("other")).client
        report = {"positions": {topic: position(), "shop/shared": position()}}
        answer = await client.put("/v1/consumers/etl", json=report)
        assert (answer.status_code, answer.json()["code"]) == (404, "topic.unknown")
        assert (await client.get("/v1/consumers")).json() == {"consumers": []}


async def test_an_account_has_limits_of_its_own_over_http_too() -> None:
    limits = {"account-topics-max": 3, "account-sessions-max": 1, "account-messages-per-s-max": 1}
    async with accounts_bus(limits=limits) as bus:
        shop = (await bus.of("shop")).client
        codes = []
        for path, body in [
            ("/v1/topics", {"name": "three"}),
            ("/v1/topics", {"name": "four"}),
            ("/v1/sessions", {}),
            ("/v1/sessions", {}),
        ]:
            codes.append((await shop.post(path, json=body)).json().get("code", ""))
        assert codes == ["", "account.topics", "", "account.sessions"]
        lines = b'{"value":1}\n' * 10
        ndjson = {"content-type": "application/x-ndjson"}
        path = "/v1/topics/news/messages"
        assert (await shop.post(path, content=lines, headers=ndjson)).status_code == 200
        slow = await shop.post(path, content=b"1")
        assert (slow.status_code, slow.json()["code"]) == (429, "account.rate")
        late = await commit(shop, {"news": [b"1"]})
        assert (late.status_code, late.json()["code"]) == (429, "account.rate")
        # The default account has none of these.
        default = (await bus.of("default")).client
        for number in range(5):
            assert (await default.post("/v1/topics", json={"name": f"n{number}"})).is_success
            assert (await default.post("/v1/sessions", json={})).is_success
            assert (await default.post(path, content=lines, headers=ndjson)).is_success
