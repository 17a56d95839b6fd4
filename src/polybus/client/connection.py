"""ClientConnection: keeps one link to the bus open, and reports its events to an owner.

    open ──► up ──► lost ──► (back-off) ──► up ──► …            until close()
                      └───── without reconnect: failed

All calls to the owner come from the loop's thread, and never from inside a call by the owner.
"""

import asyncio
import logging
import os
import ssl
from typing import Protocol

from polybus.batch import Buffer
from polybus.client import transports
from polybus.client.link import Link, open_link
from polybus.client.options import ClientOptions
from polybus.client.retry import Backoff, retrying
from polybus.client.transports.base import Event, Refusal, Transport
from polybus.client.urls import Address
from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")


class Owner(Protocol):
    """Receives the events of a connection."""

    def opened(self, transport: Transport) -> None:
        """A new link is open, with a new transport."""
        ...

    def received(self, event: Event) -> None: ...

    def lost(self) -> None:
        """The link is lost. Another may follow."""
        ...

    def failed(self, error: PolybusError) -> None:
        """No other link follows."""
        ...


class ClientConnection:
    """One connection to a bus, which reconnects after a loss."""

    def __init__(self, address: Address, options: ClientOptions, owner: Owner) -> None:
        self._address = address
        transports.check(address)
        self._transport_class = transports.find(address.scheme)
        self._options = options
        self._owner = owner
        self._backoff = Backoff()
        self._link: Link | None = None
        self._transport: Transport | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        self._given_up = False

    async def open(self) -> None:
        """Connect for the first time, one attempt.

        Raises:
            PolybusError: `client.unreachable`.
        """
        try:
            link = await self._connect()
        except OSError as error:
            text = f"{self._address}: {reason(error)}"
            raise PolybusError("client.unreachable", text) from error
        self._keeper = asyncio.create_task(self._keep(link), name=self._options.name)

    @property
    def link(self) -> Link | None:
        """The open link, if any."""
        return self._link

    def write(self, data: Buffer) -> None:
        if self._link is not None:
            self._link.write(data)

    def restart(self) -> None:
        """Drop this link; the loss is handled like any other."""
        self._given_up = True
        if self._link is not None:
            self._link.abort()

    def abandon(self) -> None:
        """Drop the connection at once and do not reconnect; `close` must still be called."""
        self._closing = True
        self.restart()

    async def close(self, *, politely: bool) -> PolybusError | None:
        """Disconnect; `politely` sends everything first and reads the bus's last answers.

        Idempotent. Returns `client.disconnected` if the connection did not end in order.
        """
        self._closing = True
        failure = None
        link = self._link
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
        why = f": {reason(error)}" if error else ""
        return PolybusError("client.disconnected", f"{self._address} ended the connection{why}")

    async def _connect(self) -> Link:
        transport = self._transport_class(self._options.message_bytes_max)
        link = await open_link(
            self._address,
            self._received,
            tls=tls_context(self._address, self._options),
            timeout_s=self._options.connect_timeout_s,
        )
        self._link, self._transport, self._given_up = link, transport, False
        self._owner.opened(transport)
        return link

    async def _keep(self, link: Link) -> None:
        while True:
            error = await link.lost
            self._link = None
            self._owner.lost()
            if self._closing:
                return
            if not self._options.reconnect:
                self._owner.failed(self._ended_by(error))
                return
            log.info("%s: lost %s, reconnecting", self._options.name, self._address)
            await asyncio.sleep(self._backoff.next_s())
            link = await retrying(self._connect, self._backoff, name=self._options.name)

    def _received(self, data: bytes) -> None:
        if self._given_up or self._transport is None:
            return
        events = self._transport.receive(data)
        # Only an event proves that the connection works: a bus that accepts and closes at once must
        # not be retried twenty times a second.
        if events:
            self._backoff.reset()
        for event in events:
            self._owner.received(event)
            if isinstance(event, Refusal) and event.final:
                self.restart()
                return


def tls_context(address: Address, options: ClientOptions) -> ssl.SSLContext | None:
    """The context for TLS connections to the address; None for plain ones."""
    if not address.tls:
        return None
    return options.tls or ssl.create_default_context()


def reason(error: Exception) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()  # asyncio's text names its own calls
    return str(error) or type(error).__name__
