"""Sessions: a msgstream client's durable inbox, one sequence of numbered packs.

The rules:

1. Packs are numbered from 1, one for each batch of a topic and one for each direct pack, in order
   of arrival. A number that a client may have seen never changes its meaning.
2. A pack stays until it is confirmed. Confirming a number that is not there does nothing.
3. A session holds at most `session_packs_max` packs and `session_bytes_max` bytes. Beyond that the
   oldest are dropped, and a notice says which topic lost how many messages from which position on.
4. Clients stop at a gap in the numbers. So a pack that was dropped before a client could have seen
   it leaves no gap (the later ones move up), and one that was dropped later is sent empty, until
   its client confirms it or a later one: an answer can be lost with its connection.
5. A number may be shown to a client only below `mark`, which is on disk (write-ahead). A crash
   loses what happened after the last save. The numbers up to the mark are then used up, as empty
   packs, and the messages come again under new numbers.
6. A pack that was shown and cannot be read at the moment is used up likewise, and so are the later
   ones of its topic: they are sent empty once that is on disk, and their messages come again under
   new numbers when the topic can be read.
7. A session expires when it has had no connection and no request for longer than its time to live.
   A restart begins that time again.

Only this module writes a session's fields. It knows no clock, no disk and no client.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from polybus.config import Msgstream
from polybus.services.sessions.feeds import BEHIND, EMPTY, Content, Feed, Follow, Receiver
from polybus.wire.msgstream import DAMAGED, EMPTY_PACK, OVERFLOW, encode_notice
from polybus.wire.positions import Position

# How far a session that catches up with the log runs ahead of its client's confirmations.
CATCH_UP_BYTES_MAX = 4 << 20
CATCH_UP_PACKS_MAX = 64
NOTICES_MAX = 100
ORDER = attrgetter("order")
NUMBERS_AHEAD = 256
"""How many numbers the mark reserves at most beyond the existing packs, so that a busy session does
not wait for the disk before each pack. A session reserves no more than it has shown so far, so that
a crash leaves few empty packs in a session with few messages, and no more than it has room for, so
that they do not push out packs with messages."""
NUMBERS_FEW = 8
"""A session that has shown more than this reserves again, with any save, when half is used up."""


class LostMessages(NamedTuple):
    """What a notice reports: how many messages of a topic, from this position on."""

    topic: str
    epoch: int
    offset: int
    messages: int

    def encode(self) -> bytes:
        data = {"topic": self.topic or None, "position": None, "count": self.messages}
        if self.topic:
            data["position"] = f"{self.epoch}:{self.offset}"
        return encode_notice(OVERFLOW, data)


PackKey = tuple[int, int]
"""A session's number, and the number of a pack."""


@dataclass(slots=True)
class SessionChanges:
    """What one save of sessions writes.

    Attributes:
        rows: number, time to live, next number, mark, topics with epoch and offset, losses, the
            first number that its client may wait for and the number of packs.
        digests: those of the rows' keys.
        first: packs below these are gone.
        renumbered: packs from these on have other numbers now.
        confirmed: packs that are on disk and were confirmed since the last save.
        fresh: packs that are not on disk yet, or no longer under their number.
        ended: the numbers of sessions that are over.
        direct: direct packs that are not on disk yet.
        direct_gone: the numbers of those that no session has any more.
    """

    rows: list[tuple[object, ...]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    first: list[PackKey] = field(default_factory=list)
    renumbered: list[PackKey] = field(default_factory=list)
    confirmed: list[PackKey] = field(default_factory=list)
    fresh: list[tuple[PackKey, Content]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    direct: list[Content] = field(default_factory=list)
    direct_gone: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Session:
    """One inbox. The module docstring has its rules.

    Attributes:
        number: its name on disk; only its client knows its key.
        receiver: the connection that gets its packs.
        follows: its topics.
        lost: the losses that the client has not been notified of, by topic.
        damaged: the topics that cannot be read, and whether the client was notified.
        shown_to: the last number that a client may have seen.
        pack_count: how many packs are not confirmed.
    """

    number: int
    digest: bytes
    ttl_s: float
    _limits: Msgstream
    receiver: Receiver | None = None
    follows: dict[str, Follow] = field(default_factory=dict)
    lost: dict[str, LostMessages] = field(default_factory=dict)
    damaged: dict[str, bool] = field(default_factory=dict)
    shown_to: int = 0
    pack_count: int = 0
    value_bytes: int = 0
    is_ended: bool = False
    _contact_s: float = 0.0
    # Pack `_first_id + i` is `_packs[i]`; None: confirmed. The first is never None.
    _first_id: int = 1
    _packs: list[Content | None] = field(default_factory=list)
    # Numbers below `_first_id` that were shown and dropped.
    _gap: range = range(0)
    # The save that opens a session reserves its first number.
    _mark: int = 2
    _raises_mark: bool = False
    # Packs below this number are on disk, or were confirmed before they had to be.
    _saved_to: int = 1
    _rewrite_from: int = 0
    _is_changed: bool = True
    _unsaved_confirms: list[int] = field(default_factory=list)
    # Packs that are on disk with what they held before.
    _unsaved_empties: list[int] = field(default_factory=list)

    @property
    def next_id(self) -> int:
        return self._first_id + len(self._packs)

    @property
    def has_reserved(self) -> bool:
        """Whether the mark is above what was shown."""
        return self._mark > self.shown_to + 1

    @property
    def is_changed(self) -> bool:
        """Whether there is something to save."""
        return self._is_changed and not self.is_ended

    # Contact

    def attach(self, receiver: Receiver) -> Receiver | None:
        """Make this its connection; return the one before it."""
        before, self.receiver = self.receiver, receiver
        for follow in self.follows.values():
            follow.listen(receiver)
        return before

    def detach(self) -> Receiver | None:
        """It has no connection any more; return the one it had."""
        before, self.receiver = self.receiver, None
        for follow in self.follows.values():
            follow.unlisten()
        return before

    def contact(self, now_s: float) -> None:
        """Its client is there: the time to live begins again."""
        self._contact_s = now_s

    def is_expired(self, now_s: float) -> bool:
        return self.receiver is None and now_s - self._contact_s > self.ttl_s

    # Topics

    def follow(self, follow: Follow) -> None:
        self.follows[follow.feed.topic] = follow
        self._is_changed = True

    def unfollow(self, topic: str) -> None:
        self.follows.pop(topic, None)
        self.damaged.pop(topic, None)
        self._is_changed = True

    def hold(self, topic: str, number: int | None = None) -> set[Content]:
        """A topic is damaged: stay where it is, with a notice, until it can be read again.

        Its packs from `number` on, or else those that no client has seen, are taken back, and come
        from the log later. Returns what they held.
        """
        follow = self.follows.get(topic)
        if follow is None:
            return set()
        follow.feed.damage()
        self.damaged.setdefault(topic, False)
        unseen = max(0, self.shown_to + 1 - self._first_id)
        first = unseen if number is None else max(0, number - self._first_id)
        place = (topic, follow.feed.epoch)
        packs = self._packs
        back = {one for one in packs[first:] if one is not None and (one.topic, one.epoch) == place}
        if back:
            follow.go_back(min(follow.offset, *(one.first_offset for one in back)))
            for index in range(first, unseen):
                if packs[index] in back:
                    self._empty(index)
            gone = back.intersection(packs[unseen:])
            packs[unseen:] = [one for one in packs[unseen:] if one not in gone]
            self.pack_count -= len(gone)
            self.value_bytes -= sum(one.value_bytes for one in gone)
            self._renumber()
        return back

    # Filling

    def cut(self) -> None:
        """Number everything that its topics have received since the last call."""
        fresh: list[Content] = []
        runs = 0
        for follow in self.follows.values():
            index = follow.index
            feed = follow.feed
            if follow.offset == feed.stop_offset or index == BEHIND:
                continue
            if index < feed.first_index:
                first = feed.contents[0].first_offset
                self._note_lost(feed.topic, feed.epoch, follow.offset, first - follow.offset)
                index = feed.first_index
            fresh += feed.contents[index - feed.first_index :]
            follow.take_all()
            runs += 1
        if runs > 1:
            fresh.sort(key=ORDER)
        if fresh:
            self._take(fresh)

    def add(self, content: Content) -> None:
        """Take a direct pack, after everything that came before it."""
        self.cut()
        self._take([content])

    def add_caught(self, follow: Follow, content: Content) -> None:
        """Take messages that were read from the log while catching up."""
        follow.read_to(content.stop_offset)
        self.damaged.pop(content.topic, None)
        self._take([content])

    def note_missing(self, follow: Follow, start: int) -> None:
        """The log has expired the topic's messages below `start`: continue there, with a notice."""
        feed = follow.feed
        self._note_lost(feed.topic, feed.epoch, follow.offset, start - follow.offset)
        follow.read_to(start)

    def note_start(self, feed: Feed, asked: Position, offset: int) -> None:
        """The session begins at `offset`: a notice says what of the position asked for is gone."""
        if asked.epoch != feed.epoch:
            # How much the topic had before it was deleted is not known.
            self._note_lost(feed.topic, asked.epoch, asked.offset, 0)
        elif offset > asked.offset:
            self._note_lost(feed.topic, feed.epoch, asked.offset, offset - asked.offset)

    def wants_catch_up(self) -> Follow | None:
        """A topic to read from the log; None if there is none or the session has no room."""
        for follow in self.follows.values():
            if follow.index == BEHIND and not follow.feed.is_damaged:
                limits = self._limits
                packs_max = min(limits.session_packs_max, CATCH_UP_PACKS_MAX)
                bytes_max = min(limits.session_bytes_max, CATCH_UP_BYTES_MAX)
                has_room = self.pack_count < packs_max and self.value_bytes < bytes_max
                return follow if has_room else None
        return None

    def _take(self, fresh: list[Content]) -> None:
        self._packs += fresh
        self._count(fresh)
        self._is_changed = True
        if self._is_over():
            self._drop_oldest()

    def _count(self, contents: Iterable[Content | None]) -> None:
        for content in contents:
            if content is not None:
                self.pack_count += 1
                self.value_bytes += content.value_bytes
                content.holders += not content.topic

    # Emptying

    def confirm(self, ids: Iterable[int]) -> None:
        """Remove packs; ignore numbers that are not there or were not shown yet."""
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

    def _trim(self) -> None:
        packs = self._packs
        count = 0
        while count < len(packs) and packs[count] is None:
            count += 1
        del packs[:count]
        self._first_id += count

    def close(self) -> None:
        """The session ends: release everything."""
        for index, content in enumerate(self._packs):
            if content is not None:
                self._let_go(index)
        self._packs = []
        self.follows = {}
        self.is_ended = True

    # The bound

    def _is_over(self) -> bool:
        limits = self._limits
        packs, size = self.pack_count, self.value_bytes
        return packs > limits.session_packs_max or size > limits.session_bytes_max

    def _drop_oldest(self) -> None:
        packs = self._packs
        unseen = max(0, self.shown_to + 1 - self._first_id)
        index = 0
        while self._is_over() and index < len(packs):
            content = packs[index]
            if content is not None:
                self._note_lost(content.topic, content.epoch, content.first_offset, content.count)
                self._let_go(index)
            index += 1
        if index > unseen:
            # No client has seen these numbers: the packs behind move up to them.
            del packs[unseen:index]
            self._renumber()
        first = self._first_id
        self._trim()
        if min(index, unseen):
            start = self._gap.start if self._gap else first
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
        first = after + 1 if after >= self._first_id else self._first_id
        stop = min(self._mark, self.next_id)
        shown: list[tuple[int, Content]] = []
        size = 0
        packs, first_id = self._packs, self._first_id
        for number in range(first, stop):
            content = packs[number - first_id]
            if content is None:
                continue
            size += content.value_bytes
            if shown and size > bytes_max:
                break
            shown.append((number, content))
        return shown

    def needs_mark(self) -> bool:
        """Whether there are packs that may not be shown before the next save raises the mark."""
        if self._first_id + len(self._packs) > self._mark:
            self._raises_mark = True
        return self._raises_mark

    def show(self, number: int) -> None:
        """A client is being sent packs up to this number."""
        if number > self.shown_to:
            self.shown_to = number

    def needs_notice(self, after: int) -> bool:
        """Whether `take_notice` has something for a client that has the packs up to a number."""
        if self.lost or (self.damaged and not all(self.damaged.values())):
            return True
        return bool(self._gap) and self._gap[-1] > after

    def take_notice(self, after: int) -> list[tuple[int, bytes]]:
        """Pack "0", which reports losses, and empty packs for lost numbers above `after`."""
        notices = [lost.encode() for lost in self.lost.values()]
        for topic in [one for one, is_told in self.damaged.items() if not is_told]:
            follow = self.follows[topic]
            position = f"{follow.feed.epoch}:{follow.offset}"
            notices.append(encode_notice(DAMAGED, {"topic": topic, "position": position}))
            self.damaged[topic] = True
        packs = [(0, b"[" + b",".join(notices) + b"]")] if notices else []
        self._is_changed |= bool(notices)
        self.lost = {}
        first = max(self._gap.start, after + 1)
        packs += [(number, EMPTY_PACK) for number in range(first, self._gap.stop)]
        return packs

    # Saving

    def take_unsaved(self, changes: SessionChanges, *, is_last: bool = False) -> int:
        """Add what a save must write; it counts as saved from now on, until `save_failed`.

        Returns the mark: numbers below it may be shown once this is on disk. It rises above all
        packs if `needs_mark` said so. With `is_last`, before the bus ends, it comes down to what
        was shown.
        """
        mark, next_id = self._mark, self.next_id
        room = max(0, self._limits.session_packs_max - self.pack_count)
        ahead = min(NUMBERS_AHEAD, self.shown_to, room)
        if is_last:
            mark = self._mark = self.shown_to + 1
        elif self._raises_mark or (ahead > NUMBERS_FEW and mark - next_id < ahead // 2):
            mark = max(mark, next_id + ahead)
        me, first = self.number, self._first_id
        follows = [(one.feed.topic, one.feed.epoch, one.offset) for one in self.follows.values()]
        lost = list(self.lost.values())
        sent_from = self._gap.start if self._gap else first
        row = (me, self.ttl_s, next_id, mark, follows, lost, sent_from, self.pack_count)
        changes.rows.append(row)
        changes.digests.append(self.digest)
        changes.first.append((me, first))
        if self._rewrite_from:
            changes.renumbered.append((me, self._rewrite_from))
        changes.confirmed += [(me, number) for number in self._unsaved_confirms if number >= first]
        emptied = [number for number in self._unsaved_empties if number >= first]
        for number in (*emptied, *range(max(self._saved_to, first), next_id)):
            content = self._packs[number - first]
            if content is not None:
                changes.fresh.append(((me, number), content))
        self._unsaved_confirms = []
        self._unsaved_empties = []
        self._saved_to = next_id
        self._rewrite_from = 0
        self._is_changed = self._raises_mark = False
        return mark

    def saved(self, mark: int) -> bool:
        """The mark is on disk; return whether there are packs that waited for it."""
        before = self._mark
        # Packs that were renumbered during the save need another one before they are shown.
        if not self._rewrite_from:
            self._mark = max(before, mark)
        return before < self._mark and before < self.next_id

    def save_failed(self) -> None:
        """Nothing of it is known to be on disk: write everything again."""
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
        """Take over what was saved; numbers that may have been shown since are used up."""
        self.lost = {one.topic: one for one in losses}
        first = self._first_id = min([*packs, next_id])
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
        self._packs = [*missing, *(EMPTY if one is None else one for one in self._packs)]
        self._first_id = first
        self._gap = range(0)
        self.pack_count = len(self._packs)
        self._note_lost("", 0, 0, count)
