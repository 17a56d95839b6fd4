"""Messages as Kafka records: one contract, the compiled module and its twin."""

from __future__ import annotations

from array import array
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import compiled

from polybus.batch import Batch
from polybus.scan import records_py

_records = compiled("records")
BOTH = pytest.mark.parametrize("records", [_records, records_py], ids=["compiled", "pure"])

messages = st.tuples(
    st.binary(max_size=200),
    st.none() | st.binary(max_size=9),
    st.none() | st.dictionaries(st.text(max_size=5), st.binary(max_size=200), max_size=3),
)
batches = st.lists(
    st.tuples(
        st.lists(messages, min_size=1, max_size=9),
        st.sampled_from(["goms", "boson-frames", ""]),
        st.text(max_size=12),
        st.integers(0, 1 << 50),
    ),
    min_size=1,
    max_size=5,
)


def batch_of(
    rows: list[tuple[bytes, bytes | None, dict[str, bytes] | None]],
    protocol: str = "goms",
    sender: str = "10.0.0.1:9@n1",
    time_us: int = 5_000,
) -> Batch:
    values, keys, headers = zip(*rows, strict=True)
    batch = Batch.of("t", list(values), keys=list(keys), headers=list(headers))
    batch.protocol, batch.sender, batch.timestamp_us = protocol, sender, time_us
    return batch


def rows_of(found: list[Batch]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for batch in found:
        for index, value in enumerate(batch.values()):
            key = batch.keys[index] if batch.keys is not None else None
            headers = batch.headers[index] if batch.headers is not None else None
            about = (batch.protocol, batch.sender, batch.timestamp_us // 1000)
            rows.append((batch.first_offset + index, value, key, dict(headers or {}), *about))
    return rows


@given(batches)
def test_messages_come_back_as_they_were_and_both_forms_write_the_same_bytes(
    made: list[tuple[list[tuple[bytes, bytes | None, dict[str, bytes] | None]], str, str, int]],
) -> None:
    sent = [batch_of(*one) for one in made]
    base_ms = min(batch.timestamp_us for batch in sent) // 1000
    encoded = bytes(_records.encode_records(sent, base_ms))
    assert encoded == bytes(records_py.encode_records(sent, base_ms))
    offset = 70
    expected = []
    for batch in sent:
        batch.first_offset = offset
        offset += len(batch)
        expected += rows_of([batch])
    for form in (_records, records_py):
        found = form.decode_records("t", encoded, offset - 70, 70, base_ms)
        assert rows_of(found) == expected


@BOTH
def test_a_run_of_one_sender_is_one_batch(records: ModuleType) -> None:
    mine = [batch_of([(b"a", None, None), (b"b", None, None)]) for _ in range(3)]
    encoded = records.encode_records([*mine, batch_of([(b"c", None, None)], sender="x")], 5)
    found = records.decode_records("t", encoded, 7, 0, 5)
    assert [(len(batch), batch.sender) for batch in found] == [(6, "10.0.0.1:9@n1"), (1, "x")]


def foreign(*headers: tuple[bytes, bytes | None], offset: int = 0) -> bytes:
    """A record as another producer writes it, with a null value."""

    def sized(value: bytes | None) -> bytes:
        return b"\1" if value is None else bytes([2 * len(value)]) + value

    body = b"\0\0" + bytes([2 * offset]) + sized(None) + sized(None) + bytes([2 * len(headers)])
    body += b"".join(sized(name) + sized(value) for name, value in headers)
    return bytes([2 * len(body)]) + body


@BOTH
def test_a_record_of_another_producer_is_a_message_of_protocol_kafka(records: ModuleType) -> None:
    (batch,) = records.decode_records("t", foreign((b"a", b"1"), (b"n", None)), 1, 4, 9)
    assert (batch.protocol, batch.sender, batch.first_offset) == ("kafka", "", 4)
    assert (list(batch.values()), batch.headers) == ([b""], [{"a": b"1", "n": b""}])


@BOTH
@pytest.mark.parametrize("name", [b"protocol", b"sender"])
def test_half_of_the_reserved_headers_is_the_messages_own(records: ModuleType, name: bytes) -> None:
    (batch,) = records.decode_records("t", foreign((name, b"1"), (b"z", b"2")), 1, 0, 0)
    assert (batch.protocol, batch.headers) == ("kafka", [{name.decode(): b"1", "z": b"2"}])


@BOTH
def test_a_gap_in_the_offsets_begins_a_new_batch(records: ModuleType) -> None:
    data = foreign() + foreign(offset=1) + foreign(offset=5)
    found = records.decode_records("t", data, 3, 10, 0)
    assert [(batch.first_offset, len(batch)) for batch in found] == [(10, 2), (15, 1)]


@BOTH
def test_no_record_is_cut_off_or_changed_without_being_noticed_or_crashing(
    records: ModuleType,
) -> None:
    encoded = bytes(records.encode_records([batch_of([(b"abc", b"k", {"h": b"v"})] * 3)], 5))
    for size in range(len(encoded)):
        with pytest.raises(ValueError, match="malformed"):
            records.decode_records("t", encoded[:size], 3, 0, 5)
    for at in range(len(encoded)):
        for byte in (0, 1, 0x7F, 0x80, 0xFF):
            bad = encoded[:at] + bytes([byte]) + encoded[at + 1 :]
            try:
                records.decode_records("t", bad, 3, 0, 5)
            except ValueError as error:
                assert "malformed" in str(error)


def test_spans_outside_their_buffer_are_refused() -> None:
    for bad in ([0, 4], [-1, 2], [2, 1]):
        with pytest.raises(IndexError):
            _records.encode_records([Batch("t", b"abc", array("i", bad))], 0)
