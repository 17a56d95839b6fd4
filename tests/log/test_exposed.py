"""A topic's history as a Delta table: delta-rs, Polars and DuckDB read it as it grows."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import duckdb
import msgspec
import polars as pl
import pyarrow as pa
import pytest
import topics_kit
from deltalake import DeltaTable, write_deltalake
from log_kit import opened_log
from segments_kit import DAY_US, NOON_US, make_segment, make_topic, rows_batch

from polybus.config import Retention
from polybus.errors import StorageError, UsageError
from polybus.log import delta
from polybus.log.history import exposed, retention
from polybus.log.history import manifest as manifests
from polybus.log.history.handover import hand_over
from polybus.log.interface import TopicSettings
from polybus.log.layout import topic_folder
from polybus.log.verify.verify import verify
from polybus.services.backup import backup, restore


def grow(data: Path, first: int, count: int = 10, *, day: int = 0) -> None:
    """Hand over a segment with some more messages of `news`."""
    batch = rows_batch("news", first, count, timestamp_us=NOON_US + day * DAY_US)
    for segment in hand_over(data, grace_s=0.0):
        segment.unlink()
    make_segment(data, first + 1, [[batch]])
    for segment in hand_over(data, grace_s=0.0):
        segment.unlink()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """The table of `news`, which has ten messages."""
    make_topic(tmp_path, "news")
    grow(tmp_path, 0)
    return exposed.expose(tmp_path, "news")


def offsets(table: Path, version: int | None = None) -> list[int]:
    return sorted(DeltaTable(table, version=version).to_pyarrow_table()["offset"].to_pylist())


def test_every_hand_over_is_one_version_for_every_reader(tmp_path: Path, table: Path) -> None:
    for number in range(1, 4):
        grow(tmp_path, 10 * number, day=number // 3)
        delta_table = DeltaTable(table)
        assert delta_table.version() == number
        assert delta_table.transaction_version(exposed.WRITER) == 10 * number + 10
        expected = list(range(10 * number + 10))
        assert offsets(table) == expected
        assert pl.read_delta(str(table)).sort("offset")["offset"].to_list() == expected
        listed = [str(table / path) for path in delta_table.file_uris()]
        rows = duckdb.read_parquet(listed).order('"offset"').fetchall()
        assert [row[2] for row in rows] == expected
        assert rows[5][5] == b"news:1:5"
    later = pl.scan_delta(str(table)).filter(pl.col("date") > pl.date(2024, 10, 4))
    assert later.collect()["offset"].to_list() == list(range(30, 40))


def test_no_row_is_copied(tmp_path: Path, table: Path) -> None:
    files = [Path(path) for path in DeltaTable(table).file_uris()]
    assert [path.stat().st_nlink for path in files] == [2]
    assert exposed.unexpose(tmp_path, "news") and not table.exists()
    assert not exposed.unexpose(tmp_path, "news")


def test_a_reader_keeps_the_files_of_its_version(tmp_path: Path, table: Path) -> None:
    begun = DeltaTable(table)
    grow(tmp_path, 10)
    assert sorted(begun.to_pyarrow_table()["offset"].to_pylist()) == list(range(10))
    assert offsets(table, version=0) == list(range(10))


def test_links_that_no_version_has_named_for_an_hour_go(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first] = DeltaTable(table).file_uris()
    grow(tmp_path, 10)
    assert os.path.exists(first)
    monkeypatch.setattr(delta, "RETENTION_S", -1.0)
    grow(tmp_path, 20)
    assert not os.path.exists(first) and offsets(table) == list(range(30))


def test_checkpoints_sum_up_versions_and_old_versions_go(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(delta, "RETENTION_S", -1.0)
    for number in range(1, 6):
        grow(tmp_path, 10 * number)
    names = sorted(path.name for path in (table / delta.LOG).iterdir())
    assert [name for name in names if name.endswith(".json")] == [
        f"{version:020d}.json" for version in (4, 5)
    ]
    assert offsets(table) == list(range(60)) and DeltaTable(table).version() == 5
    assert pl.read_delta(str(table)).height == 60


def test_retention_takes_files_out_of_the_table(tmp_path: Path, table: Path) -> None:
    grow(tmp_path, 10, day=3)
    limits = Retention(age_s=86_400.0)
    changed = retention.apply(
        tmp_path, {"news": TopicSettings()}, limits, now_us=NOON_US + 3 * DAY_US
    )
    assert changed == ["news"]
    assert offsets(table) == list(range(10, 20))
    assert offsets(table, version=1) == list(range(20))


def test_no_other_writer_can_change_the_table(table: Path) -> None:
    rows = DeltaTable(table).to_pyarrow_table()
    with pytest.raises(Exception, match="polybusHistory"):
        write_deltalake(table, rows, mode="append")
    with pytest.raises(Exception, match="polybusHistory"):
        DeltaTable(table).optimize.compact()


def test_a_damaged_table_does_not_stop_the_hand_over(
    tmp_path: Path, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delta.version_path(table / delta.LOG, 0).write_text("{")
    grow(tmp_path, 10)
    found = manifests.load(table.parent)
    assert found is not None and found.handed_over == 20
    assert "polybus tables unexpose" in caplog.text
    with pytest.raises(StorageError, match=r"lake\.damaged"):
        exposed.expose(tmp_path, "news")
    exposed.unexpose(tmp_path, "news")
    assert offsets(exposed.expose(tmp_path, "news")) == list(range(20))


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_version_is_never_made_again(tmp_path: Path, table: Path, lost: int) -> None:
    for number in (1, 2):
        grow(tmp_path, 10 * number)
    delta.version_path(table / delta.LOG, lost).unlink()
    names = sorted(path.name for path in (table / delta.LOG).iterdir())
    grow(tmp_path, 30)
    assert sorted(path.name for path in (table / delta.LOG).iterdir()) == names
    assert any("is missing" in one.reason for one in verify(tmp_path).damages)


def test_a_version_with_a_wrong_checksum_is_not_continued(tmp_path: Path, table: Path) -> None:
    path = delta.version_path(table / delta.LOG, 0)
    path.write_bytes(path.read_bytes().replace(b'"numRecords', b'"numrecords'))
    with pytest.raises(StorageError, match=r"lake\.damaged.*checksum"):
        exposed.expose(tmp_path, "news")


def test_a_damaged_file_that_only_the_table_still_has_is_named(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [link] = (Path(path) for path in DeltaTable(table).file_uris())
    # As after a kill before the table has followed its manifest.
    monkeypatch.setattr(exposed, "catch_up", lambda *_: None)
    grow(tmp_path, 10)
    assert verify(tmp_path).intact
    with link.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(32))
    [damage] = verify(tmp_path).damages
    assert damage.file == str(link) and "checksum" in damage.reason


def test_a_restored_history_file_is_the_tables_too(tmp_path: Path, table: Path) -> None:
    [link] = (Path(path) for path in DeltaTable(table).file_uris())
    original = table.parent / "history" / link.relative_to(table)
    content = original.read_bytes()
    original.write_bytes(b"damaged")
    original.unlink()
    original.write_bytes(content)
    assert link.read_bytes() == b"damaged"
    exposed.expose(tmp_path, "news")
    assert offsets(table) == list(range(10))


def test_a_backup_has_no_second_copy_and_the_next_hand_over_makes_the_table_again(
    tmp_path: Path, table: Path
) -> None:
    copy, data = tmp_path.with_name("copy"), tmp_path.with_name("restored")
    backup(tmp_path, copy)
    assert not list(copy.rglob(exposed.TABLE))
    assert exposed.is_exposed(copy / table.parent.relative_to(tmp_path))
    restore(copy, data)
    grow(data, 10)
    again = data / table.relative_to(tmp_path)
    assert offsets(again) == list(range(20)) and DeltaTable(again).version() == 1


def test_a_topic_without_history_is_an_empty_table(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    table = exposed.expose(tmp_path, "news")
    assert offsets(table) == []
    grow(tmp_path, 0)
    assert offsets(table) == list(range(10))


def test_what_cannot_be_a_table_is_refused(tmp_path: Path) -> None:
    make_topic(tmp_path / "50%", "news")
    with pytest.raises(UsageError, match=r"lake\.path.*rename the data folder"):
        exposed.expose(tmp_path / "50%", "news")
    with pytest.raises(UsageError, match=r"topic\.unknown"):
        exposed.expose(tmp_path, "missing")


def test_the_columns_are_those_of_the_log_and_the_day(table: Path) -> None:
    schema = DeltaTable(table).to_pyarrow_table().schema
    assert schema.field("timestamp").type == pa.timestamp("us", "UTC")
    assert schema.names == [
        *("account", "topic", "offset", "timestamp", "key", "value", "headers", "protocol"),
        *("sender", "date"),
    ]


def test_the_table_of_an_escaped_name_goes_with_its_topic_also_after_a_crash(
    tmp_path: Path,
) -> None:
    topics_kit.make_topic(tmp_path, "two words", count=6)
    table = exposed.expose(tmp_path, "two words")
    assert "%" not in str(table) and offsets(table) == [0, 1, 2, 3]
    topics_kit.hand_over(tmp_path)
    assert offsets(table) == list(range(6))
    saved = tmp_path / "saved"
    shutil.copytree(table, saved)
    with closing(opened_log(tmp_path, lambda: NOON_US)) as log:
        log.delete_topic("two words")
    assert not table.exists()
    shutil.move(saved, table)
    topics_kit.publish(tmp_path, "two words", [b"1"])
    topics_kit.hand_over(tmp_path)
    assert not table.exists()
    assert offsets(exposed.expose(tmp_path, "two words")) == [0]
    assert exposed.unexpose(tmp_path, "two words") and not table.exists()


def test_the_mark_of_an_earlier_version_still_exposes_a_topic(tmp_path: Path, table: Path) -> None:
    folder = table.parent
    found = manifests.load(folder)
    assert found is not None
    manifests.save(folder, msgspec.structs.replace(found, exposed=False))
    (folder / exposed.MARK).touch()
    assert exposed.exposed_folders(tmp_path) == [folder]
    grow(tmp_path, 10)
    assert offsets(table) == list(range(20)) and not (folder / exposed.MARK).exists()
    assert exposed.is_exposed(folder)
    assert exposed.unexpose(tmp_path, "news") and not table.exists()


@pytest.mark.parametrize("name", ["news", "two words"])
def test_a_table_is_not_removed_without_proof(tmp_path: Path, name: str) -> None:
    """A manifest, or a topic, that was lost says nothing about the table."""
    topics_kit.make_topic(tmp_path, name, count=4)
    topics_kit.hand_over(tmp_path)
    table = exposed.expose(tmp_path, name)
    before = sorted(table.rglob("*"))
    folder = topic_folder(tmp_path, name)
    # The conversion of an earlier version must not put an empty manifest in place of a lost one.
    (folder / exposed.MARK).touch()
    for lost in (folder / manifests.NAME, folder if name != "news" else folder / "topic.json"):
        lost.rename(tmp_path / "lost")
        assert not verify(tmp_path).intact
        hand_over(tmp_path, grace_s=0.0)
        assert sorted(table.rglob("*")) == before
        with pytest.raises((StorageError, UsageError)):
            exposed.unexpose(tmp_path, name)
        (tmp_path / "lost").rename(lost)
    assert verify(tmp_path).intact and exposed.is_exposed(folder)


def test_the_lost_manifest_of_an_empty_table_is_named(tmp_path: Path) -> None:
    make_topic(tmp_path, "news")
    table = exposed.expose(tmp_path, "news")
    (table.parent / manifests.NAME).unlink()
    [damage] = [one for one in verify(tmp_path).damages if one.topic == "news"]
    assert damage.file == str(table.parent / manifests.NAME)
    hand_over(tmp_path, grace_s=0.0)
    assert table.is_dir()
    exposed.expose(tmp_path, "news")
    assert verify(tmp_path).intact or verify(tmp_path).damages[0].topic != "news"
