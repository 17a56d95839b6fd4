"""The memory of transactions: whatever is asked again, in any order, is done once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import UsageError
from polybus.services.transactions.commits import (
    REMEMBERED_RANGES_MAX,
    CommitRecord,
    Producer,
    Producers,
    TransactionKey,
    joined,
)


def record(batch: int, *, query: str = "q", producer: str = "p", **fields: object) -> CommitRecord:
    values = {"kind": "commit", "offsets": {"t": [(1, batch, batch + 1)]}} | fields
    return CommitRecord(producer=producer, query=query, batch=batch, **values)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60))
def test_each_batch_is_done_once_and_in_order(asked: list[tuple[int, bool]]) -> None:
    producers = Producers(producers_max=10)
    done: list[int] = []
    for batch, gaps in asked:
        try:
            known = producers.decide(TransactionKey("p", "q", batch), gaps=gaps)
        except UsageError as error:
            assert error.code == "commit.gap"
            assert done
            assert batch > done[-1] + 1
            continue
        if known is None:
            done.append(batch)
            producers.apply(record(batch))
        else:
            assert batch <= done[-1]
            assert known == ({"t": [(1, batch, batch + 1)]} if batch == done[-1] else {})
    assert done == sorted(set(done))


def test_a_name_belongs_to_the_query_that_used_it_until_it_is_taken_over() -> None:
    producers = Producers(producers_max=10)
    producers.apply(record(5))
    with pytest.raises(UsageError) as caught:
        producers.decide(TransactionKey("p", "other", 0))
    assert caught.value.code == "commit.query"
    assert producers.decide(TransactionKey("p", "other", 0), take_over=True) is None
    producers.apply(record(0, query="other"))
    assert producers.decide(TransactionKey("p", "other", 1)) is None
    with pytest.raises(UsageError):
        producers.decide(TransactionKey("p", "q", 6))


def test_a_transaction_with_an_intent_is_unfinished_until_its_last_part() -> None:
    producers = Producers(producers_max=10)
    producers.apply(record(0))
    producers.apply(record(1, kind="intent", files=["f"], parts=3, part_bytes=9, offsets={}))
    producers.apply(record(1, kind="part", part=1, parts=3))
    (unfinished,) = producers.unfinished()
    assert (unfinished.parts_done, unfinished.intent.files) == (1, ["f"])
    assert producers.decide(TransactionKey("p", "q", 0)) == {"t": [(1, 0, 1)]}
    assert producers.decide(TransactionKey("p", "q", 1)) is None
    producers.apply(record(1, part=3, parts=3))
    assert producers.unfinished() == []
    assert producers.decide(TransactionKey("p", "q", 1)) == {"t": [(1, 1, 2)]}


def test_only_single_writes_are_ever_forgotten() -> None:
    producers = Producers(producers_max=3)
    producers["kept"] = Producer(name="kept", query="q", batch=7)
    for number in range(10):
        producers.apply(record(0, query="once", producer=f"once-{number}"))
    assert [*producers] == ["kept", "once-8", "once-9"]
    for number in range(2):
        producers.apply(record(0, producer=f"stream-{number}"))
    assert len(producers) == 3
    with pytest.raises(UsageError) as caught:
        producers.decide(TransactionKey("one too many", "q", 0))
    assert caught.value.code == "commit.too-many"


def test_ranges_that_touch_become_one() -> None:
    first = {"a": [(1, 0, 5)], "b": [(2, 3, 4)]}
    more = {"a": [(1, 5, 7), (1, 9, 10)], "c": [(3, 0, 1)]}
    assert joined(first, more) == {"a": [(1, 0, 7), (1, 9, 10)], "b": [(2, 3, 4)], "c": [(3, 0, 1)]}
    assert first == {"a": [(1, 0, 5)], "b": [(2, 3, 4)]}


def test_where_a_transaction_of_many_ranges_is_is_not_kept_in_memory() -> None:
    producers = Producers(producers_max=10)
    offsets = {f"t{number}": [(1, 0, 1)] for number in range(REMEMBERED_RANGES_MAX + 1)}
    producers.apply(record(0, offsets=offsets))
    assert producers.decide(TransactionKey("p", "q", 0)) == {}
