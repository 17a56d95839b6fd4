"""The packs of a session on one connection, by WebSocket or by polls.

A source lives as long as its connection. It returns the packs that the bus sends, and sends
confirmations; client/http/sessions.py handles repeated packs and lost connections.
"""

import asyncio
import itertools
import logging
from base64 import b64decode
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode

from polybus.client.connection import reason
from polybus.client.http.connection import HttpConnection
from polybus.client.options import Address, ClientOptions
from polybus.errors import PeerError, PolybusError

TransportName = Literal["websocket", "longpolling", "shortpolling"]
# A bus accepts frames and URLs of up to 64 KiB.
CONFIRM_IDS_MAX = 2000
# While packs are being handled, the session is polled at this interval to keep it alive.
CONTACT_S = 20.0
# A long poll without an answer for longer than any heartbeat is dead.
HANG_S_MAX = 600.0
# The URL contains the session's key, and the library logs URLs.
_quiet = logging.getLogger("polybus.client.websocket")
_quiet.setLevel(logging.CRITICAL)
_quiet.propagate = False


class _PackEvent(msgspec.Struct, array_like=True):
    name: str
    raw: msgspec.Raw = msgspec.Raw()


class _Base64Payload(msgspec.Struct, forbid_unknown_fields=True):
    base64: str


_packs = msgspec.json.Decoder(dict[int, list[_PackEvent]])
_string = msgspec.json.Decoder(str)
_base64 = msgspec.json.Decoder(_Base64Payload)


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """One event of a session.

    Attributes:
        name: its type, perhaps dotted; for a topic's message, the topic.
        raw: the data as JSON text; empty if it has none.
        pack_id: the number of its pack; 0 is a notice of the bus.
    """

    name: str
    raw: bytes = b""
    pack_id: int = 0

    @property
    def data(self) -> Any:
        """The data, or None. Raises msgspec.DecodeError if Python cannot represent it."""
        return msgspec.json.decode(self.raw) if self.raw else None

    @property
    def value(self) -> bytes:
        """The data as a message value: decoded base64, a string as UTF-8, or JSON text.

        JSON has lost its white space on the way (docs/protocols/msgstream.md).
        """
        try:
            if self.raw[:1] == b'"':
                return _string.decode(self.raw).encode()
            if self.raw.startswith(b'{"base64":'):
                return b64decode(_base64.decode(self.raw).base64, validate=True)
        except (msgspec.DecodeError, ValueError):
            pass  # JSON that only looks like base64
        return self.raw


@dataclass(frozen=True, slots=True)
class Pack:
    """Events that arrived together; `pack_id` 0 is a notice, which is never confirmed."""

    pack_id: int
    events: list[StreamEvent]


def parse_packs(text: bytes) -> list[Pack]:
    """The packs of one answer or frame, in the order of their numbers.

    Raises:
        PeerError: `msgstream.pack-invalid`.
    """
    try:
        packs = sorted(_packs.decode(text).items())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError(
            "msgstream.pack-invalid", f"the answer has no packs: {str(error)[:80]}"
        ) from error
    return [
        Pack(number, [StreamEvent(event.name, bytes(event.raw), number) for event in events])
        for number, events in packs
    ]


class WebSocketSource:
    """Packs by WebSocket.

    Both sources `receive` the next packs in the order of their numbers, sometimes none, and raise
    PolybusError if the connection is unusable. `confirm` tells the bus, soon, that it may delete a
    pack; `close` sends the last confirmations, if possible, and disconnects.
    """

    def __init__(self, websocket: ClientConnection, address: Address) -> None:
        self._websocket = websocket
        self._address = address
        self._confirmed: list[int] = []
        self._sending: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, options: ClientOptions, key: str) -> "WebSocketSource":
        """Connect. Raises PolybusError `client.unreachable`."""
        address = options.address
        scheme = "wss" if address.tls else "ws"
        uri = f"{scheme}://{address.authority}/msgstream?sessionKey={quote(key, safe='')}"
        try:
            websocket = await connect(
                uri,
                ssl=options.tls_context,
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
                text = "another connection uses the session"
                raise PolybusError("session.taken", text) from None
            said = f": {closed.code} {closed.reason}".rstrip() if closed is not None else ""
            text = f"{self._address} ended the WebSocket{said}"
            raise PolybusError("client.disconnected", text) from None

    def confirm(self, pack_id: int) -> None:
        self._confirmed.append(pack_id)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Send confirmations; those that are added meanwhile are sent together."""
        try:
            while self._confirmed:
                some = self._confirmed[:CONFIRM_IDS_MAX]
                del self._confirmed[:CONFIRM_IDS_MAX]
                await self._websocket.send(_ids(some))
        except ConnectionClosed:
            self._confirmed.clear()  # the bus sends the packs again, and they are confirmed then

    async def close(self) -> None:
        if self._sending is not None:
            await asyncio.wait([self._sending])
        await self._websocket.close()


class PollSource:
    """Packs by polls; the next poll sends the confirmations.

    An answer has all unconfirmed packs, so the next poll waits until those of the last one are
    confirmed: polling earlier would only repeat them.
    """

    def __init__(self, options: ClientOptions, key: str, *, interval_s: float | None) -> None:
        """With `interval_s`, use short polls, at this interval while there are no packs."""
        self._http = HttpConnection(options)
        self._options = options
        self._key = quote(key, safe="")
        self._interval_s = interval_s
        self._outstanding: set[int] = set()
        # An ordered set.
        self._confirmed: dict[int, None] = {}
        self._settled = asyncio.Event()
        self._idle = False
        self._hangs = False

    async def receive(self) -> list[Pack]:
        if self._outstanding:
            try:
                async with asyncio.timeout(CONTACT_S):
                    await self._settled.wait()
            except TimeoutError:
                return await self._poll(hangs=False)
        if self._interval_s is not None:
            if self._idle:
                await asyncio.sleep(self._interval_s)
            return await self._poll(hangs=False)
        # The first poll is short: it shows at once whether the session and the bus exist.
        hangs, self._hangs = self._hangs, True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        packs = await self._poll(hangs=hangs)
        if hangs and not packs and loop.time() - began_s < 1.0:
            # Another client polls the same session, and each poll ends the other.
            await asyncio.sleep(1.0)
        return packs

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
            pass  # the bus sends the packs again to the next connection
        finally:
            self._http.close()

    async def _poll(self, *, hangs: bool) -> list[Pack]:
        confirmed = list(itertools.islice(self._confirmed, CONFIRM_IDS_MAX))
        transport = "longpolling" if hangs else "shortpolling"
        target = f"/msgstream?sessionKey={self._key}&transport={transport}"
        if confirmed:
            target += f"&confirmIds={_ids(confirmed)}"
        timeout_s = HANG_S_MAX if hangs else self._options.connect_timeout_s
        answer = await self._http.request("GET", target, timeout_s=timeout_s)
        # Only now, because the bus may not have received an unanswered poll.
        for pack_id in confirmed:
            del self._confirmed[pack_id]
        packs = parse_packs(answer) if answer else []
        self._outstanding.update(pack.pack_id for pack in packs if pack.pack_id)
        self._idle = not packs
        if self._outstanding:
            self._settled.clear()
        return packs


PackSource = WebSocketSource | PollSource


def _ids(pack_ids: list[int]) -> str:
    return ",".join(map(str, pack_ids))
