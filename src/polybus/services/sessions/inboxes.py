"""All sessions of a bus: opening, expiry, attached connections, and the packs to send."""

import asyncio
import hashlib
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from weakref import WeakValueDictionary

import msgspec

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.log.topics import unknown
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.accounts import Accounts
from polybus.services.catch_up import resolve
from polybus.services.context import Context
from polybus.services.events import UndeliveredRange
from polybus.services.sessions.broadcasts import Broadcasts, ClusterBroadcast
from polybus.services.sessions.cluster import ClusterSaver, SavedSession
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
UNDELIVERED = {"expired": "session-expired", "token-ended": "session-token-ended"}
"""Reasons why a session ends without a request; dead letters have them too."""


class Inboxes(PackDelivery):
    """Sessions by the digest of their key: the key itself is not kept."""

    def __init__(self, context: Context, state: StateDb, accounts: Accounts) -> None:
        self._feeds = Feeds(context.bus, context.loop, context.config, self._on_deleted)
        wake = self._feeds.wake_one
        self._settings = settings = context.config.msgstream
        self._moving: ClusterSaver | None = None
        if context.cluster_table is None:
            saver = Saver(state, context.loop, wake)
        else:
            # A save is one message of the cluster.
            bytes_max = min(settings.session_bytes_max, context.config.limits.message_bytes_max)
            self._settings = msgspec.structs.replace(settings, session_bytes_max=bytes_max)
            self._broadcasts = Broadcasts(
                context.cluster_table, self._settings, self._on_broadcast, context.loop.time
            )
            saver = self._moving = ClusterSaver(
                state, context.loop, wake, context.cluster_table, self._broadcasts, self._let_go
            )
        self._claims: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        super().__init__(context.events, saver, state)
        self._accounts = accounts
        self._loop = context.loop
        self._memory = context.memory
        self._sessions: dict[bytes, Session] = {}
        # By account.
        self._counts: Counter[str] = Counter()
        # Sessions whose first save is under way, with their accounts.
        self._opening: dict[bytes, str] = {}
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

    # Lifecycle

    async def start(self) -> None:
        """Restore the sessions. Raises StorageError."""
        found = await self._saver.restore(self._settings, self._feeds, self._accounts.of)
        for session in found:
            self._add(session)
            self._last_number = max(self._last_number, session.number)
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)

    def _add(self, session: Session) -> None:
        session.contact(self._loop.time())
        self._sessions[session.digest] = session
        self._counts[session.account] += 1

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
        where = parse_start(start)
        access = access or self._accounts.default
        self._check_room(access.account)
        places = await self._places(self._resolved(topics, access), where, access)
        # Other requests may have created sessions meanwhile.
        self._check_room(access.account)
        token = _token_of(access)
        if self._accounts.of(access.account, token) is None:
            # The account or token was deleted during the request, and its sessions have ended.
            raise UsageError("auth.ended", "your account or token is no longer valid")
        key = _new_key()
        digest = _digest(key)
        self._last_number += 1
        ttl_s = self._settings.session_ttl_s if ttl_s is None else ttl_s
        session = Session(self._last_number, digest, ttl_s, self._settings, access.account, token)
        for feed, offset in places:
            session.follow(self._feeds.join(feed, offset))
            if isinstance(where, Position):
                session.note_start(feed, where, offset)
        self._add(session)
        self._opening[digest] = access.account
        try:
            await self._saver.save([session])
        except BaseException:
            self.end(session)
            raise
        finally:
            del self._opening[digest]
        self._events.opened(session)
        return key

    def _check_room(self, account: str) -> None:
        limit = self._settings.sessions_max
        if self._count() >= limit:
            text = f"the bus is at its limit of {limit} sessions (msgstream.sessions-max)"
            raise UsageError("session.too-many", text)
        limits = self._accounts.configs.limits.get(account)
        if limits is not None and self._count(account) >= (limits.sessions_max or 0):
            text = f"your account is at its limit of {limits.sessions_max} sessions"
            raise UsageError("account.sessions", f"{text} (account-sessions-max)")

    def _count(self, account: str | None = None) -> int:
        """The sessions of the bus, in a cluster of all nodes, or those of an account."""
        if self._moving is None:
            return len(self._sessions) if account is None else self._counts[account]
        return self._moving.count(account) + sum(
            account in (None, one) and not self._moving.knows(digest)
            for digest, one in self._opening.items()
        )

    def find(self, key: str) -> Session | None:
        """The session of a key, or None if it does not exist or has expired. Counts as contact."""
        session = self._sessions.get(_digest(key))
        if session is not None and session.is_expired(self._loop.time()):
            self.end(session, "expired")
            return None
        if session is not None:
            session.contact(self._loop.time())
        return session

    async def find_anywhere(self, key: str) -> Session | None:
        """As `find`, but takes over a session of another node. Raises StorageError."""
        session = self.find(key)
        return await self._claimed(_digest(key)) if session is None else session

    async def _claimed(self, digest: bytes) -> Session | None:
        """A session of this node, or one that it takes over; None if it does not exist."""
        if self._moving is None:
            return None
        async with self._claims.setdefault(digest, asyncio.Lock()):
            session = self._sessions.get(digest)
            if session is not None:
                return session

            def make(saved: SavedSession) -> Session:
                self._last_number += 1
                number, owner = self._last_number, saved.owner
                return Session(number, digest, saved.ttl_s, self._settings, *owner)

            session = await self._moving.claim(digest, make, self._log, self._feeds)
            if session is not None:
                self._add(session)
                # The broadcasts that it had not heard are not saved.
                self._saver.touch(session)
        return session

    def _let_go(self, digest: bytes) -> None:
        """Another node has taken over the session, if this one had it."""
        session = self._sessions.pop(digest, None)
        if session is None:
            return
        self._counts[session.account] -= 1
        for follow in session.follows.values():
            self._feeds.leave(follow)
        session.close()
        self._saver.forget(session)
        receiver = session.detach()
        if receiver is not None:
            receiver.replaced()

    def by_id(self, name: str) -> Session | None:
        """The session of a digest, in hexadecimal. Does not count as contact."""
        try:
            return self._sessions.get(bytes.fromhex(name))
        except ValueError:
            return None

    async def replace_topics(
        self, session: Session, topics: Sequence[str], access: AccountAccess | None = None
    ) -> Session:
        """Follow exactly these topics; topics that it followed before keep their position.

        `access` has the permissions of the caller; by default those of the session. A session
        belongs to the token by which its account did this last, so that its token can be replaced.
        Returns the session, which is a new object if it came back from another node. Raises as
        `create` does, with nothing changed.
        """
        owner = self._access(session)
        if access is not None and access.account == session.account:
            owner = access
        wanted = self._resolved(topics, access or owner)
        others = [topic for topic in wanted if topic not in session.follows]
        places = await self._places(others, Latest(), owner)
        if owner.is_ended:
            raise UsageError("auth.ended", "your account, password or token is no longer valid")
        session.give_to(_token_of(owner))
        session.cut()
        for topic in [one for one in session.follows if one not in wanted]:
            self._unfollow(session, topic)
        for feed, offset in places:
            session.follow(self._feeds.join(feed, offset, session.receiver))
        if session not in await self._saver.save([session]):
            moved = await self._claimed(session.digest)
            if moved is not None:
                return await self.replace_topics(moved, topics, access)
        return session

    def _access(self, session: Session) -> AccountAccess:
        # The sessions of an account end with the account.
        return self._accounts.of(session.account, session.token) or self._accounts.nobody

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
                raise unknown(shown)
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
            # The permission may have been revoked meanwhile, or never existed.
            if not access.may_read(topic):
                raise unknown(access.shown(topic))
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
        """The topic was deleted, or this session may no longer read it."""
        # Number its last packs first, so that losses can still be reported.
        session.cut()
        self._unfollow(session, topic)
        session.add(notice)
        self._saver.touch(session)
        if session.receiver is not None:
            session.receiver.wake()

    # Accounts

    def access_lost(self, account: str) -> None:
        """Make its sessions leave topics of other accounts that it may no longer read."""
        for session in [one for one in self._sessions.values() if one.account == account]:
            access = self._access(session)
            for topic in [one for one in session.follows if not access.may_read(one)]:
                notice = self._feeds.deletion_notice(access.shown(topic))
                self._take_away(session, topic, notice)

    def end_all(self, account: str) -> None:
        """The account is being deleted: end its sessions."""
        for session in [one for one in self._sessions.values() if one.account == account]:
            self.end(session, "deleted")

    def end_of_token(self, token: str) -> None:
        """A token was revoked or has expired: end the sessions that were created with it."""
        for session in [one for one in self._sessions.values() if one.token == token]:
            self.end(session, "token-ended")

    def end(
        self, session: Session, reason: str = "deleted"
    ) -> asyncio.Future[AbstractSet[Session]] | None:
        """End the session; the future is done when it is removed from disk."""
        if self._sessions.pop(session.digest, None) is None:
            return None
        self._counts[session.account] -= 1
        self._events.ended(session, reason)
        if reason in UNDELIVERED:
            for missed in _unconfirmed_ranges(session):
                self._note_undelivered(session, missed, UNDELIVERED[reason])
        for follow in session.follows.values():
            self._feeds.leave(follow)
        session.close()
        gone = self._saver.end(session)
        receiver = session.detach()
        if receiver is not None:
            receiver.ended()
        return gone

    def _note_undelivered(self, session: Session, missed: UndeliveredRange, reason: str) -> None:
        if missed.topic:
            to = session.digest.hex()
            self._events.undelivered(
                session.account, missed, reason=reason, to=to, protocol="msgstream"
            )

    async def delete(self, session: Session) -> None:
        """End the session; it is removed from disk when this returns. Raises StorageError."""
        gone = self.end(session)
        if gone is not None:
            await asyncio.shield(gone)
        moved = await self._claimed(session.digest)
        if moved is not None:
            # Another node had taken it over before it ended here.
            await self.delete(moved)

    async def post(self, sessions: Sequence[Session], json: bytes) -> None:
        """Put one direct pack into sessions; it is on disk when this returns.

        Raises:
            StorageError: it is not, and may or may not be delivered.
        """
        content = direct(json, order=self._feeds.next_order())
        for session in sessions:
            session.add(content)
        saved = await self._saver.save(sessions)
        for session in sessions:
            if session.receiver is not None:
                session.receiver.wake()
            if session not in saved:
                moved = await self._claimed(session.digest)
                if moved is not None:
                    await self.post([moved], json)

    async def broadcast(self, json: bytes, account: str | None = None) -> int:
        """Put one direct pack into every session, or those of an account; return their number.

        In a cluster these are the sessions of all nodes, and each gets it once when this returns,
        or a little later. Raises StorageError, as `post` does.
        """
        if self._moving is not None:
            await self._broadcasts.send(account, json)
            return self._moving.count(account)
        sessions = self._for(account)
        if sessions:
            await self.post(sessions, json)
        return len(sessions)

    def _for(self, account: str | None) -> list[Session]:
        found = self._sessions.values()
        return [one for one in found if account is None or one.account == account]

    def _on_broadcast(self, broadcast: ClusterBroadcast) -> None:
        """A broadcast has arrived, from any node of the cluster."""
        content = direct(broadcast.json, order=self._feeds.next_order())
        for session in self._for(broadcast.account):
            session.add(content)
            self._saver.touch(session)
            if session.receiver is not None:
                session.receiver.wake()

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
        """The packs above a number, after a notice if there is one; empty if there are none.

        Raises:
            StorageError: the session could not be saved, so its packs may not be shown.
        """
        session.cut()
        self._saver.touch(session)
        shown = session.unconfirmed(after, ANSWER_BYTES_MAX)
        is_cached = all(content.json is not None for _, content in shown)
        if is_cached and session.wants_catch_up() is None:
            return await self._collect(session, after)
        # Limited like a catch-up: many sessions that no client reads would fill our memory.
        async with self._memory.catch_up_turn():
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
            # After a crash the numbers would have their messages again, and a client may confirm
            # them.
            await self._saver.save([session])
        if session.needs_notice(after):
            for lost in session.lost.values():
                self.messages_lost += lost.messages
                self._events.lost(session, lost.topic, lost.messages)
                stop = lost.offset + lost.messages
                missed = UndeliveredRange(lost.topic, lost.epoch, lost.offset, stop)
                self._note_undelivered(session, missed, "session-full")
            notice = session.take_notice(after, self._access(session).shown)
            packs = sorted({**dict(notice), **dict(packs)}.items())
        self._saver.touch(session)
        return packs

    async def _json_of(self, session: Session, content: Content) -> bytes | None:
        shown = self._access(session).shown(content.topic)
        return await json_of(self._log, self._feeds.cache, content, shown)

    async def _readable(self, session: Session, after: int) -> list[tuple[int, Content]]:
        """The packs to show; those of a damaged topic that no client has seen are held back.

        Raises StorageError if the session could not be saved.
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
            if self._moving is not None:
                self._moving.sweep(self._sessions.values())


def _token_of(access: AccountAccess) -> str:
    return "" if access.token is None else access.token.id


def _new_key() -> str:
    """A random key that does not begin with a dash, so that it is not parsed as an option."""
    while (key := secrets.token_urlsafe(KEY_BYTES)).startswith("-"):
        pass
    return key


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _unconfirmed_ranges(session: Session) -> Iterator[UndeliveredRange]:
    """By topic, the ranges that the client has not confirmed or not been shown."""
    first: dict[str, tuple[int, int]] = {}
    for _, content in session.unconfirmed(0, sys.maxsize):
        first.setdefault(content.topic, (content.epoch, content.first_offset))
    for topic, follow in session.follows.items():
        epoch, offset = first.get(topic, (follow.feed.epoch, follow.offset))
        if epoch == follow.feed.epoch:
            yield UndeliveredRange(topic, epoch, offset, follow.feed.stop_offset)
