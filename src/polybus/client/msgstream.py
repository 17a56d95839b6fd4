"""EventStream: delivers the events of a session to handlers by name.

A name has levels, separated by dots. Handlers of `shop.purchase` get an event of that name first,
then those of `shop`. Events are delivered one at a time: the next waits until every handler of this
one has returned. A pack is confirmed when all its events are handled, so a program that dies
receives the pack again. Delivery is at least once, and handlers should be idempotent.

When a handler raises, its pack is not confirmed, and `on_failure(event, error)` decides:

    "stop"   `run` ends with the exception (also without `on_failure`). Unconfirmed packs come again
             with the next `run`, of this stream or of another one.
    "retry"  the event is delivered again to all its handlers, with back-off.
    "skip"   continue, as if it had been handled.

Notices of the bus are events too. `session.overflow`, with topic, position and count, means that
the session was full and lost messages. `session.unset` means that the session is gone: the stream
replaces a session of its own, and messages between are lost; with a given key, `run` raises. A
notice without a handler is logged.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from polybus.client.http.sessions import SessionStream
from polybus.client.http.sources import Pack, StreamEvent
from polybus.client.options import ClientOptions
from polybus.client.retry import Backoff
from polybus.errors import PolybusError, UsageError
from polybus.wire.msgstream import UNSET, event_chunks

__all__ = ["StreamEvent", "EventStream", "Failure", "Handler", "OnFailure"]

log = logging.getLogger("polybus.client")

Handler = Callable[[StreamEvent], Awaitable[None] | None]
Failure = Literal["stop", "retry", "skip"]
OnFailure = Callable[[StreamEvent, Exception], Failure]


class EventStream:
    """`Client.events` creates it; the module docstring has the rules.

    Attributes:
        poll_interval_s: the time between short polls while there are no events.
    """

    def __init__(
        self, stream: SessionStream, options: ClientOptions, on_failure: OnFailure | None
    ) -> None:
        self._options = options
        self._on_failure = on_failure
        self._handlers: dict[str, list[Handler]] = {}
        self._stream = stream
        self._receiving: asyncio.Task[list[Pack]] | None = None
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[object] | None = None
        self._ran = asyncio.Event()
        self._ran.set()
        self.poll_interval_s = 1.0

    @property
    def session_key(self) -> str | None:
        """The key of the session, once it is open. Treat it like a password."""
        return self._stream.key

    def on(self, name: str, handler: Handler) -> None:
        """Call the handler, a function or coroutine function, with each event of the name."""
        self._handlers.setdefault(name, []).append(handler)

    def off(self, name: str, handler: Handler) -> None:
        """Remove the handler, if it is registered."""
        with contextlib.suppress(ValueError):
            self._handlers.get(name, []).remove(handler)

    async def open(self) -> None:
        """Create the session unless it exists, or raise why not; then no event is missed."""
        await self._stream.open()

    async def run(self) -> None:
        """Deliver events until `stop` or `aclose` is called.

        Raises:
            Exception: of a handler, see the module docstring.
            PolybusError: `session.unset` or `session.taken`; without `reconnect`, why the
                connection ended.
        """
        if not self._ran.is_set():
            raise UsageError("client.running", "the stream is already running")
        self._running = asyncio.current_task()
        self._ran.clear()
        self._stopping.clear()
        try:
            await self.open()
            self._stream.poll_interval_s = self.poll_interval_s
            try:
                await self._deliver_all()
            finally:
                await self._stream.disconnect()
                self._stream.rewind()
        finally:
            self._ran.set()

    def stop(self) -> None:
        """Make `run` return after the current pack."""
        self._stopping.set()
        if self._receiving is not None:
            self._receiving.cancel()

    async def aclose(self) -> None:
        """Stop, and delete a session of its own. Idempotent."""
        self.stop()
        if self._running is not asyncio.current_task():
            await self._ran.wait()
        # `run` disconnects: called by a handler, its pack is still to be confirmed.
        await self._stream.close()

    async def __aenter__(self) -> "EventStream":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _deliver_all(self) -> None:
        while not self._stopping.is_set():
            try:
                packs = await self._receive()
            except PolybusError as error:
                if error.code != UNSET or not self._stream.owns_session:
                    raise
                await self._emit(StreamEvent(UNSET, b'"noSession"'))
                await self._stream.renew()
                continue
            for pack in packs:
                for event in pack.events:
                    if not await self._emit(event):
                        return
                self._stream.handled(pack)
                if self._stopping.is_set():
                    return

    async def _receive(self) -> list[Pack]:
        """The next packs; empty if `stop` was called meanwhile."""
        self._receiving = receiving = asyncio.create_task(self._stream.receive())
        try:
            await asyncio.wait([receiving])
            return [] if receiving.cancelled() else receiving.result()
        finally:
            self._receiving = None
            if not receiving.done():
                receiving.cancel()
                await asyncio.wait([receiving])

    async def _emit(self, event: StreamEvent) -> bool:
        """Whether the event was handled or skipped; False if `stop` ended its retries."""
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

    async def _call_handlers(self, event: StreamEvent) -> None:
        heard = False
        for name in event_chunks(event.name):
            for handler in tuple(self._handlers.get(name, ())):
                heard = True
                waiting = handler(event)
                if inspect.isawaitable(waiting):
                    await waiting
        if event.pack_id == 0 and not heard:
            log.warning("%s: %s %s", self._options.name, event.name, event.raw.decode())
