"""Sessions: a msgstream client's durable inbox, one sequence of numbered packs.

The rules:

1. Packs are numbered from 1, one for each batch of a topic and one for each direct pack, in order
   of arrival. A number that a client may have seen never changes its meaning.
2. A pack stays until it is confirmed. Confirming a number that is not there does nothing.
3. A session holds at most `session_packs_max` packs and `session_bytes_max` bytes. Beyond that the
   oldest are dropped, and a notice says which topic lost how many messages from which position on.
4. Clients stop at a gap in the numbers. So a pack that was dropped before a client could have seen
   it leaves no gap (the later ones move up), and one that was dropped later is sent once more,
   empty, beside the notice.
5. A number may be shown to a client only below `mark`, which is on disk (write-ahead). A crash
   loses what happened after the last save. The numbers up to the mark are then used up, as empty
   packs, and the messages come again under new numbers.

Only this module writes a session's fields. It knows no clock, no disk and no client.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import merge

from polybus.config import Msgstream
from polybus.services.sessions.feeds import BEHIND, EMPTY, Content, Follow, Receiver
from polybus.wire.msgstream import EMPTY_PACK, OVERFLOW, encode_notice

# How far a session that catches up with the log runs ahead of its client's confirmations.
CATCH_UP_BYTES_MAX = 4 << 20
CATCH_UP_PACKS_MAX = 64
NOTICES_MAX = 100
NUMBERS_AHEAD = 256
"""How many numbers the mark reserves at most beyond the existing packs, so that a busy session does
not wait for the disk before each pack. A session reserves no more than it has shown so far, so that
a crash leaves few empty packs in a session with few messages, and no more than it has room for, so
that they do not push out packs with messages."""


@dataclass(slots=True)
class LostMessages:
    """What a notice reports: `count` messages of a topic, from this position on."""

    topic: str
    epoch: int
    offset: int
    count: int

    def encode(self) -> bytes:
        data = {"topic": self.topic or None, "position": None, "count": self.count}
        if self.topic:
            data["position"] = f"{self.epoch}:{self.offset}"
        return encode_notice(OVERFLOW, data)


@dataclass(slots=True)
class UnsavedPacks:
    """What a save must write of a session's packs.

    Attributes:
        mark: numbers below it may be shown once this is on disk.
        first_id: packs below it are gone.
        rewrite_from: packs from here on were renumbered; 0 if none were.
        fresh: packs that are not on disk yet, or no longer under their number.
        confirmed: packs that are on disk and were confirmed since the last save.
    """

    mark: int
    first_id: int
    rewrite_from: int
    fresh: list[tuple[int, Content]]
    confirmed: list[int]


class Session:
    """One inbox. The module docstring has its rules.

    `number` is its name on disk; only its client knows its key. `follows` are its topics,
    `receiver` is the connection that gets its packs.
    """

    __slots__ = (
        "_contact_s",
        "_first_id",
        "_follows",
        "_gap",
        "_held",
        "_is_changed",
        "_is_ended",
        "_limits",
        "_lost",
        "_mark",
        "_packs",
        "_receiver",
        "_rewrite_from",
        "_saved_to",
        "_shown_to",
        "_unsaved_confirms",
        "_value_bytes",
        "digest",
        "number",
        "ttl_s",
    )

    def __init__(self, number: int, digest: bytes, ttl_s: float, limits: Msgstream) -> None:
        self.number = number
        self.digest = digest
        self.ttl_s = ttl_s
        self._contact_s = 0.0
        self._receiver: Receiver | None = None
        self._follows: dict[str, Follow] = {}
        self._limits = limits
        # Pack `_first_id + i` is `_packs[i]`; None: confirmed. The first is never None.
        self._first_id = 1
        self._packs: list[Content | None] = []
        self._held = 0
        self._value_bytes = 0
        self._shown_to = 0
        self._gap: range | None = None
        self._lost: dict[str, LostMessages] = {}
        self._mark = 1
        # Packs below this number are on disk, or were confirmed before they had to be.
        self._saved_to = 1
        self._rewrite_from = 0
        self._is_changed = True
        self._is_ended = False
        self._unsaved_confirms: list[int] = []

    @property
    def follows(self) -> Mapping[str, Follow]:
        return self._follows

    @property
    def receiver(self) -> Receiver | None:
        return self._receiver

    @property
    def next_id(self) -> int:
        return self._first_id + len(self._packs)

    @property
    def shown_to(self) -> int:
        """The last number that a client may have seen."""
        return self._shown_to

    @property
    def has_reserved(self) -> bool:
        """Whether the mark is above what was shown."""
        return self._mark > self._shown_to + 1

    @property
    def pack_count(self) -> int:
        return self._held

    @property
    def value_bytes(self) -> int:
        return self._value_bytes

    @property
    def is_changed(self) -> bool:
        """Whether there is something to save."""
        return self._is_changed and not self._is_ended

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    # Contact

    def contact(self, now_s: float) -> None:
        """Its client is there: the time to live begins anew."""
        self._contact_s = now_s

    def is_expired(self, now_s: float) -> bool:
        return self._receiver is None and now_s - self._contact_s > self.ttl_s

    def attach(self, receiver: Receiver | None) -> None:
        """Send packs to this connection from now on; None: to none."""
        self._receiver = receiver

    # Topics

    def follow(self, follow: Follow) -> None:
        self._follows[follow.feed.topic] = follow
        self._is_changed = True

    def unfollow(self, topic: str) -> None:
        self._follows.pop(topic, None)
        self._is_changed = True

    # Filling

    def cut(self) -> None:
        """Number everything that its topics have received since the last call."""
        runs = []
        for follow in self._follows.values():
            index = follow.index
            feed = follow.feed
            if follow.offset == feed.stop_offset or index == BEHIND:
                continue
            if index < feed.first_index:
                first = feed.contents[0].first_offset
                self._note_lost(feed.topic, feed.epoch, follow.offset, first - follow.offset)
                index = feed.first_index
            runs.append(feed.contents[index - feed.first_index :])
            follow.index = feed.stop_index
            follow.offset = feed.stop_offset
        if len(runs) == 1:
            self._take(runs[0])
        elif runs:
            self._take(list(merge(*runs, key=lambda content: content.order)))

    def add(self, content: Content) -> None:
        """Take a direct pack, after everything that came before it."""
        self.cut()
        self._take([content])

    def add_caught(self, follow: Follow, content: Content) -> None:
        """Take messages that were read from the log while catching up."""
        follow.offset = content.stop_offset
        self._take([content])

    def note_missing(self, follow: Follow, start: int) -> None:
        """The log has expired the topic's messages below `start`: continue there, with a notice."""
        feed = follow.feed
        self._note_lost(feed.topic, feed.epoch, follow.offset, start - follow.offset)
        follow.offset = start

    def wants_catch_up(self) -> Follow | None:
        """A topic to read from the log; None if there is none or the session has no room."""
        for follow in self._follows.values():
            if follow.index == BEHIND:
                break
        else:
            return None
        if self._held >= min(self._limits.session_packs_max, CATCH_UP_PACKS_MAX):
            return None
        if self._value_bytes >= min(self._limits.session_bytes_max, CATCH_UP_BYTES_MAX):
            return None
        return follow

    def _take(self, fresh: list[Content]) -> None:
        self._packs += fresh
        self._held += len(fresh)
        for content in fresh:
            self._value_bytes += content.value_bytes
            if not content.topic:
                content.holders += 1
        self._is_changed = True
        if self._is_over():
            self._drop_oldest()

    # Emptying

    def confirm(self, ids: Iterable[int]) -> None:
        """Remove packs; ignore numbers that are not there or were not shown yet."""
        packs = self._packs
        confirmed = False
        for number in ids:
            index = number - self._first_id
            if 0 <= index < len(packs) and number <= self._shown_to and packs[index] is not None:
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
        if 0 <= index < len(self._packs):
            content = self._packs[index]
            if content is not None and content is not EMPTY:
                self._note_lost(content.topic, content.epoch, content.first_offset, content.count)
                self._let_go(index)
                # The number stays in use: its client would wait for a missing one.
                self._packs[index] = EMPTY
                self._held += 1
                self._is_changed = True

    def _let_go(self, index: int) -> None:
        content = self._packs[index]
        assert content is not None
        self._packs[index] = None
        self._held -= 1
        self._value_bytes -= content.value_bytes
        if not content.topic:
            content.holders -= 1

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
        self._follows = {}
        self._is_ended = True

    # The bound

    def _is_over(self) -> bool:
        limits = self._limits
        return self._held > limits.session_packs_max or self._value_bytes > limits.session_bytes_max

    def _drop_oldest(self) -> None:
        packs = self._packs
        unseen = max(0, self._shown_to + 1 - self._first_id)
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
            self._rewrite_from = self._saved_to = min(self._saved_to, self._shown_to + 1)
            self._mark = self._shown_to + 1
        first = self._first_id
        self._trim()
        if min(index, unseen):
            start = first if self._gap is None else self._gap.start
            self._gap = range(start, first + min(index, unseen))

    def _note_lost(self, topic: str, epoch: int, offset: int, count: int) -> None:
        self._is_changed = True
        lost = self._lost.get(topic)
        if lost is not None and lost.epoch == epoch:
            lost.count += count
        elif lost is not None or len(self._lost) < NOTICES_MAX:
            self._lost[topic] = LostMessages(topic, epoch, offset, count)

    def lost(self) -> list[LostMessages]:
        """The losses that the client has not been notified of."""
        return list(self._lost.values())

    def restore_lost(self, lost: Iterable[LostMessages]) -> None:
        self._lost = {one.topic: one for one in lost}

    # Showing

    def unconfirmed(self, after: int, bytes_max: int) -> list[tuple[int, Content]]:
        """The packs above a number, in order: at least one, up to about `bytes_max` bytes.

        Only packs below the mark: a caller that needs more saves the session first.
        """
        first = max(after + 1, self._first_id)
        stop = min(self._mark, self.next_id)
        shown: list[tuple[int, Content]] = []
        size = 0
        for number in range(first, stop):
            content = self._packs[number - self._first_id]
            if content is None:
                continue
            size += content.value_bytes
            if shown and size > bytes_max:
                break
            shown.append((number, content))
        return shown

    def needs_mark(self) -> bool:
        """Whether there are packs that may not be shown before the session is saved."""
        return self.next_id > self._mark

    def show(self, number: int) -> None:
        """A client is being sent packs up to this number."""
        self._shown_to = max(self._shown_to, number)

    def take_notice(self, after: int) -> list[tuple[int, bytes]]:
        """Pack "0", which reports losses, and empty packs for lost numbers above `after`."""
        if not self._lost:
            return []
        notice = b"[" + b",".join(lost.encode() for lost in self._lost.values()) + b"]"
        packs = [(0, notice)]
        if self._gap is not None:
            packs += [(number, EMPTY_PACK) for number in self._gap if number > after]
            self._gap = None
        self._lost = {}
        self._is_changed = True
        return packs

    @property
    def has_notice(self) -> bool:
        return bool(self._lost)

    # Saving

    def take_unsaved(self, *, to_show: bool = False, is_last: bool = False) -> UnsavedPacks:
        """What a save must write; it counts as saved from now on, until `save_failed`.

        With `to_show` the mark rises above all packs. With `is_last`, before the bus ends, it comes
        down to what was shown.
        """
        mark = self._mark
        if is_last:
            mark = self._mark = self._shown_to + 1
        elif to_show:
            room = max(0, self._limits.session_packs_max - self._held)
            mark = self.next_id + min(NUMBERS_AHEAD, self._shown_to, room)
        first = self._first_id
        unsaved = UnsavedPacks(
            mark,
            first,
            self._rewrite_from,
            [
                (number, content)
                for number in range(max(self._saved_to, first), self.next_id)
                if (content := self._packs[number - first]) is not None
            ],
            [number for number in self._unsaved_confirms if number >= first],
        )
        self._unsaved_confirms = []
        self._saved_to = self.next_id
        self._rewrite_from = 0
        self._is_changed = False
        return unsaved

    def saved(self, mark: int) -> None:
        """The mark is on disk."""
        # Packs that were renumbered during the save need another one before they are shown.
        if not self._rewrite_from:
            self._mark = max(self._mark, mark)

    def save_failed(self) -> None:
        """Nothing of it is known to be on disk: write everything again."""
        self._saved_to = self._rewrite_from = self._first_id
        self._is_changed = True

    def restore(self, packs: dict[int, Content], *, next_id: int, mark: int) -> None:
        """Take over what was saved; numbers that may have been shown since are used up."""
        first = min([*packs, next_id])
        self._first_id = first
        self._shown_to = mark - 1
        self._mark = mark
        stop = max(next_id, mark)
        self._packs = [packs.get(number) for number in range(first, stop)]
        for number in range(next_id, stop):
            self._packs[number - first] = EMPTY
        for content in self._packs:
            if content is not None:
                self._held += 1
                self._value_bytes += content.value_bytes
                if not content.topic:
                    content.holders += 1
        self._trim()
        self._saved_to = next_id
        self._is_changed = False
