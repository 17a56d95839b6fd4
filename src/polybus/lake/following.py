"""A lake table as a stream: which files have the rows that a table has got since a position.

A stream begins with all files of the table's newest version, and then takes the files that each
later version adds. Versions never change, so two positions always have the same files between
them, also after a restart. A version that only moves rows to other files, as compaction does, says
so (`dataChange` is false) and has nothing for a stream. A file that is larger than a batch is read
in several, by its rows.

A stream fails instead of missing or repeating rows without notice: at a version that removes or
changes rows, unless it is to be skipped; if upkeep has removed a version or file before it was
read; and if the table was dropped and created again, which gives it another id.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from polybus.errors import StorageError, UsageError
from polybus.lake.files import TableFile
from polybus.lake.table import LakeTable
from polybus.lake.table_state import actions_in
from polybus.log.delta import CHECKPOINT_EVERY, version_path

FILES_MAX = 1000
START_OVER = "start the flow over with --reset FLOW to read the table as it is now"


class TablePosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything before `version`, and the first `file` files of it, are read.

    Of the next file the first `row` rows are. `table` is the id of the table, empty before it
    exists. The stream began with all files of the version `first`.
    """

    table: str = ""
    version: int = 0
    file: int = 0
    first: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a file from `start` on and before `stop`: all up to its end if that is None.

    `rows` and `bytes` are about how many these are.
    """

    path: str
    start: int
    stop: int | None
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """The most that a batch has, but at least one row."""

    files: int = FILES_MAX
    bytes: int | None = None
    rows: int | None = None

    def is_reached(self, files: int, size: int, rows: int) -> bool:
        """Whether so much is more than a batch has."""
        is_large = self.bytes is not None and size > self.bytes
        return files > self.files or is_large or (self.rows is not None and rows > self.rows)

    def rows_of(self, rows: int, size: int) -> int:
        """How many of these rows a batch takes that has no others. All count as equally large."""
        most = rows if self.rows is None else self.rows
        if self.bytes is not None:
            most = min(most, rows * self.bytes // max(1, size))
        return max(1, most)


class FollowedTable:
    """A table in a folder that a stream follows; it need not exist yet."""

    def __init__(self, path: Path, *, skips_changes: bool = False) -> None:
        """With `skips_changes` versions that remove or change rows are left out completely."""
        self._path = path
        self._log = LakeTable(path).folder
        self._name = LakeTable(path).name
        self._skips_changes = skips_changes
        self._whole: tuple[int, list[TableFile]] = (-1, [])
        self._passed = (TablePosition(), 0)
        """A position, and the version before which there is nothing to read from there."""

    def newest(self) -> int:
        """The newest version; -1 if there is no table."""
        return LakeTable(self._path).version

    def end_of_batch(
        self, start: TablePosition, limit: BatchLimit, until: int | None = None
    ) -> TablePosition:
        """Where a batch ends that begins at `start`: there, if there is nothing to read.

        Versions after `until` are not read.

        Raises:
            UsageError: `lake.rows-changed`, `lake.version`, `lake.recreated`: see above.
            StorageError: `lake.damaged`.
        """
        if not self._may_have_news(start):
            return start
        identity, newest = self._look()
        if start.table:
            self._check(start, identity, newest)
            if start.version > start.first:
                self._whole = (-1, [])
        newest = newest if until is None else min(newest, until)
        if newest < 0:
            return start
        begin = start if start.table else TablePosition(identity, newest, 0, newest)
        files = size = rows = 0
        version, index, row = begin.version, begin.file, begin.row
        while version <= newest:
            for file in self._files_of(version, begin.first)[index:]:
                part = self._part(file, row)
                if limit.is_reached(files + 1, size + part.bytes, rows + part.rows):
                    taken = 0 if files else limit.rows_of(part.rows, part.bytes)
                    if files or taken < part.rows:
                        return replace(begin, version=version, file=index, row=row + taken)
                files, size, rows = files + 1, size + part.bytes, rows + part.rows
                index, row = index + 1, 0
            version, index = version + 1, 0
        # A batch without rows costs as much as another. But a position must not stay at a version
        # that a checkpoint sums up, because upkeep may remove it.
        is_summed_up = version // CHECKPOINT_EVERY > begin.version // CHECKPOINT_EVERY
        if not files and start.table and not is_summed_up:
            self._passed = (start, version)
            return start
        return replace(begin, version=version, file=0, row=0)

    def files(self, start: TablePosition, end: TablePosition) -> list[FileRows]:
        """What is between two positions, in files that exist. Raises as `end_of_batch`."""
        if not end.table:
            return []
        self._check(end, *self._look())
        begin = start if start.table else replace(end, version=end.first, file=0, row=0)
        found: list[FileRows] = []
        for version in range(begin.version, end.version + (end.file > 0 or end.row > 0)):
            first = (begin.file, begin.row) if version == begin.version else (0, 0)
            last = (end.file, end.row) if version == end.version else None
            for index, file in enumerate(self._files_of(version, end.first)):
                if index < first[0] or (last is not None and (index, 0) >= last):
                    continue
                start_row = first[1] if index == first[0] else 0
                stop_row = last[1] if last is not None and index == last[0] else None
                found.append(self._part(file, start_row, stop_row))
        for part in found:
            if not (self._path / part.path).exists():
                raise self._removed(f"file {part.path}")
        return found

    def _may_have_news(self, start: TablePosition) -> bool:
        """Whether it is worth to open the table, which takes longer than to look for two files."""
        known, passed = self._passed
        version = passed if known == start else start.version
        is_waiting = start.table and version > start.first
        return not (
            is_waiting
            and not version_path(self._log, version).exists()
            and version_path(self._log, version - 1).exists()
        )

    def _look(self) -> tuple[str, int]:
        """The id and the newest version; an object that is open may miss that both are others."""
        state = LakeTable(self._path).state
        return str((state.identity or {}).get("id", "")), state.version

    def _check(self, position: TablePosition, identity: str, newest: int) -> None:
        if identity != position.table or position.version > newest + 1:
            text = f"table {self._name} is not the one that was read: it was dropped, created again"
            raise UsageError("lake.recreated", f"{text} or restored; {START_OVER}")

    def _files_of(self, version: int, first: int) -> list[TableFile]:
        """What a stream reads of a version."""
        if version != first:
            return self._added(version)
        if self._whole[0] != version:
            try:
                state = LakeTable(self._path, at=version).state
            except UsageError as error:
                raise self._removed(f"version {version}") from error
            if state.version != version:
                raise self._removed(f"version {version}")
            self._whole = (version, list(state.files.values()))
        return self._whole[1]

    def _added(self, version: int) -> list[TableFile]:
        try:
            actions = actions_in(self._log, version)
        except FileNotFoundError as error:
            raise self._removed(f"version {version}") from error
        if any(one["remove"].get("dataChange", True) for one in actions if "remove" in one):
            if self._skips_changes:
                return []
            text = f"table {self._name}: version {version} removes or changes rows, and a stream"
            advice = "or set option skipChangeCommits to true to leave out such versions"
            raise UsageError(
                "lake.rows-changed", f"{text} reads rows that are added; {START_OVER}, {advice}"
            )
        found = [one["add"] for one in actions if "add" in one]
        return [
            TableFile(
                path=unquote(one["path"]),
                uri=one["path"],
                rows=json.loads(one.get("stats") or "{}").get("numRecords", 0),
                bytes=one["size"],
            )
            for one in found
            if one["dataChange"]
        ]

    def _part(self, file: TableFile, start: int, stop: int | None = None) -> FileRows:
        rows = file.rows
        if not rows:  # Other programs may not have written it down.
            try:
                rows = pq.read_metadata(self._path / file.path).num_rows
            except FileNotFoundError as error:
                raise self._removed(f"file {file.path}") from error
            except (OSError, pa.ArrowException) as error:
                raise StorageError("lake.damaged", f"{self._path / file.path}: {error}") from error
        count = max(0, (rows if stop is None else stop) - start)
        return FileRows(file.path, start, stop, count, file.bytes * count // max(1, rows))

    def _removed(self, what: str) -> UsageError:
        return removed_error(self._name, what)


def removed_error(table: str, what: str) -> UsageError:
    """The error of a stream that comes too late."""
    text = f"table {table}: {what} was removed before it was read"
    advice = f"polybus tables keep {table} HOURS keeps older versions for longer"
    return UsageError("lake.version", f"{text}; {START_OVER}. {advice}")
