"""`polybus restore`: creates a data folder from a backup."""

from pathlib import Path

import click

from polybus.cli.common.options import data_option, json_option, load_config
from polybus.cli.common.output import say
from polybus.cli.verify import checked, end_with


@click.command(epilog="Example: polybus restore /backups/monday --data /var/lib/polybus")
@click.argument("backup", type=click.Path(exists=True, file_okay=False, path_type=Path))
@data_option
@json_option
def restore(backup: Path, data: str | None, as_json: bool) -> None:
    """Verify a backup, copy it to a new or empty data folder, and verify the result.

    A backup with damage is not restored: `polybus verify --data BACKUP` names the damage.
    """
    from polybus.services import backup as backups

    backups.check_whole(backup)
    say(f"checking {backup}")
    config = load_config(data)
    report = checked(backup, config, quiet=as_json)
    if not report.intact:
        end_with(report, as_json=as_json)
    folder = Path(config.data)
    say(f"copying {backup} to {folder}")
    backups.restore(backup, folder)
    end_with(checked(folder, config, quiet=as_json), as_json=as_json)
