"""What open pages follow, computed once for all of them.

A channel that shows the state of the bus is computed when it is due, once for each account that
views it, and only while one does. The tail of a topic is read from the end of its log a few times a
second, at most `live-rows-per-s` messages, no matter how many are published: it is not on the path
of a message. Messages beyond that are counted as skipped, those shown are the last ones.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from polybus.batch import Batch
from polybus.edges.http.api.messages import StoredMessage, stored_messages
from polybus.edges.http.calls import Viewer
from polybus.edges.http.state import HttpState
from polybus.errors import PeerError, PolybusError, UsageError

logger = logging.getLogger("polybus.live")

COMPLAIN_EVERY_S = 60.0
TICK_S = 0.2
SHOWN_BYTES_MAX = 16 << 10
"""Bytes of a value that the tail shows."""
TAIL = "tail"
ENDED = "auth.ended"
View = Callable[[Viewer, Mapping[str, str]], Awaitable[Any]]


@dataclass(frozen=True)
class LiveChannel:
    """What a channel shows, how often, and whether only when it has changed."""

    view: View
    interval_s: float
    only_changes: bool = False


class LiveClient(Protocol):
    """A page, as the hub knows it."""

    viewer: Viewer | None

    @property
    def is_paused(self) -> bool: ...

    def send(self, json: bytes) -> None: ...

    def drop(self, number: int, error: PolybusError) -> None: ...


class LiveSubscription:
    """One channel that a page follows, under a number of its own."""

    __slots__ = ("about", "channel", "client", "last", "number", "skipped", "topic")

    def __init__(
        self, client: LiveClient, number: int, channel: str, about: Mapping[str, str]
    ) -> None:
        self.client = client
        self.number = number
        self.channel = channel
        self.about = about
        self.topic = ""
        self.last = b""
        self.skipped = 0

    def send(self, data: bytes) -> None:
        """Send the current data of the channel."""
        self.last = data
        head = b'{"id":%d,"channel":"%b","data":' % (self.number, self.channel.encode())
        self.client.send(head + data + b"}")


class Tail:
    """The end of one topic, and its followers."""

    def __init__(self, next_offset: int, epoch: int, rows_per_s: int) -> None:
        self.next_offset = next_offset
        self.epoch = epoch
        self.followers: list[LiveSubscription] = []
        self._rows_per_s = rows_per_s
        self._allowed = float(rows_per_s)

    def allow(self, wanted: int) -> int:
        """How many of these messages may be shown now."""
        self._allowed = min(self._rows_per_s, self._allowed + self._rows_per_s * TICK_S)
        given = min(wanted, int(self._allowed))
        self._allowed -= given
        return given


class LiveHub:
    """All subscriptions of all pages of one bus."""

    def __init__(self, state: HttpState, channels: Mapping[str, LiveChannel]) -> None:
        self._state = state
        self._channels = channels
        self._following: dict[str, list[LiveSubscription]] = {}
        self._due_s: dict[str, float] = {}
        self._complain_s: dict[str, float] = {}
        self._tails: dict[str, Tail] = {}
        self._running: asyncio.Task[None] | None = None
        self._again = asyncio.Event()

    # Pages call these

    def join(self, subscription: LiveSubscription, viewer: Viewer) -> None:
        """Begin to follow. Raises PolybusError."""
        if subscription.channel == TAIL:
            self._join_tail(subscription, viewer)
        elif subscription.channel not in self._channels:
            known = ", ".join(sorted([*self._channels, TAIL]))
            raise PeerError("live.invalid", f"the channel is unknown; use one of {known}")
        else:
            self._following.setdefault(subscription.channel, []).append(subscription)
            # At once, so that a page can show it.
            self._due_s[subscription.channel] = 0.0
        if self._running is None or self._running.done():
            self._running = self._state.loop.create_task(self._run())
        self._again.set()

    def leave(self, subscription: LiveSubscription) -> None:
        found = self._following.get(subscription.channel, [])
        if subscription in found:
            found.remove(subscription)
        tail = self._tails.get(subscription.topic)
        if tail is not None and subscription in tail.followers:
            tail.followers.remove(subscription)
            if not tail.followers:
                del self._tails[subscription.topic]

    def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()

    # Running

    async def _run(self) -> None:
        """Run until there are no subscriptions."""
        while self._tails or any(self._following.values()):
            await self._attempt(TAIL, self._show_tails())
            await self._show_channels()
            self._again.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), TICK_S)

    async def _attempt(self, what: str, showing: Coroutine[Any, Any, None]) -> None:
        """A channel that fails must not stop the others, nor fill the log."""
        try:
            await showing
        except Exception:
            now_s = self._state.loop.time()
            if now_s >= self._complain_s.get(what, 0.0):
                self._complain_s[what] = now_s + COMPLAIN_EVERY_S
                logger.exception("live figures cannot be computed: %s", what)

    async def _show_channels(self) -> None:
        now_s = self._state.loop.time()
        for name, channel in self._channels.items():
            followers = self._following.get(name)
            if not followers or now_s < self._due_s.get(name, 0.0):
                continue
            self._due_s[name] = now_s + channel.interval_s
            await self._attempt(name, self._show_all(list(followers), channel))

    async def _show_all(self, followers: list[LiveSubscription], channel: LiveChannel) -> None:
        seen: dict[tuple[int, str], bytes] = {}
        for subscription in followers:
            await self._show(subscription, channel, seen)

    async def _show(
        self,
        subscription: LiveSubscription,
        channel: LiveChannel,
        seen: dict[tuple[int, str], bytes],
    ) -> None:
        viewer = self._watching(subscription)
        if viewer is None:
            return
        about = subscription.about
        key = (id(viewer.access), about["replay"])
        if key not in seen:
            try:
                seen[key] = msgspec.json.encode(await channel.view(viewer, about))
            except PolybusError as error:
                subscription.client.drop(subscription.number, error.without_traceback())
                return
        if not (channel.only_changes and subscription.last == seen[key]):
            subscription.send(seen[key])

    def _watching(self, subscription: LiveSubscription) -> Viewer | None:
        """The viewer of a subscription, if its page reads its messages."""
        client = subscription.client
        viewer = client.viewer
        if viewer is None or client.is_paused:
            return None
        if viewer.access.is_ended:
            client.drop(subscription.number, ended())
            return None
        return viewer

    # Tails

    def _join_tail(self, subscription: LiveSubscription, viewer: Viewer) -> None:
        topic = viewer.topic_named(subscription.about["topic"])
        subscription.topic = topic
        tail = self._tails.get(topic)
        if tail is None:
            bounds = self._state.bus.log.bounds(topic)
            rows_per_s = self._state.config.http.live_rows_per_s
            tail = self._tails[topic] = Tail(bounds.stop, bounds.epoch, rows_per_s)
        tail.followers.append(subscription)

    async def _show_tails(self) -> None:
        for topic, tail in list(self._tails.items()):
            try:
                await self._show_tail(topic, tail)
            except PolybusError as error:
                if error.code == "topic.unknown":
                    error = UsageError("topic.deleted", "the topic was deleted")
                for subscription in list(tail.followers):
                    subscription.client.drop(subscription.number, error.without_traceback())

    async def _show_tail(self, topic: str, tail: Tail) -> None:
        """Raises PolybusError, the topic is gone or damaged."""
        bounds = self._state.bus.log.bounds(topic)
        if bounds.epoch != tail.epoch:
            raise UsageError("topic.deleted", "the topic was deleted")
        fresh = bounds.stop - tail.next_offset
        if not fresh:
            tail.allow(0)
            return
        shown = tail.allow(fresh)
        tail.next_offset = bounds.stop
        batches: list[Batch] = []
        if shown:
            batches = await self._read(topic, bounds.stop - shown, bounds.stop)
        count = sum(map(len, batches))
        seen: dict[tuple[bool, str], bytes] = {}
        for subscription in list(tail.followers):
            subscription.skipped += fresh - count
            viewer = self._watching(subscription)
            if viewer is None:
                subscription.skipped += count
                continue
            if not viewer.access.may_read(topic):
                gone = UsageError("topic.deleted", "the topic was deleted")
                subscription.client.drop(subscription.number, gone)
                continue
            key = (viewer.is_admin, subscription.about["text"])
            if key not in seen:
                seen[key] = _rows(batches, viewer, key[1])
            skipped, subscription.skipped = subscription.skipped, 0
            subscription.send(
                b'{"messages":%b,"skipped":%d,"rate":%.1f}' % (seen[key], skipped, fresh / TICK_S)
            )

    async def _read(self, topic: str, offset: int, stop: int) -> list[Batch]:
        log = self._state.bus.log
        found = log.read_recent(topic, offset)
        if found is None:
            found = await asyncio.to_thread(log.read, topic, offset)
        # More may have arrived meanwhile: that is for the next time.
        return [
            one if one.last_offset < stop else one.slice(0, stop - one.first_offset)
            for one in found
            if one.first_offset < stop
        ]


def ended() -> UsageError:
    """The error of a page whose login has ended."""
    return UsageError(ENDED, "your account, password or token is no longer valid")


def _rows(batches: list[Batch], viewer: Viewer, text: str) -> bytes:
    """Messages that contain a text, as JSON."""
    messages: list[StoredMessage] = []
    for batch in batches:
        mask = viewer.mask_of(batch.topic)
        for index in range(len(batch)):
            one = batch.slice(index, index + 1)
            if one.value_bytes > SHOWN_BYTES_MAX:
                one.spans[1] = one.spans[0] + SHOWN_BYTES_MAX
                (message,) = stored_messages(one, mask)
                message.size, message.cut = batch.slice(index, index + 1).value_bytes, True
            else:
                (message,) = stored_messages(one, mask)
            messages.append(message)
    encoded = [msgspec.json.encode(one) for one in messages]
    if text:
        needle = msgspec.json.encode(text.lower())[1:-1]
        encoded = [one for one in encoded if needle in one.lower()]
    return b"[" + b",".join(encoded) + b"]"
