"""A whole bus: its first start, its later ones and its stop, with every file it makes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from crash_kit import Run, crashes, kill
from opened_kit import all_messages, messages, on_node, running_node

from polybus.batch import Batch
from polybus.edges.node import Node

pytestmark = pytest.mark.slow


TOPICS = ["a", "b"]


def start_and_stop(run: Run) -> None:
    async def ready(node: Node) -> None:
        run.acknowledge("ready")

    on_node(ready, run.data, topics=TOPICS)


def look(data: Path) -> Any:
    async def shown(node: Node) -> Any:
        return [sorted(node.bus.log.topics()), all_messages(node.bus.log)]

    return on_node(shown, data, topics=TOPICS)


def test_a_first_start_may_end_anywhere() -> None:
    for crash in crashes(start_and_stop, look):
        assert crash.seen[1] == {"a": [], "b": []}, crash
        assert {"$events", "$commits"} < set(crash.seen[0]), crash


def with_events(run: Run) -> None:
    """The events of a session are written to `$events` while other messages are published."""

    async def work() -> None:
        async with running_node(run.data, topics=TOPICS, system={"events": True}) as node:
            run.resume()
            await node.services.inboxes.create(["a"], None, "latest")
            node._events.write()
            await node.context.durability.wait()
            run.acknowledge("event")
            node.bus.commit([Batch.of("a", [b"1"])], urgent=True)
            await node.context.durability.wait()
            run.acknowledge("message")

    run.pause()
    asyncio.run(work())


def look_at_events(data: Path) -> Any:
    async def shown(node: Node) -> Any:
        opened = [text for text in messages(node.bus.log, "$events") if "session-opened" in text]
        return [len(opened), all_messages(node.bus.log)["a"], len(node.services.inboxes)]

    return on_node(shown, data, topics=TOPICS)


def started(run: Run) -> None:
    start_and_stop(Run(run.data))


def test_an_event_is_in_its_topic_once_it_is_durable() -> None:
    for crash in crashes(with_events, look_at_events, start=started):
        facts = [fact for [fact] in crash.acknowledged]
        events, values, sessions = crash.seen
        assert events <= 1, crash
        # The session is on disk before its event.
        assert events <= sessions, crash
        assert events == 1 or "event" not in facts, crash
        assert values == ["1"] or (not values and "message" not in facts), crash


def killed_in_its_first_start(run: Run) -> None:
    kill(start_and_stop, run.data, before="sqlite", nth=2)


def test_a_start_after_a_start_that_was_killed_may_be_killed_too() -> None:
    for crash in crashes(start_and_stop, look, start=killed_in_its_first_start):
        assert crash.seen[1] == {"a": [], "b": []}, crash
