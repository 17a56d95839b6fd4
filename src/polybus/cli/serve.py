"""`polybus serve`: the bus alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click
import msgspec

from polybus import config as configuration
from polybus.config import Config
from polybus.edges.node import Node
from polybus.log.arrow_alone import leave_pandas_out


@click.command(
    epilog="""\b
Examples:
  polybus serve
  polybus serve --config server.json --data /var/lib/polybus
  polybus serve --port 0 --topic orders --topic alerts
"""
)
@click.option("--config", "config_path", type=click.Path(dir_okay=False), help="TOML or JSON file.")
@click.option("--data", help="Folder of the log.  [default: ./polybus-data]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of all connectors but queues'; 0 = any free.",
)
@click.option("--topic", "topics", multiple=True, help="Declare a topic; may be repeated.")
@click.option("--demo", is_flag=True, help="Show messages cross protocols, then serve.")
@click.option("--verbose", is_flag=True, help="Log more on standard error.")
@click.option(
    "--stop-with-stdin",
    is_flag=True,
    help="Stop when standard input ends, so that it ends with the process that started it.",
)
def serve(
    config_path: str | None,
    data: str | None,
    port: int | None,
    topics: tuple[str, ...],
    demo: bool,
    verbose: bool,
    stop_with_stdin: bool,
) -> None:
    """Run the bus: all protocols on one port, every message in the log.

    Prints one line with `ready` and its addresses when it accepts connections. SIGTERM or Ctrl-C
    stops it cleanly.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    leave_pandas_out()
    config = _adapt(configuration.load(config_path), data, port, topics)
    configuration.check(config)
    sys.exit(run_loop(_serve(config, demo=demo, stop_with_stdin=stop_with_stdin)))


def _adapt(config: Config, data: str | None, port: int | None, topics: tuple[str, ...]) -> Config:
    if data is not None:
        config = msgspec.structs.replace(config, data=data)
    if port is not None:
        # A queue has no first bytes to tell it by, so its port cannot be the others' too.
        connectors = [
            one if "queue" in one.protocols else msgspec.structs.replace(one, port=port)
            for one in config.connectors
        ]
        config = msgspec.structs.replace(config, connectors=connectors)
    return msgspec.structs.replace(config, topics=[*config.topics, *topics])


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run on uvloop where there is one: many small reads and writes are cheaper there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


# How long a thread may keep the interpreter while the loop waits for it: with Python's default of
# 5 ms the committer shows in the latency of one message in a hundred.
SWITCH_INTERVAL_S = 0.0002


def _calm_collector() -> None:
    """Batches come and go by the thousand and hold no cycles: look for garbage cycles less often.

    With the default thresholds the collector takes a third of the loop's time when traffic is
    spread over a thousand topics.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def _await_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """A thread, because standard input may be a file, which no event loop can wait for."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stop.set)


async def _serve(config: Config, *, demo: bool, stop_with_stdin: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if stop_with_stdin:
        threading.Thread(
            target=_await_stdin, args=(loop, stop), name="polybus-stdin", daemon=True
        ).start()
    node = Node(config)
    await node.start()
    _calm_collector()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    print(f"polybus ready: {' '.join(node.addresses)} data={Path(config.data)}", flush=True)
    try:
        if demo:
            from polybus.cli.demo import show

            await show(node)
        await stop.wait()
    finally:
        await node.stop()
    return 0
