"""Compaction of a table: many small files become few, and unused files are removed.

Streams add small files with every batch. `tidy` runs after a commit and merges them every
COMPACT_EVERY versions. The merged file is added in the version that removes the small ones, so a
crash leaves both or neither change. Files that no version names are removed by `vacuum`.
"""

import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from polybus.errors import StorageError
from polybus.lake import files as lake_files
from polybus.lake import versions
from polybus.lake.files import FileNote, TableFile, note_of
from polybus.lake.table import STAGING, Conflict, LakeTable, table_error

logger = logging.getLogger("polybus.lake")

WRITER = "polybus-compact"
COMPACT_EVERY = 32
SMALL_BYTES = 32 << 20
TARGET_BYTES = 128 << 20
RUN_BYTES_MAX = 256 << 20
"""The most that one run of `tidy` merges, because it delays the next batch of a stream."""
GRACE_S = 900.0
"""How long a file stays after its last version, for readers of that version."""
STAGING_GRACE_S = 86_400.0


def tidy(table: LakeTable) -> None:
    """Compact and vacuum if it is time. A failure is logged; a later call tries again."""
    if table.version % COMPACT_EVERY:
        return
    try:
        compact(table, files_min=COMPACT_EVERY // 2, bytes_max=RUN_BYTES_MAX)
        vacuum(table)
    except Exception as error:
        # The batch is committed: a failure here must not make the stream repeat it.
        logger.warning("table %s: compaction failed: %s", table.name, error)


def compact(table: LakeTable, *, files_min: int = 2, bytes_max: int | None = None) -> int:
    """Merge the small files of each partition with at least `files_min`; return how many.

    Returns 0 if another writer removed one of the files meanwhile; a later call tries again.

    Raises:
        StorageError: `lake.damaged`, a file cannot be read; the table is unchanged.
    """
    add: list[FileNote] = []
    remove: list[str] = []
    for group in _groups(table, files_min, bytes_max):
        add.append(_merged(table, group))
        remove += [file.path for file in group]
    if not remove:
        return 0
    try:
        table.commit(add, remove=remove, writer=WRITER, batch_id=None)
    except Conflict:
        for note in add:
            (table.path / note.file.path).unlink(missing_ok=True)
        return 0
    return len(remove)


def vacuum(table: LakeTable, *, grace_s: float = GRACE_S) -> int:
    """Remove files that no version has named for `grace_s`; return how many."""
    named = set(table.state.files)
    now = time.time()
    removed = 0
    for path in table.path.rglob("*.parquet"):
        relative = path.relative_to(table.path)
        if relative.parts[0] in (versions.FOLDER, STAGING) or str(relative) in named:
            continue
        with suppress(FileNotFoundError):
            # The change time too: a file may just have been renamed here for a commit.
            status = path.stat()
            if max(status.st_mtime, status.st_ctime) <= now - grace_s:
                path.unlink()
                removed += 1
    with suppress(FileNotFoundError):
        for entry in os.scandir(table.path / STAGING):
            if entry.stat().st_mtime <= now - max(grace_s, STAGING_GRACE_S):
                shutil.rmtree(entry.path, ignore_errors=True)
    return removed


def _groups(table: LakeTable, files_min: int, bytes_max: int | None) -> Iterator[list[TableFile]]:
    """Groups of small files of one partition that make a file of about the target size."""
    small: dict[Path, list[TableFile]] = defaultdict(list)
    for file in table.state.files.values():
        if file.bytes < SMALL_BYTES:
            small[Path(file.path).parent].append(file)
    left_bytes = float("inf") if bytes_max is None else bytes_max
    for found in small.values():
        if len(found) < files_min:
            continue
        for group in _runs(found):
            left_bytes -= sum(file.bytes for file in group)
            if left_bytes < 0:
                return
            yield group


def _runs(found: list[TableFile]) -> Iterator[list[TableFile]]:
    run: list[TableFile] = []
    for file in found:
        run.append(file)
        if sum(one.bytes for one in run) >= TARGET_BYTES:
            yield run
            run = []
    if len(run) > 1:
        yield run


def _merged(table: LakeTable, group: list[TableFile]) -> FileNote:
    """Write one file with the rows of several; missing columns become null."""
    assert table.schema is not None
    folder = Path(group[0].path).parent
    partitions = lake_files.partition_values(group[0].path)
    schema = pa.schema([field for field in table.schema if field.name not in partitions])
    path = str(folder / lake_files.new_path())
    try:
        paths = [table.path / file.path for file in group]
        lake_files.write_file(table.path / path, schema, _rows(paths, schema))
    except OSError as error:
        raise table_error(error, f"table {table.name}: cannot write {path}") from error
    types = {name: table.schema.field(name).type for name in partitions}
    return note_of(table.path, path, types)


def _rows(paths: list[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        try:
            with pq.ParquetFile(path) as reader:
                for batch in reader.iter_batches(use_threads=False):
                    yield _fitted(batch, schema)
        except (OSError, pa.ArrowInvalid) as error:
            raise StorageError("lake.damaged", f"{path}: {error}") from error


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    known = batch.schema.names
    columns = [
        batch.column(field.name) if field.name in known else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
