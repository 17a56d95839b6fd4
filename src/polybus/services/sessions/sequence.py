# cython: annotation_typing=False
"""The numbered packs of a session: which numbers are used, shown, confirmed, lost and saved.

`session` has the rules. Only these two modules write the fields.

Compiled as it is (sequence.pxd), or run as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
from polybus.services.sessions.changes import LostMessages
from polybus.services.sessions.contents import EMPTY

if TYPE_CHECKING:
    from polybus.config import Msgstream
    from polybus.services.sessions.contents import Content

NOTICES_MAX = 100


@cython.cclass
class PackSequence:
    """See the module docstring.

    Attributes:
        lost: the losses that the client has not been notified of, by topic.
        shown_to: the last number that a client may have seen.
        pack_count: how many packs are not confirmed.
        value_bytes: their size.
    """

    __slots__ = (
        "_bytes_max",
        "_first_id",
        "_gap",
        "_is_changed",
        "_mark",
        "_packs",
        "_packs_max",
        "_raises_mark",
        "_rewrite_from",
        "_saved_to",
        "_unsaved_confirms",
        "_unsaved_empties",
        "lost",
        "pack_count",
        "shown_to",
        "value_bytes",
    )

    def __init__(self, limits: Msgstream) -> None:
        self._packs_max = limits.session_packs_max
        self._bytes_max = limits.session_bytes_max
        self.lost: dict[str, LostMessages] = {}
        self.shown_to = 0
        self.pack_count = 0
        self.value_bytes = 0
        # Pack `_first_id + i` is `_packs[i]`; None: confirmed. The first is never None.
        self._first_id = 1
        self._packs: list[Content | None] = []
        # Numbers below `_first_id` that were shown and dropped.
        self._gap = range(0)
        # The save that opens a session reserves its first number.
        self._mark = 2
        self._raises_mark = False
        # Packs below this number are on disk, or were confirmed before they needed to be.
        self._saved_to = 1
        self._rewrite_from = 0
        self._is_changed = True
        self._unsaved_confirms: list[int] = []
        # Packs that are on disk with their previous content.
        self._unsaved_empties: list[int] = []

    @property
    def next_id(self) -> int:
        return self._first_id + len(self._packs)

    @property
    def has_reserved(self) -> bool:
        """Whether the mark is above what was shown."""
        return self._mark > self.shown_to + 1

    # Filling

    def _take(self, fresh: list[Content]) -> None:
        self._packs += fresh
        self._count(fresh)
        self._is_changed = True
        if self._is_over():
            self._drop_oldest()

    def _count(self, contents: list[Content | None] | list[Content]) -> None:
        for content in contents:
            if content is not None:
                self.pack_count += 1
                self.value_bytes += content.value_bytes
                content.holders += not content.topic

    # Emptying

    def confirm(self, ids: Iterable[int]) -> None:
        """Remove packs; ignore numbers that do not exist or were not shown yet."""
        packs = self._packs
        confirmed = False
        for number in ids:
            if self._gap and self._gap.start <= number <= self.shown_to:
                # Its client takes packs in order, so it has all up to this one.
                self._gap = range(number + 1, self._gap.stop)
                confirmed = True
            index = number - self._first_id
            if 0 <= index < len(packs) and number <= self.shown_to and packs[index] is not None:
                self._let_go(index)
                confirmed = True
                if number < self._saved_to:
                    self._unsaved_confirms.append(number)
        if confirmed:
            self._trim()
            self._is_changed = True

    def discard(self, number: int) -> None:
        """Drop a pack whose messages are no longer in the log, with a notice."""
        index = number - self._first_id
        content = self._packs[index] if 0 <= index < len(self._packs) else None
        if content is not None and content is not EMPTY:
            self._note_lost(content.topic, content.epoch, content.first_offset, content.count)
            self._empty(index)

    def _take_back(self, topic: str, epoch: int, number: int | None) -> set[Content]:
        """Remove a topic's packs from `number` on, or else those that no client has seen.

        Returns their contents. Numbers that were shown stay in use, as empty packs.
        """
        packs = self._packs
        unseen = max(0, self.shown_to + 1 - self._first_id)
        first = unseen if number is None else max(0, number - self._first_id)
        place = (topic, epoch)
        back = {one for one in packs[first:] if one is not None and (one.topic, one.epoch) == place}
        if back:
            for index in range(first, unseen):
                if packs[index] in back:
                    self._empty(index)
            gone = back.intersection(packs[unseen:])
            packs[unseen:] = [one for one in packs[unseen:] if one not in gone]
            self.pack_count -= len(gone)
            self.value_bytes -= sum([one.value_bytes for one in gone])
            self._renumber()
        return back

    def _empty(self, index: int) -> None:
        """Keep the number in use: its client would wait for a missing one."""
        self._let_go(index)
        self._packs[index] = EMPTY
        self.pack_count += 1
        self._unsaved_empties.append(self._first_id + index)
        self._is_changed = True

    def _let_go(self, index: int) -> None:
        content = self._packs[index]
        assert content is not None
        self._packs[index] = None
        self.pack_count -= 1
        self.value_bytes -= content.value_bytes
        content.holders -= not content.topic

    def _let_go_all(self) -> None:
        for index, content in enumerate(self._packs):
            if content is not None:
                self._let_go(index)
        self._packs = []

    def _trim(self) -> None:
        packs = self._packs
        count = 0
        while count < len(packs) and packs[count] is None:
            count += 1
        del packs[:count]
        self._first_id += count

    # The bound

    def _is_over(self) -> bool:
        return self.pack_count > self._packs_max or self.value_bytes > self._bytes_max

    def _drop_oldest(self) -> None:
        packs = self._packs
        unseen = max(0, self.shown_to + 1 - self._first_id)
        index = taken = 0
        while index < len(packs) and (packs[index] is None or self._is_over()):
            content = packs[index]
            if content is None:
                # Its client takes packs in order, so it has all up to this one.
                taken = index + 1
            else:
                self._note_lost(content.topic, content.epoch, content.first_offset, content.count)
                self._let_go(index)
            index += 1
        if index > unseen:
            # No client has seen these numbers: the later packs move up to them.
            del packs[unseen:index]
            self._renumber()
        first = self._first_id
        self._trim()
        if min(index, unseen):
            start = self._gap.start if self._gap and not taken else first + taken
            self._gap = range(start, first + min(index, unseen))

    def _renumber(self) -> None:
        """Packs that no client has seen have other numbers now."""
        self._rewrite_from = self._saved_to = min(self._saved_to, self.shown_to + 1)
        self._mark = self.shown_to + 1
        self._is_changed = True

    def _note_lost(self, topic: str, epoch: int, offset: int, count: int) -> None:
        self._is_changed = True
        lost = self.lost.get(topic)
        if lost is not None and lost.epoch == epoch:
            self.lost[topic] = lost._replace(messages=lost.messages + count)
        elif lost is not None or len(self.lost) < NOTICES_MAX:
            self.lost[topic] = LostMessages(topic, epoch, offset, count)

    # Showing

    def unconfirmed(self, after: int, bytes_max: int) -> list[tuple[int, Content]]:
        """The packs above a number, in order: at least one, up to about `bytes_max` bytes.

        Only packs below the mark: a caller that needs more saves the session first.
        """
        packs, first_id = self._packs, self._first_id
        first = after + 1 if after >= first_id else first_id
        stop = min(self._mark, first_id + len(packs))
        shown: list[tuple[int, Content]] = []
        size = 0
        for number in range(first, stop):
            content = packs[number - first_id]
            if content is None:
                continue
            size += content.value_bytes
            if shown and size > bytes_max:
                break
            shown.append((number, content))
        return shown

    def held(self) -> list[tuple[int, Content]]:
        """All packs that are not confirmed, shown or not."""
        packs = enumerate(self._packs, self._first_id)
        return [(number, content) for number, content in packs if content is not None]

    def needs_mark(self) -> bool:
        """Whether there are packs that may not be shown before the next save raises the mark."""
        if self._first_id + len(self._packs) > self._mark:
            self._raises_mark = True
        return self._raises_mark

    def show(self, number: int) -> None:
        """A client is being sent packs up to this number."""
        if number > self.shown_to:
            self.shown_to = number

    # Saving

    def saved(self, mark: int) -> bool:
        """The mark is on disk; return whether there are packs that waited for it."""
        before = self._mark
        # Packs that were renumbered during the save need another one before they are shown.
        if not self._rewrite_from:
            self._mark = max(before, mark)
        return before < self._mark and before < self.next_id

    def save_failed(self) -> None:
        """The save failed: write everything again."""
        self._saved_to = self._rewrite_from = self._first_id
        self._is_changed = True

    def restore(
        self,
        packs: dict[int, Content],
        losses: Iterable[LostMessages],
        *,
        next_id: int,
        mark: int,
        first_id: int,
    ) -> None:
        """Restore the saved state; numbers that may have been shown since are used up."""
        self.lost = {one.topic: one for one in losses}
        first = self._first_id = min(next_id, min(packs, default=next_id))
        self._gap = range(first_id, first)
        self.shown_to = mark - 1
        self._mark = mark
        stop = max(next_id, mark)
        self._packs = [
            packs.get(number) if number < next_id else EMPTY for number in range(first, stop)
        ]
        self._count(self._packs)
        self._trim()
        self._saved_to = next_id
        self._is_changed = False

    def lose(self, count: int, first_id: int) -> None:
        """`count` of the restored packs, from this number on, are damaged: send a notice.

        It is unknown which: every number without a pack is sent as an empty one.
        """
        first = min(first_id, self._first_id)
        missing = [EMPTY] * (self._first_id - first)
        self._packs = [*missing, *[EMPTY if one is None else one for one in self._packs]]
        self._first_id = first
        self._gap = range(0)
        self.pack_count = len(self._packs)
        self._note_lost("", 0, 0, count)
