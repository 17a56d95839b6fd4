"""Events: deliveries and confirmations are added up, and told in bounded messages."""

from __future__ import annotations

import json
from typing import Any

from bus_kit import closed_loop, new_bus, new_feeds

from polybus.config import Msgstream
from polybus.services import events as module
from polybus.services.events import EventRecorder
from polybus.services.sessions.contents import Content, Follow
from polybus.services.sessions.feeds import Feed
from polybus.services.sessions.session import Session


class Book(EventRecorder):
    """A book whose clock the test moves, in microseconds."""

    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000
        self.asked = 0
        super().__init__(new_bus(), closed_loop(), lambda: self.now_us)

    def _write_soon(self) -> None:
        self.asked += 1

    def told(self) -> list[dict[str, Any]]:
        messages = self.take().get("$events", [])
        return [event for message in messages for event in json.loads(message)["events"]]


def session(number: int = 1) -> Session:
    return Session(
        number,
        bytes([number]) * 16,
        60.0,
        Msgstream(session_packs_max=1000, session_bytes_max=1 << 20),
    )


def packs(session: Session, *topics: str) -> list[tuple[int, Content]]:
    """Give a session a pack of two messages for each topic, as if it followed them."""
    first = session.next_id
    for number, topic in enumerate(topics):
        session._take([Content(topic, 1, number, 2)])
    session.saved(session.next_id)
    return session.unconfirmed(first - 1, 1 << 20)


def show(book: Book, session: Session, *topics: str) -> None:
    shown = packs(session, *topics)
    book.delivered(session, shown)
    session.show(shown[-1][0])


def confirm(book: Book, session: Session, *ids: int) -> None:
    held = session.pack_count
    session.confirm(ids)
    book.confirmed(session, ids, held - session.pack_count)


def test_deliveries_are_added_up_by_session_and_topic() -> None:
    book, one = Book(), session()
    show(book, one, "news", "sport", "news")
    show(book, one, "news")
    assert book.asked == 1
    found = book.told()
    assert [(event["kind"], event["topic"]) for event in found] == [
        ("delivered", "news"),
        ("delivered", "sport"),
    ]
    assert found[0] == {
        "kind": "delivered",
        "time": "2023-11-14T22:13:20.000000Z",
        "session": "01" * 16,
        "topic": "news",
        "first": 1,
        "last": 4,
        "count": 3,
        "messages": 6,
        "waiting": 4,
    }
    assert book.told() == []


def test_confirmations_say_how_long_they_took() -> None:
    book, one = Book(), session()
    show(book, one, "news")
    book.now_us += 20_000
    show(book, one, "news", "news")
    book.told()
    book.now_us += 10_000
    confirm(book, one, 1)
    confirm(book, one, 2, 3, 77)
    (event,) = book.told()
    assert event["kind"] == "confirmed"
    assert (event["first"], event["last"], event["count"], event["waiting"]) == (1, 3, 3, 0)
    assert (event["wait-ms"], event["wait-ms-max"]) == (16.667, 30.0)


def test_what_is_confirmed_twice_or_never_was_is_not_told() -> None:
    book, one = Book(), session()
    show(book, one, "news")
    confirm(book, one, 1)
    book.told()
    confirm(book, one, 1)
    confirm(book, one, 9)
    assert book.told() == []


def test_packs_that_go_out_again_are_not_counted_as_sent_twice() -> None:
    book, one = Book(), session()
    show(book, one, "news")
    book.delivered(one, one.unconfirmed(0, 1 << 20))
    delivered, repeated = book.told()
    assert (delivered["count"], repeated["kind"], repeated["count"]) == (1, "repeated", 1)


def test_packs_that_were_sent_before_a_restart_are_confirmed_without_a_time() -> None:
    book, one = Book(), session()
    one.show(packs(one, "news")[-1][0])
    confirm(book, one, 1)
    (event,) = book.told()
    assert (event["count"], event["wait-ms"]) == (1, None)


def test_a_session_that_ends_tells_what_was_pending_and_what_still_waits() -> None:
    book, one = Book(), session()
    show(book, one, "news", "news")
    book.ended(one, "expired")
    delivered, ended = book.told()
    assert (delivered["kind"], delivered["waiting"]) == ("delivered", 2)
    assert (ended["kind"], ended["reason"], ended["waiting"]) == ("session-ended", "expired", 2)


def test_telling_of_a_session_that_follows_events_would_never_end() -> None:
    book, one = Book(), session()
    one.follow(Follow(Feed("$events", 1, 0, new_feeds(Msgstream())), 0))
    show(book, one, "news")
    confirm(book, one, 1)
    assert book.told() == [] and book.asked == 0


def test_a_message_holds_a_bounded_number_of_events() -> None:
    book = Book()
    for number in range(module.EVENTS_PER_MESSAGE + 1):
        book.tell("consumer-failed", group=str(number), error="x" * 10_000)
    first, second = book.take()["$events"]
    assert len(json.loads(first)["events"]) == module.EVENTS_PER_MESSAGE
    (last,) = json.loads(second)["events"]
    assert len(last["error"]) == module.TEXT_MAX
    book.tell("session-opened", topics=["t"] * 10_000)
    (opened,) = book.told()
    assert len(opened["topics"]) == module.LIST_MAX


def test_over_the_bound_events_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 2)
    book = Book()
    for _ in range(5):
        book.tell("noise")
    *_, dropped = book.told()
    assert (dropped["kind"], dropped["count"]) == ("dropped", 3)
