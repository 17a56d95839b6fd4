"""Reading history by offset and time, and the manifest it rests on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from segments_kit import (
    DAY_US,
    NOON_US,
    bury_topic,
    expected_values,
    history_of,
    make_segment,
    make_topic,
    read_history,
    rows_batch,
)

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log.columns import SCHEMA
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.handover import hand_over
from polybus.log.history.manifest import Manifest
from polybus.log.history.topic_history import TopicHistory


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 100)


def history_of_1000(data: Path) -> Path:
    """1,000 messages, one second apart, in commits of 50."""
    folder = make_topic(data, "news")
    commits = [
        [rows_batch("news", first, 50, timestamp_us=NOON_US + first * 1_000_000)]
        for first in range(0, 1000, 50)
    ]
    make_segment(data, 1, commits)
    hand_over(data)
    return folder


def rows_at(history: TopicHistory, offset: int, *, bytes_max: int = 1 << 20) -> Any:
    """What one read gives, which is something."""
    rows = history.read(offset, bytes_max=bytes_max)
    assert rows is not None
    return rows


def test_a_topic_without_a_manifest_has_an_empty_history(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    history = history_of(tmp_path, "news")
    assert (history.start, history.handed_over) == (0, 0)
    assert history.read(0, bytes_max=1000) is None
    assert history.offset_at(0) is None


@pytest.mark.usefixtures("small_row_groups")
@pytest.mark.parametrize("offset", [0, 1, 99, 100, 101, 555, 999])
@pytest.mark.parametrize("bytes_max", [1, 300, 1 << 20])
def test_a_read_begins_at_its_offset_and_goes_on_without_gap_or_repeat(
    tmp_path: Path, offset: int, bytes_max: int
) -> None:
    history_of_1000(tmp_path)
    table = read_history(history_of(tmp_path, "news"), offset, bytes_max=bytes_max)
    assert table.schema.equals(SCHEMA)
    assert table.column("offset").to_pylist() == list(range(offset, 1000))
    assert table.column("value").to_pylist() == expected_values("news", 1000)[offset:]
    assert table.column("headers")[0].as_py() == [("n", str(offset).encode())]


def test_a_read_stays_near_its_limit(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 1000, value_bytes=1000)]])
    hand_over(tmp_path)
    rows = rows_at(history_of(tmp_path, "news"), 0, bytes_max=100_000)
    assert 50_000 < rows.nbytes < 200_000


def test_a_message_larger_than_the_limit_is_read_alone(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    batches = [rows_batch("news", n, 1, value_bytes=1 << 20 if n == 5 else 10) for n in range(10)]
    make_segment(tmp_path, 1, [batches])
    hand_over(tmp_path)
    assert rows_at(history_of(tmp_path, "news"), 5, bytes_max=100).num_rows == 1


def test_a_reader_that_comes_back_is_not_decoded_for_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history_of_1000(tmp_path)
    opened = []
    real = parquet.open_file

    def open_file(path: Path) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(parquet, "open_file", open_file)
    table = read_history(history_of(tmp_path, "news"), bytes_max=1000)
    assert table.num_rows == 1000
    assert len(opened) == 1


@pytest.mark.parametrize(("count", "value_bytes"), [(40_000, 100), (3000, 5000), (12, 2 << 20)])
def test_readers_that_never_come_back_hold_little_memory(
    tmp_path: Path, count: int, value_bytes: int
) -> None:
    """Random values: what is compressed well takes little in any case."""
    make_topic(tmp_path, "news")
    batch = Batch.of("news", [random.randbytes(value_bytes) for _ in range(count)])
    batch.epoch, batch.first_offset, batch.timestamp_us = 1, 0, NOON_US
    make_segment(tmp_path, 1, [[batch]])
    hand_over(tmp_path)
    del batch
    history = history_of(tmp_path, "news")
    before_bytes = pa.total_allocated_bytes()
    for reader in range(40):
        rows_at(history, reader % (count - 1), bytes_max=1000)
    assert pa.total_allocated_bytes() - before_bytes < 20 << 20


@pytest.mark.usefixtures("small_row_groups")
@pytest.mark.parametrize(
    ("seconds", "offset"), [(-5, 0), (0, 0), (1, 50), (50, 50), (51, 100), (950, 950), (951, None)]
)
def test_a_time_is_the_first_offset_at_or_after_it(
    tmp_path: Path, seconds: int, offset: int | None
) -> None:
    history_of_1000(tmp_path)
    assert history_of(tmp_path, "news").offset_at(NOON_US + seconds * 1_000_000) == offset


def test_a_time_is_found_though_the_clock_jumped_back(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    times = [NOON_US, NOON_US + 2 * DAY_US, NOON_US + DAY_US, NOON_US + 3 * DAY_US]
    commits = [[rows_batch("news", n * 10, 10, timestamp_us=t)] for n, t in enumerate(times)]
    make_segment(tmp_path, 1, commits)
    hand_over(tmp_path)
    history = history_of(tmp_path, "news")
    assert history.offset_at(NOON_US + DAY_US) == 10
    assert history.offset_at(NOON_US + 3 * DAY_US) == 30


def test_an_offset_that_retention_removed_is_said_to_be_unknown(tmp_path: Path) -> None:
    folder = history_of_1000(tmp_path)
    manifests.save(folder, Manifest(epoch=1, handed_over=1000, start=1000))
    with pytest.raises(UsageError, match=r"log\.offset-unknown.*1000"):
        history_of(tmp_path, "news").read(0, bytes_max=1)


def test_the_history_of_an_older_epoch_is_not_shown(tmp_path: Path) -> None:
    history_of_1000(tmp_path)
    make_topic(tmp_path, "news", epoch=2)
    with pytest.raises(StorageError, match="it has epoch 1, topic.json has 2"):
        history_of(tmp_path, "news")
    bury_topic(tmp_path, "news", epoch=1)
    history = history_of(tmp_path, "news")
    assert (history.start, history.handed_over) == (0, 0)


def test_a_file_replaced_under_a_reader_is_read_from_its_successor(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    hand_over(tmp_path)
    reader = history_of(tmp_path, "news")
    make_segment(tmp_path, 2, [[rows_batch("news", 10, 10)]])
    hand_over(tmp_path, grace_s=0)
    assert read_history(reader).column("value").to_pylist() == expected_values("news", 20)


def test_a_missing_file_is_named_with_its_offsets(tmp_path: Path) -> None:
    folder = history_of_1000(tmp_path)
    [path] = folder.glob("history/**/*.parquet")
    path.unlink()
    with pytest.raises(StorageError, match=rf"log\.damaged.*{path.name}, offsets 0 to 999.*miss"):
        history_of(tmp_path, "news").read(0, bytes_max=1)
    with pytest.raises(StorageError, match=rf"log\.damaged.*{path.name}"):
        history_of(tmp_path, "news").offset_at(NOON_US)


def test_a_flipped_bit_is_never_served(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    make_segment(tmp_path, 1, [[rows_batch("news", 0, 10)]])
    hand_over(tmp_path)
    [path] = folder.glob("history/**/*.parquet")
    intact = path.read_bytes()
    for position in range(0, len(intact), 7):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"log\.damaged"):
            history_of(tmp_path, "news").read(0, bytes_max=1)


def test_files_before_a_damaged_one_are_served(tmp_path: Path) -> None:
    folder = make_topic(tmp_path, "news")
    days = [[rows_batch("news", n * 10, 10, timestamp_us=NOON_US + n * DAY_US)] for n in range(3)]
    make_segment(tmp_path, 1, days)
    hand_over(tmp_path)
    sorted(folder.glob("history/**/*.parquet"))[1].write_bytes(b"gone")
    history = history_of(tmp_path, "news")
    assert rows_at(history, 0).num_rows == 10
    with pytest.raises(StorageError, match="offsets 10 to 19"):
        history.read(10, bytes_max=1 << 20)
    assert rows_at(history, 20).num_rows == 10


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    folder = history_of_1000(tmp_path)
    path = folder / "manifest.json"
    intact = path.read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"log\.damaged.*manifest\.json"):
            manifests.load(folder)


def test_a_manifest_is_json_with_the_documented_fields(tmp_path: Path) -> None:
    folder = history_of_1000(tmp_path)
    content = msgspec.json.decode((folder / "manifest.json").read_bytes())
    [file] = content["files"]
    assert (content["epoch"], content["start"], content["handed-over"]) == (1, 0, 1000)
    assert (file["first"], file["last"], file["rows"]) == (0, 999, 1000)
    assert file["path"] == "history/date=2024-10-04/" + f"{0:020d}-{999:020d}.parquet"
    assert file["min-timestamp-us"] == NOON_US
    assert file["max-timestamp-us"] == NOON_US + 950 * 1_000_000


def test_a_manifest_with_a_gap_is_refused(tmp_path: Path) -> None:
    folder = history_of_1000(tmp_path)
    found = manifests.load(folder)
    assert found is not None
    with pytest.raises(StorageError, match="hand-over is at 1001"):
        manifests.save(folder, msgspec.structs.replace(found, handed_over=1001))
