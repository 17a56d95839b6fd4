"""`polybus backup`: a consistent copy of a data folder."""

from pathlib import Path

import click

from polybus.cli.options import existing_data, json_option, settings_options
from polybus.cli.output import say
from polybus.cli.verify import checked, end_with
from polybus.config import Config


@click.command(epilog="Example: polybus backup /backups/monday --data /var/lib/polybus")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--no-tables", is_flag=True, help="Leave out tables and the pipeline's checkpoints.")
@settings_options
@json_option
def backup(config: Config, folder: Path, no_tables: bool, as_json: bool) -> None:
    """Copy everything of a running or stopped bus to a new folder, then verify the copy.

    The copy has every message that had a receipt when the command began. Files that do not change
    any more are hard links where the file system allows it. A pipeline must be stopped, because it
    changes the tables. The exit code is 1 if the copy, and so the bus, has damage.
    """
    from polybus.services.backup import backup as make

    data = existing_data(config)
    say(f"copying {data} to {folder}")
    make(data, folder, tables=not no_tables)
    end_with(checked(folder, config, quiet=as_json), as_json=as_json)
