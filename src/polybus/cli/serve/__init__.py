"""`polybus serve`: run the bus alone."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial

import click
import msgspec

from polybus import config_file
from polybus.cli.common import allocator, exits
from polybus.cli.common.options import (
    config_option,
    data_option,
    load_config,
    port_option,
    topics_option,
)
from polybus.cli.serve import log_lines, self_signed
from polybus.client import Subscription, connect
from polybus.config import PORT, Config, Connector
from polybus.edges.node import Node
from polybus.errors import PolybusError, StorageError
from polybus.log import file_modes
from polybus.log.topics import storage_error
from polybus.log.without_pandas import block_pandas
from polybus.services.topics import create_topic

logger = logging.getLogger("polybus.server")

# How long a thread may keep the interpreter while the event loop waits for it. With Python's
# default of 5 ms the committer delays one message in a hundred.
SWITCH_INTERVAL_S = 0.0002
DEMO_TOPIC = "demo"
DEMO_SCHEMES = {
    "Boson frames": "boson",
    "Boson properties": "boson+properties",
    "goMS": "goms",
    "msgstream": "ws",
}


@click.command(
    epilog="""\b
Examples:
  polybus serve
  polybus serve --config server.json --data /var/lib/polybus
  polybus serve --port 0 --topic orders --topic alerts
  polybus serve --ip 0.0.0.0 --tls-self-signed
"""
)
@config_option
@data_option
@port_option
@click.option(
    "--ip",
    metavar="ADDRESS",
    help="Address of all TCP connectors except queues; 0.0.0.0 is every address of this machine.",
)
@topics_option
@click.option("--demo", is_flag=True, help="Show messages that cross protocols, then serve.")
@click.option(
    "--tls-self-signed",
    is_flag=True,
    help="Accept TLS with a certificate that the bus creates in the data folder, and require it "
    "beyond this machine; to try it.",
)
@click.option("--verbose", is_flag=True, help="Log more on standard error.")
@click.option(
    "--stop-with-stdin",
    is_flag=True,
    help="Stop at the end of standard input, and thus with the process that started the bus.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen beyond this machine even if anyone there can use the bus.",
)
def serve(
    config_path: str | None,
    data: str | None,
    port: int | None,
    ip: str | None,
    topics: tuple[str, ...],
    demo: bool,
    tls_self_signed: bool,
    verbose: bool,
    stop_with_stdin: bool,
    insecure: bool,
) -> None:
    """Run the bus: all protocols on one port, every message in the log.

    Prints one line with `ready` and its addresses when it accepts connections. SIGTERM or Ctrl-C
    stops it cleanly. SIGHUP reads the settings again.
    """
    block_pandas()

    def read_config() -> Config:
        config = load_config(data, config_path, topics)
        connectors = [_moved(one, ip, port) for one in config.connectors]
        config = msgspec.structs.replace(config, connectors=connectors)
        if tls_self_signed:
            config = self_signed.with_tls(config)
        config_file.check(config)
        return config

    config = read_config()
    log_lines.start(config.logging, verbose=verbose)
    node = Node(config, insecure=insecure)
    try:
        # Many small reads and writes cost less on uvloop.
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    try:
        file_modes.prepare(node.data, group=node.config.group_access)
        file_modes.adopt(node.data)
        if tls_self_signed:
            self_signed.make(node.config)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            show = partial(self_signed.show, node.config) if tls_self_signed else None
            runner.run(_serve(node, read_config, show, demo=demo, stop_with_stdin=stop_with_stdin))
    except OSError as error:
        failed = storage_error(error, str(error.filename or node.data))
        raise exits.at_start(failed) from error
    except StorageError as error:
        raise exits.at_start(error) from error


def _moved(connector: Connector, ip: str | None, port: int | None) -> Connector:
    """A connector at the address and port of the options."""
    if "queue" in connector.protocols:
        # It cannot be detected by its first bytes, so it needs its own port.
        return connector
    # UDP has no TLS, so it leaves this machine only if the config says so.
    moved = {"ip": ip if connector.protocol == "tcp" else None, "port": port}
    given = {name: value for name, value in moved.items() if value is not None}
    return msgspec.structs.replace(connector, **given)


async def _serve(
    node: Node,
    read_config: Callable[[], Config],
    show_certificate: Callable[[int], None] | None,
    *,
    demo: bool,
    stop_with_stdin: bool,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if stop_with_stdin:
        threading.Thread(
            target=_await_stdin, args=(loop, stop), name="polybus-stdin", daemon=True
        ).start()
    await node.start()
    # Until here a signal ends the process at once (polybus.cli).
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    reloading = asyncio.create_task(_reload_at(hangup, node, read_config))
    _calm_collector()
    allocator.trim_regularly()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if show_certificate is not None:
        show_certificate(node.tcp_port)
    print(f"polybus ready: {' '.join(node.addresses)} data={node.data}", flush=True)
    try:
        if demo:
            await _show_demo(node)
        await stop.wait()
    finally:
        reloading.cancel()
        await node.stop()


async def _reload_at(hangup: asyncio.Event, node: Node, read_config: Callable[[], Config]) -> None:
    """Reload one time after the other: a cluster takes a while to create topics."""
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            await _reload(node, read_config)
        except Exception:
            # The next SIGHUP may bring valid settings.
            logger.exception("a reload of the settings failed")


async def _reload(node: Node, read_config: Callable[[], Config]) -> None:
    try:
        restart = node.reload(read_config())
    except (PolybusError, OSError) as error:
        logger.error("the settings could not be reloaded; the bus keeps its settings: %s", error)
        return
    try:
        await node.create_declared()
    except (PolybusError, OSError) as error:
        text = "the settings were reloaded, but topics could not be created; send SIGHUP again: %s"
        logger.error(text, error)
    else:
        logger.info("the settings were reloaded")
    if restart:
        logger.warning("settings that need a restart keep their values: %s", ", ".join(restart))


def _await_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Runs in a thread: standard input may be a file, which no event loop can wait for."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stop.set)


def _calm_collector() -> None:
    """Let the garbage collector look for cycles less often: batches are many and have no cycles.

    With the default thresholds the collector takes a third of the loop's time when traffic is
    spread over a thousand topics.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


async def _show_demo(node: Node) -> None:
    """Publish on each protocol, print what arrives on each, then print commands to try."""
    if not node.bus.has_topic(DEMO_TOPIC):
        await create_topic(node.bus, DEMO_TOPIC)
    port = node.tcp_port
    click.echo(f"\nOne topic, {len(DEMO_SCHEMES)} protocols, one port ({port}):\n")
    async with contextlib.AsyncExitStack() as stack:
        subscriptions: dict[str, Subscription] = {}
        for name, scheme in DEMO_SCHEMES.items():
            client = await stack.enter_async_context(connect(f"{scheme}://127.0.0.1:{port}"))
            subscriptions[name] = await stack.enter_async_context(client.subscribe(DEMO_TOPIC))
        for name, scheme in DEMO_SCHEMES.items():
            client = await stack.enter_async_context(connect(f"{scheme}://127.0.0.1:{port}"))
            position = await client.publish(DEMO_TOPIC, f"hello from {name}", receipt=True)
            offset = "?" if position is None else position.offset
            click.echo(f"  published on {name}: durable at offset {offset}")
            for reader, subscription in subscriptions.items():
                message = await anext(aiter(subscription))
                click.echo(f"    received on {reader:<17} {message.text!r}")
            click.echo()
    at_port = "" if port == PORT else f" --url boson://127.0.0.1:{port}"
    click.echo(f"""\
All of it is in the log: {node.data}/ (plain Arrow and Parquet files).

The bus is still running. Try, in another terminal:

  .venv/bin/polybus tail {DEMO_TOPIC} --from earliest{at_port}
  .venv/bin/polybus publish {DEMO_TOPIC} "hello from me"{at_port}

or open http://127.0.0.1:{port}/ in a browser to follow a topic live.

Ctrl-C stops the bus.""")
