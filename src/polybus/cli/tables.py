"""`polybus tables migrate`: convert the tables of a data folder of an earlier version."""

import click

from polybus.cli.options import existing_data, json_option, settings_options
from polybus.cli.output import echo, say
from polybus.config import Config


@click.group(epilog="Example: polybus tables migrate --data /var/lib/polybus")
def tables() -> None:
    """Convert lake tables."""


@tables.command(epilog="Example: polybus tables migrate --data /var/lib/polybus")
@settings_options
@json_option
def migrate(config: Config, as_json: bool) -> None:
    """Turn tables of the format before Delta into Delta tables.

    The pipeline must be stopped; the bus may run. No row is copied, except in tables with VARIANT
    columns, which become JSON text. Each table is converted completely or not at all: after a crash
    or an error, run it again.
    """
    from polybus.lake.migrate import migrate as convert

    names = convert(existing_data(config), None if as_json else say)
    echo(as_json, {"tables": names}, f"{len(names)} tables were converted")
