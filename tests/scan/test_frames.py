"""The scan of Boson frames: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import compiled

from polybus.batch import Batch
from polybus.scan import binary_py

_frames = compiled("binary")
BOTH = pytest.mark.parametrize("scan", [_frames, binary_py], ids=["compiled", "pure"])
LIMIT = 1000


def frame(topic: bytes, content: bytes, flag: int = 0) -> bytes:
    return binary_py.HEADER.pack(len(content), flag, len(topic)) + topic + content


def owing(buffer: bytes, ids: list[int], epoch: int, first_offset: int) -> Batch:
    """A batch of empty messages that requested receipts with these ids."""
    batch = Batch("a", buffer, array("i", [0] * len(ids)))
    batch.receipt_ids = array("i", ids)
    batch.epoch, batch.first_offset = epoch, first_offset
    return batch


def shape(scan: ModuleType, data: bytes) -> tuple[int, list[object]]:
    """What a scan found: each topic with its spans and receipts."""
    stop, _, unnamed = scan.scan_frames(data, 0, len(data), 15, 255, {}, "boson")
    return stop, [(topic, batch.spans, batch.receipt_ids) for batch, topic in unnamed]


def found(scan: ModuleType, data: bytes) -> tuple[int, dict[bytes, list[bytes]]]:
    stop, _, unnamed = scan.scan_frames(data, 0, len(data), LIMIT, 255, {}, "boson")
    return stop, {topic: list(batch.values()) for batch, topic in unnamed}


@BOTH
def test_a_scan_gathers_messages_by_topic_in_order(scan: ModuleType) -> None:
    data = frame(b"a", b"1") + frame(b"b", b"2") + frame(b"a", b"") + frame(b"a", b"4")
    assert found(scan, data) == (len(data), {b"a": [b"1", b"", b"4"], b"b": [b"2"]})


@BOTH
def test_a_scan_knows_nothing_of_the_scans_before_it(scan: ModuleType) -> None:
    for first, count in ((0, 3000), (5, 1), (2990, 40), (0, 0), (17, 300), (17, 2)):
        topics = [b"topic%d" % number for number in range(first, first + count)]
        data = b"".join(frame(topic, topic) for topic in [*topics, *reversed(topics)])
        assert found(scan, data) == (len(data), {topic: [topic, topic] for topic in topics})


@BOTH
@pytest.mark.parametrize(
    "other",
    [
        frame(b"a", b"part", flag=1),
        frame(b"$subscribe", b"a"),
        frame(b"", b"no topic"),
        frame(b"a?receipt=", b"no id"),
        frame(b"a?receipt=" + b"i" * 256, b"long id"),
        frame(b"a?other=1", b"no receipt"),
        frame(b"?receipt=1", b"no topic"),
        frame(b"t" * 256, b"long topic"),
        frame(b"a", b"x" * (LIMIT + 1)),
        b"\xff\xff\xff\xff\x00\x00\x01a",
        frame(b"a", b"unfinished")[:-1],
        b"\x00\x00\x00",
    ],
)
def test_a_scan_stops_at_what_is_not_plain(scan: ModuleType, other: bytes) -> None:
    plain = frame(b"a", b"1")
    assert found(scan, plain + other) == (len(plain), {b"a": [b"1"]})


@BOTH
def test_receipt_requests_are_found_beside_messages_without(scan: ModuleType) -> None:
    data = frame(b"a", b"1") + frame(b"a?receipt=x7", b"2") + frame(b"a", b"3")
    _, [batch], _ = scan.scan_frames(data, 0, len(data), LIMIT, 255, {b"a": "a"}, "boson")
    ids = batch.receipt_ids
    assert batch.topic == "a"
    assert [data[ids[i] : ids[i + 1]] for i in range(0, len(ids), 2)] == [b"", b"x7", b""]


@BOTH
def test_a_scan_never_looks_behind_its_end(scan: ModuleType) -> None:
    data = frame(b"a", b"1")
    assert scan.scan_frames(data, 0, len(data) - 1, LIMIT, 255, {}, "boson") == (0, [], [])


def test_spans_outside_the_buffer_are_refused() -> None:
    with pytest.raises(IndexError):
        _frames.encode_frames([Batch("a", b"short", array("i", [0, 99]))])
    with pytest.raises(IndexError):
        _frames.encode_frames([Batch("a", b"short", array("i", [3, 2]))])
    with pytest.raises(IndexError):
        _frames.encode_receipts([owing(b"short", [-1, 3], 1, 1)])
    with pytest.raises(IndexError):
        _frames.scan_frames(b"short", 0, 99, LIMIT, 255, {}, "boson")


@BOTH
def test_thousands_of_topics_in_one_scan_are_kept_apart(scan: ModuleType) -> None:
    topics = [b"topic-%d" % number for number in range(5000)]
    data = b"".join(frame(topic, topic * 2) for topic in [*topics, *reversed(topics)])
    _, groups = found(scan, data)
    assert groups == {topic: [topic * 2, topic * 2] for topic in topics}


@BOTH
def test_receipts_name_each_messages_own_offset(scan: ModuleType) -> None:
    receipts = scan.encode_receipts([owing(b"abc", [0, 1, 1, 1, 1, 3], 17, 1000)])
    assert receipts == frame(b"$receipt", b"a 17:1000") + frame(b"$receipt", b"bc 17:1002")


@BOTH
def test_a_scan_makes_batches_of_topics_whose_names_are_known(scan: ModuleType) -> None:
    data = frame(b"a", b"1") + frame(b"b?receipt=7", b"2") + frame(b"a", b"3") + b"\x00"
    names = {b"a": "a", b"b": "b"}
    stop, batches, unnamed = scan.scan_frames(data, 0, len(data), LIMIT, 255, names, "boson")
    assert unnamed == []
    assert stop == len(data) - 1
    assert [(one.topic, list(one.values()), one.protocol) for one in batches] == [
        ("a", [b"1", b"3"], "boson"),
        ("b", [b"2"], "boson"),
    ]
    assert batches[0].receipt_ids is None
    start, end = batches[1].receipt_ids
    assert data[start:end] == b"7"
    assert scan.scan_frames(b"", 0, 0, LIMIT, 255, names, "boson") == (0, [], [])


@BOTH
def test_a_batch_of_an_unknown_topic_comes_with_its_topic(scan: ModuleType) -> None:
    data = frame(b"a", b"1") + frame(b"B", b"2")
    _, [known, unknown], unnamed = scan.scan_frames(
        data, 0, len(data), LIMIT, 255, {b"a": "a"}, "boson"
    )
    assert (known.topic, unknown.topic) == ("a", "")
    [(batch, topic)] = unnamed
    assert batch is unknown and topic == b"B"
    assert list(batch.values()) == [b"2"]


@BOTH
def test_many_batches_are_encoded_as_one_after_the_other(scan: ModuleType) -> None:
    batches = [Batch.of("ä", [b"1", b""]), Batch.of("b", []), Batch.of("c", [b"22"])]
    assert scan.encode_frames(batches) == (
        frame("ä".encode(), b"1") + frame("ä".encode(), b"") + frame(b"c", b"22")
    )
    assert scan.encode_frames([]) == b""


@BOTH
def test_receipts_of_many_batches_follow_one_another(scan: ModuleType) -> None:
    asked = Batch("a", b"abc", array("i", [0, 1, 1, 2, 2, 3]))
    asked.receipt_ids = array("i", [0, 1, 1, 1, 1, 3])
    asked.epoch, asked.first_offset = 17, 9
    silent = Batch.of("b", [b"x"])
    expected = frame(b"$receipt", b"a 17:9") + frame(b"$receipt", b"bc 17:11")
    assert scan.encode_receipts([asked, silent, asked]) == 2 * expected
    assert scan.encode_receipts([silent]) == b""


chunks = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"bb", b"a?receipt=1", b"$x", b"", b"\xff"]),
        st.binary(max_size=20),
        st.integers(0, 4),
    ),
    max_size=12,
)


@given(chunks, st.binary(max_size=12), st.integers(0, 40))
def test_both_twins_find_the_same(
    frames: list[tuple[bytes, bytes, int]], garbage: bytes, cut: int
) -> None:
    data = b"".join(frame(topic, content, flag) for topic, content, flag in frames) + garbage
    data = data[: max(len(data) - cut, 0)]
    assert shape(_frames, data) == shape(binary_py, data)


@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=300),
    st.lists(st.binary(max_size=50), max_size=20),
)
def test_what_is_encoded_scans_back(topic: str, values: list[bytes]) -> None:
    batches = [Batch.of(topic, values)]
    encoded = _frames.encode_frames(batches)
    assert encoded == binary_py.encode_frames(batches)
    assert encoded == b"".join(frame(topic.encode(), value) for value in values)
