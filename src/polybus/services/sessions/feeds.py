"""Feeds: what sessions follow. One feed per topic, however many sessions follow it.

A feed remembers where each batch of its topic is in the log, not its messages. A session remembers
how far along the feed it is. So a message costs a feed one entry, and costs nothing for a session
that no client listens to.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from polybus.batch import Batch
from polybus.bus.subscriptions import Publisher, Subscriber
from polybus.wire.msgstream import EMPTY_PACK, PROTOCOL, encode_messages

CACHE_BYTES_MAX = 16 << 20
PACK_BYTES = 256 << 10
"""The approximate size of a pack when a large commit is split."""
BEHIND = -1


@dataclass(slots=True, eq=False)
class Content:
    """What a pack holds, shared by every session that has it.

    For a topic's messages: their place in the log, and their JSON while it is cached. For a direct
    pack (`topic` is empty): its JSON.

    Attributes:
        order: when it arrived, compared to other contents; the number a direct pack is stored as.
        value_bytes: what it counts towards a session's limit.
        holders: how many sessions hold a direct pack.
    """

    topic: str
    epoch: int
    first_offset: int
    count: int
    value_bytes: int = 0
    order: int = 0
    json: bytes | None = None
    holders: int = 0

    @property
    def stop_offset(self) -> int:
        return self.first_offset + self.count


def direct(json: bytes, *, order: int = 0) -> Content:
    """A pack that a program posted."""
    return Content("", 0, 0, 1, len(json), order, json)


# The content of a pack whose number is used up and whose messages, if any, are in another pack.
EMPTY = direct(EMPTY_PACK)
EMPTY.count = EMPTY.value_bytes = 0


class JsonCache:
    """Keeps the JSON of the contents used last, up to a limit in bytes."""

    def __init__(self, *, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._contents: deque[Content] = deque()
        self._bytes = 0

    def put(self, content: Content, json: bytes) -> None:
        if content.json is not None:
            return
        content.json = json
        self._contents.append(content)
        self._bytes += len(json)
        while self._bytes > self._bytes_max and len(self._contents) > 1:
            oldest = self._contents.popleft()
            if oldest.json is not None:
                self._bytes -= len(oldest.json)
                oldest.json = None


class Receiver(Protocol):
    """The connection that receives a session's packs."""

    def wake(self) -> None:
        """There may be something to send."""
        ...

    def replaced(self) -> None:
        """A newer connection has attached to the session."""
        ...

    def ended(self) -> None:
        """The session is over."""
        ...

    def shut_down(self) -> None:
        """The bus stops."""
        ...


class Follower(Protocol):
    """A session, as its feeds know it."""

    @property
    def follows(self) -> "Mapping[str, Follow]": ...

    @property
    def receiver(self) -> Receiver | None: ...


class Feed(Subscriber):
    """The batches of one topic since its first session came."""

    protocol = PROTOCOL

    def __init__(self, topic: str, epoch: int, stop_offset: int, shared: "FeedsShared") -> None:
        self.topic = topic
        self.epoch = epoch
        self.stop_offset = stop_offset
        self.contents: list[Content] = []
        # The index of the first entry in `contents`: entries keep their index when older ones go.
        self.first_index = 0
        self.followers: set[Follower] = set()
        # The followers that have a receiver.
        self.listeners: dict[Follower, None] = {}
        self._signalled = False
        self._shared = shared

    @property
    def start_offset(self) -> int:
        """The first offset that the entries cover; older messages are in the log alone."""
        return self.contents[0].first_offset if self.contents else self.stop_offset

    @property
    def stop_index(self) -> int:
        return self.first_index + len(self.contents)

    def index_of(self, offset: int) -> int:
        """The index of the first entry that begins at or after the offset."""
        place = bisect_left(self.contents, offset, key=lambda content: content.first_offset)
        return self.first_index + place

    def trim(self, index: int) -> None:
        """Forget the entries below the index."""
        count = min(index - self.first_index, len(self.contents))
        if count > 0:
            del self.contents[:count]
            self.first_index += count

    def reset_signal(self) -> None:
        """Its listeners are about to be woken; the next delivery signals again."""
        self._signalled = False

    # The bus calls these

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        content = self._add(batch)
        if self.listeners:
            self._shared.cache.put(content, bytes(batch.encoded(PROTOCOL, encode_messages)))
            self._signal()

    def deliver_from_log(self, batches: Sequence[Batch]) -> None:
        """As `deliver`, but JSON is made when a session needs it, in packs of about PACK_BYTES."""
        for batch in batches:
            count = max(1, len(batch) * PACK_BYTES // max(batch.value_bytes, 1))
            for first in range(0, len(batch), count):
                self._add(batch.slice(first, min(first + count, len(batch))))
        if self.listeners:
            self._signal()

    def _add(self, batch: Batch) -> Content:
        shared = self._shared
        content = Content(self.topic, batch.epoch, batch.first_offset, len(batch))
        content.value_bytes = batch.value_bytes
        content.order = shared.next_order()
        self.stop_offset = content.stop_offset
        self.contents.append(content)
        if len(self.contents) > 2 * shared.contents_max:
            self.trim(self.stop_index - shared.contents_max)
        return content

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._shared.on_delivered(self)

    def topic_deleted(self, topic: str) -> None:
        self._shared.on_deleted(self)


class FeedsShared:
    """What all feeds share; a subclass decides what follows from a delivery and a deletion."""

    def __init__(self, *, contents_max: int) -> None:
        self.contents_max = contents_max
        self.cache = JsonCache()
        self.last_order = 0

    def next_order(self) -> int:
        """The place of a pack in the order of everything that arrives."""
        self.last_order += 1
        return self.last_order

    def on_delivered(self, feed: Feed) -> None:
        """The feed has something for its listeners."""

    def on_deleted(self, feed: Feed) -> None:
        """The feed's topic was deleted."""


class Follow:
    """A session's place in a topic.

    `offset` is its next message. `index` is its next entry of the feed, or BEHIND while the session
    catches up from the log.
    """

    __slots__ = ("feed", "index", "offset")

    def __init__(self, feed: Feed, offset: int) -> None:
        self.feed = feed
        self.offset = offset
        self.index = BEHIND
        self.try_live()

    def try_live(self) -> bool:
        """Continue with the feed's entries if one begins at the session's offset."""
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
