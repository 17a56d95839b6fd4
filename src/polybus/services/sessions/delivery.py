# cython: annotation_typing=False
"""Shows packs to clients and takes their confirmations, where no waiting is needed.

Every delivery to every session passes through this module, so it is compiled (delivery.pxd).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.scan import Traffic

if TYPE_CHECKING:
    from polybus.services.events import EventRecorder
    from polybus.services.sessions.contents import Content
    from polybus.services.sessions.saving import Saver
    from polybus.services.sessions.session import Session
    from polybus.services.state import StateDb

# The approximate size of one answer or frame; a single pack may be larger.
ANSWER_BYTES_MAX = 4 << 20

Packs = list[tuple[int, bytes]]


@cython.cclass
class PackDelivery:
    """The part of the inboxes that does not wait.

    Attributes:
        delivered: the messages shown, by topic.
        packs_out: the packs shown.
    """

    def __init__(self, events: EventRecorder, saver: Saver, state: StateDb) -> None:
        self._events = events
        self._saver = saver
        self._touched = saver.touched
        self._state = state
        self.delivered: dict[str, Traffic] = {}
        self.packs_out = 0

    def confirm(self, session: Session, ids: Sequence[int]) -> None:
        if ids:
            held = session.pack_count
            session.confirm(ids)
            self._events.confirmed(session, ids, held - session.pack_count)
            self._touch(session)

    def collect_now(self, session: Session, after: int) -> Packs | None:
        """The packs above a number; None if something must be read first.

        While its mark must be raised there may be fewer packs or none: its connection is woken
        later.
        """
        session.cut()
        self._touch(session)
        if session.needs_notice(after) or session.wants_catch_up() is not None:
            return None
        if session.needs_mark():
            if self._state.error is not None:
                return None
            if self._saver.raise_mark(session):
                return []
        shown = session.unconfirmed(after, ANSWER_BYTES_MAX)
        packs: Packs = []
        for number, content in shown:
            if content.json is None:
                return None
            packs.append((number, content.json))
        self.show(session, shown)
        return packs

    def _touch(self, session: Session) -> None:
        if self._touched:
            self._touched.add(session)
        else:
            # This also starts the timer.
            self._saver.touch(session)

    def show(self, session: Session, packs: Sequence[tuple[int, Content]]) -> None:
        """The session's client is being sent these packs."""
        if not packs:
            return
        self._events.delivered(session, packs)
        session.show(packs[-1][0])
        self.packs_out += len(packs)
        for _, content in packs:
            traffic = self.delivered.get(content.topic)
            if traffic is None:
                traffic = self.delivered[content.topic] = Traffic()
            traffic.add(content.count, content.value_bytes)
