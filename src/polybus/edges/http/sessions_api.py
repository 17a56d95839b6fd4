"""/v1/sessions and /v1/broadcast: inboxes for msgstream clients."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from polybus.edges.http.calls import Answer, Call, Operation, answer
from polybus.edges.http.problems import Problem, unknown_session
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import parse_pack

TTL_S_MAX = 30 * 86_400
PROBLEM = "application/problem+json"

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
    wanted = await call.json(NewSession)
    key = await call.state.inboxes.create(wanted.topics, wanted.ttl_s, wanted.from_)
    return answer(SessionCreated(key), 201)


async def put_topics(call: Call) -> Response:
    session = _session(call)
    wanted = await call.json(SessionTopics)
    await call.state.inboxes.replace_topics(session, wanted.topics)
    return answer(SessionTopics(list(session.follows)))


async def post_pack(call: Call) -> Response:
    session = _session(call)
    pack = parse_pack(await call.json_bytes())
    await call.state.inboxes.post([session], pack)
    return Response(status_code=202)


async def broadcast(call: Call) -> Response:
    pack = parse_pack(await call.json_bytes())
    return answer(Broadcast(await call.state.inboxes.broadcast(pack)), 202)


async def delete(call: Call) -> Response:
    await call.state.inboxes.delete(_session(call))
    return Response(status_code=204)


UNKNOWN = Answer("No such session, or it has expired", Problem, PROBLEM)
INVALID = Answer("The request is malformed", Problem, PROBLEM)
NO_TOPIC = Answer("No such topic", Problem, PROBLEM)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/sessions",
        run=create,
        summary="Open a session",
        body=NewSession,
        answers={201: Answer("The session's key", SessionCreated), 400: INVALID, 404: NO_TOPIC},
    ),
    Operation(
        method="PUT",
        path="/v1/sessions/{key}/topics",
        run=put_topics,
        summary="Replace the topics a session follows",
        body=SessionTopics,
        answers={
            200: Answer("The topics it follows", SessionTopics),
            400: INVALID,
            404: UNKNOWN,
        },
    ),
    Operation(
        method="POST",
        path="/v1/sessions/{key}/packs",
        run=post_pack,
        summary="Put one pack into a session",
        body=Pack,
        answers={202: Answer("It is stored, and will be delivered"), 400: INVALID, 404: UNKNOWN},
    ),
    Operation(
        method="POST",
        path="/v1/broadcast",
        run=broadcast,
        summary="Put one pack into every session",
        body=Pack,
        answers={202: Answer("It is stored, and will be delivered", Broadcast), 400: INVALID},
    ),
    Operation(
        method="DELETE",
        path="/v1/sessions/{key}",
        run=delete,
        summary="End a session",
        answers={204: Answer("It is deleted"), 404: UNKNOWN},
    ),
)
