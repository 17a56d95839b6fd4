"""A conversion of tables that ends anywhere: each is of the old format or converted, and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crash_kit import Crash, Run, crashes
from old_tables_kit import BY_TOPIC, PAYLOADS, lay_out_old_tables

from polybus.errors import UsageError
from polybus.lake.old_tables import convert_tables
from polybus.lake.table import LakeTable

WHOLE = {"silver": [len(PAYLOADS), [2]], "by topic": [len(BY_TOPIC), [7, 0]]}


def old(run: Run) -> None:
    lay_out_old_tables(run.data)


def convert(run: Run) -> None:
    for name in convert_tables(run.data):
        run.acknowledge(name)


def look(data: Path) -> Any:
    """For each table its rows and batches; of an old one the error, and the number of versions."""
    seen: dict[str, Any] = {}
    for folder in (data / "tables").iterdir():
        table = LakeTable(folder)
        try:
            writers = ("standard.decode:1",) if folder.name == "silver" else ("w", "v")
            seen[table.name] = [table.read().num_rows, [table.last_batch(one) for one in writers]]
        except UsageError as error:
            old_files = [path for path in folder.rglob("*.json") if path.parent.name == "_polybus"]
            seen[table.name] = [error.code, len(old_files)]
    return seen


def check(crash: Crash) -> None:
    versions = {"silver": 3, "by topic": 2}
    assert crash.seen.keys() == WHOLE.keys(), crash
    for name, seen in crash.seen.items():
        assert seen in (WHOLE[name], ["lake.old-format", versions[name]]), crash
    for [name] in crash.acknowledged:
        assert crash.seen[name] == WHOLE[name], crash
    assert crash.end == WHOLE, crash


def test_a_table_is_old_or_converted() -> None:
    for crash in crashes(convert, look, start=old, verified=False):
        check(crash)
