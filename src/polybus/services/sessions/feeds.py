"""Feeds: sessions follow them. There is one feed per topic for any number of sessions.

Accounts have different names for a topic: there is one feed for each of these names.

A feed records the position of each batch of its topic in the log, not its messages. A session
records its position in the feed. So a message costs a feed one entry, and costs nothing for a
session without a listening client.

How large a pack is: a batch that is delivered live is one pack. Messages that come from the log (a
large commit, or a catch-up) are split into packs of about PACK_BYTES.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.bus.subscriptions import Publisher, Subscriber
from polybus.config import Config
from polybus.errors import StorageError, UsageError
from polybus.services.sessions.contents import (
    BEHIND,
    Content,
    Entries,
    Follow,
    JsonCache,
    Receiver,
    direct,
)
from polybus.wire.msgstream import PROTOCOL, encode_messages, encode_notice

PACK_BYTES = 256 << 10
"""The approximate size of a pack whose messages come from the log."""
WAKES_PER_TURN = 500


class Feed(Entries, Subscriber):
    """The entries of a topic, from the bus."""

    protocol = PROTOCOL

    def __init__(
        self, topic: str, epoch: int, stop_offset: int, feeds: "Feeds", shown: str | None = None
    ) -> None:
        super().__init__(topic, epoch, stop_offset, shown)
        # Whether waking its listeners is scheduled.
        self.signalled = False
        self._feeds = feeds

    # The bus calls these

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        content = self._add(batch)
        if self.listeners:
            form = PROTOCOL if self.shown == self.topic else f"{PROTOCOL} {self.shown}"
            self._feeds.cache.put(content, bytes(batch.encoded(form, self._encode)))
            self._feeds.wake(self)

    def deliver_from_log(self, batches: Sequence[Batch]) -> None:
        """As `deliver`, but JSON is encoded on demand, in packs of about PACK_BYTES."""
        for batch in batches:
            count = max(1, len(batch) * PACK_BYTES // max(batch.value_bytes, 1))
            for first in range(0, len(batch), count):
                self._add(batch.slice(first, min(first + count, len(batch))))
        if self.listeners:
            self._feeds.wake(self)

    def _encode(self, batch: Batch) -> bytes:
        return encode_messages(batch, self.shown)

    def _add(self, batch: Batch) -> Content:
        order = self._feeds.next_order()
        size = batch.value_bytes
        content = Content(self.topic, batch.epoch, batch.first_offset, len(batch), size, order)
        self.add(content)
        if len(self.contents) > 2 * self._feeds.contents_max:
            self.trim(self.stop_index - self._feeds.contents_max)
        return content

    def topic_deleted(self, topic: str) -> None:
        self._feeds.forget(self)


class Feeds:
    """One feed per followed topic, and name for it. `trim` removes feeds without followers."""

    def __init__(
        self,
        bus: Bus,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        on_deleted: Callable[[Feed], None],
    ) -> None:
        """`on_deleted` makes the sessions leave the feed of a deleted topic."""
        self.contents_max = config.msgstream.session_packs_max
        self.cache = JsonCache()
        self._last_order = 0
        self._bus = bus
        self._loop = loop
        self._is_volatile = config.durability == "memory"
        self._on_deleted = on_deleted
        self._feeds: dict[tuple[str, str], Feed] = {}
        self._delivered: deque[Feed] = deque()
        self._to_wake: list[Receiver] = []
        self._waking = False

    def next_order(self) -> int:
        """The position of a pack in the order of arrival."""
        self._last_order += 1
        return self._last_order

    def begin_after(self, order: int) -> None:
        """Continue the order above that of everything stored."""
        self._last_order = order

    def __iter__(self) -> Iterator[Feed]:
        return iter(self._feeds.values())

    def feed(self, topic: str, shown: str) -> Feed:
        """The feed of a topic. Raises UsageError `topic.unknown`; StorageError if it is damaged."""
        feed = self._feeds.get((topic, shown))
        if feed is None:
            bounds = self._bus.log.bounds(topic)
            feed = self._feeds[topic, shown] = Feed(topic, bounds.epoch, bounds.stop, self, shown)
            self._bus.subscribe(topic, feed)
        return feed

    def join(self, feed: Feed, offset: int, receiver: Receiver | None = None) -> Follow:
        """Follow the feed from the offset on."""
        follow = Follow(feed, offset)
        feed.followers.add(follow)
        if receiver is not None:
            follow.listen(receiver)
        return follow

    def leave(self, follow: Follow) -> None:
        feed = cast(Feed, follow.feed)
        feed.followers.discard(follow)
        follow.unlisten()
        if not feed.followers and self._feeds.get((feed.topic, feed.shown)) is not feed:
            # The feed of a damaged topic, which `trim` does not visit.
            self._bus.unsubscribe(feed.topic, feed)

    def restore(self, topic: str, shown: str, epoch: int, offset: int) -> Follow | None:
        """Follow a topic from a saved position; None if the topic was deleted."""
        if not self._bus.has_topic(topic):
            return None
        try:
            bounds = self._bus.log.bounds(topic)
        except StorageError:
            # Damaged: the session keeps its position, and continues with its other topics.
            feed = Feed(topic, epoch, offset, self, shown)
            feed.damage()
            self._bus.subscribe(topic, feed)
            return self.join(feed, offset)
        # A log in memory begins every topic at 0 again, with a larger epoch than the one on disk.
        # A topic that was recreated on disk has a larger epoch than the saved one.
        if epoch < bounds.epoch and not self._is_volatile:
            return None
        at = min(offset, bounds.stop) if epoch == bounds.epoch else bounds.start
        return self.join(self.feed(topic, shown), at)

    def stored(self, topic: str, epoch: int, first_offset: int, count: int) -> int:
        """How many of a pack's messages are still in the log after a crash."""
        try:
            bounds = self._bus.log.bounds(topic)
        except (UsageError, StorageError):
            # Deleted or damaged: a read will report that.
            return count
        if bounds.epoch != epoch:
            return count
        return max(0, min(count, bounds.stop - first_offset))

    def trim(self) -> None:
        """Forget entries that every follower has passed, and feeds without followers."""
        for feed in list(self._feeds.values()):
            # The file of a damaged topic may have been restored.
            if feed.try_again():
                self.wake(feed)
            if not feed.followers:
                self._bus.unsubscribe(feed.topic, feed)
                del self._feeds[feed.topic, feed.shown]
                continue
            live = [follow.index for follow in feed.followers if follow.index != BEHIND]
            feed.trim(min(live, default=feed.stop_index))

    def forget(self, feed: Feed) -> None:
        """Drop the feed of a deleted topic."""
        if self._feeds.get((feed.topic, feed.shown)) is feed:
            del self._feeds[feed.topic, feed.shown]
        self._on_deleted(feed)

    def deletion_notice(self, shown: str) -> Content:
        """The pack that notifies a session that its topic was deleted, or that its access ended."""
        notice = b"[" + encode_notice("topic.deleted", {"topic": shown}) + b"]"
        return direct(notice, order=self.next_order())

    def wake(self, feed: Feed) -> None:
        """Wake the feed's listeners soon."""
        if not feed.signalled:
            feed.signalled = True
            self._delivered.append(feed)
        self._wake_soon()

    def wake_one(self, receiver: Receiver) -> None:
        """Wake a connection soon."""
        self._to_wake.append(receiver)
        self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._waking:
            self._waking = True
            self._loop.call_soon(self._wake_some)

    def _wake_some(self) -> None:
        while self._delivered and len(self._to_wake) < WAKES_PER_TURN:
            feed = self._delivered.popleft()
            feed.signalled = False
            self._to_wake += feed.listeners.values()
        some = self._to_wake[:WAKES_PER_TURN]
        del self._to_wake[:WAKES_PER_TURN]
        self._waking = bool(self._to_wake or self._delivered)
        if self._waking:
            # Let other tasks run: ten thousand sessions on one topic take a while.
            self._loop.call_soon(self._wake_some)
        for receiver in some:
            receiver.wake()
