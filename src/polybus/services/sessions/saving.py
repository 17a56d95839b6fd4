"""Saves and restores sessions: this module decides what a restart keeps of a session.

A change is saved within a second if a crash may undo it, and at once if it was promised to a
client.

Order of writes: everything of one save is one transaction of state.db, and a pack's number is
shown only after a save has raised the session's mark above it (write-ahead). A restart restores the
last save: topics with their offsets, packs by their position in the log, direct packs with their
content, and losses that no notice has reported. Messages of the log that came later are numbered
again from the saved offsets. A pack that is missing or has lost its content, because state.db was
damaged, is empty, and a notice counts it.

State.db may be ahead of the log, which loses unsynced messages in a crash, and behind it when a
topic was deleted. So a restart corrects the sessions by the log: a pack of lost messages is empty,
a position beyond the log's end moves back to it, and a topic that was deleted, or that the account
may no longer read, leaves a notice. Corrections are saved before anything can be published.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from polybus.config import Msgstream
from polybus.errors import StorageError
from polybus.services.accounts.access import AccountAccess
from polybus.services.sessions.changes import LostMessages, SessionChanges
from polybus.services.sessions.contents import EMPTY, Content, Receiver, direct
from polybus.services.sessions.feeds import Feeds
from polybus.services.sessions.session import Session
from polybus.services.state import SqlStatement, StateDb
from polybus.services.state_rows import checksum, session_sum, summed

logger = logging.getLogger("polybus.sessions")

SAVE_INTERVAL_S = 0.1
# With many busy sessions a save takes longer and comes less often: it may take this share of the
# time, up to an interval that bounds what a crash repeats.
SAVE_SHARE = 0.1
SAVE_INTERVAL_S_MAX = 1.0
# One statement takes all rows as one JSON text, so that SQLite works without Python's lock. With a
# statement for each row, the thread and the event loop would contend for it.
SAVE_SESSIONS = """
INSERT OR REPLACE INTO sessions
SELECT json_extract(value, '$[0]'), substr(?2, key * 16 + 1, 16), json_extract(value, '$[1]'),
    json_extract(value, '$[2]'), json_extract(value, '$[3]'),
    CAST(json_extract(value, '$[4]') AS BLOB), CAST(json_extract(value, '$[5]') AS BLOB),
    json_extract(value, '$[6]'), json_extract(value, '$[7]'), json_extract(value, '$[8]'),
    json_extract(value, '$[9]'), substr(?3, key * 8 + 1, 8)
FROM json_each(?1)"""
SAVE_PACKS = f"""
INSERT OR REPLACE INTO packs
SELECT {", ".join(f"json_extract(value, '$[{column}]')" for column in range(8))},
    substr(?2, key * 8 + 1, 8) FROM json_each(?1)
"""
# `{}` is the comparison of a pack's id with the second number of each pair (session, id).
DELETE_PACKS = """
DELETE FROM packs WHERE (session, id) IN (
    SELECT packs.session, packs.id FROM json_each(?) AS gone CROSS JOIN packs
    ON packs.session = json_extract(gone.value, '$[0]')
    AND packs.id {} json_extract(gone.value, '$[1]'))"""
DELETE_EVERY = "DELETE FROM {} IN (SELECT value FROM json_each(?))"
DELETE_ORPHANS = "DELETE FROM packs WHERE session NOT IN (SELECT number FROM sessions)"
DELETE_UNUSED = "DELETE FROM direct WHERE number NOT IN (SELECT direct FROM packs WHERE direct)"
READ_PACKS = "SELECT * FROM packs ORDER BY session, id"

AccessOf = Callable[[str, str], AccountAccess | None]
"""Returns the access of a session by account and token; None if the session must end."""
PackRow = tuple[Any, ...]
"""session, id, topic, epoch, first_offset, count, value_bytes, direct, checksum"""


def statements(changes: SessionChanges) -> Iterator[SqlStatement]:
    """The writes in order; state.db executes them one by one, on its own thread."""
    direct = [summed(content.order, content.json) for content in changes.direct]
    yield "INSERT OR REPLACE INTO direct VALUES (?, ?, ?)", direct
    sums = [
        session_sum((row[0], digest, *row[1:]))
        for row, digest in zip(changes.rows, changes.digests, strict=True)
    ]
    yield SAVE_SESSIONS, (_json(changes.rows), b"".join(changes.digests), b"".join(sums))
    yield DELETE_PACKS.format("<"), (_json(changes.first),)
    yield DELETE_PACKS.format(">="), (_json(changes.renumbered),)
    yield DELETE_PACKS.format("="), (_json(changes.confirmed),)
    packs = [
        (*place, one.topic, one.epoch, one.first_offset, one.count, one.value_bytes)
        + (0 if one.topic else one.order,)
        for place, one in changes.fresh
    ]
    yield SAVE_PACKS, (_json(packs), b"".join(map(checksum, packs)))
    yield DELETE_EVERY.format("sessions WHERE number"), (_json(changes.ended),)
    yield DELETE_EVERY.format("packs WHERE session"), (_json(changes.ended),)
    yield DELETE_EVERY.format("direct WHERE number"), (_json(changes.direct_gone),)


def _json(rows: Sequence[Any]) -> str:
    return msgspec.json.encode(rows).decode()


class Saver:
    """Writes what changed, a few times a second and on demand; one save at a time.

    Attributes:
        touched: sessions that changed. While there are any, a timer runs.
    """

    def __init__(
        self,
        state: StateDb,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[Receiver], None],
    ) -> None:
        """`wake` calls a connection that waits for its session to be saved."""
        self.touched: set[Session] = set()
        self._state = state
        self._wake = wake
        self._loop = loop
        # Sessions to save next.
        self._pending: set[Session] = set()
        self._ended: list[int] = []
        # The direct packs on disk.
        self._direct: dict[int, Content] = {}
        # The running or last save, and the next one.
        self._last: asyncio.Task[AbstractSet[Session]] | None = None
        self._next: asyncio.Task[AbstractSet[Session]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = SAVE_INTERVAL_S
        self._is_closing = False

    async def restore(self, limits: Msgstream, feeds: Feeds, access_of: AccessOf) -> list[Session]:
        """The sessions as they were last saved, corrected by the log, following their topics.

        Those of a deleted account end, and so do those of an invalid token.

        Raises:
            StorageError: they could not be read, or a correction could not be saved.
        """
        await self._state.write([(DELETE_ORPHANS, ()), (DELETE_UNUSED, ())])
        for number, json in await self._state.read("SELECT number, json FROM direct"):
            self._direct[number] = direct(json, order=number)
        feeds.begin_after(max(self._direct, default=0))
        packs: dict[int, list[PackRow]] = {}
        for pack in await self._state.read(READ_PACKS):
            packs.setdefault(pack[0], []).append(pack)
        sessions = []
        corrected = []
        for number, digest, ttl_s, *rest in await self._state.read("SELECT * FROM sessions"):
            token, account = rest.pop(-2), sys.intern(rest.pop(-2))
            access = access_of(account, token)
            if access is None:
                self._ended.append(number)
                continue
            session = Session(number, digest, ttl_s, limits, account, token)
            if self._restore(session, access, rest, packs.get(number, []), feeds):
                corrected.append(session)
            sessions.append(session)
        if corrected or self._ended:
            # Before the log grows: after another crash the old rows would refer to newer messages.
            await self.save(corrected)
        return sessions

    def _restore(
        self,
        session: Session,
        access: AccountAccess,
        row: list[Any],
        packs: list[PackRow],
        feeds: Feeds,
    ) -> bool:
        """Fill the session; return whether the log has less than was saved."""
        next_id, mark, follows, lost, first_id, count, _ = row
        deleted = []
        is_corrected = False
        for topic, epoch, offset in msgspec.json.decode(follows):
            follow = None
            if access.may_read(topic):
                follow = feeds.restore(topic, access.shown(topic), epoch, offset)
            if follow is None:
                deleted.append(topic)
            else:
                session.follow(follow)
            is_corrected |= follow is None or follow.offset != offset
        contents = {pack[1]: self._content(pack, feeds) for pack in packs}
        is_corrected |= any(contents[pack[1]].count < pack[5] for pack in packs)
        losses = [LostMessages(*one) for one in msgspec.json.decode(lost)]
        session.restore(contents, losses, next_id=next_id, mark=mark, first_id=first_id)
        missing = count - len(packs) + sum(self._is_lost(pack) for pack in packs)
        if missing > 0:
            logger.error("session %d has lost %d packs (state.damaged)", session.number, missing)
            session.lose(missing, first_id)
            is_corrected = True
        for topic in deleted:
            session.add(feeds.deletion_notice(access.shown(topic)))
        for topic in [one for one, follow in session.follows.items() if follow.feed.is_damaged]:
            session.hold(topic)
        if is_corrected:
            session.save_failed()
        return is_corrected

    def _content(self, pack: PackRow, feeds: Feeds) -> Content:
        topic, epoch, first_offset, count, value_bytes, stored_as, _ = pack[2:]
        if topic:
            count = feeds.stored(topic, epoch, first_offset, count)
            return Content(topic, epoch, first_offset, count, value_bytes) if count else EMPTY
        # The number of a lost pack stays in use: a client may wait for it.
        return self._direct.get(stored_as, EMPTY)

    def _is_lost(self, pack: PackRow) -> bool:
        return pack[7] and pack[7] not in self._direct

    def touch(self, session: Session) -> None:
        """The session may have changed: save it soon."""
        self.touched.add(session)
        if self._timer is None:
            self._save_soon()

    def _save_soon(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._on_timer)

    def end(self, session: Session) -> asyncio.Future[AbstractSet[Session]]:
        """Delete the session; it is removed from disk when the future is done."""
        self.forget(session)
        self._ended.append(session.number)
        return self._start()

    def forget(self, session: Session) -> None:
        """Do not save the session any more."""
        self.touched.discard(session)
        self._pending.discard(session)

    async def save(self, sessions: Iterable[Session]) -> AbstractSet[Session]:
        """Wait until the sessions are on disk as they are now.

        Returns the saved ones, and perhaps others; the rest ended before, or moved to another node.

        Raises:
            StorageError: they are not.
        """
        wanted = [one for one in sessions if not one.is_ended]
        self._pending.update(wanted)
        saved = await asyncio.shield(self._start())
        if any(one not in saved and not one.is_ended for one in wanted):
            raise StorageError("state.failed", "a session could not be saved; see the bus's log")
        return saved

    def raise_mark(self, session: Session) -> bool:
        """Save the session, then wake its connection; False if that was already requested.

        Many sessions that get the same message are saved together, without a task for each.
        """
        if session in self._pending:
            return False
        self._pending.add(session)
        self._start()
        return True

    async def close(self, sessions: Iterable[Session]) -> None:
        """Save all sessions exactly as they are."""
        if self._timer is not None:
            self._timer.cancel()
        running = self._next or self._last
        if running is not None:
            await asyncio.wait([running])
        self._is_closing = True
        self._pending.update(one for one in sessions if one.is_changed or one.has_reserved)
        if self._pending or self._ended:
            try:
                await asyncio.shield(self._start())
            except StorageError:
                logger.exception("sessions could not be saved")

    def _start(self) -> asyncio.Task[AbstractSet[Session]]:
        """Save everything that is pending when the previous save has ended."""
        if self._next is None:
            self._next = self._loop.create_task(self._run(self._last))
            # Without a waiter, the next save reports the failure again.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._next

    async def _run(self, before: asyncio.Task[AbstractSet[Session]] | None) -> AbstractSet[Session]:
        if before is not None:
            await asyncio.wait([before])
        began_s = self._loop.time()
        self._last, self._next = self._next, None
        pending = self._take_pending()
        changes = self._changes()
        changes.ended, self._ended = self._ended, []
        marks = [one.take_unsaved(changes, is_last=self._is_closing) for one in pending]
        self._take_direct(changes)
        try:
            saved = await self._write(pending, changes)
        except StorageError:
            self._put_back(pending, changes)
            raise
        elapsed_s = self._loop.time() - began_s
        self._interval_s = min(max(SAVE_INTERVAL_S, elapsed_s / SAVE_SHARE), SAVE_INTERVAL_S_MAX)
        for session, mark in zip(pending, marks, strict=True):
            if session in saved and session.saved(mark) and session.receiver is not None:
                self._wake(session.receiver)
        return saved

    def _changes(self) -> SessionChanges:
        return SessionChanges()

    async def _write(
        self, pending: Sequence[Session], changes: SessionChanges
    ) -> AbstractSet[Session]:
        """Return the written sessions. Raises StorageError if nothing was written."""
        await self._state.write(statements(changes))
        return set(pending)

    def _take_pending(self) -> list[Session]:
        pending, self._pending = self._pending, set()
        if any(not content.holders for content in self._direct.values()):
            # The rows that refer to a direct pack go in the same transaction as the pack itself.
            pending |= {session for session in self.touched if session.is_changed}
        return list(pending)

    def _put_back(self, pending: list[Session], changes: SessionChanges) -> None:
        self._ended += changes.ended
        for session in pending:
            session.save_failed()
            self.touched.add(session)
            if session.receiver is not None:
                self._wake(session.receiver)
        for content in changes.direct:
            del self._direct[content.order]
        if self._timer is None and not self._is_closing:
            self._save_soon()

    def _on_timer(self) -> None:
        self._timer = None
        self._pending |= {session for session in self.touched if session.is_changed}
        self.touched.clear()
        if self._pending or self._ended:
            self._start()

    def _take_direct(self, changes: SessionChanges) -> None:
        """Add the direct packs that must be written or deleted."""
        for _, content in changes.fresh:
            if not content.topic and content.count and content.order not in self._direct:
                self._direct[content.order] = content
                changes.direct.append(content)
        changes.direct_gone = [
            number for number, content in self._direct.items() if not content.holders
        ]
        for number in changes.direct_gone:
            del self._direct[number]
