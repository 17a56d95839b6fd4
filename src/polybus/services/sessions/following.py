"""Which session follows which topic: one feed per topic that any session follows."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.services.context import Context
from polybus.services.replay import resolve
from polybus.services.sessions.feeds import Content, Feed, FeedsShared, Follow, Follower, direct
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import encode_notice
from polybus.wire.positions import parse_start

WAKES_PER_TURN = 500


class Following(FeedsShared):
    """The feeds of a bus. `trim` removes feeds that no session follows."""

    def __init__(self, context: Context, on_changed: Callable[[Session], None]) -> None:
        super().__init__(contents_max=context.config.msgstream.session_packs_max)
        self._bus = context.bus
        self._loop = context.loop
        self._topics_max = context.config.limits.topics_per_request_max
        self._is_volatile = context.config.durability == "memory"
        self._on_changed = on_changed
        self._feeds: dict[str, Feed] = {}
        self._delivered: deque[Feed] = deque()
        self._to_wake: deque[Follower] = deque()
        self._waking = False

    def canonical(self, topics: Sequence[str]) -> list[str]:
        """The topics' canonical names, each once. Raises UsageError `request.too-many-topics`."""
        if len(topics) > self._topics_max:
            text = f"more than {self._topics_max} topics in one request (topics-per-request-max)"
            raise UsageError("request.too-many-topics", text)
        return list(dict.fromkeys(names.canonical(topic) for topic in topics))

    async def places(self, topics: Sequence[str], start: str) -> list[Follow]:
        """A session's first position in each topic.

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

    def restore(self, session: Session, topic: str, epoch: int, offset: int) -> int | None:
        """Follow a topic from a saved position; the offset, or None if the topic was deleted."""
        if not self._bus.has_topic(topic):
            return None
        try:
            bounds = self._bus.log.bounds(topic)
        except StorageError:
            # Damaged: the session keeps its place in it, and goes on with its other topics.
            feed = Feed(topic, epoch, offset, self)
            feed.followers.add(session)
            self._bus.subscribe(topic, feed)
            session.follow(Follow(feed, offset))
            return offset
        # A log in memory begins every topic anew, with a larger epoch than the one on disk. A topic
        # that was recreated on disk has a larger epoch than the saved one.
        if epoch < bounds.epoch and not self._is_volatile:
            return None
        at = min(offset, bounds.stop) if epoch == bounds.epoch else bounds.start
        self.follow(session, Follow(self._feed(topic), at))
        return at

    def stored(self, content: Content) -> int:
        """How many of the content's messages a crash has left in the log."""
        try:
            bounds = self._bus.log.bounds(content.topic)
        except (UsageError, StorageError):
            # Deleted or damaged: reading it will tell.
            return content.count
        if bounds.epoch != content.epoch:
            return content.count
        return max(0, min(content.count, bounds.stop - content.first_offset))

    def follow(self, session: Session, follow: Follow) -> None:
        feed = follow.feed
        if self._feeds.get(feed.topic) is not feed and self._bus.has_topic(feed.topic):
            # `trim` removed the feed while its first position was looked up.
            feed = self._feed(feed.topic)
            follow = Follow(feed, follow.offset)
        session.follow(follow)
        feed.followers.add(session)
        if session.receiver is not None:
            feed.listeners[session] = None

    def unfollow(self, session: Session, feed: Feed) -> None:
        session.unfollow(feed.topic)
        feed.followers.discard(session)
        feed.listeners.pop(session, None)
        if not feed.followers and self._feeds.get(feed.topic) is not feed:
            # The feed of a damaged topic: `trim` does not know it.
            self._bus.unsubscribe(feed.topic, feed)

    def listen(self, session: Session) -> None:
        """Wake the session's receiver at each delivery to one of its topics."""
        for follow in session.follows.values():
            follow.feed.listeners[session] = None

    def stop_listening(self, session: Session) -> None:
        for follow in session.follows.values():
            follow.feed.listeners.pop(session, None)

    def trim(self) -> None:
        """Forget entries that every follower has passed, and feeds without followers."""
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
            feed = self._feeds[topic] = Feed(topic, bounds.epoch, bounds.stop, self)
            self._bus.subscribe(topic, feed)
        return feed

    def on_delivered(self, feed: Feed) -> None:
        self._delivered.append(feed)
        if not self._waking:
            self._waking = True
            self._loop.call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(WAKES_PER_TURN):
            while not self._to_wake:
                if not self._delivered:
                    self._waking = False
                    return
                feed = self._delivered.popleft()
                feed.reset_signal()
                self._to_wake.extend(feed.listeners)
            receiver = self._to_wake.popleft().receiver
            if receiver is not None:
                receiver.wake()
        # Let others run: ten thousand sessions on one topic take a while.
        self._loop.call_soon(self._wake_some)

    def deletion_notice(self, topic: str) -> Content:
        """The pack that tells a session that its topic was deleted."""
        notice = b"[" + encode_notice("topic.deleted", {"topic": topic}) + b"]"
        return direct(notice, order=self.next_order())

    def on_deleted(self, feed: Feed) -> None:
        self._feeds.pop(feed.topic, None)
        content = self.deletion_notice(feed.topic)
        for session in [one for one in feed.followers if isinstance(one, Session)]:
            # Number its last packs first, so that losses can still be reported.
            session.cut()
            self.unfollow(session, feed)
            session.add(content)
            self._on_changed(session)
            if session.receiver is not None:
                session.receiver.wake()
