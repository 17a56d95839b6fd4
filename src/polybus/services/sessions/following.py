"""Who follows which topic: one feed per topic that any session follows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from polybus import names
from polybus.bus.bus import Bus
from polybus.errors import UsageError
from polybus.services.replay import resolve
from polybus.services.sessions.feeds import Feed, FeedsShared, JsonCache, direct
from polybus.services.sessions.session import Follow, Session
from polybus.wire.msgstream import encode_notice
from polybus.wire.positions import parse_start

WAKES_PER_TURN = 500


class Receiver(Protocol):
    """The connection that a session's packs go to now."""

    def wake(self) -> None:
        """There may be something to send."""
        ...

    def replaced(self) -> None:
        """A newer connection has come for the session."""
        ...

    def ended(self) -> None:
        """The session is gone."""
        ...

    def shut_down(self) -> None:
        """The bus stops."""
        ...


class Following:
    """The feeds of a bus. A feed goes when nobody has followed it for a while."""

    def __init__(
        self,
        bus: Bus,
        *,
        topics_max: int,
        contents_max: int,
        on_changed: Callable[[Session], None],
    ) -> None:
        self._bus = bus
        self._topics_max = topics_max
        self._on_changed = on_changed
        self._loop = asyncio.get_running_loop()
        self._feeds: dict[str, Feed] = {}
        self._shared = FeedsShared(
            contents_max=contents_max, on_stirred=self._on_stirred, on_deleted=self._on_deleted
        )
        self._stirred: deque[Feed] = deque()
        self._to_wake: deque[Session] = deque()
        self._waking = False

    @property
    def cache(self) -> JsonCache:
        return self._shared.cache

    def next_order(self) -> int:
        """When something comes, compared to everything that comes from topics."""
        return self._shared.next_order()

    def canonical(self, topics: Sequence[str]) -> list[str]:
        """Topics as they are called, each once. Raises UsageError `request.too-many-topics`."""
        if len(topics) > self._topics_max:
            text = f"more than {self._topics_max} topics in one request (topics-per-request-max)"
            raise UsageError("request.too-many-topics", text)
        return list(dict.fromkeys(names.canonical(topic) for topic in topics))

    async def places(self, topics: Sequence[str], start: str) -> list[Follow]:
        """Where a session begins in each topic.

        Raises:
            UsageError: `topic.unknown`, `request.too-many-topics`.
            PeerError: `position.invalid`.
        """
        where = parse_start(start)
        wanted = self.canonical(topics)
        for topic in wanted:
            # All or nothing: an unknown topic must not leave the others followed.
            self._bus.log.bounds(topic)
        if start == "latest":
            return [Follow(self._feed(topic), self._feed(topic).stop_offset) for topic in wanted]
        follows = []
        for topic in wanted:
            feed = self._feed(topic)
            _, offset = await asyncio.to_thread(resolve, self._bus.log, topic, where)
            follows.append(Follow(feed, offset))
        return follows

    def restore(self, session: Session, topic: str, epoch: int, offset: int) -> None:
        """Follow a topic from where the session was, if there is such a topic still."""
        if self._bus.has_topic(topic):
            bounds = self._bus.log.bounds(topic)
            # What a crash took from the log is not there to be followed.
            at = min(offset, bounds.stop) if epoch == bounds.epoch else bounds.start
            self.follow(session, Follow(self._feed(topic), at))

    def follow(self, session: Session, follow: Follow) -> None:
        feed = follow.feed
        if self._feeds.get(feed.topic) is not feed and self._bus.has_topic(feed.topic):
            # Nobody followed it while its beginning was looked up, and so it was forgotten.
            feed = self._feed(feed.topic)
            follow = Follow(feed, follow.offset)
        session.follows[feed.topic] = follow
        feed.followers.add(session)
        if session.receiver is not None:
            feed.listeners[session] = None

    def unfollow(self, session: Session, feed: Feed) -> None:
        session.follows.pop(feed.topic, None)
        feed.followers.discard(session)
        feed.listeners.pop(session, None)

    def listen(self, session: Session) -> None:
        """Wake the session's receiver whenever one of its topics gets something."""
        for follow in session.follows.values():
            follow.feed.listeners[session] = None

    def stop_listening(self, session: Session) -> None:
        for follow in session.follows.values():
            follow.feed.listeners.pop(session, None)

    def trim(self) -> None:
        """Forget what every follower has behind it, and feeds that nobody follows."""
        for feed in list(self._feeds.values()):
            if not feed.followers:
                self._bus.unsubscribe(feed.topic, feed)
                del self._feeds[feed.topic]
                continue
            indexes = [session.follows[feed.topic].index for session in feed.followers]
            live = [index for index in indexes if index >= 0]
            feed.trim(min(live, default=feed.stop_index))

    def _feed(self, topic: str) -> Feed:
        feed = self._feeds.get(topic)
        if feed is None:
            bounds = self._bus.log.bounds(topic)
            feed = self._feeds[topic] = Feed(topic, bounds.epoch, bounds.stop, self._shared)
            self._bus.subscribe(topic, feed)
        return feed

    def _on_stirred(self, feed: Feed) -> None:
        self._stirred.append(feed)
        if not self._waking:
            self._waking = True
            self._loop.call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(WAKES_PER_TURN):
            while not self._to_wake:
                if not self._stirred:
                    self._waking = False
                    return
                feed = self._stirred.popleft()
                feed.calm()
                self._to_wake.extend(feed.listeners)
            receiver = self._to_wake.popleft().receiver
            if receiver is not None:
                cast(Receiver, receiver).wake()
        # Others first: ten thousand sessions on one topic take a while.
        self._loop.call_soon(self._wake_some)

    def _on_deleted(self, feed: Feed) -> None:
        self._feeds.pop(feed.topic, None)
        notice = b"[" + encode_notice("topic.deleted", {"topic": feed.topic}) + b"]"
        content = direct(notice, order=self.next_order())
        for session in list(feed.followers):
            # What it was owed can still be told as lost.
            session.cut()
            self.unfollow(session, feed)
            session.add(content)
            session.is_changed = True
            self._on_changed(session)
            if session.receiver is not None:
                cast(Receiver, session.receiver).wake()
