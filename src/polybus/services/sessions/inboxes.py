"""All sessions of a bus: opening, expiry, attached connections, and the packs to send."""

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence

from polybus import names
from polybus.bus.bus import unknown_topic
from polybus.errors import StorageError, UsageError
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.accounts import Accounts
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

    def __init__(self, context: Context, state: StateDb, accounts: Accounts) -> None:
        self._feeds = Feeds(context.bus, context.loop, context.config, self._on_deleted)
        saver = Saver(state, context.loop, self._feeds.wake_one)
        super().__init__(context.events, saver, state)
        self._accounts = accounts
        self._settings = context.config.msgstream
        self._loop = context.loop
        self._memory = context.memory
        self._sessions: dict[bytes, Session] = {}
        # By account.
        self._counts: Counter[str] = Counter()
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
        found = await self._saver.restore(self._settings, self._feeds, self._accounts.of)
        for session in found:
            session.contact(self._loop.time())
            self._sessions[session.digest] = session
            self._counts[session.account] += 1
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

    async def saved(self) -> None:
        """Wait until the end of every session that has ended is on disk. Raises StorageError."""
        await self._saver.save(())

    # Sessions

    async def create(
        self,
        topics: Sequence[str],
        ttl_s: float | None,
        start: str,
        access: AccountAccess | None = None,
    ) -> str:
        """Open a session of the access's account and return its key.

        It is on disk when this returns. Without an access it is the default account's.

        Raises:
            UsageError: `topic.unknown`, `request.too-many-topics`, `session.too-many`,
                `account.sessions`, `auth.ended`.
            PeerError: `position.invalid`.
            StorageError: it could not be saved and does not exist.
        """
        limit = self._settings.sessions_max
        if len(self._sessions) >= limit:
            raise UsageError("session.too-many", f"there are {limit} sessions (sessions-max)")
        where = parse_start(start)
        access = access or self._accounts.default
        self._check_room(access.account)
        places = await self._places(self._resolved(topics, access), where, access)
        if self._accounts.of(access.account) is None:
            # It was deleted while the request came in, and its sessions have ended.
            raise UsageError("auth.ended", "your account is no longer valid")
        key = _new_key()
        digest = _digest(key)
        self._last_number += 1
        ttl_s = self._settings.session_ttl_s if ttl_s is None else ttl_s
        session = Session(self._last_number, digest, ttl_s, self._settings, access.account)
        session.contact(self._loop.time())
        for feed, offset in places:
            session.follow(self._feeds.join(feed, offset))
            if isinstance(where, Position):
                session.note_start(feed, where, offset)
        self._sessions[digest] = session
        self._counts[access.account] += 1
        try:
            await self._saver.save([session])
        except BaseException:
            self.end(session)
            raise
        self._events.opened(session)
        return key

    def _check_room(self, account: str) -> None:
        limits = self._accounts.configs.limits.get(account)
        if limits is not None and self._counts[account] >= (limits.sessions_max or 0):
            text = f"your account has {limits.sessions_max} sessions (account-sessions-max)"
            raise UsageError("account.sessions", text)

    def find(self, key: str) -> Session | None:
        """The session of a key; this counts as contact. None if it does not exist or expired."""
        session = self._sessions.get(_digest(key))
        if session is not None and session.is_expired(self._loop.time()):
            self.end(session, "expired")
            return None
        if session is not None:
            session.contact(self._loop.time())
        return session

    async def replace_topics(
        self, session: Session, topics: Sequence[str], access: AccountAccess | None = None
    ) -> None:
        """Follow these topics and no others; topics it followed before keep their position.

        `access` is what the caller may do; without it, what the session's account may do.
        Raises as `create`, with nothing changed.
        """
        wanted = self._resolved(topics, access or self._access(session))
        others = [topic for topic in wanted if topic not in session.follows]
        places = await self._places(others, Latest(), self._access(session))
        session.cut()
        for topic in [one for one in session.follows if one not in wanted]:
            self._unfollow(session, topic)
        for feed, offset in places:
            session.follow(self._feeds.join(feed, offset, session.receiver))
        await self._saver.save([session])

    def _access(self, session: Session) -> AccountAccess:
        # The sessions of an account end with it.
        return self._accounts.of(session.account) or self._accounts.nobody

    def _resolved(self, topics: Sequence[str], access: AccountAccess) -> list[str]:
        """The topics' full names, each once; all may be read.

        Raises UsageError `request.too-many-topics`, `topic.unknown`.
        """
        if len(topics) > self._topics_max:
            text = f"more than {self._topics_max} topics in one request (topics-per-request-max)"
            raise UsageError("request.too-many-topics", text)
        found: dict[str, None] = {}
        for topic in topics:
            shown = names.canonical(topic)
            full = access.full(shown)
            if not access.may_read(full):
                raise unknown_topic(shown)
            found[full] = None
        return list(found)

    async def _places(
        self, topics: Sequence[str], where: Start, access: AccountAccess
    ) -> list[tuple[Feed, int]]:
        """The feed of each topic, and the first offset in it. Raises UsageError `topic.unknown`."""
        offsets = {}
        if not isinstance(where, Latest):
            for topic in topics:
                _, offsets[topic] = await asyncio.to_thread(resolve, self._log, topic, where)
        for topic in topics:
            # It may have been taken away meanwhile, or the account never had it.
            if not access.may_read(topic):
                raise unknown_topic(access.shown(topic))
        feeds = [self._feeds.feed(topic, access.shown(topic)) for topic in topics]
        return [(feed, offsets.get(feed.topic, feed.stop_offset)) for feed in feeds]

    def _unfollow(self, session: Session, topic: str) -> None:
        self._feeds.leave(session.follows[topic])
        session.unfollow(topic)

    def _on_deleted(self, feed: Feed) -> None:
        content = self._feeds.deletion_notice(feed.shown)
        for session in list(self._sessions.values()):
            follow = session.follows.get(feed.topic)
            if follow is not None and follow.feed is feed:
                self._take_away(session, feed.topic, content)

    def _take_away(self, session: Session, topic: str, notice: Content) -> None:
        """The topic is gone, for everybody or for this session."""
        # Number its last packs first, so that losses can still be reported.
        session.cut()
        self._unfollow(session, topic)
        session.add(notice)
        self._saver.touch(session)
        if session.receiver is not None:
            session.receiver.wake()

    # Accounts

    def accounts_changed(self) -> None:
        """Let sessions leave topics of other accounts that they may not read any more."""
        shared = {feed.topic for feed in self._feeds if self._is_shared(feed)}
        # Sessions that were restored while a topic was damaged have feeds of their own.
        shared |= self._log.frozen.keys()
        if not shared:
            return
        for session in list(self._sessions.values()):
            access = self._access(session)
            for topic in shared & session.follows.keys():
                if not access.may_read(topic):
                    notice = self._feeds.deletion_notice(access.shown(topic))
                    self._take_away(session, topic, notice)

    def _is_shared(self, feed: Feed) -> bool:
        owner = self._accounts.default.owner_of(feed.topic)
        return feed.shown != names.within(owner, feed.topic)

    def end_all(self, account: str) -> None:
        """The account is being deleted: end its sessions."""
        for session in [one for one in self._sessions.values() if one.account == account]:
            self.end(session, "deleted")

    def end(self, session: Session, reason: str = "deleted") -> asyncio.Future[None] | None:
        """End the session; the future is done when it is gone from disk."""
        if self._sessions.pop(session.digest, None) is None:
            return None
        self._counts[session.account] -= 1
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

    async def broadcast(self, json: bytes, account: str | None = None) -> int:
        """Put one direct pack into every session, or those of an account; return their number."""
        found = self._sessions.values()
        sessions = [one for one in found if account is None or one.account == account]
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
                    json = await self._json_of(session, content)
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
            notice = session.take_notice(after, self._access(session).shown)
            packs = sorted({**dict(notice), **dict(packs)}.items())
        self._saver.touch(session)
        return packs

    async def _json_of(self, session: Session, content: Content) -> bytes | None:
        shown = self._access(session).shown(content.topic)
        return await json_of(self._log, self._feeds.cache, content, shown)

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
                    await self._json_of(session, content)
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
