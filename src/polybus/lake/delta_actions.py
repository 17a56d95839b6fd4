"""The actions of a commit to a lake table: files, columns, and the change data feed.

log/delta.py commits them as a version. Delta allows tags in an action: that of a file has its
checksum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from polybus.lake.fields import TableFields, schema_string
from polybus.lake.files import TableFile, partition_values
from polybus.log.delta import CHECKSUM, Action, now_ms

FEED = "_change_data/"
_FED = "delta.enableChangeDataFeed"


def added(file: TableFile, *, is_change: bool) -> Action:
    return {
        "add": {
            "path": file.uri,
            "partitionValues": partition_values(file.path),
            "size": file.bytes,
            "modificationTime": now_ms(),
            "dataChange": is_change,
            "stats": file.stats,
            **_tags(file),
        }
    }


def fed(file: TableFile) -> Action:
    """A file with changed rows, for readers of the change data feed."""
    about = {"path": file.uri, "partitionValues": {}, "size": file.bytes, "dataChange": False}
    return {"cdc": {**about, **_tags(file)}}


def _tags(file: TableFile) -> dict[str, dict[str, str]]:
    return {"tags": {CHECKSUM: file.xxh3}} if file.xxh3 else {}


def removed(file: TableFile, *, is_change: bool) -> Action:
    return {
        "remove": {
            "path": file.uri,
            "deletionTimestamp": now_ms(),
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
    is_fed = has_feed(configuration)
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


def has_feed(settings: Mapping[str, str]) -> bool:
    """Whether a table with these settings has a change data feed."""
    return settings.get(_FED) == "true"


def add_feed(identity: dict[str, Any], *, is_fed: bool) -> bool:
    """Give a table a change data feed if it should have one; return whether it had none."""
    is_missing = is_fed and not has_feed(identity["configuration"])
    if is_missing:
        identity["configuration"] = {**identity["configuration"], _FED: "true"}
    return is_missing
