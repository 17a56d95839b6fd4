"""`polybus tail`: print messages as they come."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import click
import msgspec

from polybus.cli.options import from_option, json_option, url_option
from polybus.cli.output import as_json as value_as_json
from polybus.cli.output import shown
from polybus.client import Message, connect


@click.command(
    epilog="""\b
Examples:
  polybus tail news
  polybus tail news sport --from earliest --count 10 --json
  polybus tail news --from 2026-01-31T12:00:00Z
  polybus tail news --url ws://127.0.0.1
"""
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@from_option
@url_option
@click.option("--count", type=click.IntRange(1), help="End after so many messages.")
@click.option("--headers", is_flag=True, help="Print the headers too.")
@json_option
def tail(
    topics: tuple[str, ...],
    start: str,
    url: str,
    count: int | None,
    headers: bool,
    as_json: bool,
) -> None:
    """Print messages of topics as they come, one a line. Ctrl-C ends it.

    With several topics each line begins with its topic. Control characters are escaped, and values
    that are not UTF-8 are printed as base64. A lost connection is made again, and nothing is missed
    unless a line on standard error says so. On queue:// the topic is the connector's, from now on:
    TOPIC only names it here. On http:// and ws:// messages have no positions and no headers.
    """
    printer = Printer(with_topic=len(topics) > 1, with_headers=headers, as_json=as_json)
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(_tail(url, topics, start, count, printer))


class Printer:
    """Writes messages, a line each."""

    def __init__(self, *, with_topic: bool, with_headers: bool, as_json: bool) -> None:
        self._with_topic = with_topic
        self._with_headers = with_headers
        self._as_json = as_json

    def print(self, messages: list[Message]) -> None:
        for message in messages:
            if message.gap:
                place = message.position or "the next one"
                text = f"polybus: {message.topic}: messages before {place} are lost"
                click.echo(text, err=True)
            click.echo(self._json(message) if self._as_json else self._line(message))
        sys.stdout.flush()

    def _line(self, message: Message) -> str:
        parts = [shown(message.topic.encode())] if self._with_topic else []
        if self._with_headers and message.headers:
            pairs = (f"{name}={shown(value)}" for name, value in message.headers.items())
            parts.append(f"[{', '.join(pairs)}]")
        return "\t".join([*parts, shown(message.value)])

    def _json(self, message: Message) -> bytes:
        fields: dict[str, object] = {
            "topic": message.topic,
            "position": None if message.position is None else str(message.position),
            "gap": message.gap,
        }
        if message.headers:
            fields["headers"] = {
                name: value_as_json(value) for name, value in message.headers.items()
            }
        return msgspec.json.encode(fields | value_as_json(message.value))


async def _tail(
    url: str, topics: tuple[str, ...], start: str, count: int | None, printer: Printer
) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    left = count
    async with connect(url) as client, client.subscribe(topics, start) as subscription:
        async for messages in subscription.batches():
            printer.print(messages[:left])
            if left is not None:
                left -= len(messages)
                if left <= 0:
                    return
