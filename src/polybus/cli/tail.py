"""`polybus tail`: print messages as they arrive."""

import asyncio
import contextlib
import signal
import sys

import click
import msgspec

from polybus.cli.options import from_option, json_option, url_option
from polybus.cli.output import as_json as value_as_json
from polybus.cli.output import say, shown
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
@click.option("--count", type=click.IntRange(1), help="End after this many messages.")
@click.option("--headers", is_flag=True, help="Print the headers too.")
@json_option
def tail(
    topics: tuple[str, ...], start: str, url: str, count: int | None, headers: bool, as_json: bool
) -> None:
    """Print messages of topics as they arrive, one per line, until Ctrl-C.

    With several topics each line begins with its topic. Control characters are escaped, and values
    that are not UTF-8 are printed as base64. A lost connection is restored; a line on standard
    error says if messages were missed meanwhile. On queue:// the connector decides the topic and
    there is no replay: TOPIC is only a label. On http:// and ws:// messages have no positions and
    no headers.
    """

    def line_of(message: Message) -> str | bytes:
        if as_json:
            return _json(message)
        parts = [shown(message.topic)] if len(topics) > 1 else []
        if headers and message.headers:
            pairs = (f"{name}={shown(value)}" for name, value in message.headers.items())
            parts.append(f"[{', '.join(pairs)}]")
        return "\t".join([*parts, shown(message.value)])

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        left = count
        async with connect(url) as client, client.subscribe(topics, start) as subscription:
            async for messages in subscription.batches():
                for message in messages[:left]:
                    if message.gap:
                        place = message.position or "the next one"
                        say(f"polybus: {message.topic}: messages before {place} are lost")
                    click.echo(line_of(message))
                sys.stdout.flush()
                if left is not None:
                    left -= len(messages)
                    if left <= 0:
                        return

    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(run())


def _json(message: Message) -> bytes:
    fields: dict[str, object] = {
        "topic": message.topic,
        "position": None if message.position is None else str(message.position),
        "gap": message.gap,
    }
    if message.headers:
        fields["headers"] = {name: value_as_json(value) for name, value in message.headers.items()}
    return msgspec.json.encode(fields | value_as_json(message.value))
