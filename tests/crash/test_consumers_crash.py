"""The consumer book in state.db and the history that retention removes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from crash_kit import Crash, Run, crashes
from opened_kit import on_node, running_node

from polybus.batch import Batch
from polybus.edges.node import Node
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.services.consumers import ConsumerPosition, Report

pytestmark = pytest.mark.slow


DAY_US = 86_400_000_000


def six_days(run: Run) -> None:
    """Five days in history, one file each, and the sixth in the journal."""

    async def work(node: Node) -> None:
        log = node.bus.log
        assert isinstance(log, FileLog)
        for day in range(6):
            batch = Batch.of("a", [str(day).encode()])
            batch.timestamp_us = (day + 1) * DAY_US
            log.append(batch)
            log.sync()
            if day < 5:
                log.seal()
        log.after_handover(hand_over(run.data, grace_s=0.0))

    on_node(work, run.data, topics=["a"])


def report_and_retain(run: Run) -> None:
    """A consumer moves on, and everything that it has read may go."""

    async def main() -> None:
        async with running_node(run.data, topics=["a"], retention={"bytes": 1}) as node:
            log = node.bus.log
            assert isinstance(log, FileLog)
            epoch = log.bounds("a").epoch
            run.resume()
            for offset in (1, 3):
                at = {"a": ConsumerPosition(epoch=epoch, offset=offset)}
                node.services.consumers.report("group", Report(positions=at))
                await asyncio.to_thread(log.apply_retention, 10 * DAY_US)
                await node.services.consumers.save()
                run.acknowledge("reported", offset)
                await asyncio.to_thread(log.apply_retention, 10 * DAY_US)

    run.pause()
    asyncio.run(main())


def look(data: Path) -> Any:
    async def shown(node: Node) -> Any:
        views = node.services.consumers.views()
        positions = {topic.topic: topic.offset for view in views for topic in view.topics}
        lost = [topic.lost for view in views for topic in view.topics]
        return [node.bus.log.bounds("a").start, positions.get("a"), lost]

    return on_node(shown, data)


def check_position(crash: Crash) -> None:
    start, position, lost = crash.seen
    assert position in (None, 1, 3), crash
    assert position is None or start <= position, crash
    assert not any(lost), crash
    answered = [offset for _, offset in crash.acknowledged]
    assert not answered or (position or 0) >= answered[-1], crash


def test_retention_removes_nothing_that_a_saved_position_still_needs() -> None:
    for crash in crashes(report_and_retain, look, start=six_days, ends=("kill", "cut")):
        check_position(crash)
