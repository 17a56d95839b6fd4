"""The bus over a log in memory: who gets what, in what order, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from bus_kit import Recorder, new_bus, wanting_receipt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.bus.subscriptions import Publisher
from polybus.errors import StorageError, UsageError
from polybus.log.memory import MemoryLog
from polybus.testing import ManualClock

# Topics


def test_a_topic_has_one_spelling_and_is_created_once() -> None:
    bus = new_bus("News")
    assert bus.has_topic("news") and not bus.has_topic("News")
    with pytest.raises(UsageError, match="topic.exists"):
        bus.create_topic("NEWS")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("$mine", "topic.reserved"),
        ("", "topic.invalid"),
        ("a\nb", "topic.invalid"),
        ("x" * 256, "topic.invalid"),
    ],
)
def test_impossible_names_are_refused(name: str, code: str) -> None:
    with pytest.raises(UsageError, match=code):
        new_bus().create_topic(name)


def test_there_is_a_limit_to_topics() -> None:
    bus = new_bus(*(f"topic-{n}" for n in range(10)))
    with pytest.raises(UsageError, match="topic.too-many"):
        bus.create_topic("one-more")
    bus.delete_topic("topic-0")
    bus.create_topic("one-more")


def test_a_deleted_topic_is_told_to_its_subscribers_and_takes_no_messages() -> None:
    bus, reader, writer = new_bus("news"), Recorder(), Recorder()
    bus.subscribe("news", reader)
    bus.delete_topic("news")
    assert bus.publish([Batch.of("news", [b"x"])], writer) == 0
    assert (reader.deleted, writer.refused, reader.got) == (["news"], ["topic.unknown"], [])
    with pytest.raises(UsageError, match="topic.unknown"):
        bus.subscribe("news", reader)
    with pytest.raises(UsageError, match="topic.unknown"):
        bus.delete_topic("news")


# Delivery


def test_a_refused_batch_does_not_hold_up_the_others() -> None:
    bus, reader, writer = new_bus("news", "sport"), Recorder(), Recorder()
    bus.subscribe("news", reader)
    batches = [Batch.of(topic, [b"x"]) for topic in ("nix", "news", "$error", "sport")]
    assert bus.publish(batches, writer, whole=b"all") > 0
    assert writer.refused == ["topic.unknown", "topic.reserved"]
    assert (reader.got, reader.whole) == ([("news", b"x")], [])


def test_a_whole_read_is_forwarded_only_to_those_who_take_all_of_it() -> None:
    bus, writer = new_bus("news", "sport"), Recorder()
    both, one = Recorder(), Recorder()
    for topic in ("news", "sport"):
        bus.subscribe(topic, both)
    bus.publish([Batch.of("news", [b"1"]), Batch.of("sport", [b"2"])], writer, whole=b"12")
    assert both.whole == [b"12"]
    bus.subscribe("news", one)
    bus.publish([Batch.of("news", [b"3"]), Batch.of("sport", [b"4"])], writer, whole=b"34")
    assert both.whole == [b"12"]
    assert both.got == [("news", b"1"), ("sport", b"2"), ("news", b"3"), ("sport", b"4")]
    assert one.got == [("news", b"3")]


@pytest.mark.parametrize("takes_own", [True, False])
def test_a_publisher_gets_its_own_messages_if_its_protocol_says_so(takes_own: bool) -> None:
    bus, both = new_bus("news", "sport"), Recorder(takes_own=takes_own)
    for topic in ("news", "sport"):
        bus.subscribe(topic, both)
    bus.publish([Batch.of("news", [b"1"])], both)
    bus.publish([Batch.of("news", [b"2"])], both, whole=b"2")
    bus.publish_joint([Batch.of("news", [b"3"]), Batch.of("sport", [b"3"])], both)
    assert len(both.got) == (2 if takes_own else 0)
    assert both.joint == ([["news", "sport"]] if takes_own else [])


def test_a_joint_message_is_one_delivery_with_the_topics_one_listens_to() -> None:
    bus, writer = new_bus("a", "b", "c"), Recorder()
    first, second, third = Recorder(), Recorder(), Recorder()
    for topic, readers in {"a": [first], "b": [first, second], "c": []}.items():
        for reader in readers:
            bus.subscribe(topic, reader)
    bus.publish_joint([Batch.of(topic, [b"x"]) for topic in ("b", "c", "a")], writer)
    assert (first.joint, second.joint, third.joint) == ([["b", "a"]], [["b"]], [])
    assert [bus.log.bounds(topic).stop for topic in "abc"] == [1, 1, 1]


def test_who_leaves_while_a_batch_is_delivered_disturbs_nobody() -> None:
    bus, writer = new_bus("news"), Recorder()
    last = Recorder()

    class Leaving(Recorder):
        def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
            super().deliver(batch, publisher)
            bus.unsubscribe("news", self)

    leaving = Leaving()
    bus.subscribe("news", leaving)
    bus.subscribe("news", last)
    for value in (b"1", b"2"):
        bus.publish([Batch.of("news", [value])], writer)
    assert (leaving.got, last.got) == ([("news", b"1")], [("news", b"1"), ("news", b"2")])


def test_a_replay_that_caught_up_goes_live_without_gap_or_repeat() -> None:
    bus, writer, reader = new_bus("news"), Recorder(), Recorder()
    for n in range(5):
        bus.publish([Batch.of("news", [b"%d" % n])], writer)
    assert bus.attach_if_recent("news", reader, 2) is None
    bus.publish([Batch.of("news", [b"5"])], writer)
    assert [value for _, value in reader.got] == [b"2", b"3", b"4", b"5"]


def test_a_replay_that_is_far_behind_gets_a_piece_and_stays_behind() -> None:
    bus, writer, reader = new_bus("news"), Recorder(), Recorder()
    for _ in range(40):
        bus.publish([Batch.of("news", [b"x" * (1 << 16)])], writer)
    reached = bus.attach_if_recent("news", reader, 0)
    assert reached is not None and 0 < reached < 40
    assert len(reader.got) == reached
    while reached is not None:
        reached = bus.attach_if_recent("news", reader, reached)
    assert len(reader.got) == 40
    bus.publish([Batch.of("news", [b"live"])], writer)
    assert reader.got[-1] == ("news", b"live")


def test_a_replay_goes_live_with_little_still_to_be_taken() -> None:
    bus, writer, reader = new_bus("news"), Recorder(), Recorder()
    for _ in range(2):
        bus.publish([Batch.of("news", [b"x" * 1_000_000])], writer)
    assert bus.attach_if_recent("news", reader, 0) == 1
    assert bus.attach_if_recent("news", reader, 1) is None
    assert len(reader.got) == 2


# The log


def test_a_topic_that_takes_no_writes_does_not_hold_up_the_others_of_a_read() -> None:
    class Frozen(MemoryLog):
        def append_all(
            self, batches: Sequence[Batch], *, urgent: bool = False, is_taken: bool = False
        ) -> int:
            raise StorageError("log.frozen", "a topic is damaged")

        def append(self, batch: Batch, *, urgent: bool = False) -> int:
            if batch.topic == "sport":
                raise StorageError("log.frozen", "sport is damaged")
            return super().append(batch, urgent=urgent)

    log = Frozen(clock=ManualClock(), bytes_max=1 << 20)
    bus, writer, reader = new_bus("news", "sport", log=log), Recorder(), Recorder()
    bus.subscribe("news", reader)
    bus.subscribe("sport", reader)
    read = [wanting_receipt("news", b"1"), wanting_receipt("sport", b"2")]
    assert bus.publish([*read, Batch.of("news", [b"3"])], writer, b"whole") > 0
    assert (writer.refused, writer.receipts) == (["log.frozen"], [read[0]])
    assert (reader.got, reader.whole) == ([("news", b"1"), ("news", b"3")], [])


def test_a_log_that_takes_no_writes_refuses_and_gives_no_receipt() -> None:
    class FullLog(MemoryLog):
        def append(self, batch: Batch, *, urgent: bool = False) -> int:
            raise StorageError("log.full", "the disk is full")

    log = FullLog(clock=ManualClock(), bytes_max=1 << 20)
    bus, writer, reader = new_bus("news", "sport", log=log), Recorder(), Recorder()
    bus.subscribe("news", reader)
    assert bus.publish([wanting_receipt("news", b"1")], writer) == 0
    assert bus.publish_joint([Batch.of("news", [b"x"]), Batch.of("sport", [b"x"])], writer) == 0
    assert writer.refused == ["log.full"] * 3
    assert (writer.receipts, reader.got, reader.joint) == ([], [], [])


def test_messages_are_stamped_with_the_buss_clock() -> None:
    clock = ManualClock()
    bus = Bus(MemoryLog(clock=clock, bytes_max=1 << 20), clock_us=clock)
    bus.create_topic("news")
    clock.advance(s=-3600)
    bus.publish([Batch.of("news", [b"x"])], Recorder())
    assert bus.log.read("news", 0)[0].timestamp_us == clock.now_us


# Everything at once, against a model

NAMES = st.sampled_from(["a", "b", "c"])
PEERS = st.integers(0, 2)


class BusMachine(RuleBasedStateMachine):
    """Topics come and go, peers subscribe and leave, and each gets exactly what the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = new_bus()
        self.peers = [Recorder(takes_own=index != 2) for index in range(3)]
        self.topics: dict[str, list[bytes]] = {}
        self.subscribed: dict[str, set[int]] = {}
        self.to_everything: set[int] = set()
        self.expected: list[list[tuple[str, bytes]]] = [[], [], []]
        self.number = 0

    @rule(name=NAMES)
    def create(self, name: str) -> None:
        if name in self.topics:
            with pytest.raises(UsageError, match="topic.exists"):
                self.bus.create_topic(name)
            return
        self.bus.create_topic(name)
        self.topics[name] = []
        self.subscribed[name] = set(self.to_everything)

    @precondition(lambda self: self.topics)
    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.topics:
            self.bus.delete_topic(name)
            del self.topics[name], self.subscribed[name]

    @rule(name=NAMES, peer=PEERS)
    def subscribe(self, name: str, peer: int) -> None:
        if name in self.topics:
            self.bus.subscribe(name, self.peers[peer])
            self.subscribed[name].add(peer)

    @rule(peer=PEERS)
    def subscribe_to_everything(self, peer: int) -> None:
        if peer in self.to_everything:
            self.bus.unsubscribe_new(self.peers[peer])
            self.to_everything.discard(peer)
        else:
            self.bus.subscribe_new(self.peers[peer])
            self.to_everything.add(peer)

    @rule(name=NAMES, peer=PEERS)
    def unsubscribe(self, name: str, peer: int) -> None:
        self.bus.unsubscribe(name, self.peers[peer])
        self.subscribed.get(name, set()).discard(peer)

    @rule(names=st.lists(NAMES, min_size=1, max_size=3, unique=True), peer=PEERS)
    def publish(self, names: list[str], peer: int) -> None:
        self.number += 1
        value = b"%d" % self.number
        self.bus.publish([Batch.of(name, [value, value]) for name in names], self.peers[peer], b"w")
        for name in names:
            if name not in self.topics:
                continue
            self.topics[name] += [value, value]
            for reader in self.subscribed[name]:
                if reader != peer or self.peers[reader].takes_own:
                    self.expected[reader] += [(name, value), (name, value)]

    @invariant()
    def everybody_got_what_the_model_says(self) -> None:
        for peer, expected in zip(self.peers, self.expected, strict=True):
            assert peer.got == expected

    @invariant()
    def the_log_has_what_was_published(self) -> None:
        assert [topic.name for topic in self.bus.topics()] == sorted(self.topics)
        for name, values in self.topics.items():
            found = [value for batch in self.bus.log.read(name, 0) for value in batch.values()]
            assert found == values


TestBusMachine = BusMachine.TestCase
TestBusMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_one_message_to_many_topics_is_refused_only_where_it_must_be() -> None:
    bus = Bus(MemoryLog(clock=ManualClock(), bytes_max=1 << 20), clock_us=ManualClock())
    bus.create_topic("a")
    publisher, reader = Recorder(), Recorder()
    bus.subscribe("a", reader)
    bus.publish_joint([Batch.of("a", [b"x"]), Batch.of("gone", [b"x"])], publisher)
    assert publisher.refused == ["topic.unknown"]
    assert reader.joint == [["a"]]


@pytest.mark.parametrize("name", ["*", "a?receipt=1", " lead", "$own", ""])
def test_a_name_that_a_protocol_would_misread_cannot_be_created(name: str) -> None:
    bus = Bus(MemoryLog(clock=ManualClock(), bytes_max=1 << 20), clock_us=ManualClock())
    with pytest.raises(UsageError):
        bus.create_topic(name)
