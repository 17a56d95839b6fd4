"""Connection: keeps one link to the bus up, and tells its owner what happens on it.

    open ──► up ──► lost ──► (back-off) ──► up ──► …            until close()
                      └───── without reconnect: failed

The owner's calls all come from the loop's thread, never inside a call of the owner's own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import Protocol

from polybus.batch import Buffer
from polybus.client import transports
from polybus.client.backoff import Backoff
from polybus.client.events import Event, Refused
from polybus.client.link import Link, open_link
from polybus.client.options import Options
from polybus.client.transports import Transport
from polybus.client.urls import Address
from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")


class Owner(Protocol):
    """Whose connection it is."""

    def opened(self, transport: Transport) -> None:
        """A link is up; it is new, and so is the transport."""
        ...

    def received(self, event: Event) -> None: ...

    def lost(self) -> None:
        """The link is gone. Another may follow."""
        ...

    def failed(self, error: PolybusError) -> None:
        """No other link will follow."""
        ...


class Connection:
    """One connection to a bus, made again whenever it breaks."""

    def __init__(self, address: Address, options: Options, owner: Owner) -> None:
        self._address = address
        transports.check(address)
        self._scheme = transports.find(address.scheme)
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
        """The link that is up, if one is."""
        return self._link

    def write(self, data: Buffer) -> None:
        if self._link is not None:
            self._link.write(data)

    def restart(self) -> None:
        """Give this link up; the loss is handled like any other."""
        self._given_up = True
        if self._link is not None:
            self._link.abort()

    def abandon(self) -> None:
        """Give the whole connection up, at once; `close` is still to be called."""
        self._closing = True
        self.restart()

    async def close(self, *, politely: bool) -> PolybusError | None:
        """Leave; politely means that the bus gets all we sent, and we its last words.

        May be called twice. Returns why the bus did not let us end in order: `client.disconnected`.
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
        transport = self._scheme.make(self._options.message_bytes_max)
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
            link = await self._reconnect()

    async def _reconnect(self) -> Link:
        while True:
            delay_s = self._backoff.next_s()
            log.info("%s: %s is gone, trying again", self._options.name, self._address)
            await asyncio.sleep(delay_s)
            try:
                return await self._connect()
            except OSError as error:
                log.debug("%s: %s: %s", self._options.name, self._address, reason(error))

    def _received(self, data: bytes) -> None:
        if self._given_up or self._transport is None:
            return
        events = self._transport.receive(data)
        # Only now does the connection count as working: a bus that accepts and closes again at
        # once must not be asked twenty times a second.
        if events:
            self._backoff.reset()
        for event in events:
            self._owner.received(event)
            if isinstance(event, Refused) and event.final:
                self.restart()
                return


def tls_context(address: Address, options: Options) -> ssl.SSLContext | None:
    """What to make TLS connections to the address with; None for plain ones."""
    if not address.tls:
        return None
    return options.tls or ssl.create_default_context()


def reason(error: Exception) -> str:
    """Why connecting or a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()  # asyncio's own text is about its calls
    return str(error) or type(error).__name__
