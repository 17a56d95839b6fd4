"""A complete bus inside a test."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from polybus.config import Config, check
from polybus.edges.node import Node


@contextlib.asynccontextmanager
async def run_bus(*topics: str, data: str | None = None, **settings: Any) -> AsyncIterator[Node]:
    """Run a bus on free loopback ports until the `with` block ends.

    `settings` are keys of a config file, with underscores: `limits={"outbox-bytes-max": 1 << 20}`.
    Without `data` the log is in a temporary folder.
    """
    with contextlib.ExitStack() as stack:
        if data is None:
            data = stack.enter_context(tempfile.TemporaryDirectory(prefix="polybus-"))
        raw = {name.replace("_", "-"): value for name, value in settings.items()}
        raw.setdefault(
            "connectors",
            [{"protocol": "tcp", "port": 0}, {"protocol": "udp", "port": 0, "speaks": "goms"}],
        )
        raw["data"] = data
        raw["topics"] = [*topics, *raw.get("topics", [])]
        config = msgspec.convert(raw, Config)
        check(config)
        node = Node(config)
        await node.start()
        try:
            yield node
        finally:
            await node.stop()
