"""A backup and a restored folder are whole, or a command and a start say that they are not."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from crash_kit import MEMORY_DISK, Crash, Run, crashes
from opened_kit import all_messages, on_node, opened_log, publish

from polybus.edges.node import Node
from polybus.errors import PolybusError
from polybus.lake.table import open_table
from polybus.log.history.handover import compact
from polybus.log.verify.verify import verify
from polybus.services.backup import backup, check_whole, restore
from polybus.services.state_rows import NAME as STATE
from polybus.services.state_rows import verify_state

WHOLE = [{"a": ["1", "2"], "b": ["3"]}, 1, [7]]


async def with_a_session(node: Node) -> None:
    await node.services.inboxes.create(["a"], None, "latest")


def fill(run: Run) -> None:
    """A folder with history, journal, sessions and a table, and a backup of its beginning."""
    data = run.data / "bus"
    data.mkdir()
    with opened_log(data) as log:
        log.create_topic("a")
        publish(log, "a", "1")
    compact(data)
    on_node(with_a_session, data)
    backup(data, run.data / "base")
    with opened_log(data) as log:
        log.create_topic("b")
        publish(log, "a", "2")
        publish(log, "b", "3")
    open_table(data, "silver").append(pa.table({"n": [7]}), writer="w", batch_id=0)


def content(data: Path) -> Any:
    """What a bus has that starts on a copy of the folder."""
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        copy = Path(folder) / "data"
        shutil.copytree(data, copy)
        with opened_log(copy) as log:
            found = all_messages(log)
        report = verify(copy)
        assert report.intact, [str(one) for one in report.damages]
        assert verify_state(copy) == []
        with contextlib.closing(sqlite3.connect(copy / STATE)) as state:
            [sessions] = state.execute("SELECT count(*) FROM sessions").fetchone()
        return [found, sessions, open_table(copy, "silver").read()["n"].to_pylist()]


def make_backup(run: Run) -> None:
    """Of tables on the disk of the backup, and a log on another: that is linked to the base's."""
    real, linked = os.link, []

    def link(source: Path, target: Path) -> None:
        if source.is_relative_to(run.data / "bus" / "accounts"):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        linked.append(source.relative_to(run.data).parts[0])
        real(source, target)

    # Whoever repeats it removes what the first one left: a target with files is refused.
    shutil.rmtree(run.data / "copy", ignore_errors=True)
    os.link = link  # type: ignore[assignment]
    try:
        backup(run.data / "bus", run.data / "copy", base=run.data / "base")
    finally:
        os.link = real
    assert set(linked) == {"bus", "base"}
    run.acknowledge("backup")


def look_at_backup(data: Path) -> Any:
    base = hashlib.sha256()
    for path in sorted((data / "base").rglob("*")):
        base.update(str(path.relative_to(data)).encode())
        base.update(path.read_bytes() if path.is_file() else b"")
    try:
        check_whole(data / "copy")
    except PolybusError as error:
        return [base.hexdigest(), content(data / "bus"), error.code]
    return [base.hexdigest(), content(data / "bus"), content(data / "copy")]


def check_backup(crash: Crash) -> None:
    base, source, copy = crash.seen
    assert source == WHOLE, crash
    assert copy == WHOLE or (copy == "backup.incomplete" and not crash.acknowledged), crash
    assert crash.end == [base, WHOLE, WHOLE], crash


def test_a_backup_is_whole_or_not_one_and_leaves_its_base_as_it_was() -> None:
    bases = set()
    for crash in crashes(make_backup, look_at_backup, start=fill, verified=False):
        check_backup(crash)
        bases.add(crash.seen[0])
    assert len(bases) == 1


def with_a_backup(run: Run) -> None:
    fill(run)
    make_backup(run)


def make_restored(run: Run) -> None:
    shutil.rmtree(run.data / "new", ignore_errors=True)
    restore(run.data / "copy", run.data / "new")
    run.acknowledge("restored")


def look_at_restored(data: Path) -> Any:
    """What a start on the folder makes of it."""
    if not (data / "new").is_dir() or not any((data / "new").iterdir()):
        return [content(data / "copy"), "nothing"]
    try:
        return [content(data / "copy"), content(data / "new")]
    except PolybusError as error:
        return [content(data / "copy"), error.code]


def test_a_bus_does_not_start_on_half_of_a_restored_folder() -> None:
    for crash in crashes(make_restored, look_at_restored, start=with_a_backup, verified=False):
        source, restored = crash.seen
        assert source == WHOLE, crash
        if crash.acknowledged:
            assert restored == WHOLE, crash
        assert restored in (WHOLE, "nothing", "backup.incomplete"), crash
        assert crash.end == [WHOLE, WHOLE], crash
