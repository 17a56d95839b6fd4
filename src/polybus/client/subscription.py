"""Subscriptions: an iterator over the messages of topics, for every transport.

A subscription survives its connections: no message is repeated, and messages that the bus no longer
has are marked as a gap on the next one (`Message.gap`). client/stream_subscription.py and
client/http/subscription.py implement this.
"""

import abc
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from polybus.client.message import Message
from polybus.client.options import ClientOptions
from polybus.errors import PolybusError

MESSAGE_COST_BYTES = 200


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages that arrived together; `on_done` is called when the reader requests the next."""

    messages: list[Message]
    cost_bytes: int
    on_done: Callable[[], None] | None = None


class Subscription(abc.ABC):
    """Messages of some topics, in order per topic: `async for message in subscription`.

    It starts with the first message requested, with `async with`, or with `await subscription`.
    From then on the bus has confirmed it, and no message is missed.
    """

    def __init__(self, options: ClientOptions, on_closed: "Callable[[Subscription], None]") -> None:
        self._options = options
        self._on_closed = on_closed
        self._ready: deque[Arrived] = deque()
        self._ready_bytes = 0
        self._taken: Arrived | None = None
        self._news = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._error: PolybusError | None = None
        self._closed = False
        self._current: Iterator[Message] = iter(())

    # What each kind of subscription implements

    @abc.abstractmethod
    async def _open(self) -> None:
        """Subscribe and wait for the confirmation. Raises PolybusError."""

    @abc.abstractmethod
    async def _close(self) -> None:
        """Close every connection. Idempotent."""

    @abc.abstractmethod
    def _drained(self) -> None:
        """The reader took messages, so there is more room."""

    # For readers

    async def open(self) -> None:
        """Subscribe and wait until the bus has confirmed it.

        Raises:
            PolybusError: `client.unreachable`, `client.timeout`, or the bus's refusal.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=self._options.name)
        await asyncio.shield(self._opening)

    async def aclose(self) -> None:
        """End the subscription and its iteration. Idempotent."""
        self._closed = True
        self._news.set()
        self._on_closed(self)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._close()

    async def batches(self) -> AsyncIterator[list[Message]]:
        """The messages in lists of all that have arrived: faster than one by one."""
        while True:
            batch = await self._next_batch()
            if batch is None:
                return
            yield batch

    def __await__(self) -> "Generator[object, None, Subscription]":
        yield from self.open().__await__()
        return self

    async def __aenter__(self) -> "Subscription":
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> "Subscription":
        return self

    async def __anext__(self) -> Message:
        while True:
            for message in self._current:
                return message
            batch = await self._next_batch()
            if batch is None:
                raise StopAsyncIteration
            self._current = iter(batch)

    async def _next_batch(self) -> list[Message] | None:
        """The next messages; None if the subscription is closed."""
        self._done_with_taken()
        if self._opening is None or not self._opening.done():
            if self._closed:
                return None
            await self.open()
        while not self._ready:
            if self._closed:
                return None
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        batch = self._taken = self._ready.popleft()
        self._ready_bytes -= batch.cost_bytes
        self._drained()
        return batch.messages

    def _done_with_taken(self) -> None:
        """A reader that requests more has handled the previous messages."""
        taken, self._taken = self._taken, None
        if taken is not None and taken.on_done is not None:
            taken.on_done()

    # For implementations

    def _add(self, batch: Arrived) -> None:
        self._ready.append(batch)
        self._ready_bytes += batch.cost_bytes
        self._news.set()

    def _fail(self, error: PolybusError) -> None:
        """Raise this error after the messages that are ready."""
        if self._error is None:
            self._error = error
        self._news.set()


def mark_gap(messages: Sequence[Message]) -> list[Message]:
    """The same messages, with a gap marked on the first."""
    first = messages[0]
    marked = Message(first.topic, first.value, first.headers, first.epoch, first.offset, gap=True)
    return [marked, *messages[1:]]


def cost_bytes(values: Sequence[bytes]) -> int:
    """The approximate memory of messages with these values."""
    return sum(map(len, values)) + MESSAGE_COST_BYTES * len(values)
