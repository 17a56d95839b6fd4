"""Saves sessions and restores them: what a restart keeps of a session is decided here.

A change is saved within a second if a crash may undo it, at once if a client was promised it.

Order of writes: everything of one save is one transaction of state.db, and a pack's number is
shown only after a save has raised the session's mark above it (write-ahead). A restart restores the
last save: topics with their offsets, packs by their place in the log, direct packs with their
content, and losses that no notice has reported. Messages of the log that came later are numbered
anew from the saved offsets. A direct pack whose content is missing is left out; its number stays
in use.

State.db may be ahead of the log, which loses unsynced messages in a crash, and behind it when a
topic was deleted. So a restart corrects the sessions by the log: a pack of lost messages is empty,
a position beyond the log's end moves back to it, and a deleted topic leaves its notice. Corrections
are saved before anything can be published.
"""

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from polybus.config import Msgstream
from polybus.errors import StorageError
from polybus.services.sessions.feeds import EMPTY, Content, direct
from polybus.services.sessions.following import Following
from polybus.services.sessions.session import LostMessages, Session, UnsavedPacks
from polybus.services.state import PackRow, SavedSessions, SessionChanges, SessionRow, StateDb

logger = logging.getLogger("polybus.sessions")

SAVE_INTERVAL_S = 0.1
# With many busy sessions a save takes longer and comes less often: it may take this share of the
# time, up to an interval that bounds what a crash repeats.
SAVE_SHARE = 0.1
SAVE_INTERVAL_S_MAX = 1.0
_json = msgspec.json.encode


class Saver:
    """Writes what changed, a few times a second and on demand; one save at a time."""

    def __init__(self, state: StateDb, loop: asyncio.AbstractEventLoop) -> None:
        self._state = state
        self._loop = loop
        # Sessions that changed; those to save next; and those among them that want to show packs.
        self._touched: set[Session] = set()
        self._pending: set[Session] = set()
        self._to_show: set[Session] = set()
        self._ended: list[int] = []
        self._direct: dict[int, Content] = {}
        self._last_direct = 0
        self._next_save: asyncio.Future[None] | None = None
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = SAVE_INTERVAL_S
        self._is_closing = False

    async def restore(
        self, saved: SavedSessions, limits: Msgstream, following: Following
    ) -> list[Session]:
        """The sessions as they were last saved, corrected by the log, following their topics.

        Raises:
            StorageError: a correction could not be saved.
        """
        self._direct = {
            number: direct(json, stored_as=number) for number, json in saved.direct.items()
        }
        self._last_direct = max(self._direct, default=0)
        sessions = []
        corrected = []
        for row in saved.sessions:
            session = Session(row.number, row.digest, row.ttl_s, limits)
            if self._restore(session, row, following):
                corrected.append(session)
            sessions.append(session)
        if corrected:
            # Before the log grows: another crash would take the old rows for newer messages.
            await self.save(corrected)
        return sessions

    def _restore(self, session: Session, row: SessionRow, following: Following) -> bool:
        """Fill the session; return whether the log has less than the row says."""
        deleted = []
        is_corrected = False
        for topic, epoch, offset in msgspec.json.decode(row.follows):
            at = following.restore(session, topic, epoch, offset)
            if at is None:
                deleted.append(topic)
            is_corrected |= at != offset
        session.restore_lost(LostMessages(*one) for one in msgspec.json.decode(row.lost))
        packs = {pack[1]: self._content(pack, following) for pack in row.packs}
        is_corrected |= any(
            content.count < pack[5] for pack, content in zip(row.packs, packs.values(), strict=True)
        )
        session.restore(packs, next_id=row.next_id, mark=row.mark)
        for topic in deleted:
            session.add(following.deletion_notice(topic))
        if is_corrected:
            session.save_failed()
        return is_corrected

    def _content(self, pack: PackRow, following: Following) -> Content:
        session, number, topic, epoch, first_offset, count, value_bytes, stored_as = pack
        if topic:
            content = Content(topic, epoch, first_offset, count)
            content.value_bytes = value_bytes
            content.count = following.stored(content)
            return content if content.count else EMPTY
        if stored_as and stored_as not in self._direct:
            # Its number stays in use: a client may wait for it.
            logger.warning("pack %d of session %d is lost", number, session)
        return self._direct.get(stored_as, EMPTY)

    def touch(self, session: Session) -> None:
        """The session changed: save it soon."""
        self._touched.add(session)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._on_timer)

    def end(self, session: Session) -> asyncio.Future[None]:
        """Delete the session; it is gone from disk when the future is done."""
        self._touched.discard(session)
        self._pending.discard(session)
        self._to_show.discard(session)
        self._ended.append(session.number)
        return self._start()

    async def save(self, sessions: Iterable[Session], *, to_show: bool = False) -> None:
        """Wait until the sessions are on disk as they are now; `to_show`: with room to show packs.

        Raises:
            StorageError: they are not.
        """
        self._pending.update(one for one in sessions if not one.is_ended)
        if to_show:
            self._to_show.update(sessions)
        await asyncio.shield(self._start())

    async def close(self, sessions: Iterable[Session]) -> None:
        """Save all sessions exactly as they are."""
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            await self._work
        self._is_closing = True
        self._pending.update(one for one in sessions if one.is_changed or one.has_reserved)
        if self._pending or self._ended:
            try:
                await asyncio.shield(self._start())
            except StorageError:
                logger.exception("sessions could not be saved")

    def _start(self) -> asyncio.Future[None]:
        """A future that is done when everything pending has been saved."""
        if self._next_save is None:
            self._next_save = self._loop.create_future()
        waiting = self._next_save
        if self._work is None:
            self._work = self._loop.create_task(self._run())
        return waiting

    async def _run(self) -> None:
        while self._next_save is not None:
            began_s = self._loop.time()
            waiting, self._next_save = self._next_save, None
            pending = self._take_pending()
            changes, marks = self._changes(pending)
            try:
                await self._state.save(changes)
            except StorageError as error:
                self._put_back(pending, changes)
                if not waiting.done():
                    waiting.set_exception(error)
                # Somebody may wait, or nobody: then the next round reports the failure again.
                waiting.exception()
                continue
            elapsed_s = self._loop.time() - began_s
            self._interval_s = min(
                max(SAVE_INTERVAL_S, elapsed_s / SAVE_SHARE), SAVE_INTERVAL_S_MAX
            )
            for session, mark in marks:
                session.saved(mark)
            if not waiting.done():
                waiting.set_result(None)
        self._work = None

    def _take_pending(self) -> set[Session]:
        pending, self._pending = self._pending, set()
        if any(not content.holders for content in self._direct.values()):
            # The rows that refer to a direct pack go in the same transaction as the pack itself.
            pending |= {session for session in self._touched if session.is_changed}
        return pending

    def _put_back(self, pending: set[Session], changes: SessionChanges) -> None:
        self._ended += changes.ended
        for session in pending:
            session.save_failed()
            self.touch(session)
        for number, _ in changes.direct:
            self._direct.pop(number).stored_as = 0

    def _on_timer(self) -> None:
        self._timer = None
        touched, self._touched = self._touched, set()
        self._pending |= {session for session in touched if session.is_changed}
        if self._pending:
            self._start()

    def _changes(self, sessions: set[Session]) -> tuple[SessionChanges, list[tuple[Session, int]]]:
        changes = SessionChanges(ended=self._ended)
        self._ended = []
        marks = []
        for session in sessions:
            to_show = session in self._to_show
            self._to_show.discard(session)
            unsaved = session.take_unsaved(to_show=to_show, is_last=self._is_closing)
            marks.append((session, unsaved.mark))
            changes.sessions.append(self._row(session, unsaved, changes))
        gone = [number for number, content in self._direct.items() if not content.holders]
        for number in gone:
            del self._direct[number]
        changes.direct_gone = gone
        return changes, marks

    def _row(self, session: Session, unsaved: UnsavedPacks, changes: SessionChanges) -> SessionRow:
        follows = [
            (follow.feed.topic, follow.feed.epoch, follow.offset)
            for follow in session.follows.values()
        ]
        row = SessionRow(
            number=session.number,
            digest=session.digest,
            ttl_s=session.ttl_s,
            next_id=session.next_id,
            mark=unsaved.mark,
            follows=_json(follows),
            lost=_json([(one.topic, one.epoch, one.offset, one.count) for one in session.lost()]),
            first_id=unsaved.first_id,
            rewrite_from=unsaved.rewrite_from,
            confirmed=unsaved.confirmed,
        )
        for number, content in unsaved.fresh:
            if not content.topic and content.count and not content.stored_as:
                self._last_direct += 1
                content.stored_as = self._last_direct
                self._direct[content.stored_as] = content
                changes.direct.append((content.stored_as, content.json or b""))
            place = (content.topic, content.epoch, content.first_offset, content.count)
            row.packs.append(
                (session.number, number, *place, content.value_bytes, content.stored_as)
            )
        return row
