"""A topic's history as a Delta table, without a copy (`polybus tables expose`).

The manifest of a topic says that it has a table (`exposed`). The table is the folder `table` beside
it, or one beside the topics (layout.exposed_folder): hard links to the files of history, and a
Delta log. A link stays for an hour after the version that removes its file, so a reader can finish
while the hand-over merges files and retention removes them.

The manifest is the truth, and the table follows it: each version has the files of one manifest.
Order of writes, each durable before the next:

expose     the manifest with `exposed`, then the table follows
follow     after the manifest, under HistoryLock: links of new files, one version that adds and
           removes files (log/delta.py), now and then a checkpoint, removal of old links
unexpose   the manifest without it, rename of `table` to `table.gone`, removal of that
delete     removal of the topic's folder (log/topics.py), then of a table beside the topics

A crash before a version leaves the table at the previous manifest. The next hand-over or retention,
which looks at all exposed topics, makes the version, and removes tables of topics that are gone.
A crash after it leaves nothing to do. A table is removed only with proof: a readable manifest
without `exposed`, or the tombstone of its topic. Earlier versions had an empty file `exposed` in
place of the field; the next hand-over makes it the field.

Only this module may write the table: its protocol requires a writer feature that other writers do
not support, so they refuse. Readers need not support it.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from polybus.errors import StorageError, UsageError
from polybus.log import delta, layout
from polybus.log.delta import LOG, STAGING, Action, version_path
from polybus.log.disk import Disk, replace_file, sync_path
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.manifest import HISTORY, HistoryFile, HistoryLock, Manifest
from polybus.log.journal import floor as floors
from polybus.log.layout import exposed_folder
from polybus.log.topics import storage_error, unknown, was_deleted

logger = logging.getLogger("polybus.log")

MARK = "exposed"
"""Of earlier versions."""
TABLE = "table"
GONE = "table.gone"
WRITER = "polybus-history"
"""The application id whose transaction version is the offset up to which the table has the topic.
"""
_WRITER_FEATURE = "polybusHistory"
_TYPES = {"offset": "long", "timestamp": "timestamp"}
_TYPES |= dict.fromkeys(("account", "topic", "protocol", "sender"), "string")
_TYPES |= dict.fromkeys(("key", "value"), "binary") | {"date": "date"}
_HEADERS = {"type": "map", "keyType": "string", "valueType": "binary", "valueContainsNull": True}
_COLUMNS = (
    *("account", "topic", "offset", "timestamp", "key", "value", "headers", "protocol", "sender"),
    "date",
)
_TEXTS = pa.map_(pa.string(), pa.string())
_NAMES = pa.list_(pa.string())
_CHECKPOINT = pa.schema(
    {
        "txn": pa.struct({"appId": pa.string(), "version": pa.int64()}),
        "add": pa.struct(
            {
                "path": pa.string(),
                "partitionValues": _TEXTS,
                "size": pa.int64(),
                "modificationTime": pa.int64(),
                "dataChange": pa.bool_(),
                "stats": pa.string(),
                "tags": _TEXTS,
            }
        ),
        "metaData": pa.struct(
            {
                "id": pa.string(),
                "format": pa.struct({"provider": pa.string(), "options": _TEXTS}),
                "schemaString": pa.string(),
                "partitionColumns": _NAMES,
                "configuration": _TEXTS,
                "createdTime": pa.int64(),
            }
        ),
        "protocol": pa.struct(
            {
                "minReaderVersion": pa.int32(),
                "minWriterVersion": pa.int32(),
                "writerFeatures": _NAMES,
            }
        ),
    }
)


@dataclass
class ExposedTable:
    """A topic's table as its log describes it; the version is -1 if it does not exist yet."""

    version: int = -1
    paths: set[str] = field(default_factory=set)
    metadata: dict[str, Any] = field(default_factory=dict)

    def take(self, action: Mapping[str, Any]) -> None:
        if added := action.get("add"):
            self.paths.add(added["path"])
        if removed := action.get("remove"):
            self.paths.discard(removed["path"])
        self.metadata = dict(action.get("metaData") or self.metadata)


def is_exposed(folder: Path) -> bool:
    """Whether the topic in a folder has a table. Raises StorageError `log.damaged`."""
    found = manifests.load_current(folder)
    return found is not None and _says(folder, found)


def _says(folder: Path, manifest: Manifest) -> bool:
    return manifest.exposed or (folder / MARK).exists()


def expose(data: Path, topic: str, *, wait_s: float = manifests.WAIT_S) -> Path:
    """Make the history of a topic a Delta table that follows it; return the table's folder.

    An existing table stays as it is. The bus may run or be stopped.

    Raises:
        UsageError: `topic.unknown`; `lake.path` if Delta cannot have a table in this folder.
        BusyError: `log.history-busy`.
        StorageError: `log.damaged` if the history cannot be trusted; `log.full`, `log.failed`.
    """
    folder = _folder(data, topic)
    if "%" in str(data.absolute()):
        text = f"{data}: Delta cannot have a table in a path with %; rename the data folder"
        raise UsageError("lake.path", text)
    with HistoryLock(data, wait_s=wait_s):
        manifest = _manifest(folder, topic)
        try:
            if not _says(folder, manifest):
                remove(folder, Disk())
            _note(folder, manifest, exposed=True)
            follow(folder, manifest)
        except OSError as error:
            raise storage_error(error, f"cannot make a table of topic {topic!r}") from error
    return exposed_folder(folder)


def unexpose(data: Path, topic: str, *, wait_s: float = manifests.WAIT_S) -> bool:
    """Remove a topic's table, but not its history; False if it had none.

    Raises as `expose`.
    """
    folder = _folder(data, topic)
    with HistoryLock(data, wait_s=wait_s):
        manifest = _manifest(folder, topic)
        was_exposed = _says(folder, manifest)
        try:
            if was_exposed:
                _note(folder, manifest, exposed=False)
            remove(folder, Disk())
        except OSError as error:
            raise storage_error(error, f"cannot remove the table of topic {topic!r}") from error
    return was_exposed


def _manifest(folder: Path, topic: str) -> Manifest:
    """The manifest of a topic, to be changed. Raises UsageError, StorageError."""
    manifest = manifests.load_current(folder)
    if manifest is None:
        raise unknown(topic)
    if manifests.is_lost(folder):
        text = f"{folder / manifests.NAME}: is missing; put it back, or try again after a hand-over"
        raise StorageError("log.damaged", text)
    return manifest


def _note(folder: Path, manifest: Manifest, *, exposed: bool) -> None:
    """Save whether a topic has a table. Raises OSError."""
    if manifest.exposed != exposed:
        manifests.save(folder, msgspec.structs.replace(manifest, exposed=exposed))
    if (folder / MARK).exists():
        disk = Disk()
        disk.unlink(folder / MARK)
        disk.sync_folder(folder)


def exposed_folders(data: Path) -> list[Path]:
    """The folders of the topics that have a table; damaged topics are left out."""
    found = []
    for folder in layout.topic_folders(data):
        with suppress(StorageError):
            if is_exposed(folder):
                found.append(folder)
    return found


def _folder(data: Path, topic: str) -> Path:
    folder = layout.topic_folder(data, topic)
    if not folder.is_dir():
        raise unknown(topic)
    return folder


def remove(folder: Path, disk: Disk) -> None:
    """Remove the table of a topic that is not exposed, completely even after a crash."""
    table = exposed_folder(folder)
    gone = _gone(table)
    if table.is_dir():
        disk.remove_folder(gone)
        disk.rename(table, gone)
        disk.sync_folder(gone.parent)
    if gone.is_dir():
        disk.remove_folder(gone)


def _gone(table: Path) -> Path:
    # No escape begins with ~g: no other topic has this name.
    return table.with_name(GONE if table.name == TABLE else f"{table.name}~gone")


def sweep(data: Path) -> None:
    """Remove the tables beside the topics whose topics are gone. Under HistoryLock."""
    for account in layout.folders_in(layout.accounts_folder(data)):
        for table in layout.folders_in(account / "tables"):
            name = table.name.removesuffix("~gone").replace("~", "%")
            with suppress(StorageError):
                if not _is_needed(data, account / "topics" / name):
                    Disk().remove_folder(table)


def _is_needed(data: Path, folder: Path) -> bool:
    """Whether a table beside the topics must stay. Raises StorageError if that is unknown."""
    if folder.is_dir():
        return is_exposed(folder) or not (folder / manifests.NAME).exists()
    # The tombstone of a topic stays as long as the topic is in floor.json.
    epoch, _ = (floors.load(data) or {}).get(layout.topic_in(folder), (0, 0))
    return epoch > 0 and not was_deleted(folder, epoch)


def catch_up(folder: Path, manifest: Manifest | None = None) -> None:
    """Update the table of a topic to its manifest, if it has a table. Under HistoryLock.

    The log does not depend on the table, so a failure is only logged; a later call tries again.
    """
    try:
        if manifest is None:
            manifest = _current(folder)
        if manifest is None:
            return
        if _says(folder, manifest):
            follow(folder, manifest)
        elif (folder / manifests.NAME).exists():
            remove(folder, Disk())
    except (OSError, StorageError) as error:
        if folder.is_dir():  # Else the topic was deleted meanwhile.
            logger.warning("the table of %s could not be updated to its history: %s", folder, error)


def _current(folder: Path) -> Manifest | None:
    """The manifest of a topic that has or had a table; None for others, or if it is lost.

    Raises as `load_current`.
    """
    try:
        # Most topics have none: their manifests need not be decoded.
        may_be = b'"exposed":true' in (folder / manifests.NAME).read_bytes()
    except FileNotFoundError:
        may_be = False
    is_old = (folder / MARK).exists()
    table = exposed_folder(folder)
    if not (may_be or is_old or table.is_dir() or _gone(table).is_dir()):
        return None
    if manifests.is_lost(folder):
        # An empty manifest in its place would hide the loss, and its files would be removed.
        return None
    found = manifests.load_current(folder)
    if found is not None and is_old:
        _note(folder, found, exposed=True)
        found = msgspec.structs.replace(found, exposed=True)
    return found


def follow(folder: Path, manifest: Manifest, disk: Disk | None = None) -> int:
    """Give the table the files of the manifest; return its version. Under HistoryLock.

    Raises:
        StorageError: `lake.damaged`, the table's log cannot be read.
        OSError: the table is unchanged, or complete.
    """
    disk = disk or Disk()
    table = exposed_folder(folder)
    state = read_table(table)
    shutil.rmtree(table / STAGING, ignore_errors=True)  # Left by a writer that was killed.
    files = {_path(file): file for file in manifest.files}
    _link(folder, files, state.paths, disk)
    if state.version < 0 or state.paths != files.keys():
        actions = _actions(state, files, manifest.handed_over)
        state.version += 1
        delta.publish(table, state.version, actions, disk)
        for action in actions:
            state.take(action)
        if state.version and state.version % delta.CHECKPOINT_EVERY == 0:
            _checkpoint(table, state, files, manifest.handed_over, disk)
    _tidy(table, files.keys())
    return state.version


def read_table(table: Path) -> ExposedTable:
    """The newest version of a topic's table.

    Raises:
        StorageError: `lake.damaged`.
    """
    state = ExposedTable()
    log = table / LOG
    known = [int(one.stem) for one in log.glob("*.json") if one.stem.isdigit()]
    last = max([delta.newest(table), *known])
    try:
        if (damaged := delta.damaged_checkpoint(log)) is not None:
            path, reason = damaged
            raise ValueError(reason)
        for path in sorted(log.glob("*.checkpoint.parquet"))[-1:]:
            for action in pq.read_table(path).to_pylist(maps_as_pydicts="strict"):
                state.take(action)
            state.version = _version_in(path)
        while (path := version_path(log, state.version + 1)).exists():
            content = path.read_bytes()
            if not delta.is_intact(content):
                raise ValueError("its checksum is wrong")
            for line in content.splitlines():
                state.take(json.loads(line))
            state.version += 1
        # A new version in a gap would change the meaning of the later ones, and hide the loss.
        if state.version < last:
            raise ValueError("is missing, but later versions existed")
    except (ValueError, LookupError, TypeError, pa.ArrowException) as error:
        text = f"{path}: {error}; make the table again: polybus tables unexpose, then expose"
        raise StorageError("lake.damaged", text) from error
    return state


def _link(
    folder: Path, files: Mapping[str, HistoryFile], known: Collection[str], disk: Disk
) -> None:
    """Link every file of history into the table, durably; versions name the `known` ones."""
    table = exposed_folder(folder)
    disk.make_folder(table)
    changed = set()
    for path, file in files.items():
        source, target = folder / file.path, table / path
        if not _is_same(source, target):
            disk.make_folder(target.parent)
            _replace_link(source, target, table / STAGING, disk)
        elif path in known:
            continue
        # Also that of an existing link: its writer may have been killed before the fsync.
        changed.add(target.parent)
    for parent in sorted(changed):
        disk.sync_folder(parent)


def _is_same(source: Path, target: Path) -> bool:
    try:
        return os.path.samefile(source, target)
    except FileNotFoundError:
        return False


def _replace_link(source: Path, target: Path, staging: Path, disk: Disk) -> None:
    """Link a file of history into the table.

    A target may be there: the history's file was restored from a backup, or the data folder was
    copied without its hard links. A version may name it, so it must never be missing.
    """
    if not target.exists():
        disk.link(source, target)
        return
    disk.make_folder(staging)
    disk.link(source, staging / target.name)
    disk.rename(staging / target.name, target)


def _actions(state: ExposedTable, files: Mapping[str, HistoryFile], stop: int) -> list[Action]:
    actions = [delta.info("WRITE" if state.version < 0 else "REPLACE", None)]
    if state.version < 0:
        actions += [_protocol(), {"metaData": _metadata()}]
    actions.append(delta.done(WRITER, stop))
    actions += [_removed(path) for path in sorted(state.paths - files.keys())]
    actions += [_added(file) for path, file in files.items() if path not in state.paths]
    return actions


def _added(file: HistoryFile) -> Action:
    ends = (
        {"offset": file.first, "timestamp": _iso(file.min_timestamp_us)},
        {"offset": file.last, "timestamp": _iso(file.max_timestamp_us)},
    )
    stats = {"numRecords": file.rows, "minValues": ends[0], "maxValues": ends[1]}
    return {
        "add": {
            "path": _path(file),
            "partitionValues": {"date": parquet.day_in(file.path)},
            "size": file.bytes,
            "modificationTime": delta.now_ms(),
            "dataChange": True,
            "stats": json.dumps(stats),
            "tags": {delta.CHECKSUM: file.xxh3},
        }
    }


def _removed(path: str) -> Action:
    values = {"date": path.partition("/")[0].removeprefix("date=")}
    return {
        "remove": {
            "path": path,
            "deletionTimestamp": delta.now_ms(),
            "dataChange": True,
            "partitionValues": values,
        }
    }


def _protocol() -> Action:
    features = {"minWriterVersion": 7, "writerFeatures": [_WRITER_FEATURE]}
    return {"protocol": {"minReaderVersion": 1, **features}}


def _metadata() -> dict[str, Any]:
    fields = [
        {"name": name, "type": _TYPES.get(name, _HEADERS), "nullable": True, "metadata": {}}
        for name in _COLUMNS
    ]
    return {
        **delta.new_identity(),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": ["date"],
    }


def _path(file: HistoryFile) -> str:
    return file.path.removeprefix(f"{HISTORY}/")


def _iso(time_us: int) -> str:
    return f"{parquet.time_of(time_us).isoformat(timespec='microseconds')[:26]}Z"


def _version_in(path: Path) -> int:
    return int(path.name.partition(".")[0])


# Upkeep.


def _checkpoint(
    table: Path, state: ExposedTable, files: Mapping[str, HistoryFile], stop: int, disk: Disk
) -> None:
    """Write a checkpoint of all versions, so that a reader needs few of them."""
    metadata = {name: state.metadata[name] for name in _CHECKPOINT.field("metaData").type.names}
    actions = [_protocol(), {"metaData": metadata}, delta.done(WRITER, stop)]
    actions += [_added(file) for file in files.values()]
    name = f"{state.version:020d}.checkpoint.parquet"
    staged = table / STAGING / name
    with staged.open("wb") as output:
        with pq.ParquetWriter(output, _CHECKPOINT) as writer:
            writer.write_table(pa.Table.from_pylist(actions, schema=_CHECKPOINT))
    sync_path(staged)
    disk.rename(staged, table / LOG / name)
    disk.sync_folder(table / LOG)
    hint = delta.hint({"version": state.version, "size": len(actions)}, table / LOG / name)
    replace_file(table / LOG / delta.LAST_CHECKPOINT, hint, disk)


def _tidy(table: Path, paths: Collection[str]) -> None:
    """Remove links, and versions, that have been out of use for an hour."""
    before_s = time.time() - delta.RETENTION_S
    for path in _links(table):
        # The change time (ctime): history removed the file's other name when it stopped using the
        # file.
        is_old = path.stat().st_ctime < before_s
        if is_old and str(path.relative_to(table)) not in paths:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()  # Only if it is empty.
    done = sorted((table / LOG).glob("*.checkpoint.parquet"))
    old = [path for path in done if path.stat().st_mtime < before_s]
    if old:
        for path in sorted((table / LOG).glob("*.*")):
            if path.name < old[-1].name and path.stat().st_mtime < before_s:
                path.unlink(missing_ok=True)


def _links(table: Path) -> Iterator[Path]:
    for folder in layout.folders_in(table):
        if folder.name.startswith("date="):
            yield from sorted(folder.glob("*.parquet"))
