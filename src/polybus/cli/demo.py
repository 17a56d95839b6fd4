"""What `polybus serve --demo` shows: a message on each protocol, seen by subscribers on all."""

from __future__ import annotations

import contextlib

import click

from polybus.client import connect
from polybus.client.message import Message, Position
from polybus.client.subscription import Subscription
from polybus.edges.node import Node

TOPIC = "demo"
PROTOCOLS = {
    "Boson frames": "boson",
    "Boson properties": "boson+properties",
    "goMS": "goms",
    "msgstream": "ws",
}


async def show(node: Node) -> None:
    """Publish on each protocol and print what arrives on each, then where it all is."""
    bus = node.bus
    if not bus.has_topic(TOPIC):
        bus.create_topic(TOPIC)
    port = node.tcp_port
    click.echo(f"\nOne topic, {len(PROTOCOLS)} protocols, one port ({port}):\n")
    async with contextlib.AsyncExitStack() as stack:
        subscriptions: dict[str, Subscription] = {}
        for name, scheme in PROTOCOLS.items():
            client = await stack.enter_async_context(connect(f"{scheme}://127.0.0.1:{port}"))
            subscriptions[name] = await stack.enter_async_context(client.subscribe(TOPIC))
        for name, scheme in PROTOCOLS.items():
            client = await stack.enter_async_context(connect(f"{scheme}://127.0.0.1:{port}"))
            position = await client.publish(TOPIC, f"hello from {name}", receipt=True)
            await _print_arrivals(name, position, subscriptions)
    click.echo(f"All of it is in the log: {node.data}/ (plain Arrow and Parquet files).\n")
    click.echo("The bus is still running. Try, in another terminal:\n")
    at_port = "" if port == 55545 else f" --url boson://127.0.0.1:{port}"
    click.echo(f"  .venv/bin/polybus tail {TOPIC} --from earliest{at_port}")
    click.echo(f'  .venv/bin/polybus publish {TOPIC} "hello from me"{at_port}')
    click.echo(f"\nor open http://127.0.0.1:{port}/ in a browser and watch a topic live.")
    click.echo("\nCtrl-C stops the bus.")


async def _print_arrivals(
    name: str, position: Position | None, subscriptions: dict[str, Subscription]
) -> None:
    offset = "?" if position is None else position.offset
    click.echo(f"  published on {name}: safe on disk at offset {offset}")
    for reader, subscription in subscriptions.items():
        message: Message = await anext(aiter(subscription))
        click.echo(f"    received on {reader:<17} {message.text!r}")
    click.echo()
