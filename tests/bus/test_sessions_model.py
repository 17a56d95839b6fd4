"""Sessions against a client that is as strict as the original one: it stops at a gap."""

from __future__ import annotations

from bus_kit import new_feeds
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polybus.batch import Batch
from polybus.config import Msgstream
from polybus.services.sessions.changes import SessionChanges
from polybus.services.sessions.contents import Content, Follow, direct
from polybus.services.sessions.feeds import Feed
from polybus.services.sessions.session import Session

PACKS_MAX = 6
BYTES_MAX = 40
LIMITS = Msgstream(session_packs_max=PACKS_MAX, session_bytes_max=BYTES_MAX)
TOPICS = ("a", "b")


class Client:
    """Processes packs in the order of their numbers, and waits for a number that is missing."""

    def __init__(self) -> None:
        self.expected = 1
        self.waiting: dict[int, Content | None] = {}
        self.seen: set[tuple[str, int]] = set()
        self.order: dict[str, list[int]] = {}

    def take(self, packs: list[tuple[int, Content | None]]) -> None:
        for number, content in packs:
            if number >= self.expected:
                self.waiting[number] = content
        while self.expected in self.waiting:
            content = self.waiting.pop(self.expected)
            self.expected += 1
            if content is not None:
                for offset in range(content.first_offset, content.stop_offset):
                    self.seen.add((content.topic, offset))
                    self.order.setdefault(content.topic, []).append(offset)


class Sessions(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.all_feeds = new_feeds(LIMITS)
        self.feeds = {topic: Feed(topic, 1, 0, self.all_feeds) for topic in TOPICS}
        self.session = Session(1, b"", 60, LIMITS)
        for feed in self.feeds.values():
            self.session.follow(Follow(feed, 0))
        self.client = Client()
        self.published = {"": 0, "a": 0, "b": 0}
        self.lost = {"": 0, "a": 0, "b": 0}
        self.meant: dict[int, Content] = {}
        self.shown: list[int] = []

    @rule(topic=st.sampled_from(TOPICS), values=st.lists(st.binary(max_size=8), min_size=1))
    def publish(self, topic: str, values: list[bytes]) -> None:
        batch = Batch.of(topic, values)
        batch.epoch, batch.first_offset = 1, self.published[topic]
        self.published[topic] += len(values)
        self.feeds[topic].deliver(batch)

    @rule(size=st.integers(1, 12))
    def post(self, size: int) -> None:
        content = direct(b"x" * size, order=self.all_feeds.next_order())
        content.first_offset = self.published[""]
        self.published[""] += 1
        self.session.add(content)

    @rule(arrives=st.booleans())
    def poll(self, arrives: bool) -> None:
        session = self.session
        session.cut()
        if session.needs_mark():
            session.saved(session.take_unsaved(SessionChanges()))
        packs: list[tuple[int, Content | None]] = list(session.unconfirmed(0, 1 << 20))
        for number, content in packs:
            assert content is not None
            # A number that was shown once never means anything else.
            assert self.meant.setdefault(number, content) is content
        if packs:
            session.show(packs[-1][0])
        for lost in session.lost.values():
            self.lost[lost.topic] += lost.messages
        notice = session.take_notice(0)
        fillers: list[tuple[int, Content | None]] = [
            (number, None) for number, _ in notice if number
        ]
        self.shown = [number for number, _ in packs]
        assert self.shown == sorted(set(self.shown))
        if arrives:
            self.client.take([*fillers, *packs])

    @rule(choose=st.randoms(use_true_random=False))
    def confirm(self, choose: object) -> None:
        processed = [number for number in self.shown if number < self.client.expected]
        self.session.confirm(processed[: len(processed) // 2 + 1])

    @rule(ids=st.lists(st.integers(-5, 500)))
    def confirm_what_was_never_sent(self, ids: list[int]) -> None:
        before = self.session.pack_count
        self.session.confirm(number for number in ids if number > self.session.shown_to)
        assert self.session.pack_count == before

    @invariant()
    def it_is_bounded(self) -> None:
        if hasattr(self, "session"):
            assert self.session.pack_count <= PACKS_MAX
            assert self.session.value_bytes <= BYTES_MAX

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        self.poll(True)
        for topic, count in self.published.items():
            got = {offset for name, offset in self.client.seen if name == topic}
            # Everything was delivered or told as lost (what was lost after it was seen is both).
            assert len(got) + self.lost[topic] >= count
            order = self.client.order.get(topic, [])
            assert order == sorted(set(order))
        assert not self.client.waiting, "the client waits for a number that will never come"


Sessions.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestSessions = Sessions.TestCase


def test_numbers_that_a_crash_used_up_push_out_no_messages() -> None:
    limits = Msgstream(session_packs_max=10, session_bytes_max=1000)
    session = Session(1, b"", 60, limits)
    for _ in range(8):
        session.add(direct(b"x"))
        session.needs_mark()
        session.saved(session.take_unsaved(SessionChanges()))
        session.show(session.next_id - 1)
    session.confirm([1, 2])
    mark = session.take_unsaved(SessionChanges())
    restored = Session(1, b"", 60, limits)
    packs = {number: direct(b"x") for number in range(3, 9)}
    restored.restore(packs, [], next_id=session.next_id, mark=mark, first_id=3)
    assert restored.pack_count <= 10
    assert restored.lost == {}
