"""Consumers: what they report, how far behind they are, and what they hold back."""

from __future__ import annotations

import pytest

from polybus.config import Limits
from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.services.consumers import ConsumerPosition, Consumers, Report, lag_of
from polybus.testing import ManualClock

DAY_US = 86_400_000_000


def bounds_of(topic: str) -> Bounds:
    if topic != "news":
        raise UsageError("topic.unknown", topic)
    return Bounds(epoch=5, start=10, stop=30)


def consumers(now_us: int = 1_000) -> Consumers:
    limits = Limits(consumers_max=2, topics_per_request_max=3)
    return Consumers(bounds_of, lambda: now_us, limits)


def at(offset: int, epoch: int = 5) -> Report:
    return Report(positions={"news": ConsumerPosition(epoch, offset)})


@pytest.mark.parametrize(
    ("topic", "position", "lag", "loss", "lost"),
    [
        ("news", ConsumerPosition(5, 12), 18, "", 0),
        ("news", ConsumerPosition(5, 30), 0, "", 0),
        ("news", ConsumerPosition(5, 4), 20, "expired", 6),
        ("news", ConsumerPosition(4, 12), 20, "epoch", 0),
        ("news", ConsumerPosition(5, 31), 0, "ahead", 0),
        ("olds", ConsumerPosition(5, 12), None, "topic", 0),
    ],
)
def test_lag_counts_what_can_still_be_read_and_names_what_cannot(
    topic: str, position: ConsumerPosition, lag: int | None, loss: str, lost: int
) -> None:
    found = lag_of(topic, position, bounds_of)
    assert (found.lag, found.data_loss, found.lost) == (lag, loss, lost)


def test_the_largest_lag_of_each_topic_costs_one_look_at_its_bounds() -> None:
    asked: list[str] = []

    def noted(topic: str) -> Bounds:
        asked.append(topic)
        return bounds_of(topic)

    book = Consumers(noted, lambda: 1_000, Limits())
    assert book.lags() == {}
    places = {"news": ConsumerPosition(5, 25), "olds": ConsumerPosition(1, 2)}
    book.report("ahead", Report(positions=places))
    book.report("behind", at(12))
    book.report("between", at(20))
    for _ in range(2):
        asked.clear()
        assert book.lags() == {"news": 18, "olds": 0}
        assert sorted(asked) == ["news", "olds"]
    book.report("behind", at(30, epoch=4))
    assert book.lags()["news"] == 20
    book.forget("behind")
    assert book.lags() == {"news": 10, "olds": 0}


def test_a_report_changes_only_what_it_names() -> None:
    book = consumers()
    book.report(
        "etl", Report(kind="spark", query_id="q", positions={"News": ConsumerPosition(5, 11)})
    )
    consumer = book.report("etl", Report(rows_per_s=7.5))
    assert (consumer.kind, consumer.query_id, consumer.rows_per_s) == ("spark", "q", 7.5)
    assert consumer.positions == {"news": ConsumerPosition(5, 11)}


def test_the_last_error_stays_known_while_the_consumer_goes_on() -> None:
    book = consumers()
    assert book.report("etl", Report(last_error="boom " * 1000)).failed
    consumer = book.report("etl", at(12))
    assert not consumer.failed
    assert consumer.last_error.startswith("boom") and len(consumer.last_error) == 2000


def test_there_is_an_end_to_the_number_of_consumers() -> None:
    book = consumers()
    book.report("a", at(11))
    book.report("b", at(11))
    with pytest.raises(UsageError, match="consumers-max") as caught:
        book.report("c", at(11))
    assert caught.value.code == "consumer.too-many"
    book.forget("a")
    book.report("c", at(11))


def test_a_consumer_reads_more_topics_than_a_request_may_name() -> None:
    book = consumers()
    many = Report(positions={str(number): ConsumerPosition(1, 1) for number in range(4)})
    assert len(book.report("pipeline", many).positions) == 4


@pytest.mark.parametrize("group", ["", "x" * 256, "a\nb"])
def test_a_group_is_printable_and_short(group: str) -> None:
    with pytest.raises(UsageError) as caught:
        consumers().report(group, at(11))
    assert caught.value.code == "consumer.invalid"


def test_who_is_not_there_cannot_be_forgotten() -> None:
    with pytest.raises(UsageError) as caught:
        consumers().forget("nobody")
    assert caught.value.code == "consumer.unknown"


def test_the_slowest_consumer_of_this_epoch_holds_history_until_it_is_silent_too_long() -> None:
    clock = ManualClock()
    book = Consumers(bounds_of, clock, Limits())
    start_us = clock.now_us
    book.report("slow", at(11))
    clock.advance(s=1.0)
    book.report("quick", at(25))
    book.report("of another epoch", at(1, epoch=4))
    assert book.needed_from("news", 5, seen_after_us=start_us) == 11
    assert book.needed_from("news", 5, seen_after_us=start_us + 1) == 25
    assert book.needed_from("news", 5, seen_after_us=start_us + DAY_US) is None
    assert book.needed_from("olds", 5, seen_after_us=start_us) is None


def test_positions_are_bounded_over_all_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polybus.services.consumers.POSITIONS_MAX", 4)
    known = consumers()
    three = Report(positions={name: ConsumerPosition(1, 0) for name in "abc"})
    known.report("first", three)
    with pytest.raises(UsageError, match="over 4 positions"):
        known.report("second", three)
    with pytest.raises(UsageError, match="more than 4 topics"):
        known.report("second", Report(stopped=dict.fromkeys("abcde", "broken")))
    # The same again is no more than before.
    known.report("first", three)
    known.report("second", at(1))


def test_a_position_of_what_cannot_be_a_topic_is_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        consumers().report("first", Report(positions={"x" * 256: ConsumerPosition(1, 0)}))
