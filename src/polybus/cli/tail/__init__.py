"""`polybus tail`: print messages as they arrive."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence

import click

from polybus.cli.common.lookup import epoch_at, expanded, suggesting
from polybus.cli.common.options import from_option, json_option, url_option
from polybus.cli.common.output import say
from polybus.cli.tail.conditions import condition
from polybus.cli.tail.formats import FORMATS, line_of
from polybus.client import Message, connect
from polybus.errors import PolybusError
from polybus.wire.positions import Position, parse_start


@click.command(
    epilog="""\b
Examples:
  polybus tail news
  polybus tail 'orders.*' --from earliest --where 'price > 100' --format pretty
  polybus tail news sport --from earliest --count 10 --json
  polybus tail news --from 2026-01-31T12:00:00Z
  polybus tail news --url ws://127.0.0.1
"""
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@from_option
@url_option
@click.option("--count", type=click.IntRange(1), help="End after this many messages.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="raw: the bytes as they are, then a newline. pretty: indented JSON.",
)
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Only matching messages: 'price > 10', 'order.id = 7', 'header.kind != test', "
    "'text ~ REGEX'. May be repeated: all must match.",
)
@click.option("--headers", is_flag=True, help="Print the headers too.")
@json_option
def tail(
    topics: tuple[str, ...],
    start: str,
    url: str,
    count: int | None,
    form: str,
    conditions: tuple[str, ...],
    headers: bool,
    as_json: bool,
) -> None:
    """Print messages of topics as they arrive, one per line, until Ctrl-C.

    `*` stands for all topics that exist now, `orders.*` for some of them. With several topics each
    line begins with its topic. Control characters are escaped, and values that are not UTF-8 are
    printed as base64. A lost connection is restored; a line on standard error says if messages were
    missed meanwhile. On queue:// the connector decides the topic and there is no replay: TOPIC is
    only a label. On http:// and ws:// messages have no positions and no headers.
    """
    tests = [condition(text) for text in conditions]
    with suggesting(url):
        topics = expanded(topics, url)
        line = line_of(
            "json" if as_json else form, with_topic=len(topics) > 1, with_headers=headers
        )
        notices = Notices(start, url)

        def show(messages: Sequence[Message]) -> int:
            """Print matching messages; return how many."""
            fitting = [one for one in messages if all(test(one) for test in tests)]
            for message in messages:
                notices.look(message)
            for message in fitting:
                click.echo(line(message))
            sys.stdout.flush()
            return len(fitting)

        async def run() -> None:
            task = asyncio.current_task()
            assert task is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
            left = count
            async with connect(url) as client, client.subscribe(topics, start) as subscription:
                async for messages in subscription.batches():
                    if left is None:
                        show(messages)
                        continue
                    # One by one: later ones must not be read.
                    for message in messages:
                        left -= show([message])
                        if left <= 0:
                            return

        with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
            asyncio.run(run())


class Notices:
    """Notices on standard error: messages are lost, or the start differs from the requested one."""

    def __init__(self, start: str, url: str) -> None:
        asked = parse_start(start)
        self._epoch = asked.epoch if isinstance(asked, Position) else None
        self._url = url
        self._looked: set[str] = set()

    def look(self, message: Message) -> None:
        is_first = message.topic not in self._looked
        self._looked.add(message.topic)
        epoch = self._epoch_of(message) if is_first and self._epoch is not None else self._epoch
        if epoch != self._epoch:
            say(
                f"polybus: {message.topic} has no epoch {self._epoch} (now "
                f"{epoch}): it was deleted and created again, or the epoch is of "
                "another topic; all its messages follow"
            )
        elif message.gap:
            place = message.position or "the next one"
            say(f"polybus: {message.topic}: messages before {place} are lost")

    def _epoch_of(self, message: Message) -> int | None:
        """The epoch of the first message. Sessions send none, but a gap if it is not the requested
        one.
        """
        if message.position is not None:
            return message.position.epoch
        if message.gap:
            with contextlib.suppress(PolybusError, OSError, ValueError):
                return epoch_at(self._url, message.topic)
        return self._epoch
