"""All sessions of a bus: opening, expiry, attached connections, and the packs to send."""

import asyncio
import hashlib
import secrets
from collections.abc import Iterable, Sequence

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.services.context import Context
from polybus.services.replay import resolve
from polybus.services.sessions.contents import Content, Receiver, direct
from polybus.services.sessions.delivery import ANSWER_BYTES_MAX, PackDelivery, Packs
from polybus.services.sessions.feeds import Feed, Feeds
from polybus.services.sessions.reading import catch_up, json_of
from polybus.services.sessions.saving import Saver
from polybus.services.sessions.session import Session
from polybus.services.state import StateDb
from polybus.wire.msgstream import EMPTY_PACK
from polybus.wire.positions import Latest, Position, Start, parse_start

KEY_BYTES = 24
SWEEP_S = 1.0
TRIM_SWEEPS = 10


class Inboxes(PackDelivery):
    """Sessions by the digest of their key: the key itself is not kept."""

    def __init__(self, context: Context, state: StateDb) -> None:
        self._feeds = Feeds(context.bus, context.loop, context.config, self._on_deleted)
        saver = Saver(state, context.loop, self._feeds.wake_one)
        super().__init__(context.events, saver, state)
        self._settings = context.config.msgstream
        self._loop = context.loop
        self._memory = context.memory
        self._sessions: dict[bytes, Session] = {}
        self._topics_max = context.config.limits.topics_per_request_max
        self._log = context.log
        self._last_number = 0
        self._sweeps = 0
        self._sweep: asyncio.TimerHandle | None = None
        self.messages_lost = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self) -> Iterable[Session]:
        return self._sessions.values()

    # Life

    async def start(self) -> None:
        """Restore the sessions. Raises StorageError."""
        for session in await self._saver.restore(self._settings, self._feeds):
            session.contact(self._loop.time())
            self._sessions[session.digest] = session
            self._last_number = max(self._last_number, session.number)
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)

    def stop(self) -> None:
        """Release every waiting client."""
        if self._sweep is not None:
            self._sweep.cancel()
        for session in list(self._sessions.values()):
            if session.receiver is not None:
                session.receiver.shut_down()

    async def close(self) -> None:
        """Save everything; call this when no client is connected."""
        await self._saver.close(self._sessions.values())

    # Sessions

    async def create(self, topics: Sequence[str], ttl_s: float | None, start: str) -> str:
        """Open a session and return its key; it is on disk when this returns.

        Raises:
            UsageError: `topic.unknown`, `request.too-many-topics`, `session.too-many`.
            PeerError: `position.invalid`.
            StorageError: it could not be saved and does not exist.
        """
        limit = self._settings.sessions_max
        if len(self._sessions) >= limit:
            raise UsageError("session.too-many", f"there are {limit} sessions (sessions-max)")
        where = parse_start(start)
        places = await self._places(self._canonical(topics), where)
        key = _new_key()
        digest = _digest(key)
        self._last_number += 1
        ttl_s = self._settings.session_ttl_s if ttl_s is None else ttl_s
        session = Session(self._last_number, digest, ttl_s, self._settings)
        session.contact(self._loop.time())
        for feed, offset in places:
            session.follow(self._feeds.join(feed, offset))
            if isinstance(where, Position):
                session.note_start(feed, where, offset)
        self._sessions[digest] = session
        try:
            await self._saver.save([session])
        except BaseException:
            self.end(session)
            raise
        self._events.opened(session)
        return key

    def find(self, key: str) -> Session | None:
        """The session of a key; this counts as contact. None if it does not exist or expired."""
        session = self._sessions.get(_digest(key))
        if session is not None and session.is_expired(self._loop.time()):
            self.end(session, "expired")
            return None
        if session is not None:
            session.contact(self._loop.time())
        return session

    async def replace_topics(self, session: Session, topics: Sequence[str]) -> None:
        """Follow these topics and no others; topics it followed before keep their position.

        Raises as `create`, with nothing changed.
        """
        wanted = self._canonical(topics)
        others = [topic for topic in wanted if topic not in session.follows]
        places = await self._places(others, Latest())
        session.cut()
        for topic in [one for one in session.follows if one not in wanted]:
            self._unfollow(session, topic)
        for feed, offset in places:
            session.follow(self._feeds.join(feed, offset, session.receiver))
        await self._saver.save([session])

    def _canonical(self, topics: Sequence[str]) -> list[str]:
        """The topics' canonical names, each once. Raises UsageError `request.too-many-topics`."""
        if len(topics) > self._topics_max:
            text = f"more than {self._topics_max} topics in one request (topics-per-request-max)"
            raise UsageError("request.too-many-topics", text)
        return list(dict.fromkeys(names.canonical(topic) for topic in topics))

    async def _places(self, topics: Sequence[str], where: Start) -> list[tuple[Feed, int]]:
        """The feed of each topic, and the first offset in it. Raises UsageError `topic.unknown`."""
        offsets = {}
        if not isinstance(where, Latest):
            for topic in topics:
                _, offsets[topic] = await asyncio.to_thread(resolve, self._log, topic, where)
        feeds = [self._feeds.feed(topic) for topic in topics]
        return [(feed, offsets.get(feed.topic, feed.stop_offset)) for feed in feeds]

    def _unfollow(self, session: Session, topic: str) -> None:
        self._feeds.leave(session.follows[topic])
        session.unfollow(topic)

    def _on_deleted(self, topic: str) -> None:
        content = self._feeds.deletion_notice(topic)
        for session in [one for one in self._sessions.values() if topic in one.follows]:
            # Number its last packs first, so that losses can still be reported.
            session.cut()
            self._unfollow(session, topic)
            session.add(content)
            self._saver.touch(session)
            if session.receiver is not None:
                session.receiver.wake()

    def end(self, session: Session, reason: str = "deleted") -> asyncio.Future[None] | None:
        """End the session; the future is done when it is gone from disk."""
        if self._sessions.pop(session.digest, None) is None:
            return None
        self._events.ended(session, reason)
        for follow in session.follows.values():
            self._feeds.leave(follow)
        session.close()
        gone = self._saver.end(session)
        receiver = session.detach()
        if receiver is not None:
            receiver.ended()
        return gone

    async def delete(self, session: Session) -> None:
        """End the session; it is gone from disk when this returns. Raises StorageError."""
        gone = self.end(session)
        if gone is not None:
            await asyncio.shield(gone)

    async def post(self, sessions: Sequence[Session], json: bytes) -> None:
        """Put one direct pack into sessions; it is on disk when this returns.

        Raises:
            StorageError: it is not, and may or may not be delivered.
        """
        content = direct(json, order=self._feeds.next_order())
        for session in sessions:
            session.add(content)
        await self._saver.save(sessions)
        for session in sessions:
            if session.receiver is not None:
                session.receiver.wake()

    async def broadcast(self, json: bytes) -> int:
        """Put one direct pack into every session; return the number of sessions."""
        sessions = list(self._sessions.values())
        if sessions:
            await self.post(sessions, json)
        return len(sessions)

    # Connections

    def attach(self, session: Session, receiver: Receiver) -> None:
        """Make this the session's connection, in place of an earlier one."""
        before = session.attach(receiver)
        if before is not None:
            before.replaced()

    def detach(self, session: Session, receiver: Receiver) -> None:
        if session.receiver is receiver:
            session.detach()
            session.contact(self._loop.time())

    async def collect(self, session: Session, after: int) -> Packs:
        """The packs above a number, after a notice if there is one; empty if there is nothing.

        Raises:
            StorageError: the session could not be saved, so its packs may not be shown.
        """
        session.cut()
        self._saver.touch(session)
        shown = session.unconfirmed(after, ANSWER_BYTES_MAX)
        is_cached = all(content.json is not None for _, content in shown)
        if is_cached and session.wants_catch_up() is None:
            return await self._collect(session, after)
        # As a replay: many sessions that nobody reads would fill our memory.
        async with self._memory.replay_turn():
            return await self._collect(session, after)

    async def _collect(self, session: Session, after: int) -> Packs:
        await catch_up(self._log, self._feeds.cache, session)
        shown = await self._readable(session, after)
        self.show(session, shown)
        packs: Packs = []
        taken_back: set[Content] = set()
        is_emptied = False
        for number, content in shown:
            json = None
            try:
                if content not in taken_back:
                    json = await json_of(self._log, self._feeds.cache, content)
            except StorageError:
                taken_back |= session.hold(content.topic, number)
            if json is None and content not in taken_back:
                session.discard(number)
            is_emptied |= json is None
            packs.append((number, EMPTY_PACK if json is None else json))
        if is_emptied:
            # A crash would give the numbers their messages back, and a client may confirm them.
            await self._saver.save([session])
        if session.needs_notice(after):
            for lost in session.lost.values():
                self.messages_lost += lost.messages
                self._events.lost(session, lost.topic, lost.messages)
            packs = sorted({**dict(session.take_notice(after)), **dict(packs)}.items())
        self._saver.touch(session)
        return packs

    async def _readable(self, session: Session, after: int) -> list[tuple[int, Content]]:
        """The packs to show; those of a damaged topic that no client has seen are held back.

        Raises StorageError, the session could not be saved.
        """
        tried: set[Content] = set()
        while True:
            if session.needs_mark():
                await self._saver.save([session])
            shown = session.unconfirmed(after, ANSWER_BYTES_MAX)
            unseen = {content for number, content in shown if number > session.shown_to}
            unread = {content for content in unseen - tried if content.json is None}
            if not unread:
                return shown
            tried |= unread
            for content in unread:
                try:
                    await json_of(self._log, self._feeds.cache, content)
                except StorageError:
                    session.hold(content.topic)

    # Timers

    def _on_sweep(self) -> None:
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)
        now_s = self._loop.time()
        for session in [one for one in self._sessions.values() if one.is_expired(now_s)]:
            self.end(session, "expired")
        self._sweeps += 1
        if self._sweeps % TRIM_SWEEPS == 0:
            self._feeds.trim()


def _new_key() -> str:
    """A random key that does not begin with a dash, so that it is not parsed as an option."""
    while (key := secrets.token_urlsafe(KEY_BYTES)).startswith("-"):
        pass
    return key


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
