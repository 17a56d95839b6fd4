"""A task of Spark's sink stages its rows, without Java: a file is whole, or nobody commits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crash_kit import Run, crashes
from opened_kit import all_messages, on_node

from polybus.edges.node import Node
from polybus.services.transactions.commits import TransactionKey
from polybus.services.transactions.transactions import CommitRequest

ROWS = pa.record_batch({"value": ["1", "2", "3"]})


def started(run: Run) -> None:
    look(run.data)


def stage(data: Path) -> str:
    from polybus.spark.location import BusLocation
    from polybus.spark.sink.staging import SinkColumns, stage

    columns = SinkColumns(topic="a", has_key=False, has_headers=False)
    name = stage(iter([ROWS]), columns, BusLocation(data), ("spark", "query"), 0).name
    assert name is not None
    return name


def stage_and_commit(run: Run) -> None:
    async def work(node: Node) -> None:
        run.resume()
        name = stage(run.data)
        run.acknowledge("staged", name)
        wanted = CommitRequest(TransactionKey("spark", "query", 0), [name])
        await node.services.transactions.commit(wanted, node.accounts.default)
        run.acknowledge("committed", name)

    run.pause()
    on_node(work, run.data, topics=["a"])


def look(data: Path) -> Any:
    async def shown(node: Node) -> Any:
        return all_messages(node.bus.log)["a"]

    values = on_node(shown, data, topics=["a"])
    return [sorted(path.name for path in data.glob("staging/*/*")), values]


@pytest.mark.slow
def test_a_staged_file_is_whole_when_the_task_is_done() -> None:
    for crash in crashes(stage_and_commit, look, start=started):
        left, values = crash.seen
        facts = dict(crash.acknowledged)
        assert values in ([], ["1", "2", "3"]), crash
        assert values or "committed" not in facts, crash
        if "staged" in facts:
            assert values or facts["staged"] in left, crash
        assert crash.end[1] == ["1", "2", "3"], crash
        assert crash.end[0] == [], crash
