"""Commits of a Delta table: the actions of one version, and how it becomes durable.

delta-rs reads the log, and writes checkpoints and compacted files, but it never calls fsync: after
a power cut its commit may be there and empty, although a stream has forgotten the batch. So a
commit is written here. Order of writes: the actions into a file below `_staging`, its fsync, a hard
link as `_delta_log/<version>.json`, fsync of that folder. The link fails if the version exists, and
so of several writers, also with other libraries, one wins. A version is there completely or not.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polybus.lake.fields import TableFields, schema_string
from polybus.lake.files import TableFile, partition_values
from polybus.log.disk import Disk
from polybus.version import __version__

LOG = "_delta_log"
STAGING = "_staging"
RETENTION = "interval 1 hours"
"""How long older versions can be read, and how long readers may take: the files stay so long."""
FEED = "_change_data/"
_FED = "delta.enableChangeDataFeed"
Action = dict[str, Any]


def version_path(log: Path, version: int) -> Path:
    return log / f"{version:020d}.json"


def publish(table: Path, version: int, actions: Sequence[Action], disk: Disk) -> None:
    """Make a version of a table, durably.

    Raises:
        FileExistsError: another writer made it first; nothing changed.
        OSError: nothing changed, or only the last fsync failed and the version is there.
    """
    disk.make_folder(table / LOG)
    disk.make_folder(table / STAGING)
    staged = table / STAGING / f"{uuid.uuid4().hex}.json"
    file = disk.open(staged)
    try:
        try:
            file.append("".join(f"{json.dumps(one)}\n" for one in actions).encode())
            file.sync()
        finally:
            file.close()
        disk.link(staged, version_path(table / LOG, version))
    finally:
        disk.unlink(staged)
    disk.sync_folder(table / LOG)


def info(operation: str, batch: int | None) -> Action:
    about = {"engineInfo": f"polybus:{__version__}", "isBlindAppend": operation == "WRITE"}
    parameters = {} if batch is None else {"batch": str(batch)}
    return {
        "commitInfo": {
            "timestamp": time.time_ns() // 1_000_000,
            "operation": operation,
            "operationParameters": parameters,
            **about,
        }
    }


def done(writer: str, batch: int) -> Action:
    """Delta's transaction identifier: a writer's last batch."""
    return {"txn": {"appId": writer, "version": batch}}


def added(file: TableFile, *, is_change: bool) -> Action:
    return {
        "add": {
            "path": file.uri,
            "partitionValues": partition_values(file.path),
            "size": file.bytes,
            "modificationTime": time.time_ns() // 1_000_000,
            "dataChange": is_change,
            "stats": file.stats,
        }
    }


def fed(file: TableFile) -> Action:
    """A file with changed rows, for readers of the change data feed."""
    about = {"path": file.uri, "partitionValues": {}, "size": file.bytes, "dataChange": False}
    return {"cdc": about}


def removed(file: TableFile, *, is_change: bool) -> Action:
    return {
        "remove": {
            "path": file.uri,
            "deletionTimestamp": time.time_ns() // 1_000_000,
            "dataChange": is_change,
            "extendedFileMetadata": True,
            "partitionValues": partition_values(file.path),
            "size": file.bytes,
        }
    }


def metadata(
    fields: TableFields, partition_by: Sequence[str], identity: Mapping[str, Any]
) -> list[Action]:
    """The columns, and the protocol that they need."""
    configuration = identity["configuration"]
    is_fed = configuration.get(_FED) == "true"
    protocol: Action = {"minReaderVersion": 1, "minWriterVersion": 4 if is_fed else 2}
    if '"timestamp_ntz"' in schema_string(fields):
        features = ["timestampNtz", *(["changeDataFeed"] if is_fed else [])]
        protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
        protocol |= {"readerFeatures": ["timestampNtz"], "writerFeatures": features}
    described = {
        **identity,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema_string(fields),
        "partitionColumns": list(partition_by),
    }
    return [{"protocol": protocol}, {"metaData": described}]


def new_identity() -> dict[str, Any]:
    """What distinguishes a new table, and its settings."""
    configuration = {
        "delta.deletedFileRetentionDuration": RETENTION,
        "delta.logRetentionDuration": RETENTION,
    }
    return {
        "id": str(uuid.uuid4()),
        "createdTime": time.time_ns() // 1_000_000,
        "configuration": configuration,
    }


def add_feed(identity: dict[str, Any], *, is_fed: bool) -> bool:
    """Give a table a change data feed if it should have one; whether it had none."""
    is_missing = is_fed and identity["configuration"].get(_FED) != "true"
    if is_missing:
        identity["configuration"] = {**identity["configuration"], _FED: "true"}
    return is_missing
