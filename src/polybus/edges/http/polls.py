"""msgstream over HTTP: GET /msgstream, short and long polls.

The endpoint answers as msgstream defines, not as the API does: 200 with packs, 204 without, 400 as
plain text, and 200 with a notice for an unknown session.
"""

import asyncio
from collections.abc import Callable
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response

from polybus.edges.http.calls import problem_of
from polybus.edges.http.sending import PackEncodings
from polybus.edges.http.state import HttpState
from polybus.errors import StorageError, UsageError
from polybus.services.sessions.delivery import Packs
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import SESSION_UNSET, encode_packs, parse_confirm_ids

METHODS = ("GET", "HEAD")
NO_CACHE = {"pragma": "no-cache"}
TRANSPORTS = ("shortpolling", "longpolling")
_ECHO_CHARS_MAX = 40


class Poll:
    """One request that waits for a session's packs. Implements contents.Receiver."""

    def __init__(self, state: HttpState, session: Session) -> None:
        self._state = state
        self._session = session
        self._packs: asyncio.Future[Packs | None] | None = None
        self.is_over = False
        self.session_ended = False

    async def hang(self, deadline_s: float) -> Packs | None:
        """Wait for packs; None if they must be read from disk first, empty if the wait is over."""
        packs = self._collect_now()
        if packs or packs is None:
            return packs
        loop = self._state.loop
        self._packs = loop.create_future()
        timer = loop.call_at(deadline_s, self.replaced)
        self._state.polls_hanging += 1
        try:
            return await self._packs
        finally:
            self._state.polls_hanging -= 1
            timer.cancel()
            self._packs = None

    def _collect_now(self) -> Packs | None:
        if self._state.context.memory.is_crowded():
            return None
        return self._state.inboxes.collect_now(self._session, 0)

    def wake(self) -> None:
        if self._packs is not None and not self._packs.done():
            packs = self._collect_now()
            if packs or packs is None:
                self._packs.set_result(packs)

    def replaced(self) -> None:
        self.is_over = True
        if self._packs is not None and not self._packs.done():
            self._packs.set_result([])

    def ended(self) -> None:
        self.session_ended = True
        self.replaced()

    def shut_down(self) -> None:
        self.replaced()


class Polls:
    """Answers the polls of one bus."""

    def __init__(self, state: HttpState) -> None:
        self._state = state
        self._answers = PackEncodings(state.loop, lambda packs: _packs(encode_packs(packs)))

    async def answer(self, request: Request) -> Response:
        """GET and HEAD of /msgstream."""
        state = self._state
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
        try:
            session = await state.inboxes.find_anywhere(key)
        except StorageError as error:
            return problem_of(error)
        if session is None:
            return _packs(SESSION_UNSET)
        try:
            request.state.count_for(state.accounts.of(session.account) or state.accounts.nobody)
        except UsageError as error:
            return problem_of(error)
        confirmed = [value for name, value in query if name == "confirmIds"]
        state.inboxes.confirm(session, parse_confirm_ids(",".join(confirmed)))
        try:
            return await self._poll(session, request, hangs=transport == "longpolling")
        except StorageError as error:
            return problem_of(error)

    async def _poll(self, session: Session, request: Request, *, hangs: bool) -> Response:
        state = self._state
        inboxes = state.inboxes
        poll = Poll(state, session)
        inboxes.attach(session, poll)
        when_lost: list[Callable[[], None]] = request.state.when_lost
        when_lost.append(poll.replaced)
        try:
            deadline_s = state.loop.time() + state.config.msgstream.heartbeat_s
            while not poll.is_over:
                is_last = not hangs or state.stopping or deadline_s <= state.loop.time()
                packs = None if is_last else await poll.hang(deadline_s)
                if packs is None:
                    await state.context.memory.uncrowded()
                    packs = await inboxes.collect(session, 0)
                    if poll.is_over:
                        # The newer connection gets them.
                        break
                if packs:
                    answer: Response = self._answers.get(packs)
                    return answer
                if is_last:
                    break
        finally:
            inboxes.detach(session, poll)
            when_lost.remove(poll.replaced)
        if poll.session_ended:
            return _packs(SESSION_UNSET)
        headers = NO_CACHE | {"connection": "close"} if state.stopping else NO_CACHE
        return Response(status_code=204, headers=headers)


def _first(query: list[tuple[str, str]], wanted: str) -> str:
    return next((value for name, value in query if name == wanted), "")


def _packs(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers=NO_CACHE)


def _plain(text: str) -> Response:
    return Response(
        text.encode(), 400, headers={"content-type": "text/plain; charset=UTF-8", **NO_CACHE}
    )
