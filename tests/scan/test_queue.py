"""The scan of queue messages: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import compiled

from polybus.scan import binary_py

_queue = compiled("binary")
BOTH = pytest.mark.parametrize("scan", [_queue, binary_py], ids=["compiled", "pure"])
LIMIT = 1000


def wire(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


@BOTH
def test_a_scan_finds_the_messages_in_order(scan: ModuleType) -> None:
    data = b"xx" + wire(b"one", b"", b"three")
    assert scan.scan_values(data, 2, len(data), b"", LIMIT) == (
        len(data),
        array("i", [6, 9, 13, 13, 17, 22]),
    )
    assert scan.split_queue(data, 2, len(data), LIMIT) == (len(data), [b"one", b"", b"three"])


@BOTH
@pytest.mark.parametrize(
    "other",
    [b"", b"\0", b"\0\0\0", wire(b"unfinished")[:-1], b"\xff\xff\xff\xff", wire(b"x" * 1001)],
    ids=["nothing", "1 byte", "3 bytes", "unfinished", "negative", "too large"],
)
def test_a_scan_stops_at_what_is_no_whole_message(scan: ModuleType, other: bytes) -> None:
    data = wire(b"a") + other
    assert scan.split_queue(data, 0, len(data), LIMIT) == (5, [b"a"])
    assert scan.scan_values(data, 0, len(data), b"", LIMIT) == (5, array("i", [4, 5]))


@BOTH
def test_a_message_of_exactly_the_limit_is_whole(scan: ModuleType) -> None:
    data = wire(b"x" * LIMIT)
    assert scan.split_queue(data, 0, len(data), LIMIT)[0] == len(data)
    assert scan.scan_values(data, 0, len(data), b"", LIMIT - 1)[0] == 0


def test_a_scan_outside_its_buffer_is_refused() -> None:
    with pytest.raises(IndexError):
        _queue.scan_values(b"\0\0\0\1", 0, 6, b"", LIMIT)
    with pytest.raises(IndexError):
        _queue.split_queue(b"\0\0\0\1", 0, 6, LIMIT)


@BOTH
def test_a_run_takes_small_messages_up_to_its_size(scan: ModuleType) -> None:
    messages = [b"first", b"a", b"bb", b"ccc"]
    assert scan.join_queue(messages, 1, 100, 10) == (4, wire(b"a", b"bb", b"ccc"))
    assert scan.join_queue(messages, 1, 11, 10) == (3, wire(b"a", b"bb"))
    assert scan.join_queue(messages, 1, 10, 10) == (2, wire(b"a"))
    assert scan.join_queue(messages, 4, 100, 10) == (4, b"")


@BOTH
def test_a_run_ends_before_a_large_message(scan: ModuleType) -> None:
    assert scan.join_queue([b"a", b"large", b"b"], 0, 100, 4) == (1, wire(b"a"))
    assert scan.join_queue([b"large", b"b"], 0, 100, 4) == (0, b"")


@BOTH
def test_spans_of_a_buffer_become_messages(scan: ModuleType) -> None:
    assert scan.encode_queue(b"abc", array("i", [1, 3, 0, 0])) == wire(b"bc", b"")


def test_a_span_outside_its_buffer_is_refused() -> None:
    with pytest.raises(IndexError):
        _queue.encode_queue(b"abc", array("i", [1, 4]))


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60), st.integers(0, 40))
def test_both_scans_agree_on_what_they_join_and_split(
    messages: list[bytes], run_bytes_max: int, message_bytes_max: int
) -> None:
    joined = _queue.join_queue(messages, 0, run_bytes_max, message_bytes_max)
    assert joined == binary_py.join_queue(messages, 0, run_bytes_max, message_bytes_max)
    count, run = joined
    assert _queue.split_queue(run, 0, len(run), 40) == (len(run), messages[:count])


@given(st.binary(max_size=60))
def test_both_scans_agree_on_any_bytes(data: bytes) -> None:
    compiled = _queue.scan_values(data, 0, len(data), b"", 20)
    assert compiled == binary_py.scan_values(data, 0, len(data), b"", 20)
    assert _queue.split_queue(data, 0, len(data), 20) == binary_py.split_queue(
        data, 0, len(data), 20
    )
    end, spans = compiled
    assert _queue.encode_queue(data, spans) == binary_py.encode_queue(data, spans) == data[:end]
