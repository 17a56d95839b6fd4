# cython: annotation_typing=False
"""Sessions: a msgstream client's durable inbox, one sequence of numbered packs.

The rules:

1. Packs are numbered from 1, one for each batch of a topic and one for each direct pack, in order
   of arrival. A number that a client may have seen never changes its meaning.
2. A pack stays until it is confirmed. Confirming a number that does not exist does nothing.
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

A session is a sequence of packs (sequence) and its positions in topics. It knows no clock, no disk
and no client.

Compiled as it is (session.pxd), or run as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.services.sessions.sequence import PackSequence
from polybus.names import ACCOUNT
from polybus.services.sessions.contents import BEHIND
from polybus.wire.msgstream import DAMAGED, EMPTY_PACK, encode_notice

if TYPE_CHECKING:
    from polybus.config import Msgstream
    from polybus.services.sessions.changes import SessionChanges
    from polybus.services.sessions.contents import Content, Entries, Follow, Receiver
    from polybus.wire.positions import Position

# How far a session that catches up with the log runs ahead of its client's confirmations.
CATCH_UP_BYTES_MAX = 4 << 20
CATCH_UP_PACKS_MAX = 64
ORDER = attrgetter("order")
NUMBERS_AHEAD = 256
"""How many numbers the mark reserves at most beyond the existing packs, so that a busy session does
not wait for the disk before each pack. A session reserves no more than it has shown so far, so that
a crash leaves few empty packs in a session with few messages, and no more than it has room for, so
that they do not push out packs with messages."""
NUMBERS_FEW = 8
"""A session that has shown more than this reserves again, with any save, when half is used up."""


@cython.cclass
class Session(PackSequence):
    """One inbox. The module docstring has its rules.

    Attributes:
        number: its id on disk; only its client knows its key.
        account: its owner.
        token: the id of the token that created it, and with which it ends; empty without one.
        receiver: the connection that gets its packs.
        follows: its topics.
        damaged: the topics that cannot be read, and whether the client was notified.
    """

    __slots__ = (
        "_contact_s",
        "account",
        "damaged",
        "digest",
        "follows",
        "is_ended",
        "number",
        "receiver",
        "token",
        "ttl_s",
    )

    def __init__(
        self,
        number: int,
        digest: bytes,
        ttl_s: float,
        limits: Msgstream,
        account: str = ACCOUNT,
        token: str = "",
    ) -> None:
        super().__init__(limits)
        self.number = number
        self.digest = digest
        self.ttl_s = ttl_s
        self.account = account
        self.token = token
        self.receiver: Receiver | None = None
        self.follows: dict[str, Follow] = {}
        self.damaged: dict[str, bool] = {}
        self.is_ended = False
        self._contact_s = 0.0

    @property
    def is_changed(self) -> bool:
        """Whether there are unsaved changes."""
        return self._is_changed and not self.is_ended

    # Contact

    def attach(self, receiver: Receiver) -> Receiver | None:
        """Make this its connection; return the previous one."""
        before, self.receiver = self.receiver, receiver
        for follow in self.follows.values():
            follow.listen(receiver)
        return before

    def detach(self) -> Receiver | None:
        """Remove its connection and return it."""
        before, self.receiver = self.receiver, None
        for follow in self.follows.values():
            follow.unlisten()
        return before

    def contact(self, now_s: float) -> None:
        """Its client was in contact: the time to live begins again."""
        self._contact_s = now_s

    def is_expired(self, now_s: float) -> bool:
        return self.receiver is None and now_s - self._contact_s > self.ttl_s

    def give_to(self, token: str) -> None:
        """Let it end with this token from now on; if empty, only with its account."""
        self.token = token
        self._is_changed = True

    # Topics

    def follow(self, follow: Follow) -> None:
        self.follows[follow.feed.topic] = follow
        self._is_changed = True

    def unfollow(self, topic: str) -> None:
        self.follows.pop(topic, None)
        self.damaged.pop(topic, None)
        self._is_changed = True

    def hold(self, topic: str, number: int | None = None) -> set[Content]:
        """A topic is damaged: keep the position, with a notice, until it can be read again.

        Its packs from `number` on, or else those that no client has seen, are removed, and come
        from the log later. Returns their contents.
        """
        follow = self.follows.get(topic)
        if follow is None:
            return set()
        follow.feed.damage()
        self.damaged.setdefault(topic, False)
        back = self._take_back(topic, follow.feed.epoch, number)
        if back:
            follow.go_back(min(follow.offset, *[one.first_offset for one in back]))
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
        """Add a direct pack, after everything that came before it."""
        self.cut()
        self._take([content])

    def add_caught(self, follow: Follow, content: Content) -> None:
        """Add messages that were read from the log while catching up."""
        follow.read_to(content.stop_offset)
        self.damaged.pop(content.topic, None)
        self._take([content])

    def note_missing(self, follow: Follow, start: int) -> None:
        """The log has expired the topic's messages below `start`: continue there, with a notice."""
        feed = follow.feed
        self._note_lost(feed.topic, feed.epoch, follow.offset, start - follow.offset)
        follow.read_to(start)

    def note_start(self, feed: Entries, asked: Position, offset: int) -> None:
        """The session begins at `offset`: a notice reports the requested messages that are gone."""
        if asked.epoch != feed.epoch:
            # It is unknown how many messages the deleted topic had.
            self._note_lost(feed.topic, asked.epoch, asked.offset, 0)
        elif offset > asked.offset:
            self._note_lost(feed.topic, feed.epoch, asked.offset, offset - asked.offset)

    def wants_catch_up(self) -> Follow | None:
        """A topic to read from the log; None if there is none or the session has no room."""
        for follow in self.follows.values():
            if follow.index == BEHIND and not follow.feed.is_damaged:
                packs_max = min(self._packs_max, CATCH_UP_PACKS_MAX)
                bytes_max = min(self._bytes_max, CATCH_UP_BYTES_MAX)
                has_room = self.pack_count < packs_max and self.value_bytes < bytes_max
                return follow if has_room else None
        return None

    # Ending

    def close(self) -> None:
        """The session ends: release everything."""
        self._let_go_all()
        self.follows = {}
        self.is_ended = True

    # Notices

    def needs_notice(self, after: int) -> bool:
        """Whether `take_notice` has a pack for a client that has the packs up to a number."""
        if self.lost or (self.damaged and not all(self.damaged.values())):
            return True
        return bool(self._gap) and self._gap[-1] > after

    def take_notice(self, after: int, shown: Callable[[str], str] = str) -> list[tuple[int, bytes]]:
        """Pack "0", which reports losses, and empty packs for lost numbers above `after`.

        `shown` gives the account's name for a topic.
        """
        notices = [lost.encode(shown) for lost in self.lost.values()]
        for topic in [one for one, is_told in self.damaged.items() if not is_told]:
            follow = self.follows[topic]
            position = f"{follow.feed.epoch}:{follow.offset}"
            data = {"topic": shown(topic), "position": position}
            notices.append(encode_notice(DAMAGED, data))
            self.damaged[topic] = True
        packs = [(0, b"[" + b",".join(notices) + b"]")] if notices else []
        self._is_changed |= bool(notices)
        self.lost = {}
        first = max(self._gap.start, after + 1)
        packs += [(number, EMPTY_PACK) for number in range(first, self._gap.stop)]
        return packs

    # Saving

    def take_unsaved(self, changes: SessionChanges, *, is_last: bool = False) -> int:
        """Add the unsaved changes to a save; they count as saved until `save_failed`.

        Returns the mark: numbers below it may be shown once this is on disk. It rises above all
        packs if `needs_mark` is true. With `is_last`, before the bus ends, it is lowered to what
        was shown.
        """
        mark, next_id = self._mark, self.next_id
        room = max(0, self._packs_max - self.pack_count)
        ahead = min(NUMBERS_AHEAD, self.shown_to, room)
        if is_last:
            mark = self._mark = self.shown_to + 1
        elif not changes.reserves:
            # The next node continues with exactly these numbers.
            self._mark = min(mark, next_id)
            mark = next_id if self._raises_mark else self._mark
        elif self._raises_mark or (ahead > NUMBERS_FEW and mark - next_id < ahead // 2):
            mark = max(mark, next_id + ahead)
        me, first = self.number, self._first_id
        follows = [(one.feed.topic, one.feed.epoch, one.offset) for one in self.follows.values()]
        lost = list(self.lost.values())
        sent_from = self._gap.start if self._gap else first
        row = (me, self.ttl_s, next_id, mark, follows, lost, sent_from, self.pack_count)
        changes.rows.append((*row, self.account, self.token))
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
