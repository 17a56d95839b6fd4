"""A log and a bus on a data folder, for the work that is ended and for the look afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import log_kit
import msgspec

from polybus.batch import Batch
from polybus.config import Config
from polybus.edges.node import Node
from polybus.log.files import FileLog
from polybus.log.interface import Log


@contextlib.contextmanager
def opened_log(data: Path) -> Iterator[FileLog]:
    """A log that is closed afterwards."""
    log = log_kit.opened_log(data, lambda: time.time_ns() // 1000)
    try:
        yield log
    finally:
        log.close()


def publish(log: Log, topic: str, *values: str) -> None:
    """Append messages in one batch; they are durable when this returns."""
    log.append(Batch.of(topic, [value.encode() for value in values]))
    log.sync()


def messages(log: Log, topic: str) -> list[str]:
    """A topic's messages, which must be its offsets from its start to its end, each once."""
    bounds = log.bounds(topic)
    found: list[str] = []
    offset = bounds.start
    while offset < bounds.stop:
        for batch in log.read(topic, offset):
            assert batch.first_offset == offset, (batch.first_offset, offset)
            found += [value.decode() for value in batch.values()]
            offset = batch.last_offset + 1
    assert len(found) == bounds.stop - bounds.start, (found, bounds)
    return found


def all_messages(log: Log) -> dict[str, list[str]]:
    """The messages of every topic that is not a system topic."""
    return {
        topic: messages(log, topic) for topic in sorted(log.topics()) if not topic.startswith("$")
    }


def look_at_log(data: Path) -> dict[str, list[str]]:
    with opened_log(data) as log:
        return all_messages(log)


@contextlib.asynccontextmanager
async def running_node(data: Path, **settings: Any) -> AsyncIterator[Node]:
    """A whole bus without a port."""
    raw = {"data": str(data), "connectors": [], **settings}
    node = Node(msgspec.convert({"system": {"events": False}, **raw}, Config))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def on_node(work: Callable[[Node], Awaitable[Any]], data: Path, **settings: Any) -> Any:
    """Start a bus, work with it, stop it; what the work returned."""

    async def run() -> Any:
        async with running_node(data, **settings) as node:
            return await work(node)

    return asyncio.run(run())
