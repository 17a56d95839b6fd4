"""Feeds: what sessions follow. One feed per topic, however many sessions.

A feed remembers where each batch of its topic is in the log, not what is in it. A session remembers
how far along the feed it is. So a message costs a feed one entry, and a session that nobody listens
to nothing at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from polybus.batch import Batch, Buffer
from polybus.errors import PolybusError
from polybus.wire.msgstream import EMPTY_PACK, PROTOCOL, encode_messages

if TYPE_CHECKING:
    from polybus.services.sessions.session import Session

CACHE_BYTES_MAX = 16 << 20
PACK_BYTES = 256 << 10
"""About how many bytes of messages go into a pack when much comes at once."""


class Content:
    """What a pack holds, shared by every session that has it.

    Of a topic's messages: their place in the log, and their JSON while it is cached. Of a direct
    pack (`topic` is empty): its JSON, and the number it is stored under.

    Attributes:
        order: when it came, compared to other contents.
        value_bytes: what it counts towards a session's bound.
        holders: how many sessions hold a direct pack.
    """

    __slots__ = (
        "count",
        "epoch",
        "first_offset",
        "holders",
        "json",
        "order",
        "stored_as",
        "topic",
        "value_bytes",
    )

    def __init__(self, topic: str, epoch: int, first_offset: int, count: int) -> None:
        self.topic = topic
        self.epoch = epoch
        self.first_offset = first_offset
        self.count = count
        self.value_bytes = 0
        self.order = 0
        self.json: bytes | None = None
        self.stored_as = 0
        self.holders = 0

    @property
    def stop_offset(self) -> int:
        return self.first_offset + self.count

    def __repr__(self) -> str:
        return f"<Content {self.topic!r} {self.epoch}:{self.first_offset} of {self.count}>"


def direct(json: bytes, *, order: int = 0, stored_as: int = 0) -> Content:
    """A pack that a program posted."""
    content = Content("", 0, 0, 1)
    content.json = json
    content.value_bytes = len(json)
    content.order = order
    content.stored_as = stored_as
    return content


# The content of a pack whose number is used up while its messages are in another.
EMPTY = direct(EMPTY_PACK)
EMPTY.count = EMPTY.value_bytes = 0


class JsonCache:
    """Keeps the JSON of the contents that were used last, up to a bound."""

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


class Feed:
    """The batches of one topic since its first session came. Implements bus.Subscriber."""

    takes_own = True
    protocol = PROTOCOL

    def __init__(self, topic: str, epoch: int, stop_offset: int, shared: FeedsShared) -> None:
        self.topic = topic
        self.epoch = epoch
        self.stop_offset = stop_offset
        self.contents: list[Content] = []
        # The number of the first entry in `contents`: entries keep theirs when older ones go.
        self.first_index = 0
        self.followers: set[Session] = set()
        # The sessions among them that a client waits on.
        self.listeners: dict[Session, None] = {}
        self.deleted = False
        self._stirred = False
        self._shared = shared

    @property
    def start_offset(self) -> int:
        """From here on entries tell where messages are; below, only the log does."""
        return self.contents[0].first_offset if self.contents else self.stop_offset

    @property
    def stop_index(self) -> int:
        return self.first_index + len(self.contents)

    def index_of(self, offset: int) -> int:
        """The number of the first entry that begins at or after the offset."""
        place = bisect_left(self.contents, offset, key=lambda content: content.first_offset)
        return self.first_index + place

    def trim(self, index: int) -> None:
        """Forget entries below the index."""
        count = min(index - self.first_index, len(self.contents))
        if count > 0:
            del self.contents[:count]
            self.first_index += count

    def calm(self) -> None:
        """Its listeners have been told."""
        self._stirred = False

    # The bus calls these

    def deliver(self, batch: Batch) -> None:
        content = self._add(batch)
        if self.listeners:
            self._shared.cache.put(content, bytes(batch.encoded(PROTOCOL, encode_messages)))
            self._stir()

    def deliver_from_log(self, batches: Sequence[Batch]) -> None:
        """As `deliver`, but JSON is made when a session comes to it, in packs of a fair size."""
        for batch in batches:
            count = max(1, len(batch) * PACK_BYTES // max(batch.value_bytes, 1))
            for first in range(0, len(batch), count):
                self._add(batch.slice(first, min(first + count, len(batch))))
        if self.listeners:
            self._stir()

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

    def _stir(self) -> None:
        if not self._stirred:
            self._stirred = True
            self._shared.on_stirred(self)

    def deliver_whole(self, batches: Sequence[Batch], whole: Buffer) -> None:
        for batch in batches:
            if batch.topic == self.topic:
                self.deliver(batch)

    def deliver_joint(self, batches: Sequence[Batch]) -> None:
        self.deliver_whole(batches, b"")

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        raise AssertionError("a feed publishes nothing")

    def receipt(self, batch: Batch) -> None:
        raise AssertionError("a feed publishes nothing")

    def topic_created(self, topic: str) -> None:
        raise AssertionError("a feed has one topic")

    def topic_deleted(self, topic: str) -> None:
        self.deleted = True
        self._shared.on_deleted(self)


class FeedsShared:
    """What all feeds have in common."""

    def __init__(
        self,
        *,
        contents_max: int,
        on_stirred: Callable[[Feed], None],
        on_deleted: Callable[[Feed], None],
    ) -> None:
        self.contents_max = contents_max
        self.on_stirred = on_stirred
        self.on_deleted = on_deleted
        self.cache = JsonCache()
        self._order = 0

    def next_order(self) -> int:
        self._order += 1
        return self._order
