"""The bytes of a commit: what goes in comes out, and no flipped bit gets through."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.log.columns import SCHEMA, batch_of
from polybus.log.journal import commit
from polybus.log.journal.commit import HEAD, Damaged, Encoder
from polybus.log.journal.message import read_rows, rows_of

VALUES = st.lists(st.binary(max_size=40), min_size=1, max_size=5)
BATCHES = st.lists(st.tuples(st.sampled_from(["a", "b", '{"commit":', "ü"]), VALUES), min_size=1)


def batches_of(described: list[tuple[str, list[bytes]]]) -> list[Batch]:
    """Batches with the offsets a log would give them."""
    stops: dict[str, int] = {}
    batches = []
    for number, (topic, values) in enumerate(described):
        batch = Batch.of(topic, values)
        batch.first_offset = stops.get(topic, 0)
        batch.epoch, batch.timestamp_us = 7, 1000 + number
        batch.protocol, batch.sender = "goms", f"peer-{number}"
        stops[topic] = batch.first_offset + len(values)
        batches.append(batch)
    return batches


@given(BATCHES)
@settings(max_examples=50, deadline=None)
def test_rows_come_back_grouped_by_topic_in_order(described: list[tuple[str, list[bytes]]]) -> None:
    pieces, topics = Encoder().encode(3, 2, batches_of(described))
    message = b"".join(pieces)
    commit.verify(message)
    rows = read_rows(message)
    rows.validate(full=True)
    note = commit.note_of(message)
    assert (note.commit, note.synced, note.topics) == (3, 2, topics)
    assert commit.size_of(message) == len(message)
    for topic_rows in note.topics:
        part = rows.slice(topic_rows.first_row, topic_rows.row_count)
        expected = [value for topic, values in described if topic == topic_rows.topic
                    for value in values]  # fmt: skip
        assert part["value"].to_pylist() == expected
        assert part["offset"].to_pylist() == list(range(len(expected)))
        assert set(part["topic"].to_pylist()) == {topic_rows.topic}


def test_a_stream_of_head_and_commits_is_plain_arrow() -> None:
    encoder = Encoder()
    stream = HEAD
    for number in range(3):
        stream += b"".join(encoder.encode(number, 0, batches_of([("a", [b"x"] * 3)]))[0])
    table = pa.ipc.open_stream(stream).read_all()
    assert table.schema.equals(SCHEMA)
    assert table.num_rows == 9


@pytest.mark.slow
def test_every_single_flipped_bit_of_a_commit_is_detected() -> None:
    # Enough rows for the repeating columns to be packed.
    batches = batches_of([("topic", [b"%d" % n for n in range(20)])])
    message = bytearray(b"".join(Encoder().encode(1, 0, batches)[0]))
    for bit in range(len(message) * 8):
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            commit.verify(message)
        message[bit // 8] ^= 1 << bit % 8
    commit.verify(message)


def test_flipped_bits_of_a_commit_are_detected_here_and_there() -> None:
    draw = random.Random(1)
    message = bytearray(
        b"".join(Encoder().encode(1, 0, batches_of([("topic", [b"x" * 100] * 50)]))[0])
    )
    for bit in draw.sample(range(len(message) * 8), 500):
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            commit.verify(message)
        message[bit // 8] ^= 1 << bit % 8


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_rubbish_is_damage_and_nothing_else(rubbish: bytes) -> None:
    for data in (rubbish, commit.CONTINUATION + rubbish):
        for look in (commit.verify, commit.size_of, commit.note_of):
            with pytest.raises(Damaged):
                look(data)


def test_values_that_do_not_compress_fit_too() -> None:
    draw = random.Random(1)
    encoder = Encoder()
    for size in (1, 1000, 1 << 20, 10 << 20):
        batch = Batch("a", draw.randbytes(size), array("i", [0, size]))
        batch.first_offset = 0
        message = b"".join(encoder.encode(1, 0, [batch])[0])
        commit.verify(message)
        assert read_rows(message)["value"][0].as_py() == batch.buffer


def test_keys_and_headers_of_some_batches_do_not_move_to_others() -> None:
    plain, rich = (
        Batch.of("a", [b"1", b"2"]),
        Batch.of("a", [b"3"], keys=[b"k"], headers=[{"h": b"v"}]),
    )
    plain.first_offset, rich.first_offset = 0, 2
    rows = read_rows(b"".join(Encoder().encode(1, 0, [plain, rich])[0]))
    assert rows["key"].to_pylist() == [None, None, b"k"]
    assert rows["headers"].to_pylist() == [None, None, [("h", b"v")]]


def test_rows_are_the_same_however_many_batches_topics_and_senders_they_came_in() -> None:
    encoder = Encoder()
    described = [
        (f"topic-{n % 7}", [b"%d-%d" % (n, m) for m in range(n % 5 * 40)]) for n in range(50)
    ]
    batches = batches_of([(topic, values) for topic, values in described if values])
    for number, batch in enumerate(batches):
        batch.sender = f"peer-{number // 3}"
    rows = read_rows(b"".join(encoder.encode(1, 0, batches)[0]))
    rows.validate(full=True)
    expected = [
        (b.topic, b.first_offset + n, b.timestamp_us, b.value(n), b.protocol, b.sender)
        for topic in dict.fromkeys(batch.topic for batch in batches)
        for b in batches if b.topic == topic
        for n in range(len(b))
    ]  # fmt: skip
    names = ["topic", "offset", "value", "protocol", "sender"]
    columns = [rows[name].to_pylist() for name in names]
    columns.insert(2, rows["timestamp"].cast(pa.int64()).to_pylist())
    assert list(zip(*columns, strict=True)) == expected
    assert set(rows["account"].to_pylist()) == {"default"}
    assert rows["key"].null_count == rows["headers"].null_count == len(rows)


def test_memory_for_one_huge_commit_is_given_back() -> None:
    encoder = Encoder()
    large, small = Batch.of("a", [bytes(10 << 10)] * (4 << 10)), Batch.of("a", [b"small"])
    large.first_offset = small.first_offset = 0
    encoder.encode(1, 0, [large])
    before = resident_kib()
    encoder.encode(2, 0, [small])
    assert resident_kib() < before - (30 << 10)


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "with keys and headers"])
def test_a_huge_value_is_not_copied_for_its_commit(rich: bool) -> None:
    large = Batch.of("a", [b"first", bytes(40 << 20), b"", b"last!"])
    if rich:
        large.keys, large.headers = [None, b"k", b"", None], [{"h": b"v", "i": b""}, None, None, {}]
    large.first_offset = 0
    encoder = Encoder()
    encoder.encode(1, 0, batches_of([("a", [b"small"])]))
    before = resident_kib()
    pieces = encoder.encode(2, 1, [large])[0]
    assert resident_kib() < before + (8 << 10)

    message = b"".join(pieces)
    commit.verify(message)
    assert commit.size_of(message) == len(message)
    rows = read_rows(message)
    rows.validate(full=True)
    assert rows["value"].to_pylist() == list(large.values())
    again = batch_of(rows, topic="a", epoch=large.epoch, first_offset=0)
    found = [headers or None for headers in again.headers or ()]
    assert (again.keys, found) == (large.keys, [{"h": b"v", "i": b""}, *[None] * 3][: 4 * rich])


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=9),
            st.none() | st.binary(max_size=9),
            st.none() | st.dictionaries(st.text(max_size=5), st.binary(max_size=9), max_size=3),
        ),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_keys_and_headers_come_back_as_they_were(
    messages: list[tuple[bytes, bytes | None, dict[str, bytes] | None]], beside: bool
) -> None:
    values, keys, headers = zip(*messages, strict=True)
    batch = Batch.of("a", values, keys=keys, headers=headers)
    batch.first_offset = 0
    with pytest.MonkeyPatch.context() as patched:
        if beside:
            patched.setattr("polybus.log.journal.message.BESIDE_BYTES_MIN", 0)
        message = b"".join(Encoder().encode(1, 0, [batch])[0])
    commit.verify(message)
    rows = read_rows(message)
    rows.validate(full=True)
    assert rows["value"].to_pylist() == list(values)
    assert rows["key"].to_pylist() == list(keys)
    found = [None if one is None else dict(one) for one in rows["headers"].to_pylist()]
    assert found == [one or None for one in headers]


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1])


def test_a_batch_becomes_rows_and_the_rows_that_batch_again() -> None:
    headers = [None, {"h": b"v", "i": b""}]
    batch = Batch.of("a", [b"1", b"22"], keys=[b"k", None], headers=headers)
    batch.first_offset, batch.epoch, batch.timestamp_us = 5, 7, 1000
    batch.protocol, batch.sender = "goms", "peer"
    again = batch_of(rows_of(batch), topic="a", epoch=7, first_offset=5)
    assert list(again.values()) == [b"1", b"22"]
    assert (again.keys, again.headers) == (batch.keys, headers)
    assert (again.timestamp_us, again.protocol, again.sender) == (1000, "goms", "peer")
    assert rows_of(again) is again.stored
