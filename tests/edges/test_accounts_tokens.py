"""What a limited token may do with what its account has: sessions, consumers, connections."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
from accounts_http_kit import PASSWORDS, Bus, accounts_bus
from accounts_kit import SPEAKERS, peer_of
from http_kit import Http

from polybus.testing import ScriptedPeer

POSITION = {"epoch": 1, "offset": 0}
TOKENS: dict[str, dict[str, Any]] = {
    "reads news": {"topics": ["news"], "rights": ["subscribe"]},
    "writes news": {"topics": ["news"], "rights": ["publish"]},
    "runs news": {"topics": ["news"], "rights": ["administer"]},
    "is news": {"topics": ["news"]},
    "reads": {"rights": ["subscribe"]},
    "writes": {"rights": ["publish"]},
    "runs": {"rights": ["administer"]},
    "is all": {},
}
# An operation, what is sent, and the status for each token. `shared` and `news` in a path stand for
# something of the account that uses this topic. A row that succeeds ends it, so each gets its own.
TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("POST /v1/sessions", {"json": {}}, "201 403 403 201 201 403 403 201"),
    ("PUT /v1/sessions/{news}/topics", {"json": {"topics": []}}, "200 403 403 200 200 403 403 200"),
    ("GET /v1/sessions", {}, "200 200 200 200 200 200 200 200"),
    ("GET /v1/session/{shared}", {}, "200 200 200 200 200 200 200 200"),
    ("DELETE /v1/session/{shared}", {}, "403 403 403 403 403 403 204 204"),
    ("DELETE /v1/session/{news}", {}, "403 403 204 204 403 403 204 204"),
    ("POST /v1/session/{shared}/redeliver", {}, "403 403 403 403 403 403 202 202"),
    ("POST /v1/session/{news}/redeliver", {}, "403 403 202 202 403 403 202 202"),
    ("POST /v1/broadcast", {"json": [["x"]]}, "403 403 403 403 403 403 202 202"),
    (
        "PUT /v1/consumers/{shared}",
        {"json": {"positions": {"news": POSITION}}},
        "403 403 403 403 204 403 403 204",
    ),
    (
        "PUT /v1/consumers/{news}",
        {"json": {"positions": {"news": POSITION}}},
        "204 403 403 204 204 403 403 204",
    ),
    ("DELETE /v1/consumers/{shared}", {}, "403 403 403 403 403 403 204 204"),
    ("DELETE /v1/consumers/{news}", {}, "403 403 204 204 403 403 204 204"),
    ("DELETE /v1/connections/{shared}", {}, "403 403 403 403 403 403 204 204"),
    ("DELETE /v1/connections/{news}", {}, "403 403 204 204 403 403 204 204"),
    ("POST /v1/tokens", {"json": {}}, "403 403 403 403 403 403 403 403"),
]


class Owner(NamedTuple):
    """The account that the tokens are of; a client takes long to make."""

    bus: Bus
    http: Http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop() -> AsyncIterator[Owner]:
    async with accounts_bus() as bus:
        yield Owner(bus, await bus.of("shop"))


async def by_token(shop: Owner, name: str) -> httpx.AsyncClient:
    token = shop.bus.node.accounts.store.make_token("shop", **TOKENS[name])
    return (await shop.bus.by_token(token)).client


async def session_id(shop: Owner, topic: str) -> str:
    await shop.http.open_session(topic)
    return list(shop.bus.node.services.inboxes.sessions())[-1].digest.hex()


async def connection_id(shop: Owner, topic: str, peer: ScriptedPeer) -> str:
    await peer.send(SPEAKERS["goms"].subscribe(topic))
    assert (await SPEAKERS["goms"].hear(peer))[0] == "subscribed"
    listed = (await shop.http.client.get("/v1/connections")).json()["connections"]
    return next(str(one["id"]) for one in listed if one["topics"] == [topic])


@contextlib.asynccontextmanager
async def target_of(shop: Owner, path: str) -> AsyncIterator[str]:
    """The path with the name of something of the account that uses the topic in it."""
    topic = "shared" if "{shared}" in path else "news"
    async with contextlib.AsyncExitStack() as stack:
        named = ""
        if path.startswith("/v1/sessions/"):
            named = await shop.http.open_session(topic)
        elif path.startswith("/v1/session/"):
            named = await session_id(shop, topic)
        elif path.startswith("/v1/consumers"):
            sent, named = {"positions": {topic: POSITION}}, topic
            answer = await shop.http.client.put(f"/v1/consumers/{topic}", json=sent)
            assert answer.status_code == 204
        elif path.startswith("/v1/connections"):
            opened = peer_of(shop.bus.node, SPEAKERS["goms"], "shop", PASSWORDS["shop"])
            named = await connection_id(shop, topic, await stack.enter_async_context(opened))
        yield path.format(**{topic: named})


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_ends_what_its_topics_and_rights_allow(shop: Owner, token: str) -> None:
    client = await by_token(shop, token)
    wanted, found = {}, {}
    for operation, sent, statuses in TABLE:
        method, _, path = operation.partition(" ")
        wanted[operation] = int(statuses.split()[list(TOKENS).index(token)])
        async with target_of(shop, path) as place:
            answer = await client.request(method, place, **sent)
        found[operation] = answer.status_code
        if answer.status_code == 403:
            assert answer.json()["code"] == "auth.denied"
    assert found == wanted


@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_is_shown_no_topic_that_it_may_not_read(shop: Owner) -> None:
    client = await by_token(shop, "reads news")
    named = await session_id(shop, "shared")
    await session_id(shop, "news")
    shown = (await client.get(f"/v1/session/{named}")).json()
    listed = (await client.get("/v1/sessions")).json()["sessions"]
    assert shown["topics"] == []
    assert {topic for one in listed for topic in one["topics"]} == {"news"}
    async with peer_of(shop.bus.node, SPEAKERS["goms"], "shop", PASSWORDS["shop"]) as peer:
        await connection_id(shop, "shared", peer)
        for path in ("/v1/connections", "/v1/consumers", "/v1/graph", "/v1/figures", "/v1/topics"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "topic:shared" not in answer.text and '["shared"]' not in answer.text
