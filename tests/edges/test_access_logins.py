"""docs/reference/access.md is true for peers that came in another way than by a password."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from access_kit import (
    OPEN,
    PASSWORD,
    TOPIC,
    Place,
    ask,
    bytes_of,
    default_let_in,
    end_token,
    held_logins,
    large_payload,
    table_bus,
    token_of,
)
from accounts_kit import SPEAKERS, Speaker
from edge_kit import TIMEOUT_S, UdpClient, until
from test_udp_strangers import Wire

from polybus.edges import access_matrix
from polybus.edges.access_matrix import (
    CLOSED,
    DONE,
    DROPPED,
    LOGINS,
    NONE,
    OVER,
    PROVE,
    REQUESTS,
    WAITS,
    PeerRole,
)
from polybus.edges.node import Node
from polybus.edges.protocols.queue import QueueTranslator
from polybus.edges.protocols.translator import Translator
from polybus.services.accounts import accounts, throttle
from polybus.testing import ScriptedPeer


class Asked(NamedTuple):
    """A cell of the table, at a bus."""

    node: Node
    name: str
    protocol: str
    role: PeerRole
    place: Place

    @property
    def speaker(self) -> Speaker:
        return SPEAKERS.get(self.protocol, SPEAKERS["goms"])

    @property
    def request(self) -> bytes:
        if self.name == "log in":
            return self.speaker.login("shop", PASSWORD)
        return bytes_of(self.name, self.protocol, self.place.shown, self.place.blob)

    @property
    def stored(self) -> int:
        return self.node.bus.log.bounds(self.place.full).stop

    def peer(self) -> Any:
        if self.protocol == access_matrix.UDP:
            return UdpClient(self.node.udp_port)
        port = self.node.tcp_port
        if self.protocol == access_matrix.QUEUE:
            at = 3 if self.role == "default" else 2
            port = int(self.node.addresses[at].rpartition(":")[2])
        return ScriptedPeer(port, timeout_s=TIMEOUT_S)

    def translators(self) -> list[Translator]:
        found = [one.translator for one in self.node.tcp.connections]
        return [one for one in found if isinstance(one, Translator)]


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (accounts, throttle):
        monkeypatch.setattr(module, "DELAY_S_MIN", 0.0)
    yield


# Boson and goMS


async def by_token(asked: Asked) -> str:
    async with asked.peer() as peer:
        await peer.send(asked.speaker.login("", token_of(asked.node, asked.role)))
        assert await asked.speaker.hear(peer) == ("login", "shop", "")
        if asked.name == "log in":
            return DONE
        return await ask(asked.node, peer, asked.name, asked.protocol, asked.place)


async def by_nothing(asked: Asked) -> str:
    """As the default account."""
    with default_let_in(asked.node):
        async with asked.peer() as peer:
            if asked.name == "log in":
                await peer.send(asked.request)
                assert (await asked.speaker.hear(peer))[0] == "login"
                return DONE
            return await ask(asked.node, peer, asked.name, asked.protocol, asked.place)


async def after_the_end(asked: Asked) -> str:
    async with asked.peer() as peer:
        token = token_of(asked.node, asked.role)
        await peer.send(asked.speaker.login("", token))
        assert await asked.speaker.hear(peer) == ("login", "shop", "")
        end_token(asked.node, asked.role, token)
        code = "000401" if asked.speaker is SPEAKERS["goms"] else "auth.ended"
        assert (await asked.speaker.hear(peer))[:2] == ("error", code)
        if asked.protocol != access_matrix.UDP:
            before = asked.stored
            with contextlib.suppress(ConnectionError):
                await peer.send(asked.request)
            assert await peer.read_to_end() == b""
            assert asked.stored == before
            return CLOSED
        if asked.name == "log in":
            await peer.send(asked.request)
            return DONE if (await asked.speaker.hear(peer))[0] == "login" else CLOSED
        return await ask(asked.node, peer, asked.name, asked.protocol, asked.place)


async def during_a_login(asked: Asked) -> str:
    """The login is one of the topic's owner, whose requests are all done."""
    before, bad = asked.stored, asked.node.bad_peers.counts
    login, speaker = asked.speaker.login("shop", PASSWORD), asked.speaker
    with held_logins(asked.node) as let_go:
        async with asked.peer() as peer:
            if asked.protocol == access_matrix.UDP:
                dropped = bad["udp.dropped"]
                await peer.send(login)
                await peer.send(asked.request)
                await until(lambda: bad["udp.dropped"] == dropped + 1)
                let_go()
                assert (await speaker.hear(peer))[0] == "login"
                assert asked.stored == before
                return DROPPED
            await peer.send(login + asked.request)
            await until(lambda: any(one.is_logging_in for one in asked.translators()))
            [found] = [one for one in asked.translators() if one.is_logging_in]
            assert found._login is not None and len(found._login[0]) >= 1
            assert asked.stored == before and not found.is_known
            let_go()
            assert (await speaker.hear(peer))[0] == "login"
            await has_happened(asked, peer, before)
            return WAITS


async def has_happened(asked: Asked, peer: Any, before: int) -> None:
    """What waited is done after the login."""
    match asked.name:
        case "close":
            assert await peer.read_to_end() == b""
        case "publish" if asked.protocol == access_matrix.GOMS:
            # It is refused, since it has not registered.
            assert (await asked.speaker.hear(peer))[1] == "002001"
        case "publish" | "publish in parts":
            await until(lambda: asked.stored > before)
        case "log in":
            assert (await asked.speaker.hear(peer))[0] == "login"
        case "unsubscribe from all topics" | "subscribe to all topics that one may read":
            await peer.send(asked.speaker.subscribe("no-such-topic"))
            assert (await asked.speaker.hear(peer))[0] == "error"
        case _:
            assert (await asked.speaker.hear(peer))[0] in ("subscribed", "chunk")


async def unproven(asked: Asked) -> str:
    wire, before = Wire(asked.node), asked.stored
    try:
        answers = wire.ask(asked.request)
        # An answer that is larger than the request is not sent.
        assert {one["messagetype"] for one in answers} <= {"prove"}
        assert asked.stored == before
        return CLOSED if wire.edge._peers.get(("192.0.2.7", 1234)) else PROVE
    finally:
        del wire.edge.send


# Queues


def message(value: bytes) -> bytes:
    return len(value).to_bytes(4) + value


@contextlib.asynccontextmanager
async def closing(peer: ScriptedPeer) -> AsyncIterator[Callable[[], bool]]:
    """Whether the bus has closed the connection."""
    reading = asyncio.create_task(peer.read_to_end())
    yield reading.done
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        assert await reading == b""


async def queue_answer(asked: Asked) -> str:
    before, token = asked.stored, token_of(asked.node, asked.role)

    def is_known() -> bool:
        found = [one for one in asked.translators() if isinstance(one, QueueTranslator)]
        return any(one.is_known and bool(one.subscriptions or one.access.topics) for one in found)

    async with asked.peer() as peer, closing(peer) as is_closed:
        if asked.role == "default":
            await peer.send(message(b"x"))
        elif asked.role == "logging-in":
            return await queue_during_a_login(asked, peer, token, is_known)
        else:
            await peer.send(message(token.encode()))
            await until(lambda: is_closed() or is_known())
            if asked.role in OVER:
                end_token(asked.node, asked.role, token)
                await until(is_closed)
            if not is_closed() and asked.name == "log in":
                return DONE
            with contextlib.suppress(ConnectionError):
                await peer.send(message(b"x"))
        await until(lambda: is_closed() or asked.stored > before)
        return CLOSED if asked.stored == before else DONE


async def queue_during_a_login(
    asked: Asked, peer: ScriptedPeer, token: str, is_known: Callable[[], bool]
) -> str:
    before = asked.stored
    with held_logins(asked.node) as let_go:
        await peer.send(message(token.encode()) + message(b"x"))
        await until(lambda: any(one.is_logging_in for one in asked.translators()))
        assert asked.stored == before and not is_known()
        let_go()
        await until(lambda: is_known() and asked.stored == before + 1)
    return WAITS


# All of them


async def answer_to(asked: Asked) -> str:
    if asked.protocol == access_matrix.QUEUE:
        is_asked = asked.role != "unproven" and (asked.name, asked.role) != ("log in", "default")
        if not is_asked:
            return NONE
        with default_let_in(asked.node) if asked.role == "default" else contextlib.nullcontext():
            return await queue_answer(asked)
    match asked.role:
        case "default":
            return await by_nothing(asked)
        case "revoked" | "expired":
            return await after_the_end(asked)
        case "logging-in":
            return await during_a_login(asked)
        case "unproven":
            return await unproven(asked) if asked.protocol == access_matrix.UDP else NONE
    return await by_token(asked)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Node, Place, Place]]:
    """A bus, and what is asked for: of `shop`, and of the default account."""
    async with table_bus(tmp_path_factory) as node:
        shared = Place("shared", TOPIC, await large_payload(node, "shop", TOPIC))
        own = Place(OPEN, OPEN, await large_payload(node, "default", OPEN), registers=True)
        yield node, shared, own


@pytest.mark.parametrize("role", LOGINS)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_request_of_a_login_is_answered_as_the_table_says(
    role: PeerRole, bus: tuple[Node, Place, Place]
) -> None:
    wanted, found = {}, {}
    node, shared, own = bus
    place = own if role == "default" else shared
    for request in REQUESTS:
        for protocol in request.words:
            wanted[request.name, protocol] = request.answer(protocol, role)
            asked = Asked(node, request.name, protocol, role, place)
            found[request.name, protocol] = await answer_to(asked)
    assert found == wanted
