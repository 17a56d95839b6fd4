"""A lake table: versions, exactly once, columns that grow, files that others read."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from polybus.errors import StorageError, UsageError
from polybus.lake import delta_actions
from polybus.lake.compact import checkpoint, compact, forget, keep, tidy, vacuum
from polybus.lake.files import note_of
from polybus.lake.table import Conflict, LakeTable, TableChange, open_table, table_names
from polybus.log import delta
from polybus.log.verify.tables import table_damages, wrong_content

START = datetime(2026, 1, 31, 23, 0, tzinfo=UTC)


def rows(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    return pa.table(
        {
            "offset": pa.array(numbers, pa.int64()),
            "timestamp": pa.array(
                [START + timedelta(minutes=number) for number in numbers],
                pa.timestamp("us", "UTC"),
            ),
            "text": [f"row {number}" for number in numbers],
        }
    )


def offsets(table: LakeTable) -> list[int]:
    return sorted(table.read().column("offset").to_pylist())


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    return open_table(tmp_path, "silver")


def test_a_table_is_not_there_before_its_first_commit(table: LakeTable, tmp_path: Path) -> None:
    assert not table.exists
    assert table.files() == []
    assert table.schema is None
    assert table_names(tmp_path) == []
    with pytest.raises(UsageError, match=r"lake\.unknown.*silver"):
        table.read()
    assert not table.path.exists(), "looking makes nothing"


def test_what_was_committed_is_read_by_every_object_of_the_table(
    table: LakeTable, tmp_path: Path
) -> None:
    other = open_table(tmp_path, "silver")
    assert table.append(rows(0, 10), writer="w", batch_id=0)
    assert (other.version, other.rows, offsets(other)) == (0, 10, list(range(10)))
    table.append(rows(10, 5), writer="w", batch_id=1)
    assert (other.version, offsets(other)) == (1, list(range(15)))
    assert table_names(tmp_path) == ["silver"]


def test_a_batch_that_comes_again_adds_nothing(table: LakeTable, tmp_path: Path) -> None:
    assert table.append(rows(0, 10), writer="w", batch_id=7)
    assert not table.append(rows(0, 10), writer="w", batch_id=7)
    assert not open_table(tmp_path, "silver").append(rows(0, 10), writer="w", batch_id=6)
    assert table.append(rows(10, 1), writer="other", batch_id=7), "each writer counts for itself"
    assert offsets(table) == list(range(11))
    assert (table.last_batch("w"), table.last_batch("none")) == (7, None)


def test_a_batch_without_rows_is_remembered(table: LakeTable) -> None:
    table.append(rows(0, 1), writer="w", batch_id=0)
    assert table.commit([], writer="w", batch_id=1)
    assert not table.commit([], writer="w", batch_id=1)
    assert table.rows == 1


def test_columns_may_come_and_are_null_in_older_rows(table: LakeTable) -> None:
    table.append(rows(0, 2), writer="w", batch_id=0)
    wider = rows(2, 2).append_column("price", pa.array([1.5, 2.5]))
    table.append(wider, writer="w", batch_id=1)
    assert table.schema is not None
    assert table.schema.names == ["offset", "timestamp", "text", "price"]
    assert table.read().sort_by("offset").column("price").to_pylist() == [None, None, 1.5, 2.5]
    table.append(rows(4, 1), writer="w", batch_id=2)
    assert table.schema.names[-1] == "price", "rows without a column do not take it away"


def test_a_column_of_another_type_is_refused_and_nothing_changes(table: LakeTable) -> None:
    table.append(rows(0, 2), writer="w", batch_id=0)
    other = rows(2, 2).set_column(2, "text", pa.array([1, 2]))
    with pytest.raises(UsageError, match=r"lake\.schema: table silver: column text is long"):
        table.append(other, writer="w", batch_id=1)
    renamed = rows(2, 2).rename_columns(["offset", "timestamp", "Text"])
    with pytest.raises(UsageError, match="spell the column text as Text"):
        table.append(renamed, writer="w", batch_id=1)
    assert (table.version, table.last_batch("w")) == (0, 0)


def test_a_version_without_old_files_may_have_other_columns(table: LakeTable) -> None:
    table.append(rows(0, 2), writer="w", batch_id=0)
    note = table.write(pa.table({"text": [1, 2]}))
    table.commit([note], remove=list(table.state.files), writer="w", batch_id=None)
    assert table.schema is not None and table.schema.names == ["text"]
    assert table.read().column("text").to_pylist() == [1, 2]


def test_a_writer_that_comes_too_late_is_told_and_does_nothing(table: LakeTable) -> None:
    table.append(rows(0, 2), writer="w", batch_id=0)
    note = table.write(rows(2, 2))
    old = list(table.state.files)
    table.append(rows(2, 2), writer="other", batch_id=0)
    with pytest.raises(Conflict):
        table.commit([note], writer="w", batch_id=1, based_on=0)
    table.commit([], remove=old, writer="other", batch_id=1)
    with pytest.raises(Conflict):
        table.commit([note], remove=old, writer="w", batch_id=1)
    assert offsets(table) == [2, 3]


def test_partitions_are_folders_with_their_columns_in_the_name(table: LakeTable) -> None:
    many = rows(0, 4).append_column("topic", pa.array(["orders", "a/b c", None, "orders"]))
    many = many.append_column("date", pa.array([date(2026, 1, 31)] * 4))
    table.append(many, writer="w", batch_id=0, partition_by=["topic", "date"])
    folders = sorted(str(path.parent.relative_to(table.path)) for path in table.files())
    assert folders == [
        "topic=__HIVE_DEFAULT_PARTITION__/date=2026-01-31",
        "topic=a%2Fb c/date=2026-01-31",
        "topic=orders/date=2026-01-31",
    ]
    assert table.schema is not None
    assert table.schema.field("date").type == pa.date32()
    found = table.read().sort_by("offset")
    assert found.column("topic").to_pylist() == ["orders", "a/b c", None, "orders"]
    assert found.column("date").to_pylist() == [date(2026, 1, 31)] * 4


def test_statistics_leave_out_files_that_cannot_have_a_row(table: LakeTable) -> None:
    for batch in range(3):
        table.append(rows(batch * 10, 10), writer="w", batch_id=batch)
    all_files = table.files()
    assert table.files(offset=(10, 19)) == all_files[1:2]
    assert table.files(offset=(5, None)) == all_files
    second_us = int((START + timedelta(minutes=20)).timestamp() * 1e6)
    assert table.files(timestamp=(second_us, None)) == all_files[2:]
    assert table.files(unknown=(1, 1)) == all_files, "no statistics, no guess"


def test_other_engines_read_the_listed_files(table: LakeTable) -> None:
    for batch in range(3):
        table.append(rows(batch * 10, 10), writer="w", batch_id=batch)
    names = [str(path) for path in table.files()]
    found = duckdb.connect().execute("SELECT count(*), max(text) FROM read_parquet(?)", [names])
    assert found.fetchone() == (30, "row 9")
    assert sum(pq.read_table(name).num_rows for name in names) == 30
    assert pq.ParquetFile(names[0]).metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.slow
def test_the_log_stays_small_and_a_late_reader_finds_the_newest_version(
    table: LakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "RETENTION", "interval 0 seconds")
    early, never = open_table(tmp_path, "silver"), open_table(tmp_path, "silver")
    table.append(rows(0, 1), writer="w", batch_id=0)
    assert early.version == 0
    for batch in range(1, 95):
        table.append(rows(batch, 1), writer="w", batch_id=batch)
        tidy(table, merge=False)
    forget(table)
    assert len(list(table.folder.iterdir())) <= 2 * 20 + 3
    assert early.version == never.version == 94
    assert offsets(early) == list(range(95))
    assert not early.append(rows(0, 1), writer="w", batch_id=3), "the batches are checkpointed too"
    table.append(rows(95, 1), writer="other", batch_id=0)
    assert open_table(tmp_path, "silver").writers() == {"w", "other"}


def test_a_table_keeps_its_versions_as_long_as_it_says(table: LakeTable, tmp_path: Path) -> None:
    table.append(rows(0, 1), writer="w", batch_id=0)
    assert delta.kept_s(table.settings) == 3600
    keep(table, 0)
    table.commit([], remove=list(table.state.files), writer="w", batch_id=1)
    DeltaTable(table.path).alter.set_table_properties({delta.KEPT[0]: "interval 7 days"})
    assert delta.kept_s(table.settings) == 7 * 86_400
    assert vacuum(table) == 0
    assert offsets(open_table(tmp_path, "silver", at=0)) == [0]
    assert delta.kept_s({}) == 3600


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [
        ("interval 1 day 12 hours", 129_600),
        ("INTERVAL 2 weeks 1 minute 5 seconds", 1_209_665),
        ("90 minutes", 5400),
        ("often", None),
        ("interval 1 month", None),
        ("interval 1 day often", None),
        ("interval", None),
    ],
)
def test_an_interval_of_another_program_is_understood_or_nothing_is_removed(
    table: LakeTable, interval: str, seconds: int | None
) -> None:
    table.append(rows(0, 1), writer="w", batch_id=0)
    table.commit([], remove=list(table.state.files), writer="w", batch_id=1)
    table.change(TableChange(settings={delta.KEPT[0]: interval}))
    assert delta.kept_s(table.settings) == seconds
    assert vacuum(table) == 0


def test_a_file_is_not_removed_before_the_table_allows_it(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was removed 70 minutes ago, as seen by a clock that is two hours later."""
    now = time.time()
    table.append(rows(0, 1), writer="w", batch_id=0)
    monkeypatch.setattr(delta_actions, "now_ms", lambda: int((now - 70 * 60) * 1000))
    table.commit([], remove=list(table.state.files), writer="w", batch_id=1)
    [path] = table.path.glob("*.parquet")
    os.utime(path, (now - 7200, now - 7200))
    monkeypatch.setattr("polybus.lake.compact.time.time", lambda: now + 7200)
    keep(table, 90 * 60)
    assert vacuum(table) == 0, "it keeps it for 90 minutes"
    table.change(TableChange(settings=dict.fromkeys(delta.KEPT, "for a long time")))
    assert vacuum(table) == 0, "nobody knows how long it keeps it"
    keep(table, 60 * 60)
    assert vacuum(table) == 1


def test_a_short_setting_leaves_the_files_that_a_writer_has_not_yet_committed(
    table: LakeTable,
) -> None:
    table.append(rows(0, 1), writer="w", batch_id=0)
    keep(table, 0)
    waiting = table.write(rows(1, 1))
    assert vacuum(table) == 0
    table.commit([waiting], writer="w", batch_id=1)
    assert offsets(table) == [0, 1]


def test_a_table_that_was_deleted_and_made_again_is_a_new_one(
    table: LakeTable, tmp_path: Path
) -> None:
    other = open_table(tmp_path, "silver")
    for batch in range(3):
        table.append(rows(batch, 1), writer="w", batch_id=batch)
    assert other.version == 2
    shutil.rmtree(table.path)
    assert not other.exists
    other.append(rows(100, 1), writer="w", batch_id=0)
    assert offsets(table) == [100]


def test_writers_in_many_threads_lose_nothing_and_add_nothing_twice(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        mine = open_table(tmp_path, "silver")
        for batch in range(10):
            first = writer * 100 + batch
            for _ in range(2):
                mine.append(rows(first, 1), writer=f"w{writer}", batch_id=batch)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = open_table(tmp_path, "silver")
    expected = sorted(writer * 100 + batch for writer in range(4) for batch in range(10))
    assert offsets(table) == expected
    assert table.version == 39


def test_damage_is_named(table: LakeTable, tmp_path: Path) -> None:
    table.append(rows(0, 3), writer="w", batch_id=0)
    first = delta.version_path(table.folder, 0)
    first.write_bytes(first.read_bytes().replace(b'"add"', b'"add'))
    with pytest.raises(StorageError, match=r"lake\.damaged: table silver: "):
        _ = open_table(tmp_path, "silver").version
    (table.path / "x.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(StorageError, match=r"lake\.damaged: .*x\.parquet"):
        note_of(table.path, "x.parquet", ())


@pytest.mark.parametrize("lost", [1, 2])
def test_the_loss_of_the_newest_versions_is_not_hidden_by_a_new_one(
    table: LakeTable, tmp_path: Path, lost: int
) -> None:
    for batch in range(2):
        table.append(rows(3 * batch, 3), writer="w", batch_id=batch)
    for version in range(2 - lost, 2):
        delta.version_path(table.folder, version).unlink()
    for one in (table, open_table(tmp_path, "silver")):
        with pytest.raises(StorageError, match=r"lake\.damaged: .*1\.json: is missing"):
            one.append(rows(6, 3), writer="w", batch_id=2)
    assert table_damages(table.path, wrong_content)


def test_older_versions_can_be_read(table: LakeTable, tmp_path: Path) -> None:
    for batch in range(3):
        table.append(rows(batch, 1), writer="w", batch_id=batch)
    compact(table)
    checkpoint(table)
    assert offsets(open_table(tmp_path, "silver", at=1)) == [0, 1]
    assert offsets(open_table(tmp_path, "silver", at=datetime.now(UTC))) == [0, 1, 2]
    with pytest.raises(UsageError, match=r"lake\.version: table silver: version 9"):
        open_table(tmp_path, "silver", at=9).read()
    before = datetime.now(UTC) - timedelta(hours=1)
    with pytest.raises(UsageError, match=r"lake\.version: .* its first version .* is of 2"):
        open_table(tmp_path, "silver", at=before).read()


def test_names_that_folders_cannot_have_are_escaped(tmp_path: Path) -> None:
    for name in ("a b", "A/ü", "x~20y", "100%"):
        open_table(tmp_path, name).append(rows(0, 1), writer="w", batch_id=0)
        assert offsets(open_table(tmp_path, name)) == [0]
    assert table_names(tmp_path) == sorted(("a b", "A/ü", "x~20y", "100%"))
    with pytest.raises(UsageError, match=r"lake\.path: .*%"):
        open_table(tmp_path / "my%20data", "silver").append(rows(0, 1), writer="w", batch_id=0)


# Compaction.


def test_compaction_merges_small_files_and_changes_no_row(table: LakeTable) -> None:
    for batch in range(5):
        table.append(rows(batch * 10, 10), writer="w", batch_id=batch)
    table.append(rows(50, 1).append_column("price", pa.array([1.5])), writer="w", batch_id=5)
    before = table.read().sort_by("offset")
    assert compact(table) == 6
    assert len(table.files()) == 1
    assert table.read().sort_by("offset") == before
    assert table.last_batch("w") == 5
    assert compact(table) == 0, "one file is not merged with itself"


@pytest.mark.parametrize("read", [compact, LakeTable.read])
def test_a_flipped_bit_is_neither_read_nor_merged_into_another_file(
    table: LakeTable, tmp_path: Path, read: Callable[[LakeTable], object]
) -> None:
    for batch in range(3):
        table.append(rows(batch, 1), writer="w", batch_id=batch)
    checkpoint(table)
    table.append(rows(3, 1), writer="w", batch_id=3)
    for damaged in (table.files()[0], table.files()[3]):
        content = bytearray(whole := damaged.read_bytes())
        # The first page of the first column, which is still valid.
        content[35] ^= 64
        damaged.write_bytes(content)
        assert pq.read_table(damaged)["offset"].to_pylist() not in ([0], [3])
        with pytest.raises(StorageError, match=r"lake\.damaged: .*(checksum|CRC)"):
            read(open_table(tmp_path, "silver"))
        damaged.write_bytes(whole)
    assert offsets(table) == [0, 1, 2, 3]


def test_compaction_stays_within_partitions(table: LakeTable) -> None:
    for batch in range(4):
        many = rows(batch * 2, 2).append_column("topic", pa.array(["a", "b"]))
        table.append(many, writer="w", batch_id=batch, partition_by=["topic"])
    before = table.read().sort_by("offset")
    compact(table)
    assert sorted(path.parent.name for path in table.files()) == ["topic=a", "topic=b"]
    assert table.read().sort_by("offset") == before


def test_compaction_gives_way_to_a_writer(
    table: LakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(3):
        table.append(rows(batch, 1), writer="w", batch_id=batch)
    change = LakeTable.change
    other = open_table(tmp_path, "silver")

    def late(self: LakeTable, wanted: TableChange) -> bool:
        if not wanted.is_change:
            gone = next(iter(other.state.files))
            change(other, TableChange(remove=[gone], writer="other"))
        return change(self, wanted)

    monkeypatch.setattr(LakeTable, "change", late)
    assert compact(table) == 0
    assert offsets(table) == [1, 2]
    assert len(list(table.path.glob("*.parquet"))) == 3, "its own file is gone again"


@pytest.mark.slow
def test_a_stream_of_small_batches_leaves_few_files(table: LakeTable) -> None:
    for batch in range(100):
        table.append(rows(batch, 1), writer="w", batch_id=batch)
        tidy(table)
    assert len(table.files()) < 40
    assert offsets(table) == list(range(100))


def test_leftovers_go_after_their_grace_and_not_before(table: LakeTable) -> None:
    table.append(rows(0, 1), writer="w", batch_id=0)
    table.append(rows(1, 1), writer="w", batch_id=1)
    held = table.files()
    table.write(rows(5, 5))  # Never committed: its writer was killed.
    compact(table)
    assert vacuum(table) == 0
    assert all(path.exists() for path in held), "a reader of the version before is at work"
    assert vacuum(table, grace_s=-1) == 3
    assert table.files()[0].exists()
    assert offsets(table) == [0, 1]
    assert not any(path.exists() for path in held)


def test_a_folder_that_cannot_be_written_is_named(table: LakeTable, tmp_path: Path) -> None:
    (tmp_path / "tables").write_bytes(b"a file in the way")
    with pytest.raises(StorageError, match=r"lake\.storage: table silver"):
        table.append(rows(0, 1), writer="w", batch_id=0)
    os.unlink(tmp_path / "tables")
