"""Converts tables of Polybus's own format before Delta: `polybus tables migrate`.

That format had `_polybus/<version>.json` with the changes of a version, and
`_polybus/checkpoint.json` with the state at a version, each with a checksum of itself. Rows were in
Parquet files, as now. So a conversion only writes a log, and those files again that have VARIANT
columns (now JSON text).

While `_polybus` is there, it is the truth, and the table is refused. Order of writes for a table:

    1. files with VARIANT columns, under new names that no version has; fsync
    2. `_delta_log/00000000000000000000.json`, all files and batches in one version
    3. `_polybus` is moved to `_staging`, if the new log has the same content; now the table is
       converted
    4. `_polybus` is removed there

After a crash the next run begins again; files of 1 that it does not use are removed by `vacuum`.
"""

import base64
import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from deltalake import DeltaTable

from polybus.errors import BusyError, StorageError, UsageError
from polybus.lake import delta_actions
from polybus.lake.fields import TableFields, checked_fields, fields_of, parsed_fields
from polybus.lake.files import (
    NewFile,
    TableFile,
    new_path,
    note_of,
    partition_values,
    write_file,
)
from polybus.lake.folders import OLD_FORMAT, name_in, table_folder, table_folders
from polybus.lake.table import table_error
from polybus.lake.table_state import state_of
from polybus.log import delta
from polybus.log.disk import Disk, FileLock, sync_path
from polybus.structs import decode

_DIGEST_BYTES = 17  # Sixteen digits and a line feed.
_SPARK_TYPE = b"spark.type"

T = TypeVar("T")


class OldFile(msgspec.Struct, frozen=True, rename="kebab"):
    path: str
    rows: int
    bytes: int
    ranges: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class OldVersion(msgspec.Struct, frozen=True, rename="kebab"):
    """What one commit changed. `schema` is None if the columns did not change."""

    version: int
    writer: str
    batch: int | None = None
    schema: str | None = None
    add: tuple[OldFile, ...] = ()
    remove: tuple[str, ...] = ()


class OldTable(msgspec.Struct, rename="kebab"):
    """A table at a version: its files in the order of their commits, each writer's last batch."""

    version: int = 0
    schema: str | None = None
    files: dict[str, OldFile] = msgspec.field(default_factory=dict)
    batches: dict[str, int] = msgspec.field(default_factory=dict)


def convert_tables(data: Path, progress: Callable[[str], None] | None = None) -> list[str]:
    """Convert all tables of a data folder; return the names of the converted ones.

    Raises:
        UsageError: `pipeline.running`; `lake.schema`, Delta has no type for a column.
        BusyError: `lake.busy`, another process writes a table.
        StorageError: `lake.damaged`, `lake.storage`; this table is unchanged.
    """
    converted = []
    with _no_pipeline(data):
        for folder in table_folders(data):
            if (folder / OLD_FORMAT).is_dir():
                name = name_in(folder)
                if progress is not None:
                    progress(f"converting {name}")
                try:
                    _convert(folder, table_folder(data, name))
                except OSError as error:
                    raise table_error(error, f"table {name}: cannot convert") from error
                converted.append(name)
    return converted


def _no_pipeline(data: Path) -> FileLock:
    Disk().make_folder(data / "pipeline")
    try:
        return FileLock(data / "pipeline" / "lock")
    except BlockingIOError as error:
        text = "a pipeline writes the tables; stop it first: polybus pipeline stop"
        raise UsageError("pipeline.running", text) from error


def _convert(old_folder: Path, folder: Path) -> None:
    disk = Disk()
    if old_folder != folder:  # Its name was escaped in another way.
        disk.rename(old_folder, folder)
        disk.sync_folder(folder.parent)
    try:
        lock = FileLock(folder / OLD_FORMAT / "lock")
    except BlockingIOError as error:
        raise BusyError("lake.busy", f"another process writes {folder}") from error
    with lock:
        old = _load(folder / OLD_FORMAT)
        if old.schema is not None and not delta.version_path(folder / delta.LOG, 0).exists():
            _write_log(folder, old, disk)
        _check_log(folder, old)
        # The proof is above: the new log has every file's rows and every writer's batch.
        disk.make_folder(folder / delta.STAGING)
        gone = folder / delta.STAGING / f"old-format-{uuid.uuid4().hex}"
        disk.rename(folder / OLD_FORMAT, gone)
        disk.sync_folder(folder)
    shutil.rmtree(gone, ignore_errors=True)


def _write_log(folder: Path, old: OldTable, disk: Disk) -> None:
    assert old.schema is not None
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(old.schema)))
    fields = checked_fields(folder.name, _delta_fields(folder.name, schema))
    variants = [field.name for field in schema if _spark_type(field) == "variant"]
    notes = [_note(folder, file, fields, variants) for file in old.files.values()]
    for note in notes:
        sync_path(folder / note.file.path)
    for parent in {(folder / note.file.path).parent for note in notes}:
        disk.sync_folder(parent)
    partition_by = tuple(partition_values(next(iter(old.files), "")))
    actions = [
        delta.info("CONVERT", None),
        *delta_actions.metadata(fields, partition_by, delta.new_identity()),
        *(delta.done(writer, batch) for writer, batch in old.batches.items()),
        *(delta_actions.added(note.file, is_change=True) for note in notes),
    ]
    delta.publish(folder, 0, actions, disk)


def _check_log(folder: Path, old: OldTable) -> None:
    """Compare the new log with the old format, which is removed next."""
    found = delta.version_path(folder / delta.LOG, 0)
    if old.schema is None and not found.exists():
        return  # There never was a commit.
    opened = DeltaTable(folder)
    state = state_of(opened)
    rows = sorted(file.rows for file in state.files.values())
    is_same = (
        state.version == 0
        and rows == sorted(file.rows for file in old.files.values())
        and all((folder / path).is_file() for path in state.files)
        and all(opened.transaction_version(name) == batch for name, batch in old.batches.items())
    )
    if not is_same:
        text = f"{found} does not have what {folder / OLD_FORMAT} has"
        raise StorageError("lake.damaged", f"{text}; remove {folder / delta.LOG} and try again")


def _note(folder: Path, file: OldFile, fields: TableFields, variants: list[str]) -> NewFile:
    """The file itself, or a new one with JSON text if it has VARIANT columns."""
    if not variants:
        uri = quote(file.path, safe="/=$-._~")
        return NewFile(TableFile(file.path, uri, file.rows, file.bytes, file.ranges), fields)
    import duckdb

    source = folder / file.path
    rows = pq.read_table(source, partitioning=None)
    for name in variants:
        if name in rows.column_names:
            quoted = '"' + name.replace('"', '""') + '"'
            sql = f"SELECT {quoted}::JSON::VARCHAR AS text FROM read_parquet(?)"
            with duckdb.connect(config={"threads": 1}) as connection:
                text = connection.sql(sql, params=[str(source)]).to_arrow_table()["text"]
            index = rows.column_names.index(name)
            rows = rows.set_column(index, name, text.cast(pa.string()))
    path = str(Path(file.path).with_name(new_path()))
    write_file(folder / path, rows.schema.remove_metadata(), rows.to_batches())
    note = note_of(folder, path, fields)
    if note.file.rows != file.rows:
        raise StorageError("lake.damaged", f"{source}: has {note.file.rows} of {file.rows} rows")
    return note


def _delta_fields(table: str, schema: pa.Schema) -> TableFields:
    """The columns: by Spark's name of the type, where the schema has it, else by Arrow's."""
    found: list[Any] = []
    for field in schema:
        kind = _spark_type(field)
        if kind is None:
            found += fields_of(table, pa.schema([field]))
        else:
            described = [{"name": field.name, "type": kind, "nullable": True, "metadata": {}}]
            found += parsed_fields(json.dumps({"fields": described}))
    return tuple(found)


def _spark_type(field: Any) -> Any:
    named = (field.metadata or {}).get(_SPARK_TYPE)
    return None if named is None else json.loads(named)


def _load(folder: Path) -> OldTable:
    """The newest version. Raises StorageError `lake.damaged`."""
    table = _read(folder / "checkpoint.json", OldTable) or OldTable()
    while True:
        change = _read(folder / f"{table.version + 1:020d}.json", OldVersion)
        if change is None:
            break
        table.version = change.version
        table.schema = change.schema or table.schema
        for path in change.remove:
            table.files.pop(path, None)
        table.files |= {file.path: file for file in change.add}
        if change.batch is not None:
            table.batches[change.writer] = change.batch
    newest = max(folder.glob("0*.json"), default=None)
    if newest is not None and int(newest.stem) != table.version:
        raise StorageError("lake.damaged", f"{newest}: versions before it are missing")
    return table


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        sealed = path.read_bytes()
    except FileNotFoundError:
        return None
    content, digest = sealed[:-_DIGEST_BYTES], sealed[-_DIGEST_BYTES:]
    if xxhash.xxh3_64_hexdigest(content).encode() + b"\n" != digest:
        raise StorageError("lake.damaged", f"{path}: its checksum is wrong")
    try:
        return decode(content, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError("lake.damaged", f"{path}: {error}") from error
