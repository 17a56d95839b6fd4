"""`polybus publish`: messages from the command line, a file or standard input."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO

import click

from polybus.cli.options import json_option, url_option
from polybus.cli.output import echo_json
from polybus.client import Client, Position, connect
from polybus.errors import PolybusError, UsageError

READ_BYTES_MAX = 1 << 18
BATCH_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be published, and how."""

    topic: str
    data: bytes | None
    file: BinaryIO
    lines: bool
    headers: dict[str, bytes]
    receipt: bool
    count: int


@click.command(
    epilog="""\b
Examples:
  polybus publish news "hello"
  polybus publish news --receipt --header lang=en "hello" --url boson+properties://127.0.0.1
  journalctl -f | polybus publish logs --lines
  polybus publish readings 21.5 --url queue://127.0.0.1:4000
  polybus publish news "hello" --receipt --url http://127.0.0.1
"""
)
@click.argument("topic")
@click.argument("data", required=False)
@url_option
@click.option("--file", type=click.File("rb"), help="Publish what the file holds (- is stdin).")
@click.option("--lines", is_flag=True, help="One message per line of the input.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Add a header.")
@click.option("--receipt", is_flag=True, help="Wait until it is safely stored, print where.")
@click.option("--count", type=click.IntRange(1), default=1, help="Publish everything N times.")
@json_option
def publish(
    topic: str,
    data: str | None,
    url: str,
    file: BinaryIO | None,
    lines: bool,
    headers: tuple[str, ...],
    receipt: bool,
    count: int,
    as_json: bool,
) -> None:
    """Publish messages to a topic.

    DATA is one message; without it, and without --file, standard input is. On queue:// the topic is
    the connector's: TOPIC is not sent, and there are no receipts or headers. A refusal has no
    reason there, but is exit 1 as everywhere.
    """
    if data is not None and (file is not None or lines):
        raise click.UsageError("DATA is one message: it goes with neither --file nor --lines")
    if lines and count > 1 and file is None:
        raise click.UsageError("--count with --lines needs --file: standard input comes only once")
    job = Job(
        topic=topic,
        data=None if data is None else os.fsencode(data),
        file=file or sys.stdin.buffer,
        lines=lines,
        headers=_headers(headers),
        receipt=receipt,
        count=count,
    )
    published, position = asyncio.run(_publish(url, job))
    if as_json:
        said = None if position is None else str(position)
        echo_json({"topic": topic, "messages": published, "position": said})
    elif position is not None:
        click.echo(position)


def _headers(pairs: tuple[str, ...]) -> dict[str, bytes]:
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--header")
        headers[name] = os.fsencode(value)
    return headers


async def _publish(url: str, job: Job) -> tuple[int, Position | None]:
    """Publish everything; return how many messages, and the last one's position if asked for."""
    refusals: list[PolybusError] = []
    async with connect(url, reconnect=False, on_error=refusals.append) as client:
        published, position = await _publish_all(client, job)
        try:
            await client.flush()
        except PolybusError as error:
            # Elsewhere than on a queue the bus has said more before.
            refusals.append(error)
    # The bus ends the connection after us, so every refusal has arrived by now.
    if refusals:
        raise _explained(refusals[0], url)
    return published, position


def _explained(error: PolybusError, url: str) -> PolybusError:
    """On a queue the end of the connection is all that the bus says of a refusal."""
    if error.code != "client.disconnected" or not url.startswith("queue"):
        return error
    text = "the bus refused a message, or the topic is gone; its log says which"
    return PolybusError(error.code, f"{error.text}: {text}")


async def _publish_all(client: Client, job: Job) -> tuple[int, Position | None]:
    published = 0
    position = None
    async for values in _batches(job):
        position = await client.publish_many(
            job.topic, values, headers=job.headers, receipt=job.receipt
        )
        published += len(values)
    return published, position


async def _batches(job: Job) -> AsyncIterator[list[bytes]]:
    if job.lines:
        for turn in range(job.count):
            if turn:
                job.file.seek(0)
            async for lines in _lines(job.file):
                yield lines
        return
    message = job.data if job.data is not None else job.file.read()
    for first in range(0, job.count, BATCH_MAX):
        yield [message] * min(BATCH_MAX, job.count - first)


async def _lines(file: BinaryIO) -> AsyncIterator[list[bytes]]:
    """The lines that are there, as soon as they are: the input may be a pipe that never ends."""
    rest = b""
    while piece := await asyncio.to_thread(_read_some, file):
        *lines, rest = (rest + piece).split(b"\n")
        for first in range(0, len(lines), BATCH_MAX):
            yield [line.removesuffix(b"\r") for line in lines[first : first + BATCH_MAX]]
    if rest:
        yield [rest]


def _read_some(file: BinaryIO) -> bytes:
    try:
        return os.read(file.fileno(), READ_BYTES_MAX)
    except OSError as error:
        raise UsageError("input.unreadable", f"{error.strerror}") from error
