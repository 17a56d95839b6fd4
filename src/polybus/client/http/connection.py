"""HttpConnection: requests to a bus, one at a time, on a keep-alive socket.

`refused` is the error of an answer that is not a success, for the blocking client too.
"""

import asyncio
from typing import TypeVar

import httptools
import msgspec

from polybus import structs
from polybus.client.connection import Link, open_link, reason
from polybus.client.options import ClientOptions
from polybus.errors import BusyError, PolybusError, StorageError, UsageError
from polybus.version import __version__

JSON = "application/json"
# A socket that was idle longer is not reused: the bus or a proxy may be closing it.
IDLE_S_MAX = 30.0
T = TypeVar("T")


class _Problem(msgspec.Struct):
    code: str
    detail: str


def refused(status: int, body: bytes) -> PolybusError:
    """The bus's refusal as an error with its code; `client.answer-invalid` if it has no code."""
    try:
        problem = structs.decode(body, _Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _invalid_answer(f"status {status} without an error code")
    kind: type[PolybusError] = StorageError if status >= 500 else UsageError
    if status == 429 or problem.code.endswith(".busy"):
        kind = BusyError
    return kind(problem.code, problem.detail)


def decode(body: bytes, kind: type[T]) -> T:
    """The JSON body of an answer. Raises PolybusError `client.answer-invalid`."""
    try:
        return structs.decode(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_answer("unexpected response body") from error


def _invalid_answer(text: str) -> PolybusError:
    return PolybusError("client.answer-invalid", f"the answer is not from a Polybus bus: {text}")


class HttpConnection:
    """One socket; a lost one is replaced on the next request."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._link: Link | None = None
        self._pending: _PendingAnswer | None = None
        self._turn = asyncio.Lock()
        self._used_s = 0.0

    async def open(self) -> Link:
        """Connect, one attempt, unless a connection is open. Raises `client.unreachable`."""
        loop = asyncio.get_running_loop()
        if self._link is not None and loop.time() - self._used_s > IDLE_S_MAX:
            self.close()
        if self._link is None or self._link.lost.done():
            self._link = await open_link(self._options, self._received)
            self._used_s = loop.time()
        return self._link

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        content_type: str = JSON,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Send a request after those of other callers, and return the body of the answer.

        `target` is path and query, percent-encoded. The timeout restarts as long as the request is
        still being sent.

        Raises:
            PolybusError: the bus's refusal with its code. `client.unreachable`: the bus did not
                receive it. `client.disconnected` or `client.answer-invalid`: it may have.
                `client.timeout`: it did not answer.
        """
        head = (
            f"{method} {target} HTTP/1.1\r\nhost: {self._options.address.authority}\r\n"
            f"user-agent: polybus/{__version__}\r\n"
        )
        if (credentials := self._options.address.credentials) is not None:
            head += f"authorization: {credentials.authorization}\r\n"
        if method in ("POST", "PUT"):
            head += f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
        async with self._turn:
            link = await self.open()
            self._pending = pending = _PendingAnswer(self._options.message_bytes_max)
            link.write(f"{head}\r\n".encode("ascii") + body)
            try:
                await link.wait_for(pending.done, link.lost, timeout_s=timeout_s)
                return self._settled(pending, link)
            finally:
                self._pending = None
                self._used_s = asyncio.get_running_loop().time()
                # The rest of an answer must not be read as the next one.
                if not pending.keeps_alive:
                    link.abort()
                    self._link = None

    def _settled(self, pending: "_PendingAnswer", link: Link) -> bytes:
        if pending.done.done():
            status, body = pending.done.result()
            if not 200 <= status < 300:
                raise refused(status, body)
            return body
        if not link.lost.done():
            raise PolybusError("client.timeout", f"{self._options.address} did not answer in time")
        error = link.lost.result()
        if isinstance(error, PolybusError):
            raise error
        text = f"{self._options.address} ended the connection before it answered"
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


class _PendingAnswer:
    """An answer that is being received. The parser calls the `on_…` methods."""

    def __init__(self, bytes_max: int) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.keeps_alive = False
        self._bytes_max = bytes_max
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()

    def receive(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.keeps_alive = False
            if not self.done.done():
                self.done.set_exception(_invalid_answer(str(error.__context__ or error)[:80]))

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._bytes_max:
            raise _invalid_answer(f"it is over {self._bytes_max} bytes (message_bytes_max)")

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.keeps_alive = self._parser.should_keep_alive()
            self.done.set_result((self._parser.get_status_code(), bytes(self._body)))
