"""What needs no broker: RecordBatch v2, names in Kafka, and what a log in Kafka refuses."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from aiokafka.record.util import calc_crc32c
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.cli import main
from polybus.errors import ConfigError, StorageError, UsageError
from polybus.log.cluster_location import ClusterLocation, write_location
from polybus.log.kafka.following import committed, from_offset
from polybus.log.kafka.kafka_names import kafka_name
from polybus.log.kafka.record_batch import (
    CHECKED_FROM,
    CONTROL,
    HEADER,
    TRANSACTIONAL,
    ProducerState,
    decode_batches,
    encode_batch,
)
from polybus.testing import run_bus


def batch_of(*values: bytes) -> Batch:
    batch = Batch.of("t", values)
    batch.protocol, batch.sender, batch.timestamp_us = "goms", "s", 7_000
    return batch


def at_offset(data: bytes, offset: int, *, attributes: int | None = None) -> bytes:
    """A RecordBatch as the broker stores it: at an offset, perhaps with other attributes."""
    changed = bytearray(data)
    struct.pack_into(">q", changed, 0, offset)
    if attributes is not None:
        struct.pack_into(">h", changed, CHECKED_FROM, attributes)
        checksum = calc_crc32c(bytes(changed[CHECKED_FROM:]))
        struct.pack_into(">I", changed, CHECKED_FROM - 4, checksum)
    return bytes(changed)


@pytest.mark.parametrize("size", [3, 5000], ids=["plain", "compressed"])
def test_a_batch_comes_back_at_the_offset_that_the_broker_gave_it(size: int) -> None:
    values = [b"x" * size, b"", b"y"]
    data = at_offset(encode_batch([batch_of(*values)]), 40)
    (fetched,) = decode_batches("t", data)
    (batch,) = fetched.batches
    assert (list(batch.values()), batch.first_offset, fetched.next_offset) == (values, 40, 43)
    assert (batch.protocol, batch.sender, batch.timestamp_us) == ("goms", "s", 7_000)


def test_the_last_batch_of_a_fetch_may_be_cut_off() -> None:
    first = at_offset(encode_batch([batch_of(b"a", b"b")]), 0)
    second = at_offset(encode_batch([batch_of(b"c")]), 2)
    for size in range(len(second)):
        found = list(decode_batches("t", first + second[:size]))
        assert [one.next_offset for one in found] == [2]


def test_a_changed_byte_is_noticed() -> None:
    data = encode_batch([batch_of(b"abc" * 300)])
    for at in range(CHECKED_FROM, len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(StorageError) as caught:
            list(decode_batches("t", changed))
        assert caught.value.code == "log.damaged"


@pytest.mark.parametrize(
    ("at", "value"),
    [(8, struct.pack(">i", 36)), (8, struct.pack(">i", -1)), (8, b"\x7f\0\0\0"), (16, b"\1")],
    ids=["short", "negative", "long and another format", "another format"],
)
def test_what_no_record_batch_can_begin_with_is_damaged(at: int, value: bytes) -> None:
    """Otherwise it would be asked for again at once, and forever."""
    first = at_offset(encode_batch([batch_of(b"a")]), 0)
    changed = bytearray(at_offset(encode_batch([batch_of(b"b")]), 1))
    if value == b"\x7f\0\0\0":
        changed[16] = 1
    changed[at : at + len(value)] = value
    found = decode_batches("t", first + changed + first)
    assert next(found).next_offset == 1
    with pytest.raises(StorageError) as caught:
        next(found)
    assert caught.value.code == "log.damaged"


def test_messages_of_an_aborted_transaction_are_not_there() -> None:
    def sent(producer: int, offset: int, value: bytes) -> bytes:
        state = ProducerState(producer, 0, 0)
        return at_offset(encode_batch([batch_of(value)], state, is_transactional=True), offset)

    def marker(producer: int, offset: int) -> bytes:
        data = encode_batch([batch_of(b"end")], ProducerState(producer, 0, 0))
        return at_offset(data, offset, attributes=TRANSACTIONAL | CONTROL)

    parts = [sent(1, 0, b"no"), sent(2, 1, b"yes"), marker(1, 2), sent(1, 3, b"again")]
    data = b"".join([*parts, marker(2, 4), marker(1, 5)])
    found = list(committed("t", data, [(1, 0)]))
    values = [value for batches, _ in found for batch in batches for value in batch.values()]
    assert values == [b"yes", b"again"]
    assert found[-1][1] == 6


def test_a_fetch_begins_before_the_wanted_offset_and_is_cut() -> None:
    (fetched,) = decode_batches("t", at_offset(encode_batch([batch_of(b"a", b"b", b"c")]), 10))
    (batch,) = from_offset(fetched.batches, 11, epoch=5)
    assert (batch.first_offset, batch.epoch, list(batch.values())) == (11, 5, [b"b", b"c"])


def test_the_header_has_the_size_that_kafka_wants() -> None:
    assert HEADER.size == 61


# Names


@given(st.text(max_size=30), st.text(max_size=30))
def test_different_topics_have_different_legal_names(one: str, other: str) -> None:
    one, other = one.lower(), other.lower()
    names = [kafka_name(one), kafka_name(other)]
    assert (names[0] == names[1]) == (one == other)
    for name in names:
        assert all(char.isascii() and (char.isalnum() or char in "._-") for char in name)
        assert name not in (".", "..")


def test_ordinary_names_stay_as_they_are() -> None:
    assert kafka_name("orders.eu-1_a") == "orders.eu-1_a"
    assert kafka_name("$events") == "X24events"


def test_a_name_that_is_too_long_for_kafka_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        kafka_name("/" * 100)
    assert caught.value.code == "topic.invalid"


# Commands


@pytest.mark.parametrize(
    "command",
    [
        ["backup", "elsewhere"],
        ["compact"],
        ["tables", "expose", "t"],
    ],
    ids=lambda command: command[0],
)
def test_commands_that_read_files_refuse_a_log_in_kafka_and_name_the_setting(
    command: list[str], tmp_path: Path
) -> None:
    environ = {"POLYBUS_LOG": "kafka://127.0.0.1:1", "POLYBUS_DATA": str(tmp_path)}
    ended = CliRunner().invoke(main, command, env=environ)
    assert ended.exit_code != 0
    assert "cluster.unsupported" in ended.output
    assert "`log`" in ended.output
    write_location(tmp_path, ClusterLocation(log="kafka://127.0.0.1:2"))
    noted = CliRunner().invoke(main, command, env={"POLYBUS_DATA": str(tmp_path)})
    assert "kafka://127.0.0.1:2" in noted.output


async def test_a_folder_with_messages_in_files_is_not_hidden_by_a_log_in_kafka(
    tmp_path: Path,
) -> None:
    async with run_bus("t", data=str(tmp_path)):
        pass
    with pytest.raises(ConfigError, match="has messages in files"):
        async with run_bus("t", data=str(tmp_path), log="kafka://127.0.0.1:1"):
            pass
