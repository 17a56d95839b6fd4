"""/v1/sessions and /v1/broadcast: inboxes for msgstream clients."""

from typing import Annotated, Any

import msgspec

from polybus.edges.http.calls import Call, denied
from polybus.services.sessions.session import Session
from polybus.services.transactions.rights import check_quota
from polybus.wire.msgstream import parse_pack

TTL_S_MAX = 30 * 86_400

Ttl = Annotated[float, msgspec.Meta(gt=0, le=TTL_S_MAX)]
Topics = Annotated[list[str], msgspec.Meta(description="Names of topics; capitals are folded.")]
# [["type", data], …]: checked by the protocol's own reader.
PackBody = Annotated[
    list[
        Annotated[
            list[Any],
            msgspec.Meta(
                min_length=1, max_length=2, extra_json_schema={"prefixItems": [{"type": "string"}]}
            ),
        ]
    ],
    msgspec.Meta(min_length=1, description='`[["type", data], …]`, delivered as one pack.'),
]


class NewSession(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """The topics to follow, the first position, and the time to live without contact."""

    topics: Topics = []
    ttl_s: Ttl | None = None
    from_: str = msgspec.field(name="from", default="latest")


class SessionCreated(msgspec.Struct):
    """The key gives access to the session: treat it as a password."""

    session_key: str = msgspec.field(name="sessionKey")


class SessionTopics(msgspec.Struct, forbid_unknown_fields=True):
    topics: Topics


class Broadcast(msgspec.Struct):
    sessions: int


async def create(call: Call, body: NewSession) -> SessionCreated:
    """Open a session."""
    inboxes = call.state.inboxes
    return SessionCreated(await inboxes.create(body.topics, body.ttl_s, body.from_, call.access))


async def put_topics(call: Call, session: Session, body: SessionTopics) -> SessionTopics:
    """Replace the topics a session follows."""
    session = await call.state.inboxes.replace_topics(session, body.topics, call.access)
    return SessionTopics([call.access.shown(topic) for topic in session.follows])


def _check_unlimited(call: Call) -> None:
    """Refuse tokens that are limited to topics. Raises UsageError `auth.denied`.

    A pack can imitate a message of any topic.
    """
    if call.access.token is not None and call.access.token.topics:
        raise denied("a token that is limited to topics may not send packs")


def _check_quota(call: Call) -> None:
    """A pack counts as a message. Raises UsageError `account.rate`, `account.bytes`."""
    check_quota(call.access, call.state.context.clock_us())
    call.state.accounts.configs.storage.check(call.access.account)


def _charge(call: Call, pack: bytes, sessions: int) -> None:
    if call.access.quota is not None:
        call.access.quota.charge(sessions, sessions * len(pack))


async def post_pack(call: Call, session: Session) -> None:
    """Put one pack into a session."""
    _check_unlimited(call)
    pack = parse_pack(await call.json_bytes())
    _check_quota(call)
    _charge(call, pack, 1)
    await call.state.inboxes.post([session], pack)


async def broadcast(call: Call) -> Broadcast:
    """Put one pack into every session of the account; of all accounts as an administrator."""
    _check_unlimited(call)
    pack = parse_pack(await call.json_bytes())
    account = None if call.is_admin else call.access.account
    _check_quota(call)
    sessions = await call.state.inboxes.broadcast(pack, account)
    _charge(call, pack, sessions)
    return Broadcast(sessions)


async def delete(call: Call, session: Session) -> None:
    """End a session."""
    await call.state.inboxes.delete(session)
