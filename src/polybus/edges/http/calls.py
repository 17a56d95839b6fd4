"""API calls: one declaration per operation, which runs it and from which OpenAPI is generated.

The types in a function's signature decode its query and JSON body, encode its answer, and are the
schemas of the description. Errors are answered as application/problem+json, with their code.
"""

import functools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from polybus import names
from polybus.edges.http.logins import CHALLENGE, access_of
from polybus.edges.http.state import HttpState
from polybus.errors import BusyError, PeerError, PolybusError, StorageError, UsageError
from polybus.log.topics import storage_error, unknown
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.records import Right
from polybus.services.masks import TopicMask
from polybus.services.sessions.session import Session
from polybus.structs import convert, decode
from polybus.wire.msgstream import deeper_than

T = TypeVar("T")
JSON = "application/json"
TEXT = "text/plain"
OCTETS = "application/octet-stream"
OFFSET_MAX = (1 << 63) - 1
"""The largest offset, epoch, or number of rows in a request."""
ENCODED = "polybus.path-is-encoded"
"""In a request's scope: its path was routed undecoded."""
STATUSES = {
    "topic.unknown": 404,
    "topic.exists": 409,
    "topic.recreated": 409,
    "topic.too-many": 409,
    "topic.reserved": 403,
    "admin.token": 401,
    "auth.needed": 401,
    "auth.failed": 401,
    "auth.ended": 401,
    "auth.denied": 403,
    "auth.busy": 429,
    "signup.too-many": 429,
    "account.unknown": 404,
    "account.no-grant": 404,
    "account.no-token": 404,
    "account.exists": 409,
    "account.taken": 409,
    "account.in-use": 409,
    "account.too-many": 409,
    "account.sessions": 409,
    "account.topics": 409,
    "account.rate": 429,
    "account.connections": 429,
    "account.bytes": 507,
    "message.unknown": 404,
    "lake.unknown": 404,
    "pipeline.running": 409,
    "pipeline.not-running": 409,
    "pipeline.unreachable": 503,
    "letter.unknown": 404,
    "replay.unknown": 404,
    "replay.running": 409,
    "sql.unknown": 404,
    "sql.id": 409,
    "sql.stopped": 409,
    "sql.too-large": 413,
    "sql.busy": 429,
    "connection.unknown": 404,
    "session.unknown": 404,
    "consumer.unknown": 404,
    "consumer.too-many": 409,
    "session.too-many": 503,
    "log.offset-unknown": 416,
    "commit.gap": 409,
    "commit.query": 409,
    "commit.too-many": 409,
    "commit.unknown": 404,
    "commit.too-large": 413,
    "commit.value-too-large": 413,
    "staging.full": 507,
    "blob.unknown": 404,
    "blob.range": 416,
    "blob.position": 409,
    "blob.arriving": 409,
    "blob.too-many": 507,
    "staging.in-use": 409,
    "staging.position": 409,
    "http.body-too-large": 413,
    "http.not-found": 404,
    "http.method": 405,
    "http.content-type": 415,
}
# Neither bugs of the bus nor mistakes of a program, but an operator should see them.
NOTED = ("auth.failed", "auth.busy")


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `run` takes the call and, if it declares them, the `topic` or `session` that the path names, the
    decoded `query` and the decoded JSON `body`. It returns what is encoded as the answer's body, or
    a Response, declared as `Annotated[Response, type]`.

    Attributes:
        fails: the statuses of problems that it may answer.
        asks: who may call it: everybody without a login, accounts, those who see the figures of
            the bus (the default account and administrators) or the bus as a whole (administrators,
            and the default account while there is no other), or administrators alone.
        right: what the caller must be allowed to do with the topic that the path names; without
            one in it, what the token must allow for some topic.
        body: the type of a body that `run` decodes itself; `media` are its content types.
        produces: the content type of its answers, and of a 503 that it declares.
        headers: descriptions of special headers of its answers.
        action: what `$audit` calls the change that it makes; empty if it makes none. `run` says
            what was changed with `Call.changes`.
    """

    method: str
    path: str
    run: Callable[..., Awaitable[Any]]
    status: int = 200
    fails: Sequence[int] = ()
    asks: Literal["nothing", "login", "figures", "overview", "administrator"] = "login"
    right: Right | None = None
    body: Any = None
    media: tuple[str, ...] = (JSON,)
    produces: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    action: str = ""

    def types(self) -> dict[str, Any]:
        """The types of what `run` takes and returns."""
        hints = dict(_hints_of(self.run))
        if self.body is not None:
            hints["body"] = self.body
        answered = get_args(hints["return"])
        if answered and answered[0] is Response:
            hints["return"] = answered[1]
        return {name: kind for name, kind in hints.items() if kind not in (None, type(None))}


@functools.cache
def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Cached, because Python compiles annotations at each call, at each start of a bus."""
    return get_type_hints(function, include_extras=True)


class Viewer:
    """A user of the API; `access` has their permissions."""

    def __init__(self, state: HttpState, access: AccountAccess) -> None:
        self.state = state
        self.access = access

    @property
    def is_admin(self) -> bool:
        """Whether they came through the administrator's socket, or have the token."""
        return self.access is self.state.accounts.admin

    @property
    def sees_bus(self) -> bool:
        """Whether they may see what concerns all accounts: their topics, peers and figures."""
        return self.is_admin or (self._is_default and self.access.is_alone)

    @property
    def _is_default(self) -> bool:
        token = self.access.token
        is_limited = token is not None and bool(token.topics or token.rights)
        return self.access.account == names.ACCOUNT and not is_limited

    def check_sees_bus(self) -> None:
        """Raises UsageError `auth.denied`."""
        if not self.sees_bus:
            text = "administrators may see this, and the default account while it is the only one"
            raise denied(text)

    def check_sees_figures(self) -> None:
        """Raises UsageError `auth.denied`."""
        if not (self.is_admin or self._is_default):
            raise denied("only the default account and administrators may see this")

    def knows(self, name: str) -> bool:
        """Whether they may see the full name of a topic, group or producer."""
        return self.sees_bus or self.access.mine(name) is not None or self.access.may_read(name)

    def check_manages(self, topics: Collection[str], what: str) -> None:
        """Raises UsageError `auth.denied` if a token may not end or move what uses these topics."""
        if not self.access.may_manage(topics):
            raise denied(f"the token may not change {what} that use other topics than its own")

    def mask_of(self, topic: str) -> TopicMask | None:
        """The mask that applies to them for a topic of this full name."""
        return None if self.is_admin else self.state.masks.of(topic)

    def hides_values(self, topic: str) -> bool:
        """Whether any part of a topic's values is hidden from them."""
        mask = self.mask_of(topic)
        return mask is not None and mask.hides_values

    def topic_named(self, shown: str, right: Right = "subscribe") -> str:
        """The full name of a topic by their name for it; checks that they have this right to it.

        Raises UsageError `topic.unknown`, whatever is wrong with it; `auth.denied` or
        `topic.reserved` if they may read it, and so know that it exists.
        """
        shown = shown.lower()
        name = self.access.full(shown)
        # First, whether or not it exists: both take the same time.
        rights = self.access.rights(name)
        exists = self.state.bus.has_topic(name)
        if right in rights and exists:
            return name
        if "subscribe" not in rights or not exists:
            # The same answer for impossible and forbidden names as for unknown ones.
            raise unknown(shown)
        if names.is_reserved(name):
            raise UsageError("topic.reserved", f"'{shown}' is a system topic")
        raise denied(f"you may read '{shown}', but not {right} it")


class Call(Viewer):
    """One request to an operation; the caller is known once `log_in` returns."""

    def __init__(self, state: HttpState, request: Request) -> None:
        super().__init__(state, state.accounts.nobody)
        self.request = request
        self._changed: tuple[str, dict[str, Any]] | None = None

    @property
    def client(self) -> str:
        """The peer's address; empty if it has none."""
        client = self.request.client
        return f"{client.host}:{client.port}" if client else ""

    @property
    def path(self) -> Mapping[str, str]:
        """The names in the path, decoded."""
        found = self.request.path_params
        if ENCODED in self.request.scope:
            return {name: unquote(value) for name, value in found.items()}
        return found

    def topic(self, right: Right = "subscribe") -> str:
        """The full name of the topic in the path. Raises as `topic_named`."""
        return self.topic_named(self.path["topic"], right)

    async def session(self) -> Session:
        """The session in the path. Raises UsageError `session.unknown`; StorageError."""
        session = await self.state.inboxes.find_anywhere(self.path["key"])
        if session is None or not (self.is_admin or session.account == self.access.account):
            # The same answer whether it never existed, expired, was deleted or is not theirs.
            raise UsageError("session.unknown", "the session does not exist or has expired")
        return session

    async def named(self, wanted: Collection[str], right: Right | None) -> dict[str, Any]:
        """The objects in the path that an operation takes. Raises as `topic` and `session` do."""
        given: dict[str, Any] = {}
        token = self.access.token
        if "topic" in wanted:
            given["topic"] = self.topic(right or "subscribe")
        elif token is not None and token.rights and right and right not in token.rights:
            raise denied(f"the token may not {right}")
        if "session" in wanted:
            given["session"] = await self.session()
        return given

    @property
    def content_type(self) -> str:
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int:
        """The announced length of the body; 0 if it is not announced."""
        text = self.request.headers.get("content-length", "")
        return int(text) if text.isdecimal() else 0

    def changes(self, target: str, detail: dict[str, Any] | None = None) -> None:
        """Set the full name of the changed object for `$audit`; never a secret."""
        named = {name.replace("_", "-"): value for name, value in (detail or {}).items()}
        self._changed = target, named

    @property
    def who(self) -> tuple[str, str]:
        """Who calls, for `$audit`: the account, and its address."""
        return self.access.account, self.client

    def pace(self, operation: Operation) -> AbstractAsyncContextManager[None]:
        """Limit the pace of changes by named accounts."""
        account = self.access.account
        if not operation.action or self.is_admin or account == names.ACCOUNT:
            return nullcontext()
        return self.state.change_pace.turn(account)

    async def record(self, action: str) -> None:
        """Record the change, if there was one. Raises StorageError."""
        if self._changed is not None:
            target, detail = self._changed
            await self.state.audit.record(self.who, action, target, detail)

    async def log_in(self, asks: str) -> None:
        """Authenticate the caller. Raises UsageError `auth.…`; the body has not been read."""
        if asks == "nothing":
            return
        self.access = await access_of(self.state, self.request)
        self.request.state.count_for(self.access)
        if asks == "overview":
            self.check_sees_bus()
        if asks == "figures":
            self.check_sees_figures()
        if asks == "administrator" and not self.is_admin:
            raise denied("only administrators may do this")

    def query(self, kind: type[T]) -> T:
        """The query. Raises PeerError `http.query`."""
        raw: dict[str, str] = {}
        for name, value in self.request.query_params.multi_items():
            if name in raw:
                raise PeerError("http.query", f"{name[:40]} is given twice")
            raw[name] = value
        try:
            return convert(raw, kind, strict=False)
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            raise PeerError("http.query", str(error)[:200]) from error

    async def json(self, kind: type[T]) -> T:
        """The body. Raises PeerError `http.body-invalid`, `…-too-large`, `http.content-type`."""
        body = await self.json_bytes()
        try:
            return decode(body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError("http.body-invalid", str(error)[:200]) from error

    async def json_bytes(self) -> bytes:
        if self.content_type not in (JSON, ""):
            raise PeerError("http.content-type", f"the body must be {JSON}")
        body = await self.body(self.state.config.http.json_bytes_max, "json-bytes-max")
        depth_max = self.state.config.limits.json_depth_max
        if deeper_than(body, depth_max):
            raise PeerError("http.body-invalid", f"nested over {depth_max} deep (json-depth-max)")
        return body

    async def body(self, bytes_max: int, limit: str) -> bytes:
        """The whole body, or PeerError `http.body-too-large`."""
        pieces = []
        size = 0
        async for piece in self.request.stream():
            size += len(piece)
            if size > bytes_max:
                text = f"the body is over {bytes_max} bytes ({limit})"
                raise PeerError("http.body-too-large", text)
            pieces.append(piece)
        return b"".join(pieces)


class Problem(msgspec.Struct, kw_only=True):
    """An error, as RFC 9457 defines it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str


def problem(status: int, code: str, text: str, headers: dict[str, str] | None = None) -> Response:
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=text, code=code)
    return Response(
        msgspec.json.encode(body), status, headers, media_type="application/problem+json"
    )


def problem_of(error: PolybusError) -> Response:
    """The answer for an error."""
    status = STATUSES.get(error.code)
    if status is None:
        status = 503 if isinstance(error, StorageError | BusyError) else 400
    headers = {}
    if error.code == "http.body-too-large":
        # The rest of the body is not read, so the connection cannot be reused.
        headers["connection"] = "close"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = CHALLENGE
    return problem(status, error.code, error.text, headers)


def denied(text: str) -> UsageError:
    return UsageError("auth.denied", text)


def performer(state: HttpState, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    """Runs an operation for a request; a PolybusError becomes a problem."""
    types = operation.types()

    async def run(call: Call) -> Response:
        await call.log_in(operation.asks)
        given = await call.named(types.keys(), operation.right)
        if "query" in types:
            given["query"] = call.query(types["query"])
        if "body" in types and operation.body is None:
            given["body"] = await call.json(types["body"])
        async with call.pace(operation):
            answer = await operation.run(call, **given)
        await call.record(operation.action)
        if call.access.is_ended and operation.method == "GET":
            # It may have waited while the caller lost the permission to read.
            raise UsageError("auth.ended", "your account, password or token is no longer valid")
        if isinstance(answer, Response):
            return answer
        if answer is None:
            return Response(status_code=operation.status)
        return Response(msgspec.json.encode(answer), operation.status, media_type=JSON)

    async def perform(request: Request) -> Response:
        call = Call(state, request)
        try:
            return await run(call)
        except ClientDisconnect:
            return Response(status_code=400)
        except PolybusError as error:
            if not isinstance(error, UsageError) or error.code in NOTED:
                state.bad_peers.record(call.client or "unknown", "http", error.code, error.text)
            return problem_of(error)
        except OSError as error:
            return problem_of(storage_error(error, str(error.filename or state.context.data)))

    return perform
