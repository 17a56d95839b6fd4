"""docs/reference/access.md is true for the pages of /v1/live and the clients of /msgstream."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from access_kit import (
    LIMITS,
    OPEN,
    PASSWORD,
    TOPIC,
    default_let_in,
    end_token,
    held_logins,
    table_bus,
    token_of,
)
from edge_kit import TIMEOUT_S, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from polybus.edges.access_matrix import CLOSED, DONE, LOGINS, NONE, OVER, ROLES, PeerRole
from polybus.edges.http.live.page import LivePeer
from polybus.edges.node import Node
from polybus.edges.web_access_matrix import LIVE, POLL, WEB_REQUESTS, WebRequest
from polybus.log.layout import admin_token_path
from polybus.services.accounts import accounts, throttle

CHANNELS = {
    "subscribe to figures, connections, graph: one's own": ("figures", "connections", "graph"),
    "subscribe to pipelines, which concern all accounts": ("pipeline",),
}
WITHOUT_LOGIN = ("stranger", "default", "logging-in")


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (accounts, throttle):
        monkeypatch.setattr(module, "DELAY_S_MIN", 0.0)
    yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    async with table_bus(tmp_path_factory) as found:
        yield found


def credentials(node: Node, role: PeerRole) -> tuple[dict[str, str], str]:
    """The header of a role, and its token, if it has one."""
    if role in WITHOUT_LOGIN:
        return {}, ""
    if role == "administrator" or role in (*LIMITS, *OVER):
        is_admin = role == "administrator"
        path = admin_token_path(node.data)
        token = path.read_text().strip() if is_admin else token_of(node, role)
        return {"authorization": f"Bearer {token}"}, token
    user = "shop" if role == "owner" else role
    basic = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
    return {"authorization": f"Basic {basic}"}, ""


# Live pages


async def hear(page: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(TIMEOUT_S):
        return dict(json.loads(await page.recv()))


async def say(page: ClientConnection, op: str, **fields: Any) -> None:
    await page.send(json.dumps({"op": op, **fields}))


async def subscribed(page: ClientConnection, channel: str, topic: str = "") -> str:
    """DONE, or the code of the refusal, which may come in place of the first data."""
    await say(page, "subscribe", id=1, channel=channel, topic=topic)
    if channel == "tail":
        # It has data only when there are messages; requests are answered in order.
        await say(page, "subscribe", id=1, channel="none")
    told = await hear(page)
    code = told["error"]["code"] if "error" in told else DONE
    return DONE if code == "live.invalid" else str(code)


async def live_answer(page: ClientConnection, words: str, channel: str, topic: str) -> str:
    match words:
        case "`login`":
            await say(page, "login", user="shop", password=PASSWORD)
            try:
                return DONE if (await hear(page)).get("op") == "login" else "refused"
            except ConnectionClosed:
                return CLOSED
        case "`unsubscribe`":
            await say(page, "unsubscribe", id=1)
            await say(page, "dance")
            told = await hear(page)
            return DONE if told["error"]["code"] == "live.invalid" else str(told)
        case "`subscribe` `tail`":
            return await subscribed(page, "tail", topic=topic)
    return await subscribed(page, channel)


@contextlib.asynccontextmanager
async def page_of(node: Node, role: PeerRole) -> AsyncIterator[ClientConnection]:
    headers, token = credentials(node, role)
    url = f"ws://127.0.0.1:{node.tcp_port}/v1/live"
    with contextlib.ExitStack() as stack:
        if role == "default":
            stack.enter_context(default_let_in(node))
        if role == "logging-in":
            stack.enter_context(held_logins(node))
        async with connect(url, additional_headers=headers) as page:
            if headers:
                assert (await hear(page))["op"] == "login"
            if role in OVER:
                end_token(node, role, token)
            if role == "logging-in":
                await say(page, "login", user="shop", password=PASSWORD)
                await until(lambda: any(is_logging_in(one) for one in node.http.websockets))
            yield page


def is_logging_in(one: Any) -> bool:
    return isinstance(one, LivePeer) and one._logging_in is not None


# msgstream


async def stream_answer(node: Node, request: WebRequest, role: PeerRole) -> str:
    """With the key of a session that the role has made, or else the account `shop`."""
    headers, token = credentials(node, role)
    base = f"http://127.0.0.1:{node.tcp_port}"
    async with httpx.AsyncClient(base_url=base, timeout=TIMEOUT_S) as client:
        by_token = headers if role in OVER else credentials(node, "owner")[0]
        made = await client.post("/v1/sessions", json={"topics": ["shared"]}, headers=by_token)
        key = made.json()["sessionKey"]
        if role in OVER:
            end_token(node, role, token)
        path = f"/msgstream?sessionKey={key}"
        if request.where == POLL:
            answer = await client.get(f"{path}&transport=shortpolling", headers=headers)
            return DONE if answer.status_code == 204 else str(answer.json()["0"][0][0])
        url = f"ws://127.0.0.1:{node.tcp_port}{path}"
        async with connect(url, additional_headers=headers) as websocket:
            if role not in OVER:
                await client.post(f"{base}/v1/sessions/{key}/packs", json=[["x"]], headers=by_token)
            told = await hear(websocket)
            return DONE if told == {"1": [["x"]]} else str(told["0"][0][0])


@pytest.mark.parametrize("role", [*ROLES, *LOGINS])
@pytest.mark.asyncio(loop_scope="module")
async def test_every_request_of_pages_and_msgstream_is_answered_as_the_table_says(
    role: PeerRole, node: Node
) -> None:
    wanted, found = {}, {}
    own = {"default": OPEN, "owner": "shared"} | dict.fromkeys((*LIMITS, *OVER), "shared")
    for request in WEB_REQUESTS:
        place = (request.name, request.where)
        wanted[place] = request.answer(role)
        if role == "unproven" or (role == "logging-in" and request.where != LIVE):
            # Addresses of UDP have no pages, and the key of a session is all that is asked for.
            found[place] = NONE
        elif request.where == LIVE:
            answers = set()
            for channel in CHANNELS.get(request.name, ("",)):
                async with page_of(node, role) as page:
                    topic = own.get(role, TOPIC)
                    answers.add(await live_answer(page, request.words, channel, topic))
            [found[place]] = answers
        else:
            found[place] = await stream_answer(node, request, role)
    assert found == wanted
