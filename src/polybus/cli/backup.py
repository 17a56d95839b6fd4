"""`polybus backup`: a consistent copy of a data folder."""

from pathlib import Path

import click
import msgspec

from polybus.cli.common.options import files_of, json_option, settings_options
from polybus.cli.common.output import say, size
from polybus.cli.verify import checked, end_with
from polybus.config import Config

EXAMPLE = "Example: polybus backup /backups/monday --base /backups --data /var/lib/polybus"


@click.command(epilog=EXAMPLE)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--base",
    metavar="BACKUP",
    type=click.Path(file_okay=False, path_type=Path),
    help="An earlier backup, or a folder of backups: the newest one is used.",
)
@click.option("--no-tables", is_flag=True, help="Leave out tables and the pipeline's checkpoints.")
@settings_options
@json_option
def backup(config: Config, folder: Path, base: Path | None, no_tables: bool, as_json: bool) -> None:
    """Copy everything of a running or stopped bus to a new folder, then verify the copy.

    The copy has every message that had a receipt when the command began. Immutable files are hard
    links where the file system allows it: to those of the bus, or to those of an earlier backup
    with `--base`, if they have the same bytes. A backup with links is complete: the earlier one can
    be deleted. A pipeline must be stopped, because it changes the tables. The exit code is 1 if the
    copy, and so the bus, has damage.
    """
    from polybus.services.backup import backup as make
    from polybus.services.backup import find_base
    from polybus.services.backup_files import taken_by

    data = files_of(config, "polybus backup")
    earlier = find_base(base) if base is not None else None
    if base is not None and earlier is None:
        say(f"no backup in {base} yet: everything is new")
    say(f"copying {data} to {folder}" + (f", based on {earlier}" if earlier is not None else ""))
    make(data, folder, tables=not no_tables, base=earlier)
    taken = taken_by(folder)
    say(
        f"copied {taken.copied_files} files ({size(taken.copied_bytes)}), "
        f"linked {taken.linked_files} ({size(taken.linked_bytes)})"
    )
    report = checked(folder, config, quiet=as_json)
    end_with(report, as_json=as_json, more=msgspec.to_builtins(taken))
