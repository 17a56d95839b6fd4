"""SessionStream: the packs of one session, each once, over all the connections it takes."""

from __future__ import annotations

import asyncio
import logging

from polybus.client.backoff import Backoff
from polybus.client.http.packs import Pack
from polybus.client.http.sources import PollSource, Source, TransportName, WebSocketSource
from polybus.client.options import Options
from polybus.client.urls import Address
from polybus.errors import PeerError, PolybusError
from polybus.wire.msgstream import UNSET

log = logging.getLogger("polybus.client")
# Nothing is won by trying again.
_FINAL = ("session.taken", "session.unset")


class SessionStream:
    """Gives packs in the order of their numbers, and confirms those that were handled.

    The bus sends unconfirmed packs again on every connection. Those that were given before are not
    given again: either they are still being handled, or their confirmation was lost and is sent
    once more.
    """

    def __init__(
        self,
        address: Address,
        options: Options,
        key: str,
        transport: TransportName,
        *,
        poll_interval_s: float = 1.0,
    ) -> None:
        self._address = address
        self._options = options
        self._key = key
        self._transport = transport
        self._poll_interval_s = poll_interval_s
        self._backoff = Backoff()
        self._source: Source | None = None
        self._given_to = 0
        self._unhandled: dict[int, Pack] = {}

    async def receive(self) -> list[Pack]:
        """The next packs, one at least. It may be cancelled, and asked again.

        Raises:
            PolybusError: `session.unset`: the session is gone. `session.taken`: another connection
                has come for it. Without `reconnect`, why the connection ended.
        """
        while True:
            try:
                source = self._source = self._source or await self._connect()
                packs = await source.receive()
            except PolybusError as error:
                await self.disconnect()
                if not self._options.reconnect or _is_final(error):
                    raise
                delay_s = self._backoff.next_s()
                log.info("%s: %s, trying again", self._options.name, error)
                await asyncio.sleep(delay_s)
                continue
            self._backoff.reset()
            if any(
                event.name == UNSET for pack in packs for event in pack.events if not pack.pack_id
            ):
                await self.disconnect()
                raise PolybusError(UNSET, "the session has expired or was deleted")
            fresh = [pack for pack in packs if self._is_fresh(pack, source)]
            if fresh:
                return fresh

    def handled(self, pack: Pack) -> None:
        """The bus may forget the pack."""
        # A pack of the session before may have the same number.
        if self._unhandled.get(pack.pack_id) is pack:
            del self._unhandled[pack.pack_id]
            if self._source is not None:
                self._source.confirm(pack.pack_id)

    async def disconnect(self) -> None:
        """Pass confirmations on and let go of the connection; `receive` makes another."""
        source, self._source = self._source, None
        if source is not None:
            await source.close()

    def rewind(self) -> None:
        """Give the packs that were not handled once more; only without a connection."""
        if self._unhandled:
            self._given_to = min(self._unhandled) - 1
            self._unhandled.clear()

    def renew(self, key: str) -> None:
        """Go on with another session; only without a connection."""
        self._key = key
        self._given_to = 0
        self._unhandled.clear()

    async def _connect(self) -> Source:
        if self._transport == "websocket":
            return await WebSocketSource.open(self._address, self._options, self._key)
        interval_s = self._poll_interval_s if self._transport == "shortpolling" else None
        return PollSource(self._address, self._options, self._key, interval_s=interval_s)

    def _is_fresh(self, pack: Pack, source: Source) -> bool:
        number = pack.pack_id
        if number == 0:
            return True
        if number > self._given_to:
            self._given_to = number
            self._unhandled[number] = pack
            return True
        if number not in self._unhandled:
            source.confirm(number)
        return False


def _is_final(error: PolybusError) -> bool:
    return error.code in _FINAL or isinstance(error, PeerError)
