# cython: annotation_typing=False
"""The batches of a topic, which its sessions share, and the position of each session in them.

Compiled as it is (contents.pxd), or run as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import attrgetter
from typing import Protocol

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
from polybus.wire.msgstream import EMPTY_PACK

BEHIND = -1
CACHE_BYTES_MAX = 16 << 20
_FIRST_OFFSET = attrgetter("first_offset")


@cython.cclass
class Content:
    """The content of a pack, shared by every session that has it.

    For a topic's messages: their position in the log, and their JSON while it is cached. For a
    direct pack (`topic` is empty): its JSON.

    Attributes:
        order: its position in the order of arrival; a direct pack is stored under this number.
        value_bytes: what it counts towards a session's limit.
        json: set by `JsonCache` for messages of a topic.
        holders: how many sessions hold a direct pack; the sessions update it.
    """

    __slots__ = (
        "count",
        "epoch",
        "first_offset",
        "holders",
        "json",
        "order",
        "topic",
        "value_bytes",
    )

    def __init__(  # noqa: PLR0913 - a row
        self,
        topic: str,
        epoch: int,
        first_offset: int,
        count: int,
        value_bytes: int = 0,
        order: int = 0,
        json: bytes | None = None,
    ) -> None:
        self.topic = topic
        self.epoch = epoch
        self.first_offset = first_offset
        self.count = count
        self.value_bytes = value_bytes
        self.order = order
        self.json = json
        self.holders = 0

    @property
    def stop_offset(self) -> int:
        return self.first_offset + self.count


def direct(json: bytes, *, order: int = 0) -> Content:
    """A pack that a program posted."""
    return Content("", 0, 0, 1, len(json), order, json)


# The content of a pack whose number is used up and whose messages, if any, are in another pack.
EMPTY = Content("", 0, 0, 0, json=EMPTY_PACK)


class JsonCache:
    """An LRU cache of the JSON of contents, up to a limit in bytes."""

    def __init__(self) -> None:
        self._contents: deque[Content] = deque()
        self._bytes = 0

    def put(self, content: Content, json: bytes) -> None:
        if content.json is not None:
            return
        content.json = json
        self._contents.append(content)
        self._bytes += len(json)
        while self._bytes > CACHE_BYTES_MAX and len(self._contents) > 1:
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


@cython.cclass
class Entries:
    """The batches of one topic since its first session followed it.

    `shown` is what the accounts of its sessions call the topic.
    """

    def __init__(self, topic: str, epoch: int, stop_offset: int, shown: str | None = None) -> None:
        self.topic = topic
        self.shown = shown or topic
        self.epoch = epoch
        self.stop_offset = stop_offset
        self.contents: list[Content] = []
        # The index of the first entry in `contents`: entries keep their index when older ones are
        # removed.
        self.first_index = 0
        self.followers: set[Follow] = set()
        # The receivers to wake at a delivery.
        self.listeners: dict[Follow, Receiver] = {}
        # Whether its messages cannot be read at the moment.
        self.is_damaged = False

    @property
    def stop_index(self) -> int:
        return self.first_index + len(self.contents)

    def damage(self) -> None:
        """Its messages cannot be read: its sessions keep their positions."""
        self.is_damaged = True

    def try_again(self) -> bool:
        """Assume that the topic can be read again; False if it was not damaged."""
        was_damaged, self.is_damaged = self.is_damaged, False
        return was_damaged

    def add(self, content: Content) -> None:
        self.stop_offset = content.stop_offset
        self.contents.append(content)

    def trim(self, index: int) -> None:
        """Forget the entries below the index."""
        count = min(index - self.first_index, len(self.contents))
        if count > 0:
            del self.contents[:count]
            self.first_index += count


@cython.cclass
class Follow:
    """A session's position in a topic.

    `offset` is its next message. `index` is its next entry of the feed, or BEHIND while the session
    catches up from the log.
    """

    __slots__ = ("feed", "index", "offset")

    def __init__(self, feed: Entries, offset: int) -> None:
        self.feed = feed
        self.offset = offset
        self.index = BEHIND
        self.try_live()

    def try_live(self) -> bool:
        """Continue with the feed's entries if one begins at the session's offset."""
        feed = self.feed
        contents = feed.contents
        at = bisect_left(contents, self.offset, key=_FIRST_OFFSET)
        starts_at = contents[at].first_offset if at < len(contents) else feed.stop_offset
        if starts_at != self.offset:
            return False
        self.index = feed.first_index + at
        return True

    def take_all(self) -> None:
        """The session has all entries of the feed."""
        self.index = self.feed.stop_index
        self.offset = self.feed.stop_offset

    def read_to(self, offset: int) -> None:
        """The session has, or has lost, everything before the offset, while it catches up."""
        self.offset = offset

    def go_back(self, offset: int) -> None:
        """Continue from the offset, reading from the log."""
        self.offset, self.index = offset, BEHIND

    def listen(self, receiver: Receiver) -> None:
        """Wake this connection, instead of the previous one, at a delivery."""
        self.feed.listeners[self] = receiver

    def unlisten(self) -> None:
        self.feed.listeners.pop(self, None)
