"""Start flows over (`--reset`): removes the rows that they wrote, and their checkpoints.

Rows without their checkpoint would be written again, and a checkpoint without its rows would never
write them again. The order of writes:

    1. CHECKPOINTS/.reset.json   which checkpoints and rows to remove; durable: the decision
    2. the tables                a new version without rows
    3. the checkpoints           removed, then a fsync of their folder
    4. CHECKPOINTS/.reset.json   removed

After a crash the next start of the pipeline does 2 to 4 before a flow starts, also without
`--reset`. Each of them is idempotent, also after a partial run.
"""

import shutil
from pathlib import Path

import msgspec

from polybus.errors import StorageError
from polybus.lake.table import open_table
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file, sync_path

# No flow can have this name.
FILE = ".reset.json"


class Reset(msgspec.Struct, frozen=True):
    """The folders of checkpoints to remove, and the lake tables that lose their rows."""

    checkpoints: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()

    def __or__(self, other: "Reset") -> "Reset":
        return Reset(self.checkpoints | other.checkpoints, self.tables | other.tables)


def begun_reset(checkpoints: Path) -> Reset:
    """An unfinished reset of an earlier start. Raises StorageError `pipeline.storage`."""
    try:
        return checked_json.read(checkpoints / FILE, Reset, accept_unchecked=True) or Reset()
    except StorageError as error:
        text = f"{error.text}; remove it and start over with --reset"
        raise StorageError("pipeline.storage", text) from error


def start_over(data: Path, checkpoints: Path, reset: Reset) -> None:
    """Remove the rows and the checkpoints, durably.

    Raises:
        StorageError: `pipeline.storage`, or an error of the table; the next start continues.
    """
    try:
        Disk().make_folder(checkpoints)
        replace_file(checkpoints / FILE, checked_json.encode(reset))
        for name in sorted(reset.tables):
            table = open_table(data, name)
            if files := table.state.files:
                table.commit([], remove=list(files), writer="reset", batch_id=None)
        for name in sorted(reset.checkpoints):
            if (checkpoints / name).exists():
                shutil.rmtree(checkpoints / name)
        sync_path(checkpoints)
        (checkpoints / FILE).unlink()
        sync_path(checkpoints)
    except OSError as error:
        text = f"cannot start over in {checkpoints}: {error}"
        raise StorageError("pipeline.storage", text) from error
