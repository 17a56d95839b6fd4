"""msgstream over HTTP: GET /msgstream, short and long polls.

The endpoint answers as msgstream defines, not as the API does: 200 with packs, 204 without, 400 as
plain text, and 200 with a notice for an unknown session.
"""

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response

from polybus.edges.http.calls import problem
from polybus.edges.http.state import HttpState
from polybus.errors import StorageError
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import SESSION_UNSET, encode_packs, parse_confirm_ids

NO_CACHE = {"pragma": "no-cache"}
TRANSPORTS = ("shortpolling", "longpolling")
_ECHO_CHARS_MAX = 40


class Poll:
    """One request that waits for a session's packs. Implements feeds.Receiver."""

    __slots__ = ("_woken", "is_over", "session_ended")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._woken: asyncio.Future[None] = loop.create_future()
        self.is_over = False
        self.session_ended = False

    async def woken(self, timeout_s: float) -> bool:
        """Wait until it is woken; False after the timeout."""
        done, _ = await asyncio.wait([self._woken], timeout=timeout_s)
        if not done:
            return False
        self._woken = self._woken.get_loop().create_future()
        return True

    def wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def replaced(self) -> None:
        self.is_over = True
        self.wake()

    def ended(self) -> None:
        self.session_ended = True
        self.replaced()

    def shut_down(self) -> None:
        self.replaced()


class Polls:
    """Answers the polls of one HTTP state."""

    def __init__(self, state: HttpState) -> None:
        self._state = state

    async def answer(self, request: Request) -> Response:
        """GET and HEAD of /msgstream."""
        query = parse_qsl(request.url.query, keep_blank_values=True, errors="replace")
        transport = _first(query, "transport")
        if transport not in TRANSPORTS:
            shown = "".join(one for one in transport[:_ECHO_CHARS_MAX] if one.isprintable())
            return _plain(f"Unknown HTTP transport: {shown}")
        if request.method == "HEAD":
            return Response(b"", media_type="application/json", headers=NO_CACHE)
        key = _first(query, "sessionKey")
        if not key:
            return _plain("Missing parameter: sessionKey")
        session = self._state.inboxes.find(key)
        if session is None:
            return _packs(SESSION_UNSET)
        confirmed = [value for name, value in query if name == "confirmIds"]
        self._state.inboxes.confirm(session, parse_confirm_ids(",".join(confirmed)))
        try:
            return await self._poll(session, request, hangs=transport == "longpolling")
        except StorageError as error:
            return problem(503, error.code, error.text)

    async def _poll(self, session: Session, request: Request, *, hangs: bool) -> Response:
        inboxes = self._state.inboxes
        poll = Poll(self._state.loop)
        inboxes.attach(session, poll)
        gone = asyncio.ensure_future(_disconnected(request, poll)) if hangs else None
        try:
            deadline = self._state.loop.time() + self._state.config.msgstream.heartbeat_s
            while not poll.is_over:
                packs = inboxes.collect_now(session, 0)
                if packs is None:
                    packs = await inboxes.collect(session, 0)
                if poll.session_ended:
                    break
                if packs:
                    return _packs(encode_packs(packs))
                left_s = deadline - self._state.loop.time()
                if not hangs or self._state.stopping or left_s <= 0:
                    break
                self._state.polls_hanging += 1
                try:
                    await poll.woken(left_s)
                finally:
                    self._state.polls_hanging -= 1
        finally:
            inboxes.detach(session, poll)
            if gone is not None:
                gone.cancel()
        if poll.session_ended:
            return _packs(SESSION_UNSET)
        return self._nothing()

    def _nothing(self) -> Response:
        headers = dict(NO_CACHE)
        if self._state.stopping:
            headers["connection"] = "close"
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
