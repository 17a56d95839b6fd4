"""The columns and the header of a commit: one contract, the compiled module and its twin."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from types import ModuleType

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import compiled

from polybus.scan import Batch, rows_py
from polybus.scan.batch import rows_by_topic

_rows = compiled("rows")
BOTH = pytest.mark.parametrize("rows", [_rows, rows_py], ids=["compiled", "pure"])
START = 16
BATCHES = st.lists(
    st.builds(
        lambda topic, values, time_us, protocol, sender: _batch(
            topic, values, time_us, protocol=protocol, sender=sender
        ),
        st.sampled_from(["a", "größe", "c" * 40]),
        st.lists(st.binary(max_size=30), max_size=20),
        st.integers(1, 3),
        st.sampled_from(["goms", "boson"]),
        st.sampled_from(["127.0.0.1:1", "127.0.0.1:2", "", "\ud800"]),
    ),
    min_size=1,
    max_size=12,
)


def _batch(
    topic: str, values: list[bytes], time_us: int = 1, *, protocol: str = "p", sender: str = "s"
) -> Batch:
    made: Batch = Batch.of(topic, values)
    made.first_offset, made.timestamp_us = 5, time_us
    made.protocol, made.sender = protocol, sender
    return made


def body_of(
    rows: ModuleType,
    batches: list[Batch],
    *,
    keys: list[memoryview | None] | None = None,
    headers: list[memoryview | None] | None = None,
    beside: bool = False,
    room: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
) -> tuple[bytes, list[int]]:
    """The bytes that `write_rows` writes, and their places."""
    ordered, _, topics = rows_by_topic(batches, tuple, "default")
    account_counts = array("q", [sum(topics[2])])
    target, places = rows.write_rows(
        ordered, ["default"], account_counts, topics, keys, headers, beside, START, room
    )
    size = places[-2] + (places[-1] + 7 & ~7)
    if beside:
        size -= sum(batch.value_bytes for batch in batches) + 7 & ~7
    assert bytes(target[:START]) == bytes(START)
    return bytes(target[START : START + size]), list(places)


@given(BATCHES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_both_forms_write_the_same_columns(batches: list[Batch], beside: bool) -> None:
    assert body_of(_rows, batches, beside=beside) == body_of(rows_py, batches, beside=beside)


@BOTH
def test_buffers_lie_at_multiples_of_eight_with_their_places(rows: ModuleType) -> None:
    body, places = body_of(rows, [_batch("a", [b"one", b"three"]), _batch("a", [b""])])
    assert len(places) == 2 * rows_py.BUFFERS
    assert all(position % 8 == 0 for position in places[::2])
    at, size = places[2 * rows_py.VALUES_BUFFER :][:2]
    assert body[at : at + size] == b"\xff" * 8 + b"onethree"
    at, size = places[14:16]
    assert list(memoryview(body[at + 8 : at + size]).cast("q")) == [5, 6, 7]


@BOTH
def test_values_that_stay_beside_the_body_have_their_place_in_it(rows: ModuleType) -> None:
    batches = [_batch("a", [b"x" * 13, b"y"])]
    whole, whole_places = body_of(rows, batches)
    body, places = body_of(rows, batches, beside=True)
    assert places == whole_places
    at = places[2 * rows_py.VALUES_BUFFER] + 8
    assert body == whole[:at] + whole[at + 16 :]


@BOTH
def test_keys_and_headers_are_stored_as_they_are(rows: ModuleType) -> None:
    keys = [memoryview(b"nulls"), None, memoryview(b"keys of the rows")]
    headers: list[memoryview | None] = [memoryview(b"%d" % n) for n in range(9)]
    body, places = body_of(rows, [_batch("a", [b"1"])], keys=keys, headers=headers)
    found = [body[at : at + size] for at, size in zip(places[::2], places[1::2], strict=True)]
    stored = b"\xff" * 8
    assert found[10:13] == [stored + b"nulls", b"", stored + b"keys of the rows"]
    assert found[16:25] == [stored + b"%d" % n for n in range(9)]
    with pytest.raises(ValueError):
        body_of(rows, [_batch("a", [b"1"])], keys=keys[:2])


@BOTH
def test_columns_that_do_not_fit_their_target_are_refused(rows: ModuleType) -> None:
    with pytest.raises(IndexError):
        body_of(rows, [_batch("a", [b"1"])], room=lambda size: memoryview(bytearray(START + 8)))


@BOTH
def test_topics_of_other_batches_are_refused(rows: ModuleType) -> None:
    topics = (["a"], array("q", [0]), array("q", [2]))
    for counts in (array("q", [1]), array("q", [2])):
        with pytest.raises(ValueError):
            rows.write_rows(
                [_batch("a", [b"1"])], ["me"], counts, topics, None, None, False, 0, bytearray
            )


def test_spans_outside_their_buffer_are_refused() -> None:
    for bad in ([0, 4], [-1, 2], [2, 1]):
        batch = _batch("a", [])
        batch.buffer, batch.spans = b"abc", array("i", bad)
        with pytest.raises(IndexError):
            body_of(_rows, [batch])


@BOTH
def test_a_header_has_the_counts_of_its_rows(rows: ModuleType) -> None:
    target = memoryview(bytearray(b"." * 120))
    fields, nodes = array("q", [2, 8, 16, 24, 40]), array("q", [1, 0])
    places = array("q", [0, 9, 16, 3])
    size = rows.write_header(target, b"-" * 80, b"note", fields, nodes, 7, places)
    assert size == 24
    numbers = array("q", [24, 7, 7, 0, 0, 9, 16, 3]).tobytes()
    assert bytes(target) == b"--note--" + numbers + b"-" * 8 + b"." * 40
    for index in range(5):
        for at in (-1, 79):
            outside = fields[:]
            outside[index] = at
            with pytest.raises(IndexError):
                rows.write_header(target, b"-" * 80, b"note", outside, nodes, 7, places)


RUNS = st.lists(
    st.tuples(
        st.one_of(st.binary(max_size=20), st.sampled_from([b"x" * 300, b"x" * 70_000])),
        st.one_of(st.integers(1, 30), st.sampled_from([500, 20_000])),
    ),
    max_size=12,
).filter(lambda runs: sum(len(value) * count for value, count in runs) < 8 << 20)


@given(RUNS)
@settings(max_examples=200, deadline=None)
def test_packed_runs_are_what_arrow_unpacks(runs: list[tuple[bytes, int]]) -> None:
    plain = b"".join(value * count for value, count in runs)
    values, counts = [value for value, _ in runs], array("q", [count for _, count in runs])
    packed = _rows.pack_runs(values, counts)
    assert rows_py.pack_runs(values, counts) == packed
    assert unpacked(packed) == plain
    assert len(packed) <= (len(plain) + 8 if plain else 0)


def test_a_long_run_packs_into_next_to_nothing() -> None:
    assert len(_rows.pack_runs([b"127.0.0.1:43210"], array("q", [10_000]))) < 700


@BOTH
def test_runs_of_text_and_of_numbers_are_packed_too(rows: ModuleType) -> None:
    counts = array("q", [40, 1, 60])
    texts = ["lamp", "", "größe"]
    plain = b"".join(text.encode() * count for text, count in zip(texts, counts, strict=True))
    assert unpacked(rows.pack_runs(texts, counts)) == plain
    numbers = array("q", [1 << 50, -1, 7])
    packed = rows.pack_runs(numbers, counts)
    assert list(memoryview(unpacked(packed)).cast("q")) == [1 << 50] * 40 + [-1] + [7] * 60
    assert len(packed) < 80
    with pytest.raises(ValueError):
        rows.pack_runs(texts, counts[:2])


@BOTH
def test_runs_larger_than_a_block_are_packed_into_several(rows: ModuleType) -> None:
    runs = [(b"ab", 1), (b"0123456789" * 25, 30_000), (b"c", 3 << 20)]
    values, counts = [value for value, _ in runs], array("q", [count for _, count in runs])
    packed = rows.pack_runs(values, counts)
    assert len(packed) < 50_000
    assert unpacked(packed) == b"".join(value * count for value, count in runs)


@BOTH
def test_what_does_not_get_smaller_is_stored_though_it_is_larger_than_a_block(
    rows: ModuleType,
) -> None:
    values = [random.Random(number).randbytes(1000) for number in range(2200)]
    packed = rows.pack_runs(values, array("q", [1] * len(values)))
    assert packed == b"\xff" * 8 + b"".join(values)
    counts = array("q", [number % 2 for number in range(len(values))])
    assert unpacked(rows.pack_runs(values, counts)) == b"".join(values[1::2])


@BOTH
def test_counts_that_cannot_be_are_refused(rows: ModuleType) -> None:
    with pytest.raises(ValueError):
        rows.pack_runs([b"a"], array("q", [-1]))


def test_only_numbers_of_64_bits_are_taken_and_no_more_rows_than_a_column_has() -> None:
    short = array("i", [3, 0])
    with pytest.raises(TypeError):
        _rows.pack_runs([b"a", b"b"], short)
    with pytest.raises(TypeError):
        _rows.pack_runs(short, array("q", [1, 1]))
    with pytest.raises(OverflowError):
        _rows.pack_runs([b""], array("q", [1 << 61]))


def unpacked(packed: bytes) -> bytes:
    """A buffer of a compressed Arrow message, as pyarrow reads it."""
    size = int.from_bytes(packed[:8], "little", signed=True)
    if size < 0:
        return packed[8:]
    return pa.Codec("lz4").decompress(packed[8:], size, asbytes=True) if packed else b""
