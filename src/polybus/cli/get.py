"""`polybus get`: download a large payload, and continue where an earlier one ended."""

import asyncio
from pathlib import Path

import click

from polybus import references
from polybus.cli.common.options import json_option, url_option
from polybus.cli.common.output import echo_json, say
from polybus.cli.common.transfers import transferred
from polybus.client import connect


@click.command(
    epilog="""\b
Examples:
  polybus get 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 --output film.mp4
  polybus tail news --url goms://127.0.0.1 --json | jq -r .value.reference.id
"""
)
@click.argument("blob_id", metavar="ID")
@url_option
@click.option("--output", type=click.Path(dir_okay=False), help="The file.  [default: ID]")
@json_option
def get(blob_id: str, url: str, output: str | None, as_json: bool) -> None:
    """Download the payload that a reference names, with resume.

    ID is the id in a reference. An unfinished download stays as OUTPUT.part, and the same command
    continues there. The file gets its name when its SHA-256 is right.
    """
    # Use the id as a file name only if it is valid.
    name = blob_id if references.is_blob_id(blob_id) else "blob"
    target = Path(output or name)
    path = asyncio.run(_download(url, blob_id, target, quiet=as_json))
    if as_json:
        echo_json({"id": blob_id, "file": str(path), "bytes": path.stat().st_size})
    else:
        say(f"{path}: {path.stat().st_size} bytes")


async def _download(url: str, blob_id: str, target: Path, *, quiet: bool) -> Path:
    async with connect(url, reconnect=False) as client:
        return await transferred(
            target.name,
            lambda progress: client.download(blob_id, target, progress=progress),
            hidden=quiet,
        )
