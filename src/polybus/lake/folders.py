"""The folders of lake tables, and whether their format can be read; without delta-rs."""

from pathlib import Path
from urllib.parse import unquote

from polybus import names
from polybus.errors import UsageError

OLD_FORMAT = "_polybus"


def tables_folder(data: Path) -> Path:
    return data / "tables"


def table_folder(data: Path, name: str) -> Path:
    """The folder of a table. delta-rs reads %20 as a space, so names are escaped with `~`."""
    return tables_folder(data) / names.folder_of(name).replace("%", "~")


def name_in(folder: Path) -> str:
    """The name of the table in a folder."""
    return unquote(folder.name.replace("~", "%"))


def table_folders(data: Path) -> list[Path]:
    folder = tables_folder(data)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def check_format(folder: Path) -> None:
    """Refuse what delta-rs cannot read. Raises UsageError `lake.old-format`, `lake.path`."""
    if (folder / OLD_FORMAT).is_dir():
        data = folder.parent.parent
        text = f"table {name_in(folder)} has the format of an earlier version"
        raise UsageError("lake.old-format", f"{text}; run: polybus tables migrate --data {data}")
    if "%" in str(folder):
        raise UsageError("lake.path", f"{folder}: the path of a table cannot contain %")
