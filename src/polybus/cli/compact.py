"""`polybus compact`: convert the whole journal of a stopped bus to history files."""

import click

from polybus.cli.common.options import files_of, json_option, settings_options
from polybus.cli.common.output import echo, plural, say
from polybus.config import Config


@click.command(epilog="Example: polybus compact --data /var/lib/polybus")
@settings_options
@json_option
def compact(config: Config, as_json: bool) -> None:
    """Turn the journal of a stopped bus into history, then exit.

    Afterwards each topic consists of Parquet files only. A running bus does this by itself.
    """
    from polybus.log import file_modes
    from polybus.log.history.handover import compact as hand_over

    data = files_of(config, "polybus compact")
    file_modes.adopt(data)
    segments = hand_over(data, progress=None if as_json else say)
    names = [segment.name for segment in segments]
    echo(as_json, {"segments": names}, f"{plural(len(names), 'journal segment')} became history")
