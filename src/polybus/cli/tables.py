"""`polybus tables`: the tables of a data folder, and which topics are tables for other engines."""

from pathlib import Path
from typing import Any

import click

from polybus import names
from polybus.cli.common.options import existing_data, files_of, json_option, settings_options
from polybus.cli.common.output import echo, echo_json, echo_table, say
from polybus.config import Config

COLUMNS = ("table", "kind", "version", "rows", "files", "bytes")
TABLES = "a topic as a table"


@click.group(epilog="Example: polybus tables list")
def tables() -> None:
    """Lake tables, and topics as Delta tables."""


@tables.command("list", epilog="Example: polybus tables list --json")
@settings_options
@json_option
def list_tables(config: Config, as_json: bool) -> None:
    """List the lake tables, and the topics whose history is a table."""
    found = _tables(existing_data(config))
    if as_json:
        echo_json(found)
        return
    echo_table(COLUMNS, [[one[column] for column in COLUMNS] for one in found])


@tables.command(epilog="Example: polybus tables show silver")
@click.argument("name")
@settings_options
@json_option
def show(config: Config, name: str, as_json: bool) -> None:
    """Show a table's folder, version, size and columns.

    NAME is a lake table, or a topic whose history is a table. If both exist, it is the lake table.
    """
    from polybus.lake.table import unknown_table

    found = [one for one in _tables(existing_data(config), name) if one["table"] == name]
    if not found:
        raise unknown_table(name)
    if as_json:
        echo_json(found[0])
        return
    columns = found[0].pop("columns")
    for key, value in found[0].items():
        click.echo(f"{key}: {'-' if value is None else value}")
    click.echo("columns:")
    echo_table(("name", "type"), [[one["name"], one["type"]] for one in columns])


@tables.command(epilog="Example: polybus tables expose orders")
@click.argument("topic")
@settings_options
@json_option
def expose(config: Config, topic: str, as_json: bool) -> None:
    """Make the history of a topic a Delta table, for Polars, DuckDB, Trino, Spark and others.

    Nothing is copied. From now on the bus adds and removes the files of the table together with
    those of the history. The bus may run or be stopped.
    """
    from polybus.log.history import exposed

    name = names.canonical(topic)
    folder = exposed.expose(files_of(config, TABLES), name).absolute()
    echo(as_json, {"topic": name, "folder": str(folder)}, f"{name} is the Delta table {folder}")


@tables.command(epilog="Example: polybus tables unexpose orders")
@click.argument("topic")
@settings_options
@json_option
def unexpose(config: Config, topic: str, as_json: bool) -> None:
    """Remove the Delta table of a topic. Its messages stay."""
    from polybus.log.history import exposed

    name = names.canonical(topic)
    is_removed = exposed.unexpose(files_of(config, TABLES), name)
    text = f"{name} is no longer a Delta table" if is_removed else f"{name} was not a Delta table"
    echo(as_json, {"topic": name, "removed": is_removed}, text)


@tables.command(epilog="Example: polybus tables drop silver_orders --yes")
@click.argument("name")
@click.option(
    "--rebuild",
    is_flag=True,
    help="With silver: remove all tables of the standard pipeline and its checkpoint.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@settings_options
@json_option
def drop(config: Config, name: str, rebuild: bool, yes: bool, as_json: bool) -> None:
    """Remove a lake table with all its rows. The pipeline must be stopped.

    A table `silver_TOPIC` is made again from `silver` when the pipeline starts. `silver` itself
    needs --rebuild: the pipeline then makes all of its tables again from the messages that the log
    still has. The other tables get only what comes later.
    """
    from polybus.lake.folders import drop_table
    from polybus.lake.standard_tables import check_drop, drop_standard, rebuilt

    data = existing_data(config)
    if rebuild and name != "silver":
        raise click.UsageError("--rebuild is only for silver, and removes the tables it feeds")
    if not rebuild:
        check_drop(data, name)
    names = rebuilt(data) if rebuild else [name]
    if not yes:
        what = ", ".join(names)
        more = " Rows of messages that the log no longer has do not come back." if rebuild else ""
        click.confirm(f"Remove {what} with all rows?{more}", abort=True)
    if rebuild:
        drop_standard(data)
    else:
        drop_table(data, name)
    echo(as_json, {"table": name, "tables": names}, f"removed {', '.join(names)}")


@tables.command(epilog="Example: polybus tables keep traffic 168")
@click.argument("name")
@click.argument("hours", type=click.IntRange(1, 24 * 3650))
@settings_options
@json_option
def keep(config: Config, name: str, hours: int, as_json: bool) -> None:
    """Keep older versions of a lake table for some hours; without this, for one.

    Until then they can be read with `VERSION AS OF` and `TIMESTAMP AS OF`, and their files stay on
    the disk. The bus and the pipeline may run.
    """
    from polybus.lake.compact import keep as keep_versions
    from polybus.lake.table import open_table, unknown_table

    table = open_table(existing_data(config), name)
    if not table.exists:
        raise unknown_table(name)
    keep_versions(table, hours * 3600)
    text = f"{name} keeps older versions for {hours} hours"
    echo(as_json, {"table": name, "keeps-s": hours * 3600.0}, text)


@tables.command(epilog="Example: polybus tables migrate --data /var/lib/polybus")
@settings_options
@json_option
def migrate(config: Config, as_json: bool) -> None:
    """Turn tables of the format before Delta into Delta tables.

    The pipeline must be stopped; the bus may run. No row is copied, except in tables with VARIANT
    columns, which become JSON text. Each table is converted completely or not at all: after a crash
    or an error, run it again.
    """
    from polybus.lake.old_tables import convert_tables

    converted = convert_tables(existing_data(config), None if as_json else say)
    echo(as_json, {"tables": converted}, f"{len(converted)} tables were converted")


def _tables(data: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The properties of the tables of this name, or of all tables."""
    from polybus.lake.folders import name_in, table_folders
    from polybus.lake.table import LakeTable
    from polybus.lake.typed import SCHEMA, SCHEMA_VERSION
    from polybus.log.delta import kept_s
    from polybus.log.history.exposed import exposed_folders
    from polybus.log.layout import exposed_folder, topic_in

    folders = [(name_in(folder), "table", folder) for folder in table_folders(data)]
    folders += [(topic_in(one), "topic", exposed_folder(one)) for one in exposed_folders(data)]
    found = []
    for table, kind, folder in folders:
        if name is not None and table != name:
            continue
        lake = LakeTable(folder)
        state = lake.state
        if state.version < 0:
            continue
        found.append(
            {
                "table": table,
                "kind": kind,
                "folder": str(lake.path),
                "schema-version": lake.settings.get(SCHEMA_VERSION),
                "schema": lake.settings.get(SCHEMA),
                "version": state.version,
                "rows": lake.rows,
                "files": len(state.files),
                "keeps-s": kept_s(lake.settings),
                "bytes": sum(file.bytes for file in state.files.values()),
                "columns": [_column(field) for field in state.fields],
            }
        )
    return found


def _column(field: dict[str, Any]) -> dict[str, str]:
    from polybus.lake.fields import type_name

    return {"name": field["name"], "type": type_name(field)}
