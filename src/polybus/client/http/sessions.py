"""Sessions: inboxes that the bus keeps for msgstream clients.

`Sessions` manages them over the HTTP API. `SessionStream` reads the packs of one, over all its
connections: a session of its own, which it creates, replaces when it is gone and deletes at the
end, or an existing session by its key, which it never deletes.
"""

import asyncio
import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from polybus import references
from polybus.client.http.connection import HttpConnection, decode
from polybus.client.http.sources import (
    Pack,
    PackSource,
    PollSource,
    TransportName,
    WebSocketSource,
)
from polybus.client.message import NO_HEADERS, Message, StartFrom, start_text
from polybus.client.options import ClientOptions
from polybus.client.retry import Backoff, retrying
from polybus.client.subscription import OnClosed, Subscription
from polybus.errors import PeerError, PolybusError, UsageError
from polybus.wire.msgstream import OVERFLOW, UNSET

TRANSPORTS: dict[str, TransportName] = {"ws": "websocket", "http": "longpolling"}
# A retry cannot help.
_FINAL = ("session.taken", "session.unset")
_TRANSIENT = (
    *("client.unreachable", "client.disconnected", "client.timeout"),
    *("client.answer-invalid", "session.too-many", "state.failed"),
)
Events = Iterable[Sequence[Any]]
"""`[("type", data), …]`; data is any JSON value and optional."""


class _Created(msgspec.Struct):
    session_key: str = msgspec.field(name="sessionKey")


class _Topics(msgspec.Struct):
    topics: list[str]


class _Broadcast(msgspec.Struct):
    sessions: int


class Sessions:
    """The sessions of a bus. A key gives full access to its session: treat it like a password.

    Every call raises PolybusError with the bus's code (`session.unknown`, `topic.unknown`, …), or
    `client.unreachable`, `client.disconnected`, `client.timeout`, `client.answer-invalid`.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._http = HttpConnection(options)
        self._timeout_s = options.connect_timeout_s

    async def create(
        self,
        topics: Iterable[str] = (),
        *,
        start: StartFrom = "latest",
        ttl_s: float | None = None,
    ) -> str:
        """Create a session that follows the topics, and return its key.

        Args:
            start: where it starts in each topic, as for `Client.subscribe`.
            ttl_s: how long it lives without a client; by default as the bus is configured.
        """
        wanted: dict[str, Any] = {"topics": list(topics), "from": start_text(start)}
        if ttl_s is not None:
            wanted["ttl-s"] = ttl_s
        answer = await self._ask("POST", "/v1/sessions", wanted)
        return decode(answer, _Created).session_key

    async def set_topics(self, key: str, topics: Iterable[str]) -> list[str]:
        """Follow exactly these topics; return their canonical names."""
        answer = await self._ask("PUT", f"{_path(key)}/topics", {"topics": list(topics)})
        return decode(answer, _Topics).topics

    async def push(self, key: str, events: Events) -> None:
        """Add events to one session, as one pack; it is durable when this returns."""
        await self._ask("POST", f"{_path(key)}/packs", list(events))

    async def broadcast(self, events: Events) -> int:
        """Add events to every session, as one pack each; return the number of sessions."""
        answer = await self._ask("POST", "/v1/broadcast", list(events))
        return decode(answer, _Broadcast).sessions

    async def delete(self, key: str) -> None:
        """Delete a session and notify its client."""
        await self._ask("DELETE", _path(key), None)

    def close(self) -> None:
        """Close the connection; the sessions stay."""
        self._http.close()

    async def _ask(self, method: str, target: str, body: Any) -> bytes:
        content = b"" if body is None else msgspec.json.encode(body)
        return await self._http.request(method, target, content, timeout_s=self._timeout_s)


def _path(key: str) -> str:
    if not key:
        raise UsageError("session.unknown", "the session key is empty")
    return f"/v1/sessions/{quote(key, safe='')}"


class SessionStream:
    """Yields packs in the order of their numbers, and confirms those that were handled.

    The bus sends unconfirmed packs again on every connection. Packs that were received before are
    not returned again: they are being handled, or their confirmation was lost and is repeated.

    Attributes:
        key: the session's key, once it is open.
        owns_session: whether the session ends with the stream.
        poll_interval_s: the time between short polls while there are no packs.
    """

    def __init__(
        self,
        options: ClientOptions,
        *,
        topics: Iterable[str] = (),
        start: StartFrom = "latest",
        key: str | None = None,
        transport: TransportName | None = None,
    ) -> None:
        self._options = options
        self._topics = tuple(topics)
        self._start = start
        self.owns_session = key is None
        self._transport = transport or TRANSPORTS[options.address.scheme]
        self._sessions = Sessions(options)
        self._backoff = Backoff()
        self._source: PackSource | None = None
        self._given_to = 0
        self._unhandled: dict[int, Pack] = {}
        self.key = key
        self.poll_interval_s = 1.0

    async def open(self) -> None:
        """Create the session unless it exists, or raise why not; then no message is missed."""
        if self.key is None:
            self.use(await self._sessions.create(self._topics, start=self._start))

    async def receive(self) -> list[Pack]:
        """The next packs, at least one. It may be cancelled and called again.

        Raises:
            PolybusError: `session.unset`: the session is gone. `session.taken`: another connection
                uses it. Without `reconnect`, why the connection ended.
        """
        while True:
            packs = await retrying(
                self._receive_once,
                self._backoff,
                name=self._options.name,
                is_transient=self._is_transient,
            )
            self._backoff.reset()
            if any(
                event.name == UNSET for pack in packs for event in pack.events if not pack.pack_id
            ):
                await self.disconnect()
                raise PolybusError(UNSET, "the session has expired or was deleted")
            fresh = [pack for pack in packs if self._is_fresh(pack)]
            if fresh:
                return fresh

    async def _receive_once(self) -> list[Pack]:
        try:
            source = self._source = self._source or await self._connect()
            return await source.receive()
        except PolybusError:
            await self.disconnect()
            raise

    def _is_transient(self, error: PolybusError) -> bool:
        is_final = isinstance(error, PeerError) or error.code in _FINAL
        return self._options.reconnect and not is_final

    def handled(self, pack: Pack) -> None:
        """The bus may delete the pack."""
        # A pack of an earlier session may have the same number.
        if self._unhandled.get(pack.pack_id) is pack:
            del self._unhandled[pack.pack_id]
            if self._source is not None:
                self._source.confirm(pack.pack_id)

    async def disconnect(self) -> None:
        """Send confirmations and close the connection; `receive` opens another."""
        source, self._source = self._source, None
        if source is not None:
            await source.close()

    def rewind(self) -> None:
        """Return unhandled packs again; only without a connection."""
        if self._unhandled:
            self._given_to = min(self._unhandled) - 1
            self._unhandled.clear()

    def use(self, key: str) -> None:
        """Continue with another session; only without a connection."""
        self.key = key
        self._given_to = 0
        self._unhandled.clear()

    async def renew(self) -> None:
        """Replace a session that is gone by another at the end of its topics, or raise why not."""
        key = await retrying(
            lambda: self._sessions.create(self._topics),
            Backoff(),
            name=self._options.name,
            is_transient=lambda error: error.code in _TRANSIENT,
        )
        self.use(key)

    async def close(self) -> None:
        """Delete a session of its own; `disconnect` is up to the caller. Idempotent."""
        if self.owns_session and self.key is not None:
            key, self.key = self.key, None
            # If the bus is unreachable, the session expires.
            with contextlib.suppress(PolybusError, TimeoutError):
                async with asyncio.timeout(self._options.close_timeout_s):
                    await self._sessions.delete(key)
        self._sessions.close()

    async def _connect(self) -> PackSource:
        assert self.key is not None, "opened before"
        if self._transport == "websocket":
            return await WebSocketSource.open(self._options, self.key)
        interval_s = self.poll_interval_s if self._transport == "shortpolling" else None
        return PollSource(self._options, self.key, interval_s=interval_s)

    def _is_fresh(self, pack: Pack) -> bool:
        number = pack.pack_id
        if number == 0:
            return True
        if number > self._given_to:
            self._given_to = number
            self._unhandled[number] = pack
            return True
        if number not in self._unhandled and self._source is not None:
            self._source.confirm(number)
        return False


class SessionSubscription(Subscription):
    """Messages of topics through a session of its own, which ends with it; without positions.

    The bus keeps messages until they are confirmed, which happens when the reader requests the next
    ones. So a lost connection or a restarted bus loses nothing. A session that expired is replaced
    by another at the end of its topics, and the messages between are a gap.
    """

    def __init__(self, options: ClientOptions, starts: dict[str, str], on_closed: OnClosed) -> None:
        super().__init__(options, on_closed)
        self._topics = frozenset(starts)
        # One call of `subscribe` has one start for all its topics.
        (start,) = set(starts.values())
        self._stream = SessionStream(options, topics=starts, start=start)
        self._reading: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._resume()
        self._gaps: set[str] = set()

    async def _open(self) -> None:
        try:
            await self._stream.open()
        except PolybusError as error:
            self._fail(error)
            raise
        self._reading = asyncio.create_task(self._read(), name=self._options.name)

    async def _close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._stream.disconnect()
        await self._stream.close()

    def _pause(self) -> None:
        self._room.clear()

    def _resume(self) -> None:
        self._room.set()

    async def _read(self) -> None:
        try:
            while True:
                await self._room.wait()
                try:
                    packs = await self._stream.receive()
                except PolybusError as error:
                    if error.code != UNSET or not self._options.reconnect:
                        raise
                    self._gaps.update(self._topics)
                    await self._stream.renew()
                    continue
                for pack in packs:
                    self._take(pack)
        except PolybusError as error:
            self._fail(error)

    def _take(self, pack: Pack) -> None:
        if pack.pack_id == 0:
            for event in pack.events:
                notice = event.data if event.name == OVERFLOW else None
                if isinstance(notice, dict) and isinstance(notice.get("topic"), str):
                    self._gaps.add(notice["topic"])
            return
        # Events that were pushed or broadcast to the session under other names are ignored.
        messages = []
        for event in pack.events:
            if event.name in self._topics:
                gap = event.name in self._gaps
                self._gaps.discard(event.name)
                found = references.parse(event.value)
                headers = NO_HEADERS if found is None else {references.HEADER: found.id.encode()}
                messages.append(Message(event.name, event.value, headers, gap=gap))
        if not messages:
            self._stream.handled(pack)
            return
        value_bytes = sum(len(message.value) for message in messages)
        self._add(messages, value_bytes, functools.partial(self._stream.handled, pack))
