"""Subscribing through a session of the bus: `ws://` by WebSocket, `http://` by long polls.

The bus keeps messages until they are confirmed, which happens when the reader requests the next
ones. So a lost connection or a restarted bus loses nothing. A session that expired is replaced by
another at the end of its topics, and the messages between are a gap.
"""

import asyncio
import functools
from collections.abc import Callable

from polybus.client.http.sessions import SessionStream
from polybus.client.http.sources import Event, Pack
from polybus.client.message import Message
from polybus.client.options import ClientOptions
from polybus.client.subscription import Subscription
from polybus.client.urls import Address
from polybus.errors import PolybusError
from polybus.wire.msgstream import OVERFLOW, UNSET


class SessionSubscription(Subscription):
    """Has a session of its own, which ends with it. Messages have no positions."""

    def __init__(
        self,
        address: Address,
        options: ClientOptions,
        starts: dict[str, str],
        on_closed: Callable[[Subscription], None],
    ) -> None:
        super().__init__(options, on_closed)
        self._topics = frozenset(starts)
        # One call of `subscribe` has one start for all its topics.
        (start,) = set(starts.values())
        self._stream = SessionStream(address, options, topics=starts, start=start)
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
            self._gaps.update(_overflown(pack.events))
            return
        # Events that were pushed or broadcast to the session under other names are ignored.
        messages = []
        for event in pack.events:
            if event.name in self._topics:
                gap = event.name in self._gaps
                self._gaps.discard(event.name)
                messages.append(Message(event.name, event.value, gap=gap))
        if not messages:
            self._stream.handled(pack)
            return
        value_bytes = sum(len(message.value) for message in messages)
        self._add(messages, value_bytes, functools.partial(self._stream.handled, pack))


def _overflown(events: list[Event]) -> set[str]:
    """The topics that lost messages, according to notices."""
    topics = set()
    for event in events:
        data = event.data if event.name == OVERFLOW else None
        if isinstance(data, dict) and isinstance(data.get("topic"), str):
            topics.add(data["topic"])
    return topics
