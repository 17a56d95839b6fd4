"""`polybus compact`: everything in the journal becomes history."""

from __future__ import annotations

import click

from polybus.cli.options import data_options, existing_data, json_option, load_config
from polybus.cli.output import echo_json


@click.command(epilog="Example: polybus compact --data /var/lib/polybus")
@data_options
@json_option
def compact(data: str | None, config_path: str | None, as_json: bool) -> None:
    """Turn the journal of a stopped bus into history, then exit.

    Afterwards each topic is Parquet files only. A running bus does this by itself.
    """
    from polybus.log.history.handover import compact as hand_over

    folder = existing_data(load_config(data, config_path))
    segments = hand_over(folder, progress=None if as_json else _say)
    if as_json:
        echo_json({"segments": [segment.name for segment in segments]})
    else:
        click.echo(f"{len(segments)} journal segments became history")


def _say(progress: str) -> None:
    click.echo(progress, err=True)
