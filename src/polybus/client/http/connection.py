"""HttpConnection: requests to a bus, one at a time, on a keep-alive socket.

`refused` is the error of an answer that is not a success, for the blocking client too.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import httptools
import msgspec

from polybus.client.connection import reason, tls_context
from polybus.client.link import Link, open_link
from polybus.client.options import ClientOptions
from polybus.client.urls import Address
from polybus.errors import BusyError, PolybusError, StorageError, UsageError
from polybus.version import __version__

JSON = "application/json"
# A socket that was idle longer is not reused: the bus or a proxy may be closing it.
IDLE_S_MAX = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request; `target` is path and query, percent-encoded."""

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
    """A response with any status."""

    status: int
    body: bytes

    def json(self, kind: type[T]) -> T:
        """The decoded body of a success.

        Raises:
            PolybusError: the bus's refusal with its code, or `client.answer-invalid`.
        """
        self.check()
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid_answer(
                f"the body of status {self.status} has an unexpected form"
            ) from error

    def check(self) -> None:
        """Raise like `json` unless this is a success."""
        if not 200 <= self.status < 300:
            raise refused(self.status, self.body)


class _Problem(msgspec.Struct):
    code: str
    detail: str


def refused(status: int, body: bytes) -> PolybusError:
    """The bus's refusal as an error with its code; `client.answer-invalid` if it has no code."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return invalid_answer(f"status {status} without an error code")
    kind: type[PolybusError] = StorageError if status >= 500 else UsageError
    if status == 429 or problem.code.endswith(".busy"):
        kind = BusyError
    return kind(problem.code, problem.detail)


def invalid_answer(text: str) -> PolybusError:
    return PolybusError("client.answer-invalid", f"the answer is not from a Polybus bus: {text}")


class HttpConnection:
    """One socket; a lost one is replaced on the next request."""

    def __init__(self, address: Address, options: ClientOptions) -> None:
        self._address = address
        self._options = options
        self._link: Link | None = None
        self._pending: _PendingAnswer | None = None
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
        """Send a request and wait for the answer, after the requests of other callers.

        The timeout restarts as long as the request is still being sent.

        Raises:
            PolybusError: `client.unreachable`: the bus did not receive it. `client.disconnected` or
                `client.answer-invalid`: it may have. `client.timeout`: it did not answer.
        """
        async with self._turn:
            await self.open()
            link = self._link
            assert link is not None
            self._pending = pending = _PendingAnswer(self._options.message_bytes_max)
            link.write(request.encode(self._address.authority))
            try:
                await _first_of(pending.done, link, timeout_s=timeout_s)
                return self._settled(pending, link)
            finally:
                self._pending = None
                self._used_s = asyncio.get_running_loop().time()
                # The rest of an answer must not be read as the next one.
                if not pending.keeps_alive:
                    link.abort()
                    self._link = None

    def _settled(self, pending: "_PendingAnswer", link: Link) -> Answer:
        if pending.done.done():
            return pending.done.result()
        if not link.lost.done():
            raise PolybusError("client.timeout", f"{self._address} did not answer in time")
        error = link.lost.result()
        text = f"{self._address} ended the connection before it answered"
        raise PolybusError("client.disconnected", f"{text}: {reason(error)}" if error else text)

    def _received(self, data: bytes) -> None:
        if self._pending is not None:
            self._pending.receive(data)
        elif self._link is not None:
            # No request is pending.
            self._link.abort()

    def close(self) -> None:
        """Close the socket; a pending request fails."""
        if self._link is not None:
            self._link.abort()
            self._link = None


async def _first_of(
    answered: asyncio.Future[Answer], link: Link, *, timeout_s: float | None
) -> None:
    """Wait for the answer, the loss of the link, or a timeout without any progress."""
    first: set[asyncio.Future[Any]] = {answered, link.lost}
    unsent_before = 0
    unsent = link.unsent_bytes
    while unsent != unsent_before:
        done, _ = await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
        # A large message may take longer on a slow line.
        unsent_before, unsent = unsent, link.unsent_bytes
        if not unsent:
            return


class _PendingAnswer:
    """An answer that is being received. The parser calls the `on_…` methods."""

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
                self.done.set_exception(invalid_answer(str(error.__context__ or error)[:80]))

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._bytes_max:
            raise invalid_answer(f"it is over {self._bytes_max} bytes (message_bytes_max)")
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.keeps_alive = self._parser.should_keep_alive()
            status = self._parser.get_status_code()
            self.done.set_result(Answer(status, b"".join(self._pieces)))
