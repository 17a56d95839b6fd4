"""The folders of lake tables, and whether their format can be read; without delta-rs.

A table is removed by a rename into DATA/trash, so that it exists completely or not at all; the next
start of the bus removes what a crash leaves there.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.log.disk import Disk, FileLock
from polybus.log.layout import trash_folder

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


def drop_table(data: Path, name: str) -> None:
    """Remove a table, durably.

    Raises:
        UsageError: `lake.unknown`; `pipeline.running` if a pipeline may be writing it.
        StorageError: `lake.storage`.
    """
    folder = table_folder(data, name)
    if not folder.is_dir():
        raise UsageError("lake.unknown", f"there is no table {name}")
    remove_folders(data, [folder])


def remove_folders(data: Path, folders: Sequence[Path]) -> None:
    """Remove folders of a pipeline that is stopped, each durably before the next.

    Raises:
        UsageError: `pipeline.running`.
        StorageError: `lake.storage`.
    """
    disk, path = Disk(), data
    try:
        disk.make_folder(data / "pipeline")
        with FileLock(data / "pipeline" / "lock"):
            for path in folders:
                if path.is_dir():
                    gone = trash_folder(data) / f"table-{uuid.uuid4().hex}"
                    disk.make_folder(gone.parent)
                    disk.rename(path, gone)
                    disk.sync_folder(path.parent)
                    disk.remove_folder(gone)
    except BlockingIOError as error:
        text = f"a pipeline runs on {data}: stop it with polybus pipeline stop"
        raise UsageError("pipeline.running", text) from error
    except OSError as error:
        text = f"cannot remove {path}: {error.strerror or error}"
        raise StorageError("lake.storage", text) from error


def check_format(folder: Path) -> None:
    """Refuse what delta-rs cannot read. Raises UsageError `lake.old-format`, `lake.path`."""
    if (folder / OLD_FORMAT).is_dir():
        data = folder.parent.parent
        text = f"table {name_in(folder)} has the format of an earlier version"
        raise UsageError("lake.old-format", f"{text}; run: polybus tables migrate --data {data}")
    if "%" in str(folder):
        raise UsageError("lake.path", f"{folder}: the path of a table cannot contain %")
