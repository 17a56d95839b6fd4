"""A version of a lake table as delta-rs has read it from the log."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from polybus.errors import StorageError
from polybus.lake.fields import TableFields, parsed_fields
from polybus.lake.files import TableFile
from polybus.log.delta import CHECKSUM, Action, is_intact, version_path

# delta-rs cuts times in the statistics of files that it compacts to milliseconds.
_CUT_US = 999


@dataclass(frozen=True)
class TableState:
    """A table at a version; the version -1 if there is no table.

    The files are in `actions`, as delta-rs gives them, or `kept`, if this process made the version.
    """

    version: int = -1
    fields: TableFields = ()
    partition_by: tuple[str, ...] = ()
    identity: dict[str, Any] | None = None
    actions: pa.Table | None = None
    kept: dict[str, TableFile] | None = None

    @cached_property
    def files(self) -> dict[str, TableFile]:
        """The files by their path, in the order of their commits."""
        if self.kept is not None:
            return self.kept
        if self.actions is None or not self.actions.num_rows:
            return {}
        ranges = self._ranges()
        columns = ("path", "num_records", "size_bytes", "modification_time")
        rows = zip(*(self.actions[name].to_pylist() for name in columns), strict=True)
        found = [
            (time_ms, TableFile(unquote(uri), uri, count or 0, size, ranges[index]))
            for index, (uri, count, size, time_ms) in enumerate(rows)
        ]
        found.sort(key=lambda one: (one[0], one[1].path.rpartition("/")[2], one[1].path))
        return {file.path: file for _, file in found}

    def _ranges(self) -> list[dict[str, tuple[int, int]]]:
        """For each file, the ranges of `offset` and of timestamps that the log has."""
        assert self.actions is not None
        found: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.actions.num_rows)]
        for field in self.fields:
            name = field["name"]
            is_time = field["type"] == "timestamp"
            if not is_time and (name, field["type"]) != ("offset", "long"):
                continue
            if f"min.{name}" not in self.actions.column_names:
                continue
            ends = (self.actions[f"{end}.{name}"].cast(pa.int64()) for end in ("min", "max"))
            for ranges, low, high in zip(found, *(end.to_pylist() for end in ends), strict=True):
                if low is not None and high is not None:
                    ranges[name] = (low, high + _CUT_US if is_time else high)
        return found


def state_of(delta: DeltaTable) -> TableState:
    """The version that the library has loaded."""
    known = delta.metadata()
    identity = {"id": known.id, "createdTime": known.created_time}
    return TableState(
        version=delta.version(),
        fields=parsed_fields(delta.schema().to_json()),
        partition_by=tuple(known.partition_columns),
        identity=identity | {"configuration": known.configuration},
        actions=pa.table(delta.get_add_actions(flatten=True)),
    )


def writers_in(log: Path, version: int) -> set[str]:
    """All writers that have committed a batch up to a version: delta-rs only answers for a name."""
    found: set[str] = set()
    first = 0
    for path in sorted(log.glob("*.checkpoint.parquet"))[-1:]:
        known = pq.read_table(path, columns=["txn"])["txn"].to_pylist()
        found = {one["appId"] for one in known if one}
        first = int(path.name.partition(".")[0]) + 1
    for number in range(first, version + 1):
        found |= {one["txn"]["appId"] for one in actions_in(log, number) if "txn" in one}
    return found


def checksums_in(log: Path, version: int) -> dict[str, str]:
    """The checksums of the files of a version by their path in the log: delta-rs hides tags."""
    found: dict[str, str] = {}
    first = 0
    for path in sorted(log.glob("*.checkpoint.parquet"))[-1:]:
        known = pq.read_table(path, columns=["add"])["add"].to_pylist(maps_as_pydicts="strict")
        found = {one["path"]: _checksum(one) for one in known if one}
        first = int(path.name.partition(".")[0]) + 1
    for number in range(first, version + 1):
        added = (action["add"] for action in actions_in(log, number) if "add" in action)
        found |= {one["path"]: _checksum(one) for one in added}
    return found


def _checksum(added: Mapping[str, Any]) -> str:
    return (added.get("tags") or {}).get(CHECKSUM) or ""


def actions_in(log: Path, version: int) -> list[Action]:
    """The actions of a version.

    Raises:
        FileNotFoundError: it was removed.
        StorageError: `lake.damaged`.
    """
    path = version_path(log, version)
    content = path.read_bytes()
    if not is_intact(content):
        raise StorageError("lake.damaged", f"{path}: its checksum is wrong")
    return [json.loads(line) for line in content.splitlines()]


def appended(log: Path, since: int, until: int) -> list[str] | None:
    """The files with the rows that a table got after one version, up to another.

    None if it also lost rows or changed its columns, or if the versions no longer exist. The files
    may since have been merged into larger ones.
    """
    found = []
    for number in range(since + 1, until + 1):
        try:
            actions = actions_in(log, number)
        except FileNotFoundError:
            return None
        for action in actions:
            if "metaData" in action or action.get("remove", {}).get("dataChange"):
                return None
            if action.get("add", {}).get("dataChange"):
                found.append(unquote(action["add"]["path"]))
    return found
