"""All sessions of a bus: their lives, who listens, and what each is owed."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.errors import UsageError
from polybus.scan import Flow
from polybus.services.events import EventBook
from polybus.services.sessions.feeds import EMPTY, Content, direct
from polybus.services.sessions.following import Following, Receiver
from polybus.services.sessions.reading import Reader
from polybus.services.sessions.saving import Saver
from polybus.services.sessions.session import Lost, Session, SessionLimits
from polybus.services.state import SessionRow, State
from polybus.wire.msgstream import EMPTY_PACK

KEY_BYTES = 24
SWEEP_S = 1.0
TRIM_SWEEPS = 10
# About what one answer or frame carries; a single pack may be larger.
ANSWER_BYTES_MAX = 4 << 20

Packs = list[tuple[int, bytes]]


class Inboxes:
    """Sessions by the digest of their key: the key itself is kept nowhere."""

    def __init__(self, bus: Bus, config: Config) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._limits = SessionLimits(
            config.msgstream.session_packs_max, config.msgstream.session_bytes_max
        )
        self._sessions: dict[bytes, Session] = {}
        path = Path(config.data) / "state.db"
        self.state = State(path, fsync=config.durability == "fsync")
        self._saver = Saver(self.state)
        self._following = Following(
            bus,
            topics_max=config.limits.topics_per_request_max,
            contents_max=self._limits.packs_max,
            on_changed=self._saver.touch,
        )
        self._reader = Reader(bus.log, self._following.cache)
        self._last_number = 0
        self._sweeps = 0
        self._sweep: asyncio.TimerHandle | None = None
        self.delivered: dict[str, Flow] = {}
        self.packs_out = 0
        self.messages_lost = 0
        self.events: EventBook | None = None
        self.stopping = False

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self) -> Iterable[Session]:
        return self._sessions.values()

    # Life

    async def start(self) -> None:
        """Take up the sessions of the last time. Raises StorageError."""
        saved = await self.state.open()
        contents = {number: direct(json, stored_as=number) for number, json in saved.direct.items()}
        for row in saved.sessions:
            self._restore(row, contents)
        self._saver.restored(contents.values())
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)

    async def stop(self) -> None:
        """Let every waiting client go, and save."""
        self.stopping = True
        if self._sweep is not None:
            self._sweep.cancel()
        for session in list(self._sessions.values()):
            if session.receiver is not None:
                cast(Receiver, session.receiver).shut_down()

    async def close(self) -> None:
        await self._saver.close()
        await self.state.close()

    def _restore(self, row: SessionRow, contents: dict[int, Content]) -> None:
        session = Session(row.number, row.digest, row.ttl_s, self._limits)
        packs = {}
        for _, number, topic, epoch, first_offset, count, value_bytes, stored_as in row.packs:
            if stored_as:
                packs[number] = contents[stored_as]
            elif not topic:
                packs[number] = EMPTY
            else:
                content = Content(topic, epoch, first_offset, count)
                content.value_bytes = value_bytes
                packs[number] = content
        session.restore(packs, next_id=row.next_id, shown_to=row.mark - 1)
        session.mark = row.mark
        session.restore_lost(Lost(*one) for one in msgspec.json.decode(row.lost))
        for topic, epoch, offset in msgspec.json.decode(row.follows):
            self._following.restore(session, topic, epoch, offset)
        session.contact_s = time.monotonic()
        session.is_changed = False
        self._sessions[row.digest] = session
        self._last_number = max(self._last_number, row.number)

    # Sessions

    async def create(self, topics: Sequence[str], ttl_s: float | None, start: str) -> str:
        """Open a session and return its key; it is on disk when this returns.

        Raises:
            UsageError: `topic.unknown`, `request.too-many-topics`, `session.too-many`.
            PeerError: `position.invalid`.
            StorageError: it could not be saved, and does not exist.
        """
        limit = self._config.msgstream.sessions_max
        if len(self._sessions) >= limit:
            raise UsageError("session.too-many", f"there are {limit} sessions (sessions-max)")
        follows = await self._following.places(topics, start)
        key = _new_key()
        digest = _digest(key)
        self._last_number += 1
        ttl_s = self._config.msgstream.session_ttl_s if ttl_s is None else ttl_s
        session = Session(self._last_number, digest, ttl_s, self._limits)
        session.contact_s = time.monotonic()
        for follow in follows:
            self._following.follow(session, follow)
        self._sessions[digest] = session
        try:
            await self._saver.save([session])
        except BaseException:
            self.end(session)
            raise
        if self.events is not None:
            self.events.opened(session)
        return key

    def find(self, key: str) -> Session | None:
        """The session of a key, which is in touch now; None if there is none, or no more."""
        session = self._sessions.get(_digest(key))
        if session is None:
            return None
        now = time.monotonic()
        if session.receiver is None and now - session.contact_s > session.ttl_s:
            self.end(session, "expired")
            return None
        session.contact_s = now
        return session

    async def replace_topics(self, session: Session, topics: Sequence[str]) -> None:
        """Follow these topics and no others; those it followed before go on where they are.

        Raises as `create`; nothing has changed then.
        """
        wanted = self._following.canonical(topics)
        others = [topic for topic in wanted if topic not in session.follows]
        fresh = await self._following.places(others, "latest")
        session.cut()
        for topic in [one for one in session.follows if one not in wanted]:
            self._following.unfollow(session, session.follows[topic].feed)
        for follow in fresh:
            self._following.follow(session, follow)
        session.is_changed = True
        await self._saver.save([session])

    def end(self, session: Session, reason: str = "deleted") -> None:
        """The session is over: deleted or expired."""
        if self._sessions.pop(session.digest, None) is None:
            return
        if self.events is not None:
            self.events.ended(session, reason, session.pack_count)
        receiver = session.receiver
        for follow in list(session.follows.values()):
            self._following.unfollow(session, follow.feed)
        session.close()
        self._saver.end(session)
        if receiver is not None:
            session.receiver = None
            cast(Receiver, receiver).ended()

    async def post(self, sessions: Sequence[Session], json: bytes) -> None:
        """Put one direct pack into sessions; it is on disk when this returns.

        Raises:
            StorageError: it is not, and may come or not.
        """
        content = direct(json, order=self._following.next_order())
        for session in sessions:
            session.add(content)
        await self._saver.save(sessions)
        for session in sessions:
            if session.receiver is not None:
                cast(Receiver, session.receiver).wake()

    async def broadcast(self, json: bytes) -> int:
        """Put one direct pack into every session; return how many that were."""
        sessions = list(self._sessions.values())
        if sessions:
            await self.post(sessions, json)
        return len(sessions)

    # Connections

    def attach(self, session: Session, receiver: Receiver) -> None:
        """Make this the session's connection; the one before is told."""
        before = session.receiver
        session.receiver = receiver
        if before is not None:
            cast(Receiver, before).replaced()
        self._following.listen(session)

    def detach(self, session: Session, receiver: Receiver) -> None:
        if session.receiver is receiver:
            session.receiver = None
            session.contact_s = time.monotonic()
            self._following.stop_listening(session)

    def confirm(self, session: Session, ids: Sequence[int]) -> None:
        if ids:
            held = session.pack_count
            session.confirm(ids)
            if self.events is not None:
                self.events.confirmed(session, ids, held - session.pack_count)
            if session.is_changed:
                self._saver.touch(session)

    def collect_now(self, session: Session, after: int) -> Packs | None:
        """The packs above a number, if they can be had without waiting, else None."""
        session.cut()
        if session.needs_mark() or session.has_notice or session.wants_catch_up() is not None:
            return None
        shown = session.unconfirmed(after, ANSWER_BYTES_MAX)
        packs = [(number, content.json) for number, content in shown if content.json is not None]
        if len(packs) < len(shown):
            return None
        self._show(session, shown)
        return packs

    async def collect(self, session: Session, after: int) -> Packs:
        """The packs above a number, a notice first if there is one; empty if there is nothing.

        Raises:
            StorageError: numbers could not be set aside on disk.
        """
        session.cut()
        await self._reader.catch_up(session)
        if session.needs_mark():
            await self._saver.save_to_show(session)
        shown = session.unconfirmed(after, ANSWER_BYTES_MAX)
        self._show(session, shown)
        packs: Packs = []
        for number, content in shown:
            json = await self._reader.json_of(content)
            if json is None:
                session.discard(number)
            packs.append((number, EMPTY_PACK if json is None else json))
        if session.has_notice:
            self._tell_lost(session)
            packs = sorted({**dict(session.take_notice(after)), **dict(packs)}.items())
            self._saver.touch(session)
        return packs

    def _tell_lost(self, session: Session) -> None:
        digest = session.digest.hex()
        for lost in session.lost():
            self.messages_lost += lost.count
            if self.events is not None:
                topic = lost.topic or None
                self.events.tell("lost", session=digest, topic=topic, messages=lost.count)

    def _show(self, session: Session, packs: Sequence[tuple[int, Content]]) -> None:
        if packs:
            if self.events is not None:
                self.events.delivered(session, packs, session.shown_to)
            session.show(packs[-1][0])
            self.packs_out += len(packs)
            for _, content in packs:
                flow = self.delivered.get(content.topic)
                if flow is None:
                    flow = self.delivered[content.topic] = Flow()
                flow.messages += content.count
                flow.value_bytes += content.value_bytes
            self._saver.showed(session)

    # What happens by itself

    def _on_sweep(self) -> None:
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)
        now = time.monotonic()
        expired = [
            session
            for session in self._sessions.values()
            if session.receiver is None and now - session.contact_s > session.ttl_s
        ]
        for session in expired:
            self.end(session, "expired")
        self._sweeps += 1
        if self._sweeps % TRIM_SWEEPS == 0:
            self._following.trim()


def _new_key() -> str:
    """A key that no command line takes for an option."""
    while (key := secrets.token_urlsafe(KEY_BYTES)).startswith("-"):
        pass
    return key


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
