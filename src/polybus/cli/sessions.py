"""`polybus sessions`: manage msgstream sessions over the HTTP API of the bus."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click
import msgspec

from polybus.cli.common.options import from_option, http_url_option, json_option
from polybus.cli.common.output import echo
from polybus.client import connect
from polybus.client.http.sessions import Sessions
from polybus.structs import decode

T = TypeVar("T")


@click.group(
    epilog="""\b
Examples:
  polybus sessions create news sport --ttl 600
  polybus sessions push KEY '[["shop.purchase", {"item": "boots"}]]'
"""
)
def sessions() -> None:
    """Open, fill and end msgstream sessions.

    Anyone with the key of a session can read it: treat the key as a password.
    """


@sessions.command(epilog="Example: polybus sessions create news --from earliest --json")
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--ttl", "ttl_s", type=float, help="Seconds until it expires without a client.")
@from_option
@http_url_option
@json_option
def create(
    topics: tuple[str, ...], ttl_s: float | None, start: str, url: str, as_json: bool
) -> None:
    """Open a session that subscribes to the topics, and print its key."""
    key = _run(url, lambda sessions: sessions.create(topics, start=start, ttl_s=ttl_s))
    echo(as_json, {"sessionKey": key}, key)


@sessions.command(epilog="Example: polybus sessions delete KEY")
@click.argument("key")
@http_url_option
@json_option
def delete(key: str, url: str, as_json: bool) -> None:
    """End a session and notify its client."""
    _run(url, lambda sessions: sessions.delete(key))
    echo(as_json, {"deleted": True}, "deleted")


@sessions.command(epilog="""Example: polybus sessions push KEY '[["mail.new", {"count": 3}]]'""")
@click.argument("key")
@click.argument("pack", metavar="JSON")
@http_url_option
@json_option
def push(key: str, pack: str, url: str, as_json: bool) -> None:
    """Put one pack of events, [["type", data], …], into a session."""
    events = _events(pack)
    _run(url, lambda sessions: sessions.push(key, events))
    echo(as_json, {"events": len(events)}, "pushed")


@sessions.command(epilog="""Example: polybus sessions broadcast '[["server.notice", "hello"]]'""")
@click.argument("pack", metavar="JSON")
@http_url_option
@json_option
def broadcast(pack: str, url: str, as_json: bool) -> None:
    """Put one pack of events, [["type", data], …], into every session."""
    events = _events(pack)
    count = _run(url, lambda sessions: sessions.broadcast(events))
    echo(as_json, {"sessions": count}, f"pushed to {count} sessions")


def _events(pack: str) -> list[list[Any]]:
    try:
        return decode(pack, list[list[Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.BadParameter(f'a pack must be [["type", data], …]: {error}') from error


def _run(url: str, ask: Callable[[Sessions], Awaitable[T]]) -> T:
    async def run() -> T:
        async with connect(url, reconnect=False) as client:
            return await ask(client.sessions)

    return asyncio.run(run())
