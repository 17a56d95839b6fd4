"""msgstream over HTTP: GET /msgstream, short and long polls.

The endpoint answers as msgstream defines, not as the API does: 200 with packs, 204 without, 400 as
plain text, and 200 with a notice for an unknown session.
"""

import asyncio
import contextlib
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response

from polybus.edges.http.calls import problem_of
from polybus.edges.http.state import HttpState
from polybus.errors import StorageError
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import SESSION_UNSET, encode_packs, parse_confirm_ids

NO_CACHE = {"pragma": "no-cache"}
TRANSPORTS = ("shortpolling", "longpolling")
_ECHO_CHARS_MAX = 40


class Poll:
    """One request that waits for a session's packs. Implements feeds.Receiver."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.is_over = False
        self.session_ended = False

    def wake(self) -> None:
        self.woken.set()

    def replaced(self) -> None:
        self.is_over = True
        self.wake()

    def ended(self) -> None:
        self.session_ended = True
        self.replaced()

    def shut_down(self) -> None:
        self.replaced()


async def answer_poll(state: HttpState, request: Request) -> Response:
    """GET and HEAD of /msgstream."""
    query = parse_qsl(request.url.query, keep_blank_values=True, errors="replace")
    transport = _first(query, "transport")
    if transport not in TRANSPORTS:
        shown = "".join(one for one in transport[:_ECHO_CHARS_MAX] if one.isprintable())
        return _plain(f"Unknown HTTP transport: {shown}")
    if request.method == "HEAD":
        return _packs(b"")
    key = _first(query, "sessionKey")
    if not key:
        return _plain("Missing parameter: sessionKey")
    session = state.inboxes.find(key)
    if session is None:
        return _packs(SESSION_UNSET)
    confirmed = [value for name, value in query if name == "confirmIds"]
    state.inboxes.confirm(session, parse_confirm_ids(",".join(confirmed)))
    try:
        return await _poll(state, session, request, hangs=transport == "longpolling")
    except StorageError as error:
        return problem_of(error)


async def _poll(state: HttpState, session: Session, request: Request, *, hangs: bool) -> Response:
    inboxes = state.inboxes
    poll = Poll()
    inboxes.attach(session, poll)
    gone = asyncio.ensure_future(_disconnected(request, poll)) if hangs else None
    try:
        deadline = state.loop.time() + state.config.msgstream.heartbeat_s
        while not poll.is_over:
            await state.context.memory.uncrowded()
            packs = inboxes.collect_now(session, 0)
            if packs is None:
                packs = await inboxes.collect(session, 0)
                if poll.is_over:
                    # The newer connection gets them.
                    break
            if packs:
                return _packs(encode_packs(packs))
            if not hangs or state.stopping or deadline <= state.loop.time():
                break
            state.polls_hanging += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await poll.woken.wait()
            finally:
                state.polls_hanging -= 1
            poll.woken.clear()
    finally:
        inboxes.detach(session, poll)
        if gone is not None:
            gone.cancel()
    if poll.session_ended:
        return _packs(SESSION_UNSET)
    headers = NO_CACHE | {"connection": "close"} if state.stopping else NO_CACHE
    return Response(status_code=204, headers=headers)


async def _disconnected(request: Request, poll: Poll) -> None:
    """End a hanging poll when its client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    poll.replaced()


def _first(query: list[tuple[str, str]], wanted: str) -> str:
    return next((value for name, value in query if name == wanted), "")


def _packs(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers=NO_CACHE)


def _plain(text: str) -> Response:
    return Response(
        text.encode(), 400, headers={"content-type": "text/plain; charset=UTF-8", **NO_CACHE}
    )
