"""HttpConnection: requests to a bus, one at a time, on a socket that is kept open between them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import httptools
import msgspec

from polybus.client.connection import reason, tls_context
from polybus.client.events import refusal
from polybus.client.link import Link, open_link
from polybus.client.options import Options
from polybus.client.urls import Address
from polybus.errors import PolybusError
from polybus.version import __version__

JSON = "application/json"
# A socket that rested longer is not trusted: the bus or a proxy may be closing it this moment.
IDLE_S_MAX = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked; `target` is path and query, with everything in it quoted."""

    method: str
    target: str
    body: bytes = b""
    content_type: str = JSON

    def encode(self, host: str) -> bytes:
        head = (
            f"{self.method} {self.target} HTTP/1.1\r\nhost: {host}\r\n"
            f"user-agent: polybus/{__version__}\r\n"
        )
        if self.method in ("POST", "PUT"):
            head += f"content-type: {self.content_type}\r\ncontent-length: {len(self.body)}\r\n"
        return f"{head}\r\n".encode("ascii") + self.body


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, whatever its status."""

    status: int
    body: bytes

    def json(self, kind: type[T]) -> T:
        """The body of a success.

        Raises:
            PolybusError: the bus's refusal, by its code; `client.answer-invalid` if this is none.
        """
        self.check()
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _no_answer(f"a {self.status} that is not what was asked for") from error

    def check(self) -> None:
        """Raises as `json` if it is no success."""
        if 200 <= self.status < 300:
            return
        try:
            problem = msgspec.json.decode(self.body, type=_Problem)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _no_answer(f"a {self.status} without a reason") from error
        raise refusal(problem.code, problem.detail)


class _Problem(msgspec.Struct):
    code: str
    detail: str


class HttpConnection:
    """One socket; a lost one is made again when the next request comes."""

    def __init__(self, address: Address, options: Options) -> None:
        self._address = address
        self._options = options
        self._link: Link | None = None
        self._waiting: _Waiting | None = None
        self._turn = asyncio.Lock()
        self._used_s = 0.0

    async def open(self) -> None:
        """Connect, one attempt, unless a connection is open. Raises `client.unreachable`."""
        loop = asyncio.get_running_loop()
        if self._link is not None and loop.time() - self._used_s > IDLE_S_MAX:
            self.close()
        if self._link is not None and not self._link.lost.done():
            return
        try:
            self._link = await open_link(
                self._address,
                self._received,
                tls=tls_context(self._address, self._options),
                timeout_s=self._options.connect_timeout_s,
            )
        except OSError as error:
            text = f"{self._address}: {reason(error)}"
            raise PolybusError("client.unreachable", text) from error
        self._used_s = loop.time()

    async def request(self, request: Request, *, timeout_s: float | None = None) -> Answer:
        """Ask, and wait for the answer, in turn with other callers.

        `timeout_s` begins anew as long as the request itself is still on its way.

        Raises:
            PolybusError: `client.unreachable`: the bus has not got it. `client.disconnected` or
                `client.answer-invalid`: it may have got it. `client.timeout`: it did not answer.
        """
        async with self._turn:
            await self.open()
            link = self._link
            assert link is not None
            self._waiting = waiting = _Waiting(self._options.message_bytes_max)
            link.write(request.encode(self._address.authority))
            try:
                await _first_of(waiting.done, link, timeout_s=timeout_s)
                return self._settled(waiting, link)
            finally:
                self._waiting = None
                self._used_s = asyncio.get_running_loop().time()
                # Half an answer must not be taken for the next one.
                if not waiting.keeps_alive:
                    link.abort()
                    self._link = None

    def _settled(self, waiting: _Waiting, link: Link) -> Answer:
        if waiting.done.done():
            return waiting.done.result()
        if not link.lost.done():
            raise PolybusError("client.timeout", f"{self._address} did not answer in time")
        error = link.lost.result()
        text = f"{self._address} ended the connection before it answered"
        raise PolybusError("client.disconnected", f"{text}: {reason(error)}" if error else text)

    def _received(self, data: bytes) -> None:
        if self._waiting is not None:
            self._waiting.receive(data)
        elif self._link is not None:
            # Nothing was asked.
            self._link.abort()

    def close(self) -> None:
        """Let go of the socket; a request that waits fails."""
        if self._link is not None:
            self._link.abort()
            self._link = None


async def _first_of(
    answered: asyncio.Future[Answer], link: Link, *, timeout_s: float | None
) -> None:
    """Wait for the answer, for the link's end, or until the bus neither takes nor says anything."""
    first: set[asyncio.Future[Any]] = {answered, link.lost}
    unsent_before = 0
    unsent = link.unsent_bytes
    while unsent != unsent_before:
        done, _ = await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
        # A large message may well take longer on a slow line.
        unsent_before, unsent = unsent, link.unsent_bytes
        if not unsent:
            return


class _Waiting:
    """An answer on its way. The parser calls the `on_…` methods."""

    def __init__(self, bytes_max: int) -> None:
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.keeps_alive = False
        self._bytes_max = bytes_max
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._size = 0

    def receive(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.keeps_alive = False
            if not self.done.done():
                self.done.set_exception(_no_answer(str(error.__context__ or error)[:80]))

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._bytes_max:
            raise _no_answer(f"the answer is over {self._bytes_max} bytes (message_bytes_max)")
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.keeps_alive = self._parser.should_keep_alive()
            status = self._parser.get_status_code()
            self.done.set_result(Answer(status, b"".join(self._pieces)))


def _no_answer(text: str) -> PolybusError:
    return PolybusError("client.answer-invalid", f"no answer of a bus: {text}")
