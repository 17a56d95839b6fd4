"""Fetch sessions: a fetch names only the topics whose position has changed.

The broker remembers the others, and its answer names only topics with new messages (Kafka's
incremental fetch sessions, KIP-227): an idle topic costs nothing. It serves topics round-robin: one
that got messages moves to the end. If a broker has no room for a session, each request names all
topics, in that order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from aiokafka.protocol.api import Request
from aiokafka.protocol.fetch import FetchRequest_v7

from polybus.log.kafka.link import READ_COMMITTED

WAIT_MS = 250
"""How long a broker holds a fetch without messages; a new topic may wait as long."""
TOPIC_BYTES_MAX = 6 << 20
"""Larger than most full RecordBatches of a node (`producing.RECORDS_BYTES_MAX`).

A broker gives a larger one only to the first topic of a fetch that has messages.
"""
FETCH_BYTES_MAX = 16 << 20
NUMBER_MAX = 2**31 - 1


class Followed:
    """A topic that is fetched: where the next fetch begins, and where its messages go."""

    def __init__(self, topic: str, name: str, epoch: int, position: int) -> None:
        self.topic = topic
        self.name = name
        self.epoch = epoch
        self.position = position
        self.start = 0
        self.damaged_at = -1
        self.answered_by = -1


class SessionFetch(Request[FetchRequest_v7]):  # type: ignore[misc]  # aiokafka has no types
    """A request of a session. Its number is 0 if it names all topics."""

    API_KEY = 1

    def __init__(self, session: int, number: int, wanted: list[Followed], left: list[str]) -> None:
        self.session = session
        self.number = number
        self.wanted = [(one.name, [(0, one.position, -1, TOPIC_BYTES_MAX)]) for one in wanted]
        self.left = [(name, [0]) for name in left]

    def build(self, request_struct_class: type[FetchRequest_v7]) -> FetchRequest_v7:
        limits = (-1, WAIT_MS, 1, FETCH_BYTES_MAX, READ_COMMITTED)
        return request_struct_class(*limits, self.session, self.number, self.wanted, self.left)


class FetchSession:
    """The topics that one broker leads. It has one request under way."""

    def __init__(self) -> None:
        self._topics: dict[str, Followed] = {}
        self._sent: dict[str, tuple[Followed, int]] = {}
        """What the broker knows: the position of each topic."""
        self._moved: set[str] = set()
        self._left: list[str] = []
        self._session = self._number = 0

    def __bool__(self) -> bool:
        return bool(self._topics)

    def begin_again(self) -> None:
        """The broker may have forgotten the session."""
        self._session = self._number = 0

    def follow(self, topics: dict[str, Followed]) -> None:
        """Ask for these topics from now on. Those that were asked for before keep their turns."""
        kept = {name: topics[name] for name in self._topics if name in topics}
        self._topics = kept | topics
        self._moved.update(topics)
        self._left = [name for name in self._sent if name not in topics]

    def moved(self, one: Followed) -> None:
        """The position of a topic has changed."""
        self._moved.add(one.name)

    def request(self) -> SessionFetch:
        for name in self._left:
            del self._sent[name]
        left, self._left = self._left, []
        names: Collection[str] = self._moved
        if self._number == 0:
            left, names = [], self._topics
            self._sent.clear()
        wanted = []
        for name in names:
            one = self._topics.get(name)
            if one is not None and self._sent.get(name) != (one, one.position):
                self._sent[name] = (one, one.position)
                wanted.append(one)
        self._moved.clear()
        return SessionFetch(self._session, self._number, wanted, left)

    def answered(self, answer: Any) -> list[tuple[Followed, Any]] | None:
        """The topics with new data, and the broker's answer for each; None if it has no session."""
        if answer.error_code:
            self.begin_again()
            return None
        self._session = answer.session_id
        self._number = self._number % NUMBER_MAX + 1 if self._session else 0
        found = []
        for name, (partition,) in answer.topics:
            found.append((self._sent[name][0], partition))
            if partition[-1] and name in self._topics:
                self._topics[name] = self._topics.pop(name)
        return found
