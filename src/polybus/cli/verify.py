"""`polybus verify`: check the files of a stopped bus."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from polybus.cli.common import exits
from polybus.cli.common.options import files_of, json_option, settings_options
from polybus.cli.common.output import echo_json, progress_bar
from polybus.config import Config

if TYPE_CHECKING:
    from polybus.log.verify.verify import VerifyReport


@click.command(epilog="Example: polybus verify --data /var/lib/polybus")
@settings_options
@json_option
def verify(config: Config, as_json: bool) -> None:
    """Check everything that a stopped bus has stored: exit 0 if it is intact, 1 if not.

    Each damage is a line with the topic, the file and the offsets that are lost; or, in state.db,
    the session, pack, consumer or producer; or a file of an account or a table.
    """
    end_with(checked(files_of(config, "polybus verify"), config, quiet=as_json), as_json=as_json)


def checked(folder: Path, config: Config, *, quiet: bool) -> "VerifyReport":
    """Verify a folder, with a progress bar."""
    # Slow to import: Arrow and Parquet.
    from polybus.services.checking import verify as check

    with progress_bar("checking", hidden=quiet) as update:

        def progress(what: str, done_bytes: int, total_bytes: int) -> None:
            update(description=what[:40], completed=done_bytes, total=total_bytes)

        return check(folder, fsync=config.durability != "memory", progress=progress)


def end_with(
    report: "VerifyReport", *, as_json: bool, more: dict[str, Any] | None = None
) -> NoReturn:
    """Print the result, and end with 0 if the folder is intact, else 1.

    `more` is what the JSON has beyond the report.
    """
    if as_json:
        echo_json({"intact": report.intact} | msgspec.to_builtins(report) | (more or {}))
        exits.end(good=report.intact)
    for damage in report.damages:
        click.echo(f"damaged: {damage}")
    for note in report.notes:
        click.echo(f"note: {note}")
    if report.damage_count > len(report.damages):
        click.echo(f"and {report.damage_count - len(report.damages)} more damages")
    verdict = "intact" if report.intact else f"{report.damage_count} damages"
    click.echo(
        f"{verdict}: {report.topics} topics, {report.messages} messages, "
        f"{report.segments} journal segments, {report.files} history files, {report.bytes} bytes"
    )
    exits.end(good=report.intact)
