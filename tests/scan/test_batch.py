"""Batch, and the bus's loops over many batches: one contract, the compiled module and its twin."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from polybus.batch import Batch
from polybus.scan import batch, plain

PURE = plain.from_source("polybus.scan.batch")
BOTH = pytest.mark.parametrize("scan", [batch, PURE], ids=["compiled", "pure"])


@dataclass
class BusTopic:
    """A topic with its figures and listeners."""

    subscribers: list[str]

    def __post_init__(self) -> None:
        self.taken: dict[str, Any] = {}


@BOTH
def test_a_batch_of_values_gives_them_back(scan: ModuleType) -> None:
    batch = scan.Batch.of("t", [b"one", b"", b"three"])
    assert len(batch) == 3
    assert list(batch.values()) == [b"one", b"", b"three"]
    assert batch.value(2) == b"three"
    assert batch.value_bytes == 8


@BOTH
def test_headers_and_keys_that_are_all_empty_are_none(scan: ModuleType) -> None:
    assert scan.Batch.of("t", [b"a"], headers=[None], keys=[None]).headers is None
    assert scan.Batch.of("t", [b"a"], headers=[{"h": b"1"}]).headers == [{"h": b"1"}]


@BOTH
def test_a_slice_shares_the_buffer_and_keeps_its_place(scan: ModuleType) -> None:
    batch = scan.Batch.of("t", [b"a", b"b", b"c"], headers=[{"n": b"0"}, None, {"n": b"2"}])
    batch.epoch, batch.first_offset, batch.sender = 7, 10, "me"
    part = batch.slice(1, 3)
    assert part.buffer is batch.buffer
    assert list(part.values()) == [b"b", b"c"]
    assert (part.epoch, part.first_offset, part.last_offset, part.sender) == (7, 11, 12, "me")
    assert part.headers == [None, {"n": b"2"}]


@BOTH
def test_an_encoding_is_made_once_for_all_subscribers(scan: ModuleType) -> None:
    made = []

    def encode(batch: Batch) -> bytes:
        made.append(batch)
        return b"encoded"

    batch = scan.Batch("t", b"abc", array("i", [0, 3]))
    assert batch.encoded("p", encode) is batch.encoded("p", encode)
    assert len(made) == 1
    batch.carry_encoding("other", b"arrived so")
    assert batch.encoded("other", encode) == b"arrived so"


@BOTH
def test_a_batch_is_told_where_it_came_from_and_where_it_is_stored(scan: ModuleType) -> None:
    batch = scan.Batch("t", b"abc", array("i", [0, 3]))
    assert (batch.keys, batch.headers, batch.receipt_ids, batch.stored) == (None, None, None, None)
    assert (batch.protocol, batch.sender, batch.timestamp_us) == ("", "", 0)
    assert (batch.epoch, batch.first_offset) == (0, -1)
    assert repr(batch) == "<Batch 't' 0:-1 of 1>"


@BOTH
def test_the_weight_counts_values_messages_and_batches(scan: ModuleType) -> None:
    batches = [scan.Batch.of("a", [b"xx", b"yyy"]), scan.Batch.of("b", [b""])]
    assert scan.weigh(batches, 10, 100) == 5 + 3 * 10 + 2 * 100
    assert scan.weigh([], 10, 100) == 0


@BOTH
def test_what_was_taken_is_counted_by_topic_and_protocol(scan: ModuleType) -> None:
    one, other = BusTopic([]), BusTopic([])
    one.taken["p"] = scan.Traffic(5, 100)
    batches = [scan.Batch.of("a", [b"xx", b"yyy"]), scan.Batch.of("b", [b""])]
    batches[0].protocol = "p"
    scan.count_taken(batches, [one, other])
    scan.count_taken(batches[:1], [one])
    traffic = one.taken["p"]
    assert (traffic.messages, traffic.value_bytes) == (9, 110)
    traffic = other.taken[""]
    assert (traffic.messages, traffic.value_bytes) == (1, 0)
    with pytest.raises(ValueError):
        scan.count_taken(batches, [one])


@BOTH
def test_topics_are_found_for_all_batches_or_for_none(scan: ModuleType) -> None:
    topics = {"a": BusTopic([]), "b": BusTopic([])}
    batches = [scan.Batch.of(name, [b"x"]) for name in ("b", "a", "b")]
    assert scan.find_topics(batches, topics, 9) == [topics["b"], topics["a"], topics["b"]]
    assert [batch.timestamp_us for batch in batches] == [9, 9, 9]
    assert scan.find_topics([*batches, scan.Batch.of("gone", [b"x"])], topics, 9) is None


@BOTH
def test_topics_listen_alike_when_all_have_the_same_subscribers(scan: ModuleType) -> None:
    one, same, other = BusTopic(["s"]), BusTopic(["s"]), BusTopic(["s", "t"])
    assert scan.listen_alike([one, same])
    assert not scan.listen_alike([one, same, other])
    assert scan.listen_alike([])


@BOTH
def test_a_receipt_is_counted_for_each_id_and_for_a_request_without(scan: ModuleType) -> None:
    three, none, whole = (scan.Batch.of("a", [b"ids"] * 4) for _ in range(3))
    three.receipt_ids = array("i", [0, 1, 2, 2, 2, 3, 3, 9])
    whole.receipt_ids = array("i")
    assert scan.count_receipts([three, none, whole]) == 4
    assert scan.count_receipts([none]) == 0


@BOTH
def test_a_batch_needs_spans(scan: ModuleType) -> None:
    with pytest.raises(TypeError):
        scan.Batch("a", b"x", None)


def test_the_source_runs_if_it_is_asked_for() -> None:
    code = "from polybus import scan; print(scan.COMPILED, scan.batch.__file__, scan.ObjectScanner)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"POLYBUS_PURE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("False ")
    assert "batch.py " in done.stdout and "goms_py" in done.stdout
