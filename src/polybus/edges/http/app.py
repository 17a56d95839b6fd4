"""The ASGI application: routes the API, msgstream and the console; reports errors.

The API's description, OpenAPI, is generated from its operations.
"""

import functools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from polybus.edges.http import console_files
from polybus.edges.http.asyncapi import describe_streams
from polybus.edges.http.calls import (
    ENCODED,
    JSON,
    TEXT,
    Operation,
    Problem,
    performer,
    problem,
    problem_of,
)
from polybus.edges.http.polls import METHODS, Polls
from polybus.edges.http.routes import CHANNELS, OPERATIONS
from polybus.edges.http.state import HttpState
from polybus.log.blobs import unknown_blob
from polybus.wire.msgstream import PATHS

logger = logging.getLogger("polybus.requests")

Endpoint = Callable[[Request], Awaitable[Response]]
REF = "#/components/schemas/{name}"
PROBLEM = "application/problem+json"
FAILURES = {
    400: "The request is malformed",
    401: "A login is needed, or has failed",
    403: "The caller may not do this, the topic is reserved, or a web page of another origin asks",
    404: "It does not exist",
    405: "Method not allowed for this path",
    409: "It conflicts with what exists or is under way",
    413: "The body is too large",
    414: "The URL is too long",
    415: "The content type is not accepted",
    416: "The offset is outside of what the topic holds",
    421: "The bus is not known by the name in the URL",
    429: "Too many at a time: try again later",
    503: "The bus is stopping, or cannot store",
    507: "Too much is staged, or the account has no more room",
}
ALWAYS = (405, 413, 414, 415, 421, 503)
OF_LOGINS = (401, 429)
SCHEMES = {"password": {"type": "http", "scheme": "basic"}}
SCHEMES["token"] = {"type": "http", "scheme": "bearer"}


def encoded_slashes(app: ASGIApp) -> ASGIApp:
    """Allows a slash in a name in a path, as `%2F`, which is not a separator.

    Such a path is routed undecoded, and `Call.path` decodes the names found in it.
    """

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or b""
        if b"%2f" in raw.lower():
            scope = {**scope, "path": raw.decode("latin-1"), ENCODED: True}
        await app(scope, receive, send)

    return routed


def polls_first(answer_poll: Endpoint, app: ASGIApp) -> ASGIApp:
    """Answers polls without the middleware of the application, because many may come at once."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PATHS or scope["method"] not in METHODS:
            await app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            answer = await answer_poll(request)
        except Exception as error:
            answer = await _bug(request, error)
        await answer(scope, receive, send)

    return routed


def make_app(state: HttpState) -> ASGIApp:
    polls = Polls(state)
    api = Starlette(
        routes=[*_api_routes(state), *_other_routes(state, polls)],
        middleware=[Middleware(encoded_slashes)],
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )
    api.router.redirect_slashes = False
    app = polls_first(polls.answer, api)
    if state.config.http.cors_origins:
        origins = state.config.http.cors_origins
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _api_routes(state: HttpState) -> Sequence[Route]:
    paths: dict[str, dict[str, Endpoint]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = performer(state, operation)
    return [_route(path, endpoints) for path, endpoints in paths.items()]


def _other_routes(state: HttpState, polls: Polls) -> Sequence[Route]:
    @functools.cache
    def description() -> dict[str, object]:
        return describe(OPERATIONS)

    async def openapi(request: Request) -> Response:
        return JSONResponse(description())

    async def asyncapi(request: Request) -> Response:
        return JSONResponse(describe_streams(state.config.connectors, list(CHANNELS)))

    async def no_blob(request: Request) -> Response:
        return problem_of(unknown_blob())

    msgstream = dict.fromkeys(METHODS, polls.answer)
    return [
        *(_route(path, msgstream) for path in PATHS),
        Route("/openapi.json", openapi),
        Route("/asyncapi.json", asyncapi),
        # A path is not an id; answer as for any other unknown blob.
        Route("/v1/blobs/{path:path}", no_blob),
        *console_files.routes(),
    ]


def _route(path: str, endpoints: Mapping[str, Endpoint]) -> Route:
    """One route for all methods, so that the answer to a wrong one lists the right ones."""
    methods = [*endpoints, "OPTIONS"]

    async def endpoint(request: Request) -> Response:
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": ", ".join(methods)})
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=methods)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "http.not-found", 405: "http.method"}.get(error.status_code, "http.invalid")
    return problem(error.status_code, code, str(error.detail), dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> Response:
    # Never the URL: it may hold a session's key.
    logger.error("a request failed: %s", request.method, exc_info=error)
    return problem(500, "http.failed", "internal error; the log of the bus has the details")


# OpenAPI


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = [Problem]
    for operation in operations:
        types += [kind for name, kind in operation.types().items() if name in ("body", "return")]
    unique = list({str(one): one for one in types}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=REF)
    by_type = dict(zip(map(str, unique), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        entry = paths.setdefault(operation.path, {})
        entry[operation.method.lower()] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polybus", "version": version("polybus")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SCHEMES},
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    types = operation.types()
    fails = {*operation.fails, *ALWAYS, *(() if operation.method == "GET" else (403,))}
    if operation.asks != "nothing":
        fails.update(OF_LOGINS)
    answers: list[tuple[int, str, Any]] = [(status, PROBLEM, Problem) for status in sorted(fails)]
    answers.append((operation.status, operation.produces, types.get("return")))
    if operation.produces == TEXT and 503 in operation.fails:
        answers.append((503, TEXT, str))
    words = re.findall(r"[a-z0-9]+", operation.path)
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": (operation.run.__doc__ or "").rstrip("."),
        "parameters": _parameters(operation.path, types.get("query")),
        "responses": {
            str(status): _answer(status, media, schemas.get(str(kind)))
            for status, media, kind in answers
        },
    }
    if operation.headers:
        described["responses"][str(operation.status)]["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in operation.headers.items()
        }
    if operation.asks != "nothing":
        described["security"] = [{}, *({name: []} for name in SCHEMES)]
    if "body" in types:
        schema = schemas[str(types["body"])]
        # A body of another type is a string; one of any type has no schema.
        others: dict[str, Any] = {JSON: schema, "*/*": {}}
        content: dict[str, Any] = {
            media: {"schema": others.get(media, {"type": "string"})} for media in operation.media
        }
        # A body that need not be JSON may be empty: an empty message.
        described["requestBody"] = {"required": JSON in operation.media, "content": content}
    return described


def _answer(status: int, media: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    text = FAILURES.get(status, HTTPStatus(status).phrase)
    if schema is None:
        return {"description": text}
    return {"description": text, "content": {media: {"schema": schema}}}


def _parameters(path: str, query: Any) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if query is not None:
        properties = msgspec.json.schema(query)["$defs"][query.__name__]["properties"]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": one}
            for name, one in properties.items()
        ]
    return parameters
