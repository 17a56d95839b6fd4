"""docs/reference/access.md is true: every request, in every role, on every protocol."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any

import httpx
import pytest
from access_kit import (
    LIMITS,
    PASSWORD,
    TOPIC,
    Place,
    ask,
    default_let_in,
    end_token,
    large_payload,
    table_bus,
    token_of,
)
from accounts_http_kit import PASSWORDS, Bus, accounts_bus
from accounts_kit import SPEAKERS, peer_of
from edge_kit import TIMEOUT_S, UdpClient, until
from test_accounts_http import TABLE

from polybus import names
from polybus.edges import access_matrix
from polybus.edges.access_matrix import CLOSED, DONE, LOGINS, OVER, REQUESTS, ROLES, PeerRole
from polybus.edges.http.routes import OPERATIONS
from polybus.edges.node import Node
from polybus.edges.web_access_matrix import http_answer
from polybus.services.accounts import accounts, pace, throttle
from polybus.testing import ScriptedPeer
from polybus.wire import boson_frames, boson_properties, goms, queue
from polybus.wire.codec import Bad, PublishPart

ASKED = [role for role in (*ROLES, *LOGINS) if http_answer(OPERATIONS[0], role) is not None]
STREAMED = [role for role in ROLES if role != "administrator"]


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (accounts, throttle):
        monkeypatch.setattr(module, "DELAY_S_MIN", 0.0)
    # Changes of an account wait for each other.
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.0)
    yield


# Boson, goMS and queues


def account_of(role: PeerRole) -> str:
    return "shop" if role == "owner" else role


async def stream_answer(node: Node, name: str, protocol: str, role: PeerRole, blob: str) -> str:
    speaker = SPEAKERS.get(protocol, SPEAKERS["goms"])
    peer: Any = ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S)
    if protocol == access_matrix.UDP:
        peer = UdpClient(node.udp_port)
    topic = "shared" if role == "owner" else TOPIC
    async with peer:
        if name == "log in" or role != "stranger":
            user = "shop" if role == "stranger" else account_of(role)
            await peer.send(speaker.login(user, PASSWORD))
            assert await speaker.hear(peer) == ("login", user, "")
            if name == "log in":
                return DONE
        place = Place(topic, TOPIC, blob, registers=role == "owner")
        return await ask(node, peer, name, protocol, place)


async def queue_answer(node: Node, name: str, role: PeerRole) -> str:
    port = int(node.addresses[2].rpartition(":")[2])
    token = "no token"
    if role != "stranger" or name == "log in":
        account = "shop" if role == "stranger" else account_of(role)
        token = node.accounts.store.make_token(account)
    before = node.bus.log.bounds(TOPIC).stop
    async with ScriptedPeer(port, timeout_s=TIMEOUT_S) as peer:
        for one in (token.encode(), b"x"):
            await peer.send(len(one).to_bytes(4) + one)
        closed = asyncio.create_task(peer.read(1))
        await until(lambda: closed.done() or node.bus.log.bounds(TOPIC).stop > before)
        if closed.done():
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await closed
            assert node.bus.log.bounds(TOPIC).stop == before
            return CLOSED
        closed.cancel()
    return DONE


async def test_every_request_of_streams_is_answered_as_the_table_says(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wanted, found = {}, {}
    async with table_bus(tmp_path_factory) as node:
        blob = await large_payload(node, "shop", TOPIC)
        for request in REQUESTS:
            for protocol in request.words:
                for role in STREAMED:
                    place = (request.name, protocol, role)
                    wanted[place] = request.answer(protocol, role)
                    if protocol == access_matrix.QUEUE:
                        found[place] = await queue_answer(node, request.name, role)
                    else:
                        found[place] = await stream_answer(node, request.name, protocol, role, blob)
    assert found == wanted
    assert len(found) == sum(len(request.words) for request in REQUESTS) * len(STREAMED)


@pytest.mark.parametrize("wire", [boson_frames, boson_properties, goms, queue])
def test_the_table_has_every_event_of_the_codecs(wire: Any) -> None:
    def classes(kind: Any) -> set[type]:
        if isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union:
            return {one for part in typing.get_args(kind) for one in classes(part)}
        return {kind}

    known = {event for request in REQUESTS for event in request.events} | {Bad}
    assert classes(wire.Event) <= known
    assert PublishPart in known


# HTTP


async def caller(bus: Bus, role: PeerRole) -> httpx.AsyncClient:
    match role:
        case "stranger":
            return (await bus.client()).client
        case "owner":
            return (await bus.of("shop")).client
        case "administrator":
            return (await bus.admin()).client
        case "default":
            return (await bus.client()).client
    if role == "expired":
        gone = bus.node.accounts.store.make_token("shop", expires=time.time() - 1)
        return (await bus.by_token(gone)).client
    if role == "revoked" or role in LIMITS:
        token = token_of(bus.node, role)
        client = (await bus.by_token(token)).client
        if role == "revoked":
            end_token(bus.node, role, token)
        return client
    if role != "none":
        bus.node.accounts.grant("shop", "other", topic_of(role), [role])
    return (await bus.of("other")).client


UNFIT = {
    "POST /v1/pipelines/stop": (409,),
    "POST /v1/pipelines/start": (400, 409),
    "POST /v1/pipelines/refresh": (400, 409),
    "POST /v1/undelivered/replay": (416,),
}
"""What an operation answers where no pipeline runs, or can run, and where messages are gone."""


def topic_of(role: PeerRole) -> str:
    return f"for-{role}"


def account_asking(role: PeerRole) -> str:
    if role == "default":
        return role
    return "shop" if role == "owner" or role in (*LIMITS, *OVER) else "other"


async def places_of(bus: Bus, role: PeerRole) -> dict[str, str]:
    """What stands for the names in paths: a topic of its owner, and what the caller has itself."""
    account = "default" if role == "default" else "shop"
    owner, topic = await bus.of(account), topic_of(role)
    full = names.full(account, topic)
    bus.node.bus.create_topic(full)
    await owner.publish(topic, b"1")
    # One that no other role may read.
    content = topic.encode() * (1 << 18)
    put = await owner.client.put(f"/v1/topics/{topic}/blob", content=content)
    assert put.status_code == 200
    path = f"/v1/topics/{topic}/messages?offset=1"
    message = (await owner.client.get(path)).json()["messages"][0]
    places = {"topic": full.replace("/", "%2F"), "group": "g", "producer": "p", "offset": "0"}
    places |= {"file": "0-aaaaaaaa.arrows", "account": "spare", "blob": message["reference"]["id"]}
    if role == "stranger":
        return places
    client = await bus.admin()
    if role != "administrator":
        client = await bus.of(account_asking(role))
        made = bus.node.accounts.store.make_token(account_asking(role))
        places["token"] = made.split("_")[1]
    # A consumer, and a session, of the caller's account that use the topic, if it owns it.
    uses = account_asking(role) == account
    positions = {topic: {"epoch": 1, "offset": 0}} if uses else {}
    put = await client.client.put("/v1/consumers/g", json={"positions": positions})
    assert put.status_code == 204
    return places | {"key": await client.open_session(*([topic] if uses else []))}


async def id_of(bus: Bus, role: PeerRole, path: str, places: dict[str, str]) -> str | None:
    """The id in a path, of something that its operation may end; None if there is none."""
    store, inboxes = bus.node.accounts.store, bus.node.services.inboxes
    if path.startswith("/v1/accounts"):
        return store.make_token("spare").split("_")[1]
    if path.startswith(("/v1/blobs", "/v1/tokens")):
        return places.get("blob" if "blobs" in path else "token", "none")
    if path.startswith("/v1/session/") and "key" in places:
        session = inboxes.find(places["key"])
        if session is None:
            access = bus.node.accounts.of(account_asking(role))
            places["key"] = await inboxes.create([], None, "latest", access)
            session = inboxes.find(places["key"])
        assert session is not None
        return session.digest.hex()
    if path.startswith("/v1/connections/") and "key" in places:
        account = account_asking(role)
        peer = peer_of(bus.node, SPEAKERS["goms"], account, PASSWORDS[account])
        await bus._stack.enter_async_context(peer)
        found = (await (await bus.admin()).client.get("/v1/connections")).json()["connections"]
        return str(next(one["id"] for one in found if one["account"] == account))
    return None


def sent_with(name: str, sent: dict[str, Any], role: PeerRole) -> dict[str, Any]:
    """What is sent: names of its own in each role, since all are asked of one bus."""
    match name:
        case "POST /v1/sessions":
            return {"json": {"topics": []}}
        case "PUT /v1/consumers/{group}":
            return {"json": {}}
        case "POST /v1/topics" | "POST /v1/accounts" | "POST /v1/signup":
            return {"json": sent["json"] | {"name": f"{sent['json']['name']}-{role}"}}
    if name.endswith("/grants"):
        return {"json": sent["json"] | {"to": "spare2"}}
    return sent


async def ask_all(bus: Bus, role: PeerRole) -> tuple[dict[str, int], dict[str, int]]:
    """The statuses that the table has, and those that the bus answers."""
    wanted, found = {}, {}
    accounts = bus.node.accounts
    places = await places_of(bus, role)
    client = await caller(bus, role)
    operations = {f"{one.method} {one.path}": one for one in OPERATIONS}
    for name, sent, _ in TABLE:
        operation = operations[name]
        named = await id_of(bus, role, operation.path, places)
        given = dict(places) if named is None else places | {"id": named}
        status = http_answer(operation, role)
        assert status is not None
        wanted[name] = status
        wants = set(re.findall(r"{(\w+)}", operation.path))
        if not wants <= given.keys() and wanted[name] < 300:
            # Allowed, and not there.
            wanted[name] = 404
        path = operation.path.format(**dict.fromkeys(wants, "none") | given)
        sent = sent_with(name, sent, role)
        answer = await client.request(operation.method, path, **sent)
        # Some have two ways to succeed, and what is allowed may have nothing to do.
        is_allowed = answer.status_code < 300 or answer.status_code in UNFIT.get(name, ())
        is_done = is_allowed and wanted[name] < 300
        found[name] = wanted[name] if is_done else answer.status_code
        if name == "DELETE /v1/accounts/{account}" and found[name] < 300:
            await accounts.create("spare", PASSWORDS["shop"])
    assert found.keys() == operations.keys()
    return wanted, found


@pytest.mark.slow
async def test_every_operation_is_answered_as_the_table_says() -> None:
    settings = {"default": "off", "signup": True}
    limits = {"signups-per-address-hour-max": 100}
    async with accounts_bus(accounts=settings, limits=limits) as bus:
        accounts = bus.node.accounts
        for name in ("spare", "spare2"):
            await accounts.create(name, PASSWORDS["shop"])
        for role in ASKED:
            accounts.grant("spare", "spare2", "x*", ["publish"])
            with default_let_in(bus.node) if role == "default" else contextlib.nullcontext():
                wanted, found = await ask_all(bus, role)
            assert found == wanted, role
