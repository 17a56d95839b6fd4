"""A connection to the bus: one socket (Link), and the connection that replaces a lost one.

    open ──► up ──► lost ──► (back-off) ──► up ──► …            until close()
                      └───── without reconnect: failed

All calls to the owner come from the loop's thread, and never from inside a call by the owner.
Everything written in one turn of the loop is sent in one write. Above `PENDING_BYTES_MAX` a writer
waits until the bus has read it.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

from polybus.batch import Buffer
from polybus.client.options import Address, ClientOptions
from polybus.client.protocols import SCHEMES
from polybus.client.retry import Backoff, retrying
from polybus.client.transport import Refusal, Transport, TransportEvent
from polybus.errors import PeerError, PolybusError
from polybus.wire.codec import LoggedIn
from polybus.wire.gzip_stream import GzipStream

PENDING_BYTES_MAX = 256 << 10
WRITE_BYTES_MAX = 1 << 20
KEEPALIVE_IDLE_S = 30
TLS_CLOSE_TIMEOUT_S = 1.0
# gzip reaches at most 1,032; the bus is trusted, and a message of zeros is not an attack.
GZIP_RATIO_MAX = 1100
TLS_ALERT = b"\x15\x03"
"""How a port with TLS answers to other bytes. As the length of a message, it is over 336 MiB."""
_OTHER_BYTES = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
"""OpenSSL's reasons if the port has answered with bytes that are not TLS."""
_MAYBE_OTHER_BYTES = (
    *("UNEXPECTED_EOF_WHILE_READING", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"),
    "PACKET_LENGTH_TOO_LONG",
)
log = logging.getLogger("polybus.client")


class Link(asyncio.Protocol):
    """One connection, from its start to its loss.

    Attributes:
        lost: done when the connection is lost; its result is the reason, None after a clean end. A
            PolybusError does not pass by itself.
    """

    def __init__(self, on_data: Callable[[bytes], None], address: Address) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_data = on_data
        self._address = address
        self._is_first = not address.tls
        self._gzip = GzipStream(GZIP_RATIO_MAX) if address.gzip else None
        self._transport: asyncio.Transport | None = None
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._flush_due = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost: asyncio.Future[Exception | None] = self._loop.create_future()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface without the base class.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BYTES_MAX)
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            self._is_first = False
            if data.startswith(TLS_ALERT):
                self.end(tls_required(self._address))
                return
        if self._gzip is None:
            self._on_data(data)
            return
        try:
            for piece in self._gzip.decompress(data):
                self._on_data(piece)
        except PeerError as error:
            log.warning("%s", error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._pending.clear()
        self._writable.set()
        if not self.lost.done():
            self.lost.set_result(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Writing

    def write(self, data: Buffer) -> None:
        """Send at the end of this turn of the loop; dropped if the connection is lost."""
        if self.lost.done():
            return
        self._pending.append(data)
        self._pending_bytes += len(data)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    @property
    def crowded(self) -> bool:
        """Whether a writer should wait (`drain`) before it writes more."""
        return self._pending_bytes > PENDING_BYTES_MAX

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the system has not accepted yet."""
        transport = self._transport
        return self._pending_bytes + (transport.get_write_buffer_size() if transport else 0)

    async def wait_for(self, *answers: asyncio.Future[Any], timeout_s: float | None) -> None:
        """Wait for one of the answers, or until nothing was sent for the timeout.

        So a large message may take longer on a slow line.
        """
        unsent_before, unsent = -1, self.unsent_bytes
        while unsent != unsent_before:
            done, _ = await asyncio.wait(
                answers, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            unsent_before, unsent = unsent, self.unsent_bytes
            if not unsent:
                return

    async def drain(self) -> None:
        """Pass everything to the system and wait until it accepts more, or the link is lost."""
        self._flush()
        if self._writable.is_set():
            await asyncio.sleep(0)  # let other tasks run, however much one task publishes
        else:
            await self._writable.wait()

    async def flush(self) -> None:
        """Wait until the system has accepted every byte, or the connection is lost."""
        self._flush()
        transport = self._transport
        if transport is None or self.lost.done():
            return
        transport.set_write_buffer_limits(high=0)
        try:
            if transport.get_write_buffer_size():
                await self._writable.wait()
        finally:
            transport.set_write_buffer_limits(high=WRITE_BYTES_MAX)

    def _flush(self) -> None:
        self._flush_due = False
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not pending or self._transport is None or self._transport.is_closing():
            return
        data = pending[0] if len(pending) == 1 else b"".join(pending)
        self._transport.write(data if self._gzip is None else self._gzip.compress(data))

    # Reading

    def pause(self) -> None:
        """Stop reading: back-pressure reaches the bus."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # Ending

    async def close(self, *, timeout_s: float) -> None:
        """Send pending bytes, end the stream, and read until the bus ends it too.

        An immediate close would drop what the bus still sends, and a reset for those bytes could
        overtake our last ones.
        """
        transport = self._transport
        if transport is None or self.lost.done():
            return
        self._flush()
        if self._gzip is not None:
            transport.write(self._gzip.finish())
        self.resume()
        if transport.can_write_eof():
            # A connection that the bus has reset cannot be ended; `lost` follows.
            with contextlib.suppress(OSError):
                transport.write_eof()
        else:
            # TLS cannot end only one direction: close, and wait briefly for the answer.
            transport.close()
            timeout_s = min(timeout_s, TLS_CLOSE_TIMEOUT_S)
        await asyncio.wait([self.lost], timeout=timeout_s)
        self.abort()

    def end(self, error: PolybusError) -> None:
        """Disconnect at once, for this reason."""
        if not self.lost.done():
            self.lost.set_result(error)
            if self._transport is not None:
                self._transport.abort()

    def abort(self) -> None:
        # A lost transport cannot be aborted again.
        if self._transport is not None and not self.lost.done():
            self._transport.abort()


async def open_link(options: ClientOptions, on_data: Callable[[bytes], None]) -> Link:
    """Connect to the first node that answers, one attempt each.

    Raises PolybusError `client.unreachable`.
    """
    loop, address = asyncio.get_running_loop(), options.address
    failure: OSError | None = None
    for host, port in address.places:
        try:
            async with asyncio.timeout(options.connect_timeout_s / len(address.places)):
                _, link = await loop.create_connection(
                    lambda: Link(on_data, address), host, port, ssl=options.tls_context
                )
                return link
        except OSError as error:  # ssl.SSLError and TimeoutError too
            failure = error
    assert failure is not None
    why = reason(failure)
    if address.tls:
        plain_url = str(dataclasses.replace(address, tls=False))
        why = without_tls(failure, plain_url) or why
    raise PolybusError("client.unreachable", f"{address}: {why}") from failure


def _keep_alive(sock: socket.socket | None) -> None:
    """Detect a lost bus even if its machine disappeared without closing the connection."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S // 3)


class Owner(Protocol):
    """Receives the events of a connection."""

    def opened(self, transport: Transport) -> None:
        """A new link is open, with a new transport."""

    def received(self, event: TransportEvent) -> None: ...

    def lost(self) -> None:
        """The link is lost. Another may follow."""

    def failed(self, error: PolybusError) -> None:
        """No other link follows."""


class ClientConnection:
    """One connection to a bus, which reconnects after a loss."""

    def __init__(self, options: ClientOptions, owner: Owner) -> None:
        self._options = options
        self._owner = owner
        self._backoff = Backoff()
        self.link: Link | None = None
        """The open link, if any."""
        self._transport: Transport | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._login: asyncio.Future[None] | None = None
        self._closing = False
        self._given_up = False

    async def open(self) -> None:
        """Connect for the first time, one attempt, and log in.

        Raises PolybusError `client.unreachable`, `auth.failed`.
        """
        link = await self._connect()
        self._keeper = asyncio.create_task(self._keep(link), name=self._options.name)

    def write(self, data: Buffer) -> None:
        if self.link is not None:
            self.link.write(data)

    def restart(self) -> None:
        """Drop this link; the loss is handled like any other."""
        self._given_up = True
        if self.link is not None:
            self.link.abort()

    def abandon(self) -> None:
        """Drop the connection at once and do not reconnect; `close` must still be called."""
        self._closing = True
        self.restart()

    async def close(self, *, politely: bool) -> PolybusError | None:
        """Disconnect; with `politely`, send everything first and read the bus's last answers.

        Idempotent. Returns `client.disconnected` if the connection did not end cleanly.
        """
        self._closing = True
        failure = None
        link = self.link
        if link is not None and self._transport is not None:
            if politely:
                ended = link.lost.done()
                link.write(self._transport.goodbye())
                await link.close(timeout_s=self._options.close_timeout_s)
                error = link.lost.result() if link.lost.done() else None
                if ended or error is not None:
                    failure = self._ended_by(error)
            else:
                link.abort()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        return failure

    def _ended_by(self, error: Exception | None) -> PolybusError:
        if isinstance(error, PolybusError):
            return error
        text = f"{self._options.address} ended the connection"
        return PolybusError("client.disconnected", f"{text}: {reason(error)}" if error else text)

    async def _connect(self) -> Link:
        transport = SCHEMES[self._options.address.scheme](self._options.message_bytes_max)
        link = await open_link(self._options, self._received)
        self._transport, self._given_up = transport, False
        await self._log_in(link, transport)
        self.link = link
        self._owner.opened(transport)
        return link

    async def _log_in(self, link: Link, transport: Transport) -> None:
        credentials = self._options.address.credentials
        if credentials is None:
            return
        link.write(transport.login(credentials.user, credentials.secret))
        if not transport.answers_login:
            return
        self._login = asyncio.get_running_loop().create_future()
        try:
            await link.wait_for(self._login, link.lost, timeout_s=self._options.connect_timeout_s)
            if not self._login.done():
                if link.lost.done() and isinstance(error := link.lost.result(), PolybusError):
                    raise error
                text = f"{self._options.address} did not answer the login"
                raise PolybusError("client.unreachable", text)
            self._login.result()
        except BaseException:
            link.abort()
            raise
        finally:
            self._login = None

    async def _keep(self, link: Link) -> None:
        while True:
            error = await link.lost
            self.link = None
            self._owner.lost()
            if self._closing:
                return
            if isinstance(error, PolybusError) or not self._options.reconnect:
                self._owner.failed(self._ended_by(error))
                return
            log.info("%s: lost %s, reconnecting", self._options.name, self._options.address)
            await asyncio.sleep(self._backoff.next_s())
            try:
                link = await retrying(
                    self._connect,
                    self._backoff,
                    name=self._options.name,
                    is_transient=lambda error: error.code != "auth.failed",
                )
            except PolybusError as error:
                self._owner.failed(error)
                return

    def _received(self, data: bytes) -> None:
        if self._given_up or self._transport is None:
            return
        events = self._transport.receive(data)
        # Only an event proves that the connection works: a bus that accepts and closes at once must
        # not be retried twenty times a second.
        if events:
            self._backoff.reset()
        for event in events:
            if self._login is not None and not self._login.done():
                if isinstance(event, Refusal):
                    self._login.set_exception(event.error)
                elif isinstance(event, LoggedIn):
                    self._login.set_result(None)
                continue
            if isinstance(event, Refusal) and event.error.code == "tls.required":
                # Another attempt would get the same answer.
                if self.link is not None:
                    self.link.end(tls_required(self._options.address))
                return
            self._owner.received(event)
            if isinstance(event, Refusal) and event.final:
                self.restart()
                return


def tls_required(address: Address) -> PolybusError:
    url = str(dataclasses.replace(address, tls=True))
    return PolybusError("tls.required", f"{address}: the port requires TLS; use {url}")


def without_tls(error: OSError, plain_url: str) -> str:
    """Why a TLS handshake failed, if it fails so at a port without TLS; otherwise empty."""
    why = reason(error)
    if isinstance(error, ssl.SSLError):
        if error.reason in _OTHER_BYTES:
            return f"the port does not speak TLS ({why}); use {plain_url}, or set tls there"
        is_possible = isinstance(error, ssl.SSLEOFError) or error.reason in _MAYBE_OTHER_BYTES
    else:
        is_possible = isinstance(error, ConnectionError)
        is_possible = is_possible and not isinstance(error, ConnectionRefusedError)
    # A restart or a proxy ends a connection in the same way. Advice to use the plain URL would make
    # people send passwords that anyone can read.
    return f"{why}; the port may be one without TLS" if is_possible else ""


def reason(error: Exception) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}; ca_file, or SSL_CERT_FILE, names what to trust"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()  # asyncio's text names internal calls
    return str(error) or type(error).__name__
