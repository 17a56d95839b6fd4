"""The model of a session: a client that knows what it must be given.

It takes packs in the order of their numbers, stops at a missing one, and remembers what each number
meant when it was shown last. From that follows what it was given: every message of its topics once
and in order, unless a notice has counted it as lost.
"""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from typing import Any

from model_life import TOPICS

EMPTY: list[Any] = []
Key = tuple[str, int]


class Listener:
    """A connection that only knows whether it was woken."""

    def __init__(self) -> None:
        self.is_woken = False

    def wake(self) -> None:
        self.is_woken = True

    def replaced(self) -> None: ...

    def ended(self) -> None: ...

    def shut_down(self) -> None: ...


@dataclass
class Following:
    """A session follows a topic from one offset to another, until it leaves it."""

    key: Key
    start: int
    stop: int | None = None
    is_left: bool = False


@dataclass
class Client:
    """A session as its client sees it.

    Attributes:
        followed: what it must be given.
        may_follow: the topics of a change without an answer.
        meaning: what each number was when it was shown last, or when it was confirmed.
        taken: it has all packs up to this number.
        waits_for: the next number, if later ones came without it.
        sent_to: the last number on its connection.
        confirmed: numbers that it has confirmed; whether that is on disk.
        firm: numbers that it was shown before the last save.
        posted: direct packs; whether they had an answer.
        told_lost: how many messages notices have counted, by topic; "" for direct packs.
        deletions: topics that were deleted while it followed them; whether that had an answer.
    """

    key: str
    followed: list[Following] = field(default_factory=list)
    may_follow: list[str] | None = None
    meaning: dict[int, Any] = field(default_factory=dict)
    taken: int = 0
    waits_for: int = 0
    sent_to: int = 0
    listener: Listener | None = None
    confirmed: dict[int, bool] = field(default_factory=dict)
    firm: set[int] = field(default_factory=set)
    posted: dict[str, bool] = field(default_factory=dict)
    told_lost: collections.Counter[Key] = field(default_factory=collections.Counter)
    is_told: bool = False
    deletions: collections.Counter[str] = field(default_factory=collections.Counter)
    is_restored: bool = False
    is_ending: bool = False

    def topics(self) -> list[str]:
        return [one.key[0] for one in self.followed if one.stop is None]

    def take(self, packs: list[tuple[int, bytes]], sent: dict[Key, list[str]]) -> None:
        """Take packs as they came; `sent` is what the log has."""
        numbers = [number for number, _ in packs]
        assert numbers == sorted(set(numbers)), numbers
        self.waits_for = 0
        for number, text in packs:
            content = json.loads(text)
            if not number:
                self.take_notice(content)
                continue
            assert not self.confirmed.get(number), f"pack {number} was confirmed and saved"
            if number in self.meaning:
                self._check_meaning(number, content, sent)
            elif number == self.taken + 1:
                self.taken = number
            else:
                # It comes again until it is confirmed.
                self.waits_for = self.taken + 1
                continue
            if number in self.confirmed and content == EMPTY:
                # The confirmation was lost, and then the pack: its client has it.
                continue
            self.meaning[number] = content
        self.sent_to = max([self.sent_to, *numbers])

    def _check_meaning(self, number: int, content: Any, sent: dict[Key, list[str]]) -> None:
        before = self.meaning[number]
        if content == before:
            return
        stored = {value for values in sent.values() for value in values}
        kept = [one for one in before if one[0] not in TOPICS or one[1] in stored]
        is_lost = content == kept and len(kept) < len(before)
        assert content in (EMPTY, kept), f"pack {number} was {before} and is {content}"
        if content == EMPTY and not is_lost:
            assert self.is_restored or self.is_told, f"pack {number} is empty"
            assert number not in self.firm or self.is_told, f"pack {number} is empty"

    def take_notice(self, content: Any) -> None:
        for kind, lost in content:
            assert kind == "session.overflow", kind
            self.is_told = True
            if lost["topic"] is None:
                self.told_lost["", 0] += lost["count"]
            else:
                epoch = int(lost["position"].split(":")[0])
                self.told_lost[lost["topic"], epoch] += lost["count"]

    # What it was given

    def check(self, sent: dict[Key, list[str]], *, is_all: bool) -> None:
        """Everything at most once and in order; with `is_all` also that nothing is missing."""
        places = {
            value: (key, offset)
            for key, values in sent.items()
            for offset, value in enumerate(values)
        }
        given: dict[Key, list[int]] = {}
        posted: collections.Counter[str] = collections.Counter()
        deleted: collections.Counter[str] = collections.Counter()
        for number in sorted(self.meaning):
            for kind, *data in self.meaning[number]:
                if kind == "direct":
                    posted[data[0]] += 1
                elif kind == "topic.deleted":
                    deleted[data[0]["topic"]] += 1
                elif data[0] in places:
                    key, offset = places[data[0]]
                    assert key[0] == kind, f"{data[0]} of {key} came as {kind}"
                    given.setdefault(key, []).append(offset)
        for key, offsets in given.items():
            assert offsets == sorted(set(offsets)), f"{key}: {offsets} in {self.meaning}"
            allowed = {offset for one in self._of(key) for offset in _range(one, sent)}
            assert allowed.issuperset(offsets), f"{key}: {offsets} of {allowed}"
        assert all(count == 1 for count in posted.values()), posted
        assert posted.keys() <= self.posted.keys()
        if is_all:
            self._check_all(given, posted, deleted, sent)

    def _check_all(
        self,
        given: dict[Key, list[int]],
        posted: collections.Counter[str],
        deleted: collections.Counter[str],
        sent: dict[Key, list[str]],
    ) -> None:
        staying = [one for one in self.followed if not one.is_left]
        for key in {one.key for one in staying}:
            wanted = {at for one in staying if one.key == key for at in _range(one, sent)}
            missing = wanted.difference(given.get(key, []))
            assert len(missing) <= self.told_lost[key], f"{key}: {missing}, {self}"
        missing_posts = {one for one, is_sure in self.posted.items() if is_sure} - posted.keys()
        missing_notices = sum((self.deletions - deleted).values())
        count = len(missing_posts) + missing_notices
        assert count <= self.told_lost["", 0], (
            f"{missing_posts}, {self.deletions} {deleted}, {self}"
        )
        assert deleted <= self.deletions, f"{deleted} of {self.deletions}"

    def _of(self, key: Key) -> list[Following]:
        return [one for one in self.followed if one.key == key]


def _range(one: Following, sent: dict[Key, list[str]]) -> range:
    stop = len(sent[one.key]) if one.stop is None else one.stop
    return range(one.start, stop)
