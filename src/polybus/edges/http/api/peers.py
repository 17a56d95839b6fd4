"""/v1/connections and /v1/session: lists connections and sessions, and ends them.

An account sees its own, and administrators see all. They may end what they see. A token sees only
names of topics that it may read, and needs the right `administer` to end something.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from polybus.edges.http.calls import Call, Viewer, denied
from polybus.edges.protocols.translator import Translator
from polybus.edges.tcp.transport import ReadInterceptor
from polybus.errors import UsageError
from polybus.services.sessions.session import Session

LIMIT_MAX = 10_000
TOPICS_SHOWN_MAX = 20
SLICE = 500
"""Peers per piece: some milliseconds of work, then other tasks run."""
_SALT = secrets.token_bytes(16)


class ListedQuery(msgspec.Struct, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = 1000


class ConnectionView(msgspec.Struct, rename="kebab", kw_only=True):
    """A peer: an open connection, or an address of UDP. An HTTP request logs in by itself."""

    id: str
    peer: str
    protocol: str
    transport: str
    account: str
    is_admin: bool
    tls: bool
    websocket: bool
    age_s: float | None
    subscriptions: int
    topics: list[str]
    waiting_bytes: int


class ConnectionList(msgspec.Struct):
    connections: list[ConnectionView]
    total: int


class SessionView(msgspec.Struct, rename="kebab", kw_only=True):
    """A session. Its `id` is not its key, and gives no access to its packs."""

    id: str
    account: str
    topics: list[str]
    packs_waiting: int
    bytes_waiting: int
    last_shown: int
    last_confirmed: int
    connected: bool
    ttl_s: float


class SessionList(msgspec.Struct):
    sessions: list[SessionView]
    total: int


# Connections


async def list_connections(call: Call, query: ListedQuery) -> ConnectionList:
    """Who is connected."""
    return await connections_for(call, query.limit)


async def live_connections(viewer: Viewer, _about: Mapping[str, str]) -> ConnectionList:
    return await connections_for(viewer, ListedQuery().limit)


async def connections_for(viewer: Viewer, limit: int) -> ConnectionList:
    found: list[ConnectionView] = []
    total = 0
    async for member in _members(viewer):
        total += 1
        if len(found) < limit:
            found.append(_view(viewer, member))
    return ConnectionList(found, total)


async def show_connection(call: Call) -> ConnectionView:
    """One connection, by its id."""
    return _view(call, await _member(call))


async def _member(call: Call) -> Translator:
    """The peer whose id is in the path. Raises UsageError `connection.unknown`."""
    async for member in _members(call):
        if _id(member) == call.path["id"]:
            return member
    raise UsageError("connection.unknown", "there is no such connection; it may have ended")


async def _members(viewer: Viewer) -> AsyncIterator[Translator]:
    """The peers that the viewer may see; other tasks run meanwhile."""
    for index, member in enumerate(viewer.state.members()):
        if index % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if not isinstance(member, Translator) or _is_ending(member):
            continue
        if viewer.sees_bus or member.access.account == viewer.access.account:
            yield member


def _is_ending(member: Translator) -> bool:
    """Whether the bus has closed it, and it only waits for the peer to read the last bytes."""
    peer: Any = member.peer
    return hasattr(peer, "is_closing") and bool(peer.is_closing())


def _view(viewer: Viewer, member: Translator) -> ConnectionView:
    peer: Any = member.peer
    is_tcp = hasattr(peer, "outbox")
    is_unix = is_tcp and not peer.ip
    topics = list(member.subscriptions)
    opened_s = getattr(peer, "opened_s", None)
    return ConnectionView(
        id=_id(member),
        peer=peer.name,
        protocol=member.protocol,
        transport="unix" if is_unix else "tcp" if is_tcp else "udp",
        account=member.access.account,
        is_admin=bool(getattr(peer, "is_admin", False)),
        tls=is_tcp and peer.tls is not None,
        websocket=is_tcp and isinstance(getattr(member.codec, "upper", None), ReadInterceptor),
        age_s=None if opened_s is None else round(viewer.state.loop.time() - opened_s, 1),
        subscriptions=len(topics),
        topics=[
            viewer.access.shown(one)
            for one in topics[:TOPICS_SHOWN_MAX]
            if viewer.access.may_read(one)
        ],
        waiting_bytes=peer.outbox.held_bytes if is_tcp else 0,
    )


def _id(member: Translator) -> str:
    """A name for a peer while it is connected; it reveals nothing about memory."""
    return hashlib.blake2b(b"%d" % id(member), digest_size=8, key=_SALT).hexdigest()


async def end_connection(call: Call) -> Annotated[Response, None]:
    """End a connection; the peer may connect again."""
    answer = Response(status_code=204)
    member = await _member(call)
    if not call.is_admin and member.access.account != call.access.account:
        raise denied("the connection belongs to another account")
    call.check_manages(member.subscriptions, "connections")
    call.changes(member.peer.name, {"protocol": member.protocol})
    if member.peer.name == call.client + call.state.context.node:
        # The caller's own: the server ends it after the answer.
        answer.headers["connection"] = "close"
    else:
        member.peer.close()
    return answer


# Sessions


async def list_sessions(call: Call, query: ListedQuery) -> SessionList:
    """The account's sessions; those of all accounts for administrators."""
    found: list[SessionView] = []
    total = 0
    for session in list(call.state.inboxes.sessions()):
        if _may_see(call, session):
            total += 1
            if len(found) < query.limit:
                found.append(_session_view(call, session))
                if len(found) % SLICE == 0:
                    await asyncio.sleep(0)
    return SessionList(found, total)


def _may_see(call: Call, session: Session) -> bool:
    return call.is_admin or session.account == call.access.account


def _session_view(call: Call, session: Session) -> SessionView:
    waiting = session.unconfirmed(0, 0)
    return SessionView(
        id=session.digest.hex(),
        account=session.account,
        topics=[call.access.shown(one) for one in session.follows if call.access.may_read(one)],
        packs_waiting=session.pack_count,
        bytes_waiting=session.value_bytes,
        last_shown=session.shown_to,
        last_confirmed=min(session.shown_to, waiting[0][0] - 1 if waiting else session.shown_to),
        connected=session.receiver is not None,
        ttl_s=session.ttl_s,
    )


def _session(call: Call) -> Session:
    """The session whose id is in the path. Raises UsageError `session.unknown`."""
    session = call.state.inboxes.by_id(call.path["id"])
    if session is None or not _may_see(call, session):
        raise UsageError("session.unknown", "the session does not exist or has expired")
    return session


def _managed_session(call: Call) -> Session:
    """As `_session`. Raises UsageError `auth.denied` if the caller may see but not end it."""
    session = _session(call)
    call.check_manages(session.follows, "sessions")
    return session


async def show_session(call: Call) -> SessionView:
    """One session, by its id."""
    return _session_view(call, _session(call))


async def end_session(call: Call) -> None:
    """End a session by its id, with the packs that wait in it."""
    session = _managed_session(call)
    waiting = session.pack_count
    await call.state.inboxes.delete(session)
    call.changes(session.digest.hex(), {"account": session.account, "packs-waiting": waiting})


async def redeliver(call: Call) -> SessionView:
    """Make a session's client reconnect: it gets all unconfirmed packs again."""
    session = _managed_session(call)
    receiver = session.detach()
    if receiver is not None:
        receiver.shut_down()
    call.changes(session.digest.hex(), {"packs-waiting": session.pack_count})
    return _session_view(call, session)
