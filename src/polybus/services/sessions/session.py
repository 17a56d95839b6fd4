"""Sessions: a msgstream client's durable inbox, one sequence of numbered packs.

The rules:

1. Packs are numbered from 1, one for each batch of a topic and one for each direct pack, in the
   order they came. A number that a client may have seen never means anything else.
2. A pack stays until it is confirmed. Confirming what is not there does nothing.
3. A session holds at most `packs_max` packs and `value_bytes_max` bytes. Beyond that the oldest go,
   and a notice says which topic lost how many messages from which position on.
4. Clients stop at a gap in the numbers. So a pack that was dropped before any client could have
   seen it leaves no gap (the later ones move up), and one that was dropped later goes out once
   more, empty, beside the notice.
5. A number may be shown to a client only below `mark`, which is on disk. What happened between the
   last save and a crash is not known afterwards; the numbers up to the mark are then used up, as
   empty packs, and the messages come again under new ones.

Nothing here knows a clock, a disk or a client.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import merge

from polybus.services.sessions.feeds import EMPTY, Content, Feed
from polybus.wire.msgstream import EMPTY_PACK, OVERFLOW, encode_notice

BEHIND = -1
# How far a session that catches up with the log runs ahead of its client's confirmations.
CATCH_UP_BYTES_MAX = 4 << 20
CATCH_UP_PACKS_MAX = 64
NOTICES_MAX = 100


@dataclass(frozen=True, slots=True)
class SessionLimits:
    packs_max: int
    value_bytes_max: int


class Follow:
    """Where a session stands in a topic.

    `offset` is its next message. `index` is its next entry of the feed, or BEHIND while it catches
    up with the log.
    """

    __slots__ = ("feed", "index", "offset")

    def __init__(self, feed: Feed, offset: int) -> None:
        self.feed = feed
        self.offset = offset
        self.index = BEHIND
        self.try_live()

    def try_live(self) -> bool:
        """Go on with the feed's entries if they begin where the session stands."""
        feed = self.feed
        if self.offset < feed.start_offset:
            return False
        index = feed.index_of(self.offset)
        at = index - feed.first_index
        starts_at = feed.contents[at].first_offset if index < feed.stop_index else feed.stop_offset
        if starts_at != self.offset:
            return False
        self.index = index
        return True


@dataclass(slots=True)
class Lost:
    """What a notice tells: so many messages of a topic, from this position on."""

    topic: str
    epoch: int
    offset: int
    count: int

    def encode(self) -> bytes:
        data = {"topic": self.topic or None, "position": None, "count": self.count}
        if self.topic:
            data["position"] = f"{self.epoch}:{self.offset}"
        return encode_notice(OVERFLOW, data)


class Session:
    """One inbox. The module docstring has its rules.

    Attributes:
        number: what the session is called on disk; its key is known to its client only.
        contact_s, ttl_s: it expires so long after its last contact.
        mark: numbers below it may be shown to a client.
        saved_to: packs below this number are on disk, or were confirmed before they had to be.
    """

    __slots__ = (
        "_first_id",
        "_gap",
        "_held",
        "_limits",
        "_lost",
        "_packs",
        "_shown_to",
        "_unsaved_confirms",
        "_value_bytes",
        "contact_s",
        "digest",
        "follows",
        "is_changed",
        "mark",
        "number",
        "receiver",
        "rewrite_from",
        "saved_to",
        "ttl_s",
    )

    def __init__(self, number: int, digest: bytes, ttl_s: float, limits: SessionLimits) -> None:
        self.number = number
        self.digest = digest
        self.ttl_s = ttl_s
        self.contact_s = 0.0
        self.receiver: object | None = None
        self.follows: dict[str, Follow] = {}
        self.mark = 1
        self.saved_to = 1
        self.rewrite_from = 0
        self.is_changed = True
        self._limits = limits
        # Pack `_first_id + i` is `_packs[i]`; None: confirmed. The first is never None.
        self._first_id = 1
        self._packs: list[Content | None] = []
        self._held = 0
        self._value_bytes = 0
        self._shown_to = 0
        self._gap: range | None = None
        self._lost: dict[str, Lost] = {}
        self._unsaved_confirms: list[int] = []

    @property
    def next_id(self) -> int:
        return self._first_id + len(self._packs)

    @property
    def first_id(self) -> int:
        return self._first_id

    @property
    def shown_to(self) -> int:
        """The last number that a client may have seen."""
        return self._shown_to

    @property
    def pack_count(self) -> int:
        return self._held

    @property
    def value_bytes(self) -> int:
        return self._value_bytes

    # Filling

    def cut(self) -> None:
        """Number everything that its topics have got since the last time."""
        runs = []
        for follow in self.follows.values():
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
        """The log has nothing of the topic below `start` any more: go on there, with a notice."""
        feed = follow.feed
        self._note_lost(feed.topic, feed.epoch, follow.offset, start - follow.offset)
        follow.offset = start

    def wants_catch_up(self) -> Follow | None:
        """A topic to read from the log, if there is one and the session has room."""
        for follow in self.follows.values():
            if follow.index == BEHIND:
                break
        else:
            return None
        if self._held >= min(self._limits.packs_max, CATCH_UP_PACKS_MAX):
            return None
        if self._value_bytes >= min(self._limits.value_bytes_max, CATCH_UP_BYTES_MAX):
            return None
        return follow

    def _take(self, fresh: list[Content]) -> None:
        self._packs += fresh
        self._held += len(fresh)
        for content in fresh:
            self._value_bytes += content.value_bytes
            if not content.topic:
                content.holders += 1
        self.is_changed = True
        if self._is_over():
            self._drop_oldest()

    # Emptying

    def confirm(self, ids: Iterable[int]) -> None:
        """Let go of packs; numbers that are not there, or not shown yet, are passed over."""
        packs = self._packs
        confirmed = False
        for number in ids:
            index = number - self._first_id
            if 0 <= index < len(packs) and number <= self._shown_to and packs[index] is not None:
                self._let_go(index)
                confirmed = True
                if number < self.saved_to:
                    self._unsaved_confirms.append(number)
        if confirmed:
            self._trim()
            self.is_changed = True

    def discard(self, number: int) -> None:
        """Drop a pack whose messages are no longer in the log, with a notice."""
        index = number - self._first_id
        if 0 <= index < len(self._packs):
            content = self._packs[index]
            if content is not None and content is not EMPTY:
                self._note_lost(content.topic, content.epoch, content.first_offset, content.count)
                self._let_go(index)
                # The number stays in use, or its client would wait for it for ever.
                self._packs[index] = EMPTY
                self._held += 1
                self.is_changed = True

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
        """The session ends: let go of everything."""
        for index, content in enumerate(self._packs):
            if content is not None:
                self._let_go(index)
        self._packs = []
        self.follows = {}

    # The bound

    def _is_over(self) -> bool:
        limits = self._limits
        return self._held > limits.packs_max or self._value_bytes > limits.value_bytes_max

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
            # Nobody has seen these numbers: the packs behind move up to them.
            del packs[unseen:index]
            self.rewrite_from = self.saved_to = min(self.saved_to, self._shown_to + 1)
            self.mark = self._shown_to + 1
        first = self._first_id
        self._trim()
        if min(index, unseen):
            start = first if self._gap is None else self._gap.start
            self._gap = range(start, first + min(index, unseen))

    def _note_lost(self, topic: str, epoch: int, offset: int, count: int) -> None:
        self.is_changed = True
        lost = self._lost.get(topic)
        if lost is not None and lost.epoch == epoch:
            lost.count += count
        elif lost is not None or len(self._lost) < NOTICES_MAX:
            self._lost[topic] = Lost(topic, epoch, offset, count)

    def lost(self) -> list[Lost]:
        """What the client has not been told yet."""
        return list(self._lost.values())

    def restore_lost(self, lost: Iterable[Lost]) -> None:
        self._lost = {one.topic: one for one in lost}

    # Showing

    def unconfirmed(self, after: int, bytes_max: int) -> list[tuple[int, Content]]:
        """The packs above a number, in order, up to about so many bytes but one at least.

        Only what may be shown: a caller that wants more raises the mark first.
        """
        first = max(after + 1, self._first_id)
        stop = min(self.mark, self.next_id)
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
        return self.next_id > self.mark

    def show(self, number: int) -> None:
        """A client is being sent packs up to this number."""
        self._shown_to = max(self._shown_to, number)

    def take_notice(self, after: int) -> list[tuple[int, bytes]]:
        """Pack "0" with what was lost, and the numbers above `after` that were lost with it."""
        if not self._lost:
            return []
        notice = b"[" + b",".join(lost.encode() for lost in self._lost.values()) + b"]"
        packs = [(0, notice)]
        if self._gap is not None:
            packs += [(number, EMPTY_PACK) for number in self._gap if number > after]
            self._gap = None
        self._lost = {}
        self.is_changed = True
        return packs

    @property
    def has_notice(self) -> bool:
        return bool(self._lost)

    # Saving

    def unsaved(self) -> tuple[list[tuple[int, Content]], list[int]]:
        """Packs that the disk has not got yet, and confirmed ones that it still has."""
        fresh = [
            (number, content)
            for number in range(max(self.saved_to, self._first_id), self.next_id)
            if (content := self._packs[number - self._first_id]) is not None
        ]
        confirmed, self._unsaved_confirms = self._unsaved_confirms, []
        return fresh, [number for number in confirmed if number >= self._first_id]

    def restore(self, packs: dict[int, Content], *, next_id: int, shown_to: int) -> None:
        """Come back from the disk; numbers that were shown but not saved are used up."""
        first = min([*packs, next_id])
        self._first_id = first
        self._shown_to = shown_to
        stop = max(next_id, shown_to + 1)
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
        self.saved_to = next_id
