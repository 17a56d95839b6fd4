"""/v1/sessions and /v1/broadcast: inboxes for msgstream clients."""

from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from polybus.edges.http.calls import Call, answer
from polybus.edges.http.problems import unknown_session
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import parse_pack

TTL_S_MAX = 30 * 86_400

Ttl = Annotated[float, msgspec.Meta(gt=0, le=TTL_S_MAX)]
Topics = Annotated[list[str], msgspec.Meta(description="Names of topics; capitals are folded.")]
# [["type", data], …]: checked by the protocol's own reader.
Pack = Annotated[
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


def _session(call: Call) -> Session:
    session = call.state.inboxes.find(call.path["key"])
    if session is None:
        raise unknown_session()
    return session


async def create(call: Call) -> Response:
    """Open a session."""
    wanted = await call.json(NewSession)
    key = await call.state.inboxes.create(wanted.topics, wanted.ttl_s, wanted.from_)
    return answer(SessionCreated(key), 201)


async def put_topics(call: Call) -> Response:
    """Replace the topics a session follows."""
    session = _session(call)
    wanted = await call.json(SessionTopics)
    await call.state.inboxes.replace_topics(session, wanted.topics)
    return answer(SessionTopics(list(session.follows)))


async def post_pack(call: Call) -> Response:
    """Put one pack into a session."""
    session = _session(call)
    pack = parse_pack(await call.json_bytes())
    await call.state.inboxes.post([session], pack)
    return Response(status_code=202)


async def broadcast(call: Call) -> Response:
    """Put one pack into every session."""
    pack = parse_pack(await call.json_bytes())
    return answer(Broadcast(await call.state.inboxes.broadcast(pack)), 202)


async def delete(call: Call) -> Response:
    """End a session."""
    await call.state.inboxes.delete(_session(call))
    return Response(status_code=204)
