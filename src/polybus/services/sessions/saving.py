"""Saves sessions: a little later for what may be repeated, at once for what was promised."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from polybus.errors import StorageError
from polybus.services.sessions.feeds import Content
from polybus.services.sessions.session import Session
from polybus.services.state import Changes, SessionRow, State

logger = logging.getLogger("polybus.sessions")

SAVE_INTERVAL_S = 0.1
# With very many busy sessions a save takes a while, and then comes less often: this share of the
# time goes into saving, within a bound for what a crash makes come again.
SAVE_SHARE = 0.1
SAVE_INTERVAL_S_MAX = 1.0
# A session that shows packs again and again gets so many numbers at once, until it is quiet for a
# while. One that shows packs now and then gets only those: a crash then leaves nothing in doubt.
NUMBERS_AHEAD = 256
QUIET_ROUNDS = 3
_json = msgspec.json.encode


class Saver:
    """Writes what changed, a few times a second, and on demand; one save at a time."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._touched: set[Session] = set()
        # Sessions that showed packs lately, and for how many rounds they still count as busy.
        self._busy: dict[Session, int] = {}
        self._showing: dict[Session, int] = {}
        self._pending: set[Session] = set()
        self._ended: list[int] = []
        self._direct: dict[int, Content] = {}
        self._last_direct = 0
        self._next_save: asyncio.Future[None] | None = None
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = SAVE_INTERVAL_S

    def restored(self, contents: Iterable[Content]) -> None:
        """Direct packs that came back from the disk."""
        self._direct = {content.stored_as: content for content in contents}
        self._last_direct = max(self._direct, default=0)

    def touch(self, session: Session) -> None:
        """The session changed: save it some time soon."""
        self._touched.add(session)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._on_timer)

    def showed(self, session: Session) -> None:
        """The session showed packs under numbers that were set aside: more may follow."""
        if session in self._busy:
            self._busy[session] = QUIET_ROUNDS
        self.touch(session)

    def end(self, session: Session) -> None:
        self._touched.discard(session)
        self._pending.discard(session)
        self._busy.pop(session, None)
        self._ended.append(session.number)
        self._start()

    async def save(self, sessions: Iterable[Session]) -> None:
        """Wait until the sessions are on disk as they are now.

        Raises:
            StorageError: they are not.
        """
        self._pending.update(sessions)
        await asyncio.shield(self._start())

    async def save_to_show(self, session: Session) -> None:
        """Wait until all its packs may be shown.

        Raises:
            StorageError: they may not.
        """
        self._showing[session] = NUMBERS_AHEAD if session in self._busy else 0
        self._busy[session] = QUIET_ROUNDS
        self.touch(session)
        await self.save([session])

    async def close(self) -> None:
        """Save everything exactly as it is."""
        if self._timer is not None:
            self._timer.cancel()
        self._pending |= self._touched | set(self._busy)
        self._touched, self._busy = set(), {}
        if self._pending or self._work is not None:
            try:
                await asyncio.shield(self._start())
            except StorageError:
                logger.exception("sessions could not be saved")

    def _start(self) -> asyncio.Future[None]:
        """A future that is done when all that is pending has been saved."""
        if self._next_save is None:
            self._next_save = asyncio.get_running_loop().create_future()
        waiting = self._next_save
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._run())
        return waiting

    async def _run(self) -> None:
        while self._next_save is not None:
            began_s = time.monotonic()
            waiting, self._next_save = self._next_save, None
            pending, self._pending = self._pending, set()
            changes, marks = self._changes(pending)
            try:
                await self._state.save(changes)
            except StorageError as error:
                self._put_back(pending, changes)
                if not waiting.done():
                    waiting.set_exception(error)
                waiting.exception()
                continue
            taken_s = time.monotonic() - began_s
            self._interval_s = min(max(SAVE_INTERVAL_S, taken_s / SAVE_SHARE), SAVE_INTERVAL_S_MAX)
            for session, mark in marks:
                # A session that renumbered its packs meanwhile needs another save before it shows.
                if not session.rewrite_from:
                    session.mark = max(session.mark, mark)
            if not waiting.done():
                waiting.set_result(None)
        self._work = None

    def _put_back(self, pending: set[Session], changes: Changes) -> None:
        self._ended += changes.ended
        for session in pending:
            session.saved_to = session.rewrite_from = session.first_id
            session.is_changed = True
            self.touch(session)
        for number, _ in changes.direct:
            self._direct[number].stored_as = 0
            del self._direct[number]

    def _on_timer(self) -> None:
        self._timer = None
        touched, self._touched = self._touched, set()
        self._pending |= {session for session in touched if session.is_changed}
        for session, rounds in list(self._busy.items()):
            if rounds:
                self._busy[session] = rounds - 1
            else:
                # Quiet: give back the numbers that were set aside.
                del self._busy[session]
                if session.mark > session.shown_to + 1:
                    self._pending.add(session)
        if self._busy:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._on_timer)
        if self._pending:
            # Nobody waits for it, and a failure comes up again at the next round.
            self._start()

    def _changes(self, sessions: set[Session]) -> tuple[Changes, list[tuple[Session, int]]]:
        changes = Changes(ended=self._ended)
        self._ended = []
        marks = []
        for session in sessions:
            row = self._row(session, changes)
            changes.sessions.append(row)
            if row.mark > session.mark:
                marks.append((session, row.mark))
            else:
                session.mark = row.mark
        gone = [number for number, content in self._direct.items() if not content.holders]
        for number in gone:
            del self._direct[number]
        changes.direct_gone = gone
        return changes, marks

    def _row(self, session: Session, changes: Changes) -> SessionRow:
        fresh, confirmed = session.unsaved()
        mark = session.shown_to + 1
        if session in self._showing:
            mark = session.next_id + self._showing.pop(session)
        elif session in self._busy and not session.rewrite_from:
            mark = max(mark, session.mark)
        row = SessionRow(
            number=session.number,
            digest=session.digest,
            ttl_s=session.ttl_s,
            next_id=session.next_id,
            mark=mark,
            follows=_json(_positions(session)),
            lost=_json([(one.topic, one.epoch, one.offset, one.count) for one in session.lost()]),
            first_id=session.first_id,
            rewrite_from=session.rewrite_from,
            confirmed=confirmed,
        )
        for number, content in fresh:
            if not content.topic and content.count and not content.stored_as:
                self._last_direct += 1
                content.stored_as = self._last_direct
                self._direct[content.stored_as] = content
                changes.direct.append((content.stored_as, content.json or b""))
            place = (content.topic, content.epoch, content.first_offset, content.count)
            row.packs.append(
                (session.number, number, *place, content.value_bytes, content.stored_as)
            )
        session.saved_to = session.next_id
        session.rewrite_from = 0
        session.is_changed = False
        return row


def _positions(session: Session) -> list[Any]:
    return [
        (follow.feed.topic, follow.feed.epoch, follow.offset) for follow in session.follows.values()
    ]
