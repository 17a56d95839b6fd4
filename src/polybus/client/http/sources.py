"""Where packs come from: one connection for a session, by WebSocket or by polls.

A source is one connection's life. It gives the packs that the bus sends and passes confirmations
on; packs that come again, and connections that break, are client/http/session_stream.py's business.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Literal, Protocol
from urllib.parse import quote

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode

from polybus.client.connection import reason, tls_context
from polybus.client.http.connection import HttpConnection, Request
from polybus.client.http.packs import Pack, parse_packs
from polybus.client.options import Options
from polybus.client.urls import Address
from polybus.errors import PolybusError

TransportName = Literal["websocket", "longpolling", "shortpolling"]
# A bus takes 64 KiB in one frame, and URLs of as much.
CONFIRM_IDS_MAX = 2000
# While packs are being handled the session is polled so often, or it would expire.
CONTACT_S = 20.0
# A long poll that says nothing for longer than any heartbeat is dead.
HANG_S_MAX = 600.0
# The URL has the session's key in it, and the library logs URLs.
_quiet = logging.getLogger("polybus.client.websocket")
_quiet.setLevel(logging.CRITICAL)
_quiet.propagate = False


class Source(Protocol):
    """One connection for a session."""

    async def receive(self) -> list[Pack]:
        """The next packs, by their numbers; an empty list now and then.

        Raises:
            PolybusError: the connection is of no use any more. `session.taken`: another one has
                come for the session.
        """
        ...

    def confirm(self, pack_id: int) -> None:
        """Tell the bus, soon, that it may forget the pack."""
        ...

    async def close(self) -> None:
        """Pass the last confirmations on, if that is possible, and disconnect."""
        ...


class WebSocketSource:
    """Packs as they come."""

    def __init__(self, websocket: ClientConnection, address: Address) -> None:
        self._websocket = websocket
        self._address = address
        self._confirmed: list[int] = []
        self._sending: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, address: Address, options: Options, key: str) -> WebSocketSource:
        """Connect. Raises PolybusError `client.unreachable`."""
        scheme = "wss" if address.tls else "ws"
        uri = f"{scheme}://{address.authority}/msgstream?sessionKey={quote(key, safe='')}"
        try:
            websocket = await connect(
                uri,
                ssl=tls_context(address, options),
                compression=None,
                proxy=None,
                open_timeout=options.connect_timeout_s,
                close_timeout=options.close_timeout_s,
                max_size=options.message_bytes_max,
                logger=_quiet,
            )
        except InvalidStatus as error:
            text = f"{address} answered {error.response.status_code} to a WebSocket"
            raise PolybusError("client.unreachable", text) from None
        except (OSError, InvalidHandshake) as error:
            text = f"{address}: {reason(error)}"
            raise PolybusError("client.unreachable", text) from error
        return cls(websocket, address)

    async def receive(self) -> list[Pack]:
        try:
            return parse_packs(await self._websocket.recv(decode=False))
        except ConnectionClosed as error:
            closed = error.rcvd
            if closed is not None and closed.code == CloseCode.NORMAL_CLOSURE:
                raise session_taken() from None
            said = f": {closed.code} {closed.reason}".rstrip() if closed is not None else ""
            text = f"{self._address} ended the WebSocket{said}"
            raise PolybusError("client.disconnected", text) from None

    def confirm(self, pack_id: int) -> None:
        self._confirmed.append(pack_id)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Send what has been confirmed; what comes meanwhile goes out together."""
        try:
            while self._confirmed:
                some = self._confirmed[:CONFIRM_IDS_MAX]
                del self._confirmed[:CONFIRM_IDS_MAX]
                await self._websocket.send(_ids(some))
        except ConnectionClosed:
            self._confirmed.clear()  # the packs come again, and are confirmed then

    async def close(self) -> None:
        if self._sending is not None:
            await asyncio.wait([self._sending])
        await self._websocket.close()


class PollSource:
    """Packs by polls; confirmations go with the next one.

    An answer has all packs that are not confirmed. So the next poll waits until those of the last
    one have been: asking earlier would only bring them again.
    """

    def __init__(
        self, address: Address, options: Options, key: str, *, interval_s: float | None
    ) -> None:
        """With `interval_s`, polls are short ones, so far apart while there is nothing."""
        self._http = HttpConnection(address, options)
        self._options = options
        self._key = quote(key, safe="")
        self._interval_s = interval_s
        self._outstanding: set[int] = set()
        # In order, each once.
        self._confirmed: dict[int, None] = {}
        self._settled = asyncio.Event()
        self._idle = False
        self._turns = 0

    async def receive(self) -> list[Pack]:
        if self._outstanding:
            try:
                async with asyncio.timeout(CONTACT_S):
                    await self._settled.wait()
            except TimeoutError:
                return self._took(await self._poll(hangs=False))
        if self._interval_s is not None:
            if self._idle:
                await asyncio.sleep(self._interval_s)
            return self._took(await self._poll(hangs=False))
        # The first one tells at once whether the session and its bus are there.
        hangs = self._turns > 0
        self._turns += 1
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        packs = await self._poll(hangs=hangs)
        if hangs and not packs and loop.time() - began_s < 1.0:
            # Another client polls for the session too, and each sends the other one home.
            await asyncio.sleep(1.0)
        return self._took(packs)

    def confirm(self, pack_id: int) -> None:
        self._confirmed[pack_id] = None
        self._outstanding.discard(pack_id)
        if not self._outstanding:
            self._settled.set()

    async def close(self) -> None:
        try:
            if self._confirmed:
                async with asyncio.timeout(self._options.close_timeout_s):
                    await self._poll(hangs=False)
        except (PolybusError, TimeoutError):
            pass  # the packs come again, to whoever comes next
        finally:
            self._http.close()

    def _took(self, packs: list[Pack]) -> list[Pack]:
        self._outstanding.update(pack.pack_id for pack in packs if pack.pack_id)
        self._idle = not packs
        if self._outstanding:
            self._settled.clear()
        return packs

    async def _poll(self, *, hangs: bool) -> list[Pack]:
        confirmed = list(itertools.islice(self._confirmed, CONFIRM_IDS_MAX))
        transport = "longpolling" if hangs else "shortpolling"
        target = f"/msgstream?sessionKey={self._key}&transport={transport}"
        if confirmed:
            target += f"&confirmIds={_ids(confirmed)}"
        timeout_s = HANG_S_MAX if hangs else self._options.connect_timeout_s
        answer = await self._http.request(Request(method="GET", target=target), timeout_s=timeout_s)
        answer.check()
        # Only now: what an unanswered poll confirmed may not have been heard.
        for pack_id in confirmed:
            del self._confirmed[pack_id]
        return parse_packs(answer.body) if answer.body else []


def session_taken() -> PolybusError:
    return PolybusError("session.taken", "another connection has come for the session")


def _ids(pack_ids: list[int]) -> str:
    return ",".join(map(str, pack_ids))
