"""`polybus verify`: is everything that was stored still there and right?"""

from __future__ import annotations

import sys

import click
import msgspec

from polybus.cli.options import data_options, existing_data, json_option, load_config
from polybus.cli.output import echo_json


@click.command(epilog="Example: polybus verify --data /var/lib/polybus")
@data_options
@json_option
def verify(data: str | None, config_path: str | None, as_json: bool) -> None:
    """Check everything a stopped bus has stored: exit 0 if it is intact, 1 if not.

    Each damage is a line with the topic, the file and the offsets it costs.
    """
    # Heavy: the files are Arrow and Parquet.
    from polybus.log.verify.check import verify as check

    folder = existing_data(load_config(data, config_path))
    with _Progress(hidden=as_json) as progress:
        report = check(folder, progress=progress.update)
    if as_json:
        echo_json({"intact": report.intact} | msgspec.to_builtins(report))
    else:
        for damage in report.damages:
            click.echo(f"damaged: {damage}")
        for note in report.notes:
            click.echo(f"note: {note}")
        more = report.damage_count - len(report.damages)
        if more:
            click.echo(f"and {more} damages more")
        verdict = "intact" if report.intact else f"{report.damage_count} damages"
        click.echo(
            f"{verdict}: {report.topics} topics, {report.messages} messages, "
            f"{report.segments} journal segments, {report.files} history files, "
            f"{report.bytes} bytes"
        )
    if not report.intact:
        sys.exit(1)


class _Progress:
    """A bar on standard error, when that is a terminal."""

    def __init__(self, *, hidden: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(
            console=console, transient=True, disable=hidden or not console.is_terminal
        )
        self._task = self._bar.add_task("checking", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self._bar.update(self._task, description=what[:40], completed=done_bytes, total=total_bytes)
