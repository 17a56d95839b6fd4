"""Slowly changing dimensions: what a table shows depends on the changes, not on their order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.errors import StorageError
from polybus.lake import dimension
from polybus.lake.dimension import DELETED, END_AT, SEQUENCE, START_AT, Dimension
from polybus.lake.fields import fields_of
from polybus.lake.table import LakeTable

Event = dict[str, Any]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("place", pa.string()),
        ("city", pa.string()),
        ("note", pa.string()),
        ("tags", pa.list_(pa.string())),
        (SEQUENCE, pa.struct([("day", pa.int64()), ("n", pa.int64())])),
        (DELETED, pa.bool_()),
    ]
)
EVENTS = st.lists(
    st.builds(
        lambda id, place, city, note, day, deleted: {
            "id": id,
            "place": place,
            "city": city,
            "note": note,
            "tags": None if note is None else [note],
            SEQUENCE: {"day": day, "n": 0},
            DELETED: deleted,
        },
        st.integers(0, 2),
        st.sampled_from("pq"),
        st.sampled_from(["Bern", "Oslo", None]),
        st.sampled_from(["x", "y", None]),
        st.integers(0, 5),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=12,
)


def apply(one: Dimension, events: list[Event], batch_id: int) -> None:
    rows = pa.Table.from_pylist(events, schema=SCHEMA)
    one.apply(rows, fields_of("t", rows.schema), writer="w", batch_id=batch_id)


def shown(one: Dimension) -> list[str]:
    return sorted(map(repr, one.table.read().to_pylist())) if one.table.exists else []


def order(event: Event) -> tuple[Any, ...]:
    """Which of two changes of a key is the newer one."""
    texts = [event[name] or "" for name in ("city", "note", "place")]
    return (event[SEQUENCE]["day"], event[DELETED], *texts)


def history(events: list[Event], keys: tuple[str, ...], tracked: tuple[str, ...]) -> list[Event]:
    """The periods of all keys, one change after the other."""
    found: list[Event] = []
    newest = {
        tuple(e[key] for key in (*keys,)) + (e[SEQUENCE]["day"],): e
        for e in sorted(events, key=order)
    }
    for event in sorted(newest.values(), key=order):
        open_ones = [p for p in found if p[END_AT] is None and all(p[k] == event[k] for k in keys)]
        values = {name: event[name] for name in SCHEMA.names if name not in (SEQUENCE, DELETED)}
        same = not event[DELETED] and all(
            period[name] == event[name] for period in open_ones for name in tracked
        )
        for period in open_ones:
            period |= values if same else {END_AT: event[SEQUENCE]}
        if not event[DELETED] and not (open_ones and same):
            found.append(values | {START_AT: event[SEQUENCE], END_AT: None})
    return found


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 12), max_size=2), st.booleans())
def test_any_order_and_any_batches_give_the_same_table(
    events: list[Event], cuts: list[int], has_two_keys: bool
) -> None:
    keys = ("id", "place") if has_two_keys else ("id",)
    with tempfile.TemporaryDirectory() as folder:
        first = Dimension(LakeTable(Path(folder, "one")), keys)
        tracked = tuple(name for name in ("place", "city", "tags") if name not in keys)
        second = Dimension(LakeTable(Path(folder, "two")), keys, has_history=True, tracked=tracked)
        bounds = [0, *sorted(cuts), len(events)]
        for batch_id, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            for _ in range(2):  # a batch that is repeated changes nothing
                apply(first, events[begin:end], batch_id)
                apply(second, events[begin:end], batch_id)
        periods = history(events, keys, tracked)
        assert shown(second) == sorted(map(repr, periods))
        current = [row for row in history(events, keys, SCHEMA.names[:5]) if row[END_AT] is None]
        for row in current:
            del row[START_AT], row[END_AT]
        assert shown(first) == sorted(map(repr, current))


def test_only_files_with_a_changed_key_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dimension, "FILE_ROWS_MIN", 2)
    table = LakeTable(tmp_path / "t")
    one = Dimension(table, ("id",))
    event = {"place": "p", "city": "Bern", SEQUENCE: {"day": 0, "n": 0}, DELETED: False}
    apply(one, [event | {"id": n} for n in range(4)], 0)
    (first,) = table.state.files
    apply(one, [event | {"id": n} for n in range(4, 8)], 1)
    second = next(path for path in table.state.files if path != first)
    apply(one, [event | {"id": 0, "city": "Oslo", SEQUENCE: {"day": 1, "n": 0}}], 2)
    files = table.state.files
    assert first not in files and second in files
    assert sorted(file.rows for file in files.values()) == [1, 3, 4]


def test_damaged_rows_are_not_written_again(tmp_path: Path) -> None:
    table = LakeTable(tmp_path / "t")
    one = Dimension(table, ("id",))
    event = {"place": "p", "city": "Bern", SEQUENCE: {"day": 0, "n": 0}, DELETED: False}
    apply(one, [event | {"id": 1}], 0)
    [path] = table.files()
    content = bytearray(path.read_bytes())
    content[35] ^= 64  # The first page, which is still valid.
    path.write_bytes(content)
    assert pq.read_table(path)["id"].to_pylist() != [1]
    with pytest.raises(StorageError, match=r"lake\.damaged.*CRC"):
        apply(one, [event | {"id": 1, "city": "Oslo", SEQUENCE: {"day": 1, "n": 0}}], 1)
    assert table.version == 0


def test_the_change_data_feed_has_the_rows_of_the_keys_of_a_batch(tmp_path: Path) -> None:
    def event(key: int, city: str, day: int, *, deleted: bool = False) -> Event:
        row = dict.fromkeys(SCHEMA.names) | {"id": key, "city": city, DELETED: deleted}
        return row | {SEQUENCE: {"day": day, "n": 0}}

    one = Dimension(LakeTable(tmp_path / "one", is_fed=True), ("id",))
    batches = [
        [event(1, "Bern", 1), event(2, "Oslo", 1)],
        [event(2, "Rome", 2), event(3, "Lima", 2)],
        [event(1, "", 3, deleted=True)],
    ]
    for number, events in enumerate(batches):
        rows = pa.Table.from_pylist(events, SCHEMA)
        one.apply(rows, fields_of("one", SCHEMA), writer="w", batch_id=number)
    feed = pa.table(DeltaTable(tmp_path / "one").load_cdf().read_all()).to_pylist()
    names = ("_commit_version", "_change_type", "id", "city")
    assert sorted(tuple(row[name] for name in names) for row in feed) == [
        (0, "insert", 1, "Bern"),
        (0, "insert", 2, "Oslo"),
        (1, "delete", 2, "Oslo"),
        (1, "insert", 2, "Rome"),
        (1, "insert", 3, "Lima"),
        (2, "delete", 1, "Bern"),
    ]
