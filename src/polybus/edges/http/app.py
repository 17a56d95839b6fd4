"""The ASGI application: routes the API's operations, msgstream and the page; reports errors."""

import functools
import hashlib
import importlib.resources
import logging
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from polybus.edges.http.calls import ENCODED, Operation, perform
from polybus.edges.http.openapi import describe
from polybus.edges.http.polls import Polls
from polybus.edges.http.problems import problem
from polybus.edges.http.routes import OPERATIONS
from polybus.edges.http.state import HttpState

logger = logging.getLogger("polybus.requests")

MSGSTREAM_METHODS = ("GET", "HEAD", "OPTIONS")
# The page shows untrusted messages: it may run only its own script and load nothing.
PAGE_POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'unsafe-inline'; "
    "connect-src 'self' ws: wss:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class EncodedSlashes:
    """Lets a name in a path contain a slash, written `%2F`, which is then no separator.

    Such a path is routed undecoded, and `Call.path` decodes the names found in it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or b""
        if b"%2f" in raw.lower():
            scope = {**scope, "path": raw.decode("latin-1"), ENCODED: True}
        await self._app(scope, receive, send)


def make_app(state: HttpState) -> Starlette:
    middleware = [Middleware(EncodedSlashes)]
    if state.config.http.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=state.config.http.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    routes = [*_api_routes(state), *_other_routes(state)]
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )
    app.router.redirect_slashes = False
    return app


def _api_routes(state: HttpState) -> Sequence[Route]:
    """One route per path, so that the answer to a wrong method lists the right ones."""
    paths: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = operation
    return [
        Route(path, _endpoint(state, methods), methods=[*methods, "OPTIONS"])
        for path, methods in paths.items()
    ]


def _endpoint(
    state: HttpState, methods: dict[str, Operation]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if request.method == "OPTIONS":
            return _options([*methods, "OPTIONS"])
        method = "GET" if request.method == "HEAD" else request.method
        return await perform(state, methods[method], request)

    return endpoint


def _other_routes(state: HttpState) -> Sequence[Route]:
    page = importlib.resources.files("polybus.edges.http").joinpath("page.html").read_text()
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = PAGE_POLICY.format(script=digest)

    polls = Polls(state)

    async def msgstream(request: Request) -> Response:
        if request.method == "OPTIONS":
            return _options(MSGSTREAM_METHODS)
        return await polls.answer(request)

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @functools.cache
    def description() -> dict[str, object]:
        return describe(OPERATIONS)

    async def openapi(request: Request) -> Response:
        return JSONResponse(description())

    return [
        Route("/msgstream", msgstream, methods=MSGSTREAM_METHODS),
        Route("/msgstream/", msgstream, methods=MSGSTREAM_METHODS),
        Route("/openapi.json", openapi),
        Route("/", index),
    ]


def _options(methods: Sequence[str]) -> Response:
    return Response(status_code=204, headers={"allow": ", ".join(methods)})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "http.not-found", 405: "http.method"}.get(error.status_code, "http.invalid")
    return problem(error.status_code, code, str(error.detail), dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> Response:
    # Never the URL: it may hold a session's key.
    logger.error("a request failed: %s", request.method, exc_info=error)
    return problem(500, "http.failed", "internal error; the log of the bus has the details")
