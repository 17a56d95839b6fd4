"""The id of a query in its checkpoint: whole or not there, and never another once it was used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crash_kit import Run, crashes

from polybus.spark.checkpoint import Checkpoint


def create(run: Run) -> None:
    run.acknowledge(Checkpoint(run.data / "checkpoint").create_query_id())


def look(data: Path) -> Any:
    try:
        return Checkpoint(data / "checkpoint").query_id()
    except FileNotFoundError:
        return None


def test_the_id_of_a_query_is_whole_or_not_there() -> None:
    for crash in crashes(create, look, verified=False):
        for [used] in crash.acknowledged:
            assert crash.seen == used, crash
        assert crash.end is not None and crash.end == (crash.seen or crash.end), crash
