"""`polybus publish`: messages from the command line, a file or standard input."""

import asyncio
import mimetypes
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import BinaryIO

import click

from polybus.cli.common.lookup import suggesting
from polybus.cli.common.options import json_option, url_option
from polybus.cli.common.output import echo_json
from polybus.cli.common.transfers import transferred
from polybus.client import Position, connect
from polybus.client.blobs import BlobProgress
from polybus.errors import PolybusError, UsageError
from polybus.references import OCTETS, Reference

READ_BYTES_MAX = 1 << 18
LARGE_BYTES = 1 << 20
"""Larger files are streamed."""
BATCH_MAX = 1000


@click.command(
    epilog="""\b
Examples:
  polybus publish news "hello"
  polybus publish news --receipt --header lang=en "hello" --url boson+properties://127.0.0.1
  journalctl -f | polybus publish logs --lines
  polybus publish films --file film.mp4
  polybus publish readings 21.5 --url queue://127.0.0.1:4000
  polybus publish news "hello" --receipt --url http://127.0.0.1
"""
)
@click.argument("topic")
@click.argument("data", required=False)
@url_option
@click.option("--file", type=click.File("rb"), help="Publish the content of a file (- is stdin).")
@click.option("--lines", is_flag=True, help="Publish each line of the input as a message.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Add a header.")
@click.option("--receipt", is_flag=True, help="Wait until it is durable, and print its position.")
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

    DATA is one message. Without DATA and --file the message is read from standard input. A file
    over 1 MiB is streamed over HTTP, and its position and the id of its blob are printed; if that
    is interrupted, the same command continues there, for a day. On
    queue:// the connector decides the topic: TOPIC is not sent, and there are no receipts or
    headers. There the bus gives no reason for a refusal; it is exit 1.
    """
    if data is not None and (file is not None or lines):
        raise click.UsageError("DATA is one message: use it without --file and --lines")
    if lines and count > 1 and file is None:
        raise click.UsageError("--count with --lines needs --file: standard input is read once")
    given = file or sys.stdin.buffer
    if file is not None and not lines and _is_large(file) and not url.startswith("queue"):
        if headers:
            raise click.UsageError(
                "--header cannot be used with a large file, which is sent over HTTP"
            )
        _publish_large(url, topic, file, count, as_json)
        return
    if lines:
        batches = _line_batches(given, count)
    else:
        batches = _copies(given, data, count)
    with suggesting(url):
        published, position = asyncio.run(_publish(url, topic, batches, _headers(headers), receipt))
    if as_json:
        text = None if position is None else str(position)
        echo_json({"topic": topic, "messages": published, "position": text})
    elif position is not None:
        click.echo(position)


def _is_large(file: BinaryIO) -> bool:
    """Whether a file is too large to be read into memory."""
    try:
        return os.fstat(file.fileno()).st_size > LARGE_BYTES
    except (OSError, ValueError):
        return False


def _publish_large(url: str, topic: str, file: BinaryIO, count: int, as_json: bool) -> None:
    """Stream a file to the bus, which stores it as a blob."""
    name = getattr(file, "name", "")
    kind = mimetypes.guess_type(name)[0] or OCTETS

    async def publish_all() -> tuple[Position, Reference]:
        async with connect(url, reconnect=False) as client:

            def send(progress: BlobProgress) -> Awaitable[tuple[Position, Reference]]:
                file.seek(0)
                return client.publish_file(topic, file, content_type=kind, progress=progress)

            for _ in range(count):
                stored = await transferred(os.path.basename(name), send, hidden=as_json)
        return stored

    position, reference = asyncio.run(publish_all())
    if as_json:
        found = {"id": reference.id, "size": reference.size, "type": reference.type}
        text = str(position)
        echo_json({"topic": topic, "messages": count, "position": text, "reference": found})
    else:
        click.echo(f"{position} {reference.id}")


def _headers(pairs: tuple[str, ...]) -> dict[str, bytes]:
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--header")
        headers[name] = os.fsencode(value)
    return headers


async def _publish(
    url: str,
    topic: str,
    batches: AsyncIterator[list[bytes]],
    headers: dict[str, bytes],
    receipt: bool,
) -> tuple[int, Position | None]:
    """Publish everything; return the number of messages and, with a receipt, the last position."""
    refusals: list[PolybusError] = []
    published, position = 0, None
    async with connect(url, reconnect=False, on_error=refusals.append) as client:
        async for values in batches:
            position = await client.publish_many(topic, values, headers=headers, receipt=receipt)
            published += len(values)
        try:
            await client.flush()
        except PolybusError as error:
            # Except on a queue, the bus has sent a more precise refusal before this.
            refusals.append(error)
    # The bus closes the connection after us, so every refusal has arrived by now.
    if refusals:
        raise _explained(refusals[0], url)
    return published, position


def _explained(error: PolybusError, url: str) -> PolybusError:
    """On a queue the bus refuses by closing the connection, without a reason."""
    if error.code != "client.disconnected" or not url.startswith("queue"):
        return error
    text = "the bus refused a message, or the topic no longer exists; see the log of the bus"
    return PolybusError(error.code, f"{error.text}: {text}")


async def _copies(file: BinaryIO, data: str | None, count: int) -> AsyncIterator[list[bytes]]:
    # Read standard input only once the bus is reached.
    message = file.read() if data is None else os.fsencode(data)
    for first in range(0, count, BATCH_MAX):
        yield [message] * min(BATCH_MAX, count - first)


async def _line_batches(file: BinaryIO, count: int) -> AsyncIterator[list[bytes]]:
    """Lines in batches, without waiting for a full batch: the input may be a pipe without end."""
    for turn in range(count):
        if turn:
            file.seek(0)
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
