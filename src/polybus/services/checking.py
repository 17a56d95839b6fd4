"""Checks everything that a stopped bus and its pipeline have stored.

That is the log, accounts, state.db, tables, metadata files and checkpoints. docs/data-folder.md
says what is not checked, and why.
"""

from collections.abc import Iterator
from pathlib import Path

from polybus.errors import StorageError
from polybus.lake.folders import OLD_FORMAT, table_folders
from polybus.log.layout import accounts_folder, folders_in
from polybus.log.spark_checkpoint import checkpoint_damages
from polybus.log.verify import verify as log
from polybus.log.verify.metadata import DISPENSABLE, metadata_damages
from polybus.log.verify.tables import table_damages, unlisted, wrong_content
from polybus.services.accounts.edits import found_config, unused_edit
from polybus.services.accounts.store import damaged_accounts
from polybus.services.state_rows import NAME, verify_state


def verify(
    data: Path, *, fsync: bool = True, progress: log.VerifyProgress | None = None
) -> log.VerifyReport:
    """The report of `polybus verify`. `fsync`: every save was synced.

    Raises as log.verify.verify does; StorageError `log.format`.
    """
    report = log.verify(data, progress=progress)
    for path, reason in damaged_accounts(data).items():
        report.add(log.Damage(file=str(path), reason=reason.removeprefix(f"{path}: ")))
    report.notes += _unused_edits(data)
    for one in verify_state(data, fsync=fsync):
        report.add(log.Damage(file=NAME, reason=str(one)))
    for table in table_folders(data):
        if (table / OLD_FORMAT).is_dir():
            report.notes.append(f"{table}: its format is old, and not checked: migrate it")
            continue
        for path, reason in table_damages(table, wrong_content):
            report.add(log.Damage(file=str(path), reason=reason))
        if rest := unlisted(table):
            text = "no version names it: a write was interrupted; a pipeline removes it later"
            report.notes += [f"{path}: {text}" for path in rest]
    for path, reason in metadata_damages(data):
        if path.name in DISPENSABLE:
            report.notes.append(f"{path}: {reason}; it is not needed, and will be rewritten")
        else:
            report.add(log.Damage(file=str(path), reason=reason))
    for path, reason in checkpoint_damages(data):
        report.add(log.Damage(file=str(path), reason=reason))
    return report


def _unused_edits(data: Path) -> Iterator[str]:
    for folder in folders_in(accounts_folder(data)):
        try:
            if edit := unused_edit(data, folder.name):
                yield f"{folder}/{found_config(data, folder.name).file}: {edit}"
        except StorageError as error:
            yield error.text
