"""`polybus verify`: check the files of a stopped bus, or what a cluster has stored."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from polybus.cli.common import exits
from polybus.cli.common.options import files_of, json_option, settings_options
from polybus.cli.common.output import echo_json, plural, progress_bar, size
from polybus.config import Config
from polybus.log.cluster_location import ClusterLocation, location_of, read_location

if TYPE_CHECKING:
    from polybus.log.verify.verify import VerifyProgress, VerifyReport


@click.command(epilog="Example: polybus verify --data /var/lib/polybus")
@settings_options
@json_option
def verify(config: Config, as_json: bool) -> None:
    """Check everything that a bus has stored: exit 0 if it is intact, 1 if not.

    Each damage is a line with the topic, the file and the offsets that are lost; or, in state.db,
    the session, pack, consumer or producer; or a file of an account or a table.

    The bus must be stopped. With Kafka it reads what the brokers have; nodes may run meanwhile.
    """
    place = location_of(config) if config.is_cluster else read_location(Path(config.data))
    if place is None:
        report = checked(files_of(config, "polybus verify"), config, quiet=as_json)
    else:
        report = checked_cluster(place, quiet=as_json)
    end_with(report, as_json=as_json)


def checked(folder: Path, config: Config, *, quiet: bool) -> "VerifyReport":
    """Verify a folder, with a progress bar."""
    # Slow to import: Arrow and Parquet.
    from polybus.services.checking import verify as check

    with _progress(quiet) as progress:
        return check(folder, fsync=config.durability != "memory", progress=progress)


def checked_cluster(place: ClusterLocation, *, quiet: bool) -> "VerifyReport":
    """Verify what the nodes of a cluster have stored, with a progress bar."""
    from polybus.services.checking_cluster import verify_cluster

    with _progress(quiet) as progress:
        return verify_cluster(place, progress=progress)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator["VerifyProgress"]:
    with progress_bar("checking", hidden=quiet) as update:

        def progress(what: str, done: int, total: int) -> None:
            update(description=what[:40], completed=done, total=total)

        yield progress


def end_with(
    report: "VerifyReport", *, as_json: bool, more: dict[str, Any] | None = None
) -> NoReturn:
    """Print the result, and end with 0 if the folder is intact, else 1.

    `more` has the fields of the JSON beyond the report.
    """
    if as_json:
        echo_json({"intact": report.intact} | msgspec.to_builtins(report) | (more or {}))
        exits.end(good=report.intact)
    for damage in report.damages:
        click.echo(f"damaged: {damage}")
    for note in report.notes:
        click.echo(f"note: {note}")
    if report.damage_count > len(report.damages):
        click.echo(f"and {plural(report.damage_count - len(report.damages), 'more damage')}")
    verdict = "intact" if report.intact else plural(report.damage_count, "damage")
    counts = [plural(report.topics, "topic"), plural(report.messages, "message")]
    if not report.is_cluster:
        counts += [plural(report.segments, "journal segment"), plural(report.files, "history file")]
    click.echo(f"{verdict}: {', '.join([*counts, size(report.bytes)])}")
    exits.end(good=report.intact)
