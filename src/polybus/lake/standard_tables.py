"""The tables of the standard pipeline: one checkpoint fills all of them, so they go together.

The checkpoint has passed the messages of `silver`. Without the table, only later messages would
come, and nothing would show that the others are missing. To build it again from the log, the
checkpoint must go too, and then all other tables: they would get their messages twice. Order of
removal: checkpoint, tables. After a crash in between the pipeline does not start, and names what is
left.
"""

from pathlib import Path

from polybus.errors import StorageError, UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.folders import remove_folders, table_folder
from polybus.lake.table import open_table, table_names
from polybus.lake.typed import SCHEMA, TABLE_PREFIX

TABLES = ("silver", "quarantine", "traffic", "top_senders", "deliveries", "recent_ids")
EXPECTATIONS = "expectations"
NEEDED = ("silver", "recent_ids")
"""Without one of these, rows would be missing, or stored twice."""


def checkpoint_of(data: Path) -> Path:
    return data / "pipeline" / "checkpoints" / "standard" / "decode"


def typed_names(data: Path) -> list[str]:
    """The tables `silver_<topic>` of topics with a schema.

    Raises StorageError: it is unknown whose table one of this name is, as it cannot be read.
    """
    names = [name for name in table_names(data) if name.startswith(TABLE_PREFIX)]
    return [name for name in names if _is_typed(data, name)]


def _is_typed(data: Path, name: str) -> bool:
    try:
        return SCHEMA in open_table(data, name).settings
    except StorageError:
        # It is removed to be built again. A user may have a table of such a name, so only a topic
        # that is declared proves that this one is the pipeline's.
        declared = pipeline_settings.read(data).topics
        if name not in {TABLE_PREFIX + one.name for one in declared if one.schema}:
            raise
        return True


def rebuilt(data: Path) -> list[str]:
    """The tables that the pipeline builds again together."""
    found = [*TABLES, EXPECTATIONS]
    return [*(one for one in found if table_folder(data, one).is_dir()), *typed_names(data)]


def check_drop(data: Path, name: str) -> None:
    """Refuse to remove a table alone that the checkpoint needs. Raises UsageError `lake.needed`."""
    if name in NEEDED and table_folder(data, name).is_dir() and checkpoint_of(data).is_dir():
        text = (
            f"the standard pipeline has read the messages of {name} already, and would continue "
            "after them; polybus tables drop silver --rebuild removes all of its tables, "
            "and builds them again from the messages that the log still has"
        )
        raise UsageError("lake.needed", text)


def drop_standard(data: Path) -> list[str]:
    """Remove all tables of the pipeline and its checkpoint; return the tables.

    Raises as `drop_table` and `typed_names`.
    """
    names = rebuilt(data)
    if not names and not checkpoint_of(data).is_dir():
        raise UsageError("lake.unknown", "there is no table of the standard pipeline")
    remove_folders(data, [checkpoint_of(data), *(table_folder(data, name) for name in names)])
    return names
