"""API calls: one declaration per operation, which runs it and from which OpenAPI is generated.

A request's query and JSON body are decoded into the same types that the description shows.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from polybus.edges.http.problems import problem_of
from polybus.edges.http.state import HttpState
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.wire.msgstream import deeper_than

T = TypeVar("T")
JSON = "application/json"
TEXT = "text/plain"
OCTETS = "application/octet-stream"
ENCODED = "polybus.path-is-encoded"
"""In a request's scope: its path was routed undecoded."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        answer: the type of the body of a successful answer; None if it has none.
        fails: the statuses of problems that it may answer.
        body: the type of a JSON body; `media` are the content types that it accepts.
        produces: the content type of its answers, and of a 503 that it declares.
    """

    method: str
    path: str
    run: "Callable[[Call], Awaitable[Response]]"
    answer: Any = None
    status: int = 200
    fails: Sequence[int] = ()
    query: type[msgspec.Struct] | None = None
    body: Any = None
    media: tuple[str, ...] = (JSON,)
    produces: str = JSON


class Call:
    """One request to an operation."""

    def __init__(self, state: HttpState, operation: Operation, request: Request) -> None:
        self.state = state
        self.operation = operation
        self.request = request

    @property
    def path(self) -> Mapping[str, str]:
        """The names in the path, decoded."""
        found = self.request.path_params
        if ENCODED in self.request.scope:
            return {name: unquote(value) for name, value in found.items()}
        return found

    @property
    def content_type(self) -> str:
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int:
        """The announced length of the body; 0 if it is not announced."""
        text = self.request.headers.get("content-length", "")
        return int(text) if text.isdecimal() else 0

    @property
    def is_admin(self) -> bool:
        """Whether the call carries the administrator's token."""
        return self.state.token.is_in(self.request.headers.get("authorization"))

    def query(self, kind: type[T]) -> T:
        """The query. Raises PeerError `http.query`."""
        raw: dict[str, str] = {}
        for name, value in self.request.query_params.multi_items():
            if name in raw:
                raise PeerError("http.query", f"{name[:40]} is given twice")
            raw[name] = value
        try:
            return msgspec.convert(raw, kind, strict=False)
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            raise PeerError("http.query", str(error)[:200]) from error

    async def json(self, kind: type[T]) -> T:
        """The body. Raises PeerError `http.body-invalid`, `…-too-large`, `http.content-type`."""
        body = await self.json_bytes()
        try:
            return msgspec.json.decode(body, type=kind)
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


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


async def perform(state: HttpState, operation: Operation, request: Request) -> Response:
    """Run an operation; a PolybusError becomes a problem."""
    try:
        return await operation.run(Call(state, operation, request))
    except ClientDisconnect:
        return Response(status_code=400)
    except PolybusError as error:
        client = request.client
        if not isinstance(error, UsageError):
            name = f"{client.host}:{client.port}" if client else "unknown"
            state.bad_peers.note(name, "http", error.code, error.text)
        headers = None
        if error.code == "http.body-too-large":
            # The rest of the body is not read, so the connection cannot be reused.
            headers = {"connection": "close"}
        return problem_of(error, headers)
