"""A lake table as a stream: added rows once, in order of versions, and errors instead of gaps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.errors import StorageError, UsageError
from polybus.lake.compact import checkpoint, compact, keep, vacuum
from polybus.lake.following import BatchLimit, FollowedTable, TablePosition
from polybus.lake.table import LakeTable, TableChange, open_table
from polybus.log.delta import CHECKPOINT_EVERY, version_path

START = TablePosition()


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    return open_table(tmp_path, "silver")


def add(table: LakeTable, *numbers: int) -> None:
    """A version with a file for each number."""
    notes = [table.write(pa.table({"n": [number]})) for number in numbers]
    table.commit(notes, writer="w", batch_id=None)


def numbers(table: LakeTable, start: TablePosition, end: TablePosition) -> list[int]:
    """What a stream reads that was started again, so it knows nothing."""
    found = []
    for one in FollowedTable(table.path).files(start, end):
        part = pq.read_table(table.path / one.path)["n"].to_pylist()[one.start : one.stop]
        assert one.rows == len(part)
        found += part
    return found


def stream(table: LakeTable, start: TablePosition, limit: BatchLimit) -> list[list[int]]:
    """The batches until there is nothing to read."""
    batches = []
    while (end := FollowedTable(table.path).end_of_batch(start, limit)) != start:
        batches.append(numbers(table, start, end))
        start = end
    return batches


def test_a_stream_begins_with_the_whole_table_and_continues_with_what_is_added(
    table: LakeTable,
) -> None:
    add(table, 1, 2)
    add(table, 3)
    followed = FollowedTable(table.path)
    end = followed.end_of_batch(START, BatchLimit())
    assert sorted(numbers(table, START, end)) == [1, 2, 3]
    assert followed.end_of_batch(end, BatchLimit()) == end
    add(table, 4)
    later = followed.end_of_batch(end, BatchLimit())
    assert numbers(table, end, later) == [4]


def test_the_first_batch_stays_the_same_when_it_runs_again_later(table: LakeTable) -> None:
    add(table, 1)
    end = FollowedTable(table.path).end_of_batch(START, BatchLimit())
    add(table, 2)
    compact(table)
    assert numbers(table, START, end) == [1]


def test_a_stream_waits_for_a_table_that_is_not_there_yet(table: LakeTable) -> None:
    followed = FollowedTable(table.path)
    assert followed.newest() == -1
    assert followed.end_of_batch(START, BatchLimit()) == START
    assert followed.files(START, START) == []
    add(table, 1)
    assert numbers(table, START, followed.end_of_batch(START, BatchLimit())) == [1]


@pytest.mark.parametrize("limit", [BatchLimit(2), BatchLimit(rows=2), BatchLimit(9, 900)])
def test_a_batch_has_limits_and_at_least_one_row(table: LakeTable, limit: BatchLimit) -> None:
    add(table, 1, 2, 3)
    sizes = [file.bytes for file in table.state.files.values()]
    add(table, 4, 5)
    assert limit.bytes is None or max(sizes) < limit.bytes < 2 * min(sizes)
    batches = stream(table, START, limit)
    assert sorted(sum(batches, [])) == [1, 2, 3, 4, 5]
    assert {len(batch) for batch in batches} <= ({1} if limit.bytes else {1, 2})
    assert len(stream(table, START, BatchLimit(1, bytes=1, rows=1))) == 5


def test_a_file_that_is_larger_than_a_batch_is_read_in_several(table: LakeTable) -> None:
    note = table.write(pa.table({"n": range(10)}))
    table.commit([note], writer="w", batch_id=None)
    add(table, 10)
    add(table, 11)
    parts = stream(table, START, BatchLimit(rows=4))
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    parts = stream(table, START, BatchLimit(bytes=note.file.bytes // 2))
    assert [number for part in parts for number in part] == [*range(12)]
    assert [len(part) for part in parts[:2]] == [5, 5]


def test_a_file_without_a_count_of_rows_is_cut_by_its_own(table: LakeTable) -> None:
    note = table.write(pa.table({"n": range(10)}))
    note = replace(note, file=replace(note.file, rows=0))
    table.commit([note], writer="w", batch_id=None)
    assert stream(table, START, BatchLimit(rows=6)) == [[*range(6)], [6, 7, 8, 9]]


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    begun_after=st.integers(0, 5),
    limit=st.builds(BatchLimit, st.integers(1, 4), rows=st.none() | st.integers(1, 4)),
    compacted=st.sets(st.integers(0, 5)),
)
def test_every_row_is_read_once_however_batches_and_versions_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    versions: list[int],
    begun_after: int,
    limit: BatchLimit,
    compacted: set[int],
) -> None:
    table = open_table(tmp_path_factory.mktemp("data"), "t")
    add(table, 0)  # a table has columns
    start, found, number = START, list[int](), 1
    for index, count in enumerate(versions):
        add(table, *range(number, number + count))
        number += count
        table.append(pa.table({"n": range(number, number + 3)}), writer="w", batch_id=None)
        number += 3
        if index in compacted:
            compact(table)
        if index >= begun_after:
            end = FollowedTable(table.path).end_of_batch(start, limit)
            found += numbers(table, start, end)
            start = end
    found += sum(stream(table, start, limit), [])
    assert sorted(found) == list(range(number))


def test_compaction_and_settings_give_no_rows(table: LakeTable) -> None:
    add(table, 1)
    followed = FollowedTable(table.path)
    end = followed.end_of_batch(START, BatchLimit())
    add(table, 2)
    add(table, 3)
    assert compact(table) == 3
    keep(table, 7200)
    later = followed.end_of_batch(end, BatchLimit())
    assert numbers(table, end, later) == [2, 3]
    table.change(TableChange(writer="w", batch=1))
    assert followed.end_of_batch(later, BatchLimit()) == later


def test_a_position_does_not_stay_at_versions_that_upkeep_may_remove(table: LakeTable) -> None:
    add(table, 1)
    followed = FollowedTable(table.path)
    end = followed.end_of_batch(START, BatchLimit())
    for batch in range(CHECKPOINT_EVERY):
        table.change(TableChange(writer="w", batch=batch))
    later = followed.end_of_batch(end, BatchLimit())
    assert later.version == CHECKPOINT_EVERY + 1
    assert numbers(table, end, later) == []
    checkpoint(table)
    for version in range(CHECKPOINT_EVERY):
        version_path(table.folder, version).unlink()
    add(table, 2)
    assert numbers(table, later, followed.end_of_batch(later, BatchLimit())) == [2]


def test_a_version_without_a_file_of_its_own_is_no_news(table: LakeTable) -> None:
    add(table, 1)
    end = FollowedTable(table.path).end_of_batch(START, BatchLimit())
    checkpoint(table)
    version_path(table.folder, 0).unlink()
    assert FollowedTable(table.path).end_of_batch(end, BatchLimit()) == end


def test_removed_rows_end_a_stream_unless_they_are_skipped(table: LakeTable) -> None:
    add(table, 1)
    end = FollowedTable(table.path).end_of_batch(START, BatchLimit())
    note = table.write(pa.table({"n": [10]}))
    table.commit([note], remove=list(table.state.files), writer="w", batch_id=None)
    add(table, 2)
    with pytest.raises(UsageError) as caught:
        FollowedTable(table.path).end_of_batch(end, BatchLimit())
    assert caught.value.code == "lake.rows-changed"
    assert "silver: version 1 removes or changes rows" in caught.value.text
    assert "--reset FLOW" in caught.value.text and "skipChangeCommits" in caught.value.text
    skipping = FollowedTable(table.path, skips_changes=True)
    later = skipping.end_of_batch(end, BatchLimit())
    (file,) = skipping.files(end, later)
    assert pq.read_table(table.path / file.path)["n"].to_pylist() == [2]
    # One that starts over reads what there is.
    assert sorted(sum(stream(table, START, BatchLimit()), [])) == [2, 10]


@pytest.mark.parametrize("versions", [1, 5])
def test_a_table_that_was_created_again_is_noticed(table: LakeTable, versions: int) -> None:
    for number in range(3):
        add(table, number)
    followed = FollowedTable(table.path)
    end = followed.end_of_batch(START, BatchLimit())
    shutil.rmtree(table.path)
    with pytest.raises(UsageError) as caught:
        followed.end_of_batch(end, BatchLimit())
    assert caught.value.code == "lake.recreated"
    again = LakeTable(table.path)
    for number in range(versions):
        add(again, number)
    for call in (
        lambda: followed.end_of_batch(end, BatchLimit()),
        lambda: followed.files(end, end),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == "lake.recreated"


def test_versions_and_files_that_are_gone_are_an_error_that_says_what_to_do(
    table: LakeTable,
) -> None:
    add(table, 1)
    followed = FollowedTable(table.path)
    begun = followed.end_of_batch(START, BatchLimit())
    for number in range(2, 5):
        add(table, number)
    end = followed.end_of_batch(begun, BatchLimit())
    compact(table)
    assert vacuum(table, grace_s=0) == 4
    with pytest.raises(UsageError) as caught:
        followed.files(begun, end)
    assert caught.value.code == "lake.version"
    assert "polybus tables keep silver HOURS" in caught.value.text
    checkpoint(table)
    version_path(table.folder, 2).unlink()
    with pytest.raises(UsageError, match="version 2 was removed before it was read"):
        FollowedTable(table.path).end_of_batch(begun, BatchLimit())
    with pytest.raises(UsageError, match="version 0 was removed before it was read"):
        version_path(table.folder, 0).unlink()
        FollowedTable(table.path).files(START, begun)


def test_a_damaged_version_is_not_believed(table: LakeTable) -> None:
    add(table, 1)
    begun = FollowedTable(table.path).end_of_batch(START, BatchLimit())
    add(table, 2)
    checkpoint(table)
    path = version_path(table.folder, 1)
    path.write_bytes(path.read_bytes().replace(b'"size": ', b'"size": 1'))
    with pytest.raises(StorageError, match="checksum"):
        FollowedTable(table.path).end_of_batch(begun, BatchLimit())


def test_only_versions_up_to_a_bound_are_read(table: LakeTable) -> None:
    add(table, 1)
    add(table, 2)
    followed = FollowedTable(table.path)
    assert followed.end_of_batch(START, BatchLimit(), until=-1) == START
    end = followed.end_of_batch(START, BatchLimit(), until=0)
    assert numbers(table, START, end) == [1]
    assert followed.end_of_batch(end, BatchLimit(), until=0) == end


def test_a_look_without_news_does_not_open_the_table(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(table, 1)
    add(table, 2)
    followed = FollowedTable(table.path)
    end = followed.end_of_batch(START, BatchLimit())
    table.commit([], writer="w", batch_id=7)
    compact(table)
    assert followed.end_of_batch(end, BatchLimit()) == end
    looks: list[None] = []
    look = followed._look

    def counted() -> tuple[str, int]:
        looks.append(None)
        return look()

    monkeypatch.setattr(followed, "_look", counted)
    assert followed.end_of_batch(end, BatchLimit()) == end
    assert not looks
    add(table, 3)
    assert numbers(table, end, followed.end_of_batch(end, BatchLimit())) == [3]
    assert looks
