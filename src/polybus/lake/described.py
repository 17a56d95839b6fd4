"""`DESCRIBE HISTORY` and `DESCRIBE DETAIL`: the versions of a lake table, and its properties.

The history is what the log still has. The time of a version is that of its file, which
`TIMESTAMP AS OF` compares.
"""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from polybus.lake.table import LakeTable
from polybus.lake.table_state import actions_in
from polybus.log.delta import Action, version_path

BATCH_ROWS = 1024
_TIME = pa.timestamp("us", "UTC")
HISTORY = pa.schema(
    [
        *(("version", pa.int64()), ("timestamp", _TIME), ("operation", pa.string())),
        *(("writer", pa.string()), ("batch", pa.int64())),
        *((name, pa.int64()) for name in ("rows_added", "bytes_added")),
        *((name, pa.int64()) for name in ("files_added", "files_removed")),
        ("engine", pa.string()),
    ]
)
DETAIL = pa.schema(
    [
        *(("name", pa.string()), ("id", pa.string()), ("location", pa.string())),
        *(("created", _TIME), ("version", pa.int64())),
        *((name, pa.int64()) for name in ("rows", "files", "bytes")),
        *(("partition_by", pa.list_(pa.string())), ("settings", pa.map_(pa.string(), pa.string()))),
    ]
)
SCHEMAS = {"history": HISTORY, "detail": DETAIL}


def described(table: LakeTable, kind: str) -> Iterator[pa.RecordBatch]:
    """The rows of `DESCRIBE HISTORY`, newest version first, or `DESCRIBE DETAIL` of a table.

    Raises:
        StorageError: `lake.damaged`.
    """
    if kind == "detail":
        yield pa.RecordBatch.from_pylist([_detail(table)], DETAIL)
        return
    found = (int(path.stem) for path in table.folder.glob("*.json") if path.stem.isdecimal())
    versions = sorted(found, reverse=True)
    for first in range(0, len(versions), BATCH_ROWS):
        rows = (_version(table, number) for number in versions[first : first + BATCH_ROWS])
        yield pa.RecordBatch.from_pylist([row for row in rows if row is not None], HISTORY)


def _version(table: LakeTable, number: int) -> dict[str, Any] | None:
    """A version; None if upkeep has just removed it."""
    try:
        actions = actions_in(table.folder, number)
        made_ns = version_path(table.folder, number).stat().st_mtime_ns
    except FileNotFoundError:
        return None
    kinds: dict[str, list[Action]] = {}
    for action in actions:
        for kind, content in action.items():
            kinds.setdefault(kind, []).append(content)
    info = kinds.get("commitInfo", [{}])[0]
    done = kinds.get("txn", [{}])[0]
    added = kinds.get("add", [])
    rows = [json.loads(one.get("stats") or "{}").get("numRecords") for one in added]
    return {
        "version": number,
        "timestamp": made_ns // 1000,
        "operation": info.get("operation"),
        "writer": done.get("appId"),
        "batch": done.get("version"),
        "rows_added": None if None in rows else sum(rows),
        "bytes_added": sum(one["size"] for one in added),
        "files_added": len(added),
        "files_removed": len(kinds.get("remove", [])),
        "engine": info.get("engineInfo"),
    }


def _detail(table: LakeTable) -> dict[str, Any]:
    state = table.state
    identity = state.identity or {}
    return {
        "name": table.name,
        "id": identity.get("id"),
        "location": str(table.path),
        "created": identity["createdTime"] * 1000 if identity.get("createdTime") else None,
        "version": state.version,
        "rows": table.rows,
        "files": len(state.files),
        "bytes": sum(file.bytes for file in state.files.values()),
        "partition_by": list(state.partition_by),
        "settings": sorted(table.settings.items()),
    }
