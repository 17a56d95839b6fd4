"""The kit finds what is wrong: each wrong order of writes is caught, and the right one passes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from crash_kit import Crash, Run, apart, crashes, kill, recorded
from disk_kit import End
from opened_kit import opened_log, publish

from polybus.log.disk import Disk, replace_file


def _write(path: Path, text: str, *, sync: bool = True) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def empty(run: Run) -> None:
    _write(run.data / "list", "[]")


def in_order(run: Run) -> None:
    """First what is named, then the name: both durable before the next."""
    _write(run.data / "named", "content")
    Disk().sync_folder(run.data)
    replace_file(run.data / "list", b'["named"]')
    run.acknowledge("done")


def name_first(run: Run) -> None:
    replace_file(run.data / "list", b'["named"]')
    _write(run.data / "named", "content")
    Disk().sync_folder(run.data)
    run.acknowledge("done")


def without_fsync(run: Run) -> None:
    _write(run.data / "named", "content", sync=False)
    Disk().sync_folder(run.data)
    replace_file(run.data / "list", b'["named"]')
    run.acknowledge("done")


def without_folder_fsync(run: Run) -> None:
    _write(run.data / "named", "content")
    _write(run.data / "list.tmp", '["named"]')
    os.replace(run.data / "list.tmp", run.data / "list")
    run.acknowledge("done")


def acknowledged_early(run: Run) -> None:
    run.acknowledge("done")
    in_order(run)


def in_place(run: Run) -> None:
    _write(run.data / "named", "content")
    _write(run.data / "list", '["named"]')
    run.acknowledge("done")


def look(data: Path) -> Any:
    return {
        name: (data / name).read_text() if (data / name).exists() else None
        for name in json.loads((data / "list").read_text())
    }


def check(crash: Crash) -> None:
    assert crash.seen == {"named": "content"} or (not crash.acknowledged and not crash.seen), crash


def test_the_right_order_passes_every_end() -> None:
    ends = list(crashes(in_order, look, start=empty, verified=False))
    for crash in ends:
        check(crash)
    # Every kind of write is one that another disk is left before.
    kinds = {crash.before.partition(" ")[0] for crash in ends}
    assert kinds >= {"create", "write", "fsync", ""}, kinds


@pytest.mark.parametrize(
    ("work", "end"),
    [
        (name_first, "kill"),
        (without_fsync, "torn"),
        (without_folder_fsync, "cut"),
        (acknowledged_early, "kill"),
        (in_place, "kill"),
    ],
)
def test_a_wrong_order_is_caught(work: Any, end: End) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        for crash in crashes(work, look, start=empty, verified=False, ends=(end,)):
            check(crash)


def with_topics(run: Run) -> None:
    with opened_log(run.data) as log:
        for topic in ("a", "b"):
            log.create_topic(topic)
        publish(log, "a", "1")
        log.delete_topic("b")


def recorded_and_killed(data: Path) -> list[tuple[str, Any, Any]]:
    """The sizes of all files, as recorded before a write and after a SIGKILL before it."""
    compared = []
    data.mkdir()
    for crash, tree in recorded(with_topics, data, ("kill",), every=True)[:-1:4]:
        shutil.rmtree(data)
        data.mkdir()
        kill(with_topics, data, nth=crash.position)
        files = {str(path.relative_to(data)): path for path in data.rglob("*") if path.is_file()}
        killed = {name: path.stat().st_size for name, path in files.items()}
        left = {name: len(content) for name, content in tree.items() if content is not None}
        compared.append((str(crash), _without_epochs(left), _without_epochs(killed)))
    return compared


def _without_epochs(sizes: dict[str, int]) -> dict[str, int]:
    return {re.sub(r"trash/\d+", "trash/EPOCH", name): size for name, size in sizes.items()}


def test_what_is_recorded_is_what_a_kill_leaves(tmp_path: Path) -> None:
    compared = apart(recorded_and_killed, tmp_path / "data")
    assert len(compared) > 10
    for crash, left, killed in compared:
        assert left == killed, crash
