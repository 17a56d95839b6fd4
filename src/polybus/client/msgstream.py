"""EventStream: the events of a session, handed to whoever asked for them by name.

A name has levels, separated by dots. Handlers of `shop.purchase` get an event of that name first,
then those of `shop`. One event after the other: the next waits until every handler of this one has
returned, and a pack is confirmed when all its events have been handled. So a program that dies
gets the pack again. Handlers should bear that: delivery is at least once.

When a handler raises, its pack is not confirmed, and `on_failure(event, error)` says what to do:

    "stop"   `run` ends with the exception (also without `on_failure`). Packs that were not
             confirmed come again with the next `run`, of this stream or of another one.
    "retry"  the event is emitted again, to all its handlers, after a growing delay.
    "skip"   go on, as if it had been handled.

Notices of the bus are events too. `session.overflow`, with topic, position and count, says that the
session was full and lost messages. `session.unset` says that the session is gone: a session of the
stream's own is replaced by another, and what came between is lost; with a key that was given, `run`
raises. A notice that nobody handles is a log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from polybus.client.backoff import Backoff
from polybus.client.http.packs import Event, Pack
from polybus.client.http.renewal import another_session
from polybus.client.http.session_stream import SessionStream
from polybus.client.http.sessions import Sessions
from polybus.client.http.sources import TransportName
from polybus.client.http.subscription import TRANSPORTS
from polybus.client.options import Options
from polybus.client.starts import Start
from polybus.client.urls import Address
from polybus.errors import PolybusError, UsageError
from polybus.wire.msgstream import UNSET, event_chunks

__all__ = ["Event", "EventStream", "Failure", "Handler", "OnFailure"]

log = logging.getLogger("polybus.client")

Handler = Callable[[Event], Awaitable[None] | None]
Failure = Literal["stop", "retry", "skip"]
OnFailure = Callable[[Event, Exception], Failure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the events come from; without a key, from a session of the stream's own."""

    topics: tuple[str, ...] = ()
    start: Start = "latest"
    key: str | None = None
    transport: TransportName | None = None

    def __post_init__(self) -> None:
        if self.key is not None and (self.topics or self.start != "latest"):
            text = "a session that is there has its topics; Sessions.set_topics changes them"
            raise UsageError("client.unsupported", text)


class EventStream:
    """`Client.events` makes it; the module's docstring has the rules.

    Attributes:
        poll_interval_s: how far short polls are apart while there is nothing.
    """

    def __init__(
        self,
        address: Address,
        options: Options,
        source: Source,
        *,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._address = address
        self._options = options
        self._wanted = source
        self._on_failure = on_failure
        self._handlers: dict[str, list[Handler]] = {}
        self._sessions = Sessions(address, options)
        self._key = source.key
        self._stream: SessionStream | None = None
        self._receiving: asyncio.Task[list[Pack]] | None = None
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[object] | None = None
        self._ran = asyncio.Event()
        self._ran.set()
        self.poll_interval_s = 1.0

    @property
    def session_key(self) -> str | None:
        """The key of the session, once it is open. Treat it as a password."""
        return self._key

    def on(self, name: str, handler: Handler) -> None:
        """Call the handler, a function or a coroutine function, with each event of the name."""
        self._handlers.setdefault(name, []).append(handler)

    def off(self, name: str, handler: Handler) -> None:
        """Call the handler no more; nothing happens if it was not."""
        with contextlib.suppress(ValueError):
            self._handlers.get(name, []).remove(handler)

    async def open(self) -> None:
        """Open a session, unless there is one: from now on, nothing is missed.

        Raises:
            PolybusError: `client.unreachable`, or the bus's refusal.
        """
        if self._key is None:
            wanted = self._wanted
            self._key = await self._sessions.create(wanted.topics, start=wanted.start)

    async def run(self) -> None:
        """Deliver events until `stop` or `aclose` is called.

        Raises:
            Exception: a handler's, see the module's docstring.
            PolybusError: `session.unset` or `session.taken`; without `reconnect`, why the
                connection ended.
        """
        if self._running is not None:
            raise UsageError("client.running", "the stream runs already")
        self._running = asyncio.current_task()
        self._ran.clear()
        self._stopping.clear()
        try:
            await self.open()
            stream = self._stream = self._stream or self._open_stream()
            try:
                await self._deliver_all(stream)
            finally:
                await stream.disconnect()
                stream.rewind()
        finally:
            self._running = None
            self._ran.set()

    def stop(self) -> None:
        """Make `run` return after the pack that is being handled."""
        self._stopping.set()
        if self._receiving is not None:
            self._receiving.cancel()

    async def aclose(self) -> None:
        """Stop, and end the session if it is the stream's own. May be called twice."""
        self.stop()
        if self._running is not asyncio.current_task():
            await self._ran.wait()
        if self._wanted.key is None and self._key is not None:
            key, self._key, self._stream = self._key, None, None
            # If the bus is away, the session expires by itself.
            with contextlib.suppress(PolybusError, TimeoutError):
                async with asyncio.timeout(self._options.close_timeout_s):
                    await self._sessions.delete(key)
        self._sessions.close()

    async def __aenter__(self) -> EventStream:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _open_stream(self) -> SessionStream:
        assert self._key is not None
        return SessionStream(
            self._address,
            self._options,
            self._key,
            self._wanted.transport or TRANSPORTS[self._address.scheme],
            poll_interval_s=self.poll_interval_s,
        )

    async def _deliver_all(self, stream: SessionStream) -> None:
        while not self._stopping.is_set():
            try:
                packs = await self._receive(stream)
            except PolybusError as error:
                if error.code != UNSET or self._wanted.key is not None:
                    raise
                await self._renew(stream)
                continue
            for pack in packs:
                for event in pack.events:
                    if not await self._emit(event):
                        return
                stream.handled(pack)
                if self._stopping.is_set():
                    return

    async def _receive(self, stream: SessionStream) -> list[Pack]:
        """The next packs; none when `stop` was called meanwhile."""
        self._receiving = receiving = asyncio.create_task(stream.receive())
        try:
            await asyncio.wait([receiving])
            return [] if receiving.cancelled() else receiving.result()
        finally:
            self._receiving = None
            if not receiving.done():
                receiving.cancel()
                await asyncio.wait([receiving])

    async def _renew(self, stream: SessionStream) -> None:
        """The session is gone: say so, and go on with another one."""
        await self._emit(Event(UNSET, b'"noSession"'))
        self._key = await another_session(self._sessions, self._wanted.topics)
        stream.renew(self._key)

    async def _emit(self, event: Event) -> bool:
        """Whether the event was handled, or skipped; not when `stop` ended its retries."""
        backoff = Backoff()
        while True:
            try:
                await self._call_handlers(event)
                return True
            except Exception as error:
                decision = self._on_failure(event, error) if self._on_failure else "stop"
                if decision == "stop":
                    raise
                if decision == "skip":
                    return True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._stopping.wait()
                if self._stopping.is_set():
                    return False

    async def _call_handlers(self, event: Event) -> None:
        heard = False
        for name in event_chunks(event.name):
            for handler in tuple(self._handlers.get(name, ())):
                heard = True
                waiting = handler(event)
                if inspect.isawaitable(waiting):
                    await waiting
        if event.pack_id == 0 and not heard:
            log.warning("%s: %s %s", self._options.name, event.name, event.raw.decode())
