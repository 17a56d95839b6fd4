"""Materialized views: tables that are brought up to date when their inputs have changed.

Where that is possible (incremental.py), only the new rows of the input are read. A metadata file
beside the checkpoint says which rows a view has. The order of writes: the version of the view's
table, then the file, which names that version. A file with another version, as after a crash
between the two, or a damaged one is ignored: the view is computed completely.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.lake.compact import tidy
from polybus.lake.delta_actions import has_feed
from polybus.lake.files import NewFile
from polybus.lake.table import Conflict, LakeTable, open_table
from polybus.lake.table_state import TableState, appended
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file
from polybus.spark import tables
from polybus.spark.expectations import CheckedRows, ExpectationCount, check
from polybus.spark.internals import Flow as Query
from polybus.spark.internals import TemporaryView, activate_in_thread
from polybus.spark.pipelines.declared.incremental import Increment, increment_of
from polybus.spark.pipelines.declared.names import (
    Analysed,
    FreshRows,
    Input,
    Names,
    in_schema_of,
)
from polybus.spark.pipelines.flows import FlowContext

FILE = "view.json"
_ATTEMPTS_MAX = 20


class ViewMetadata(msgspec.Struct, frozen=True):
    """A version of a view, and the version of the input whose rows it has.

    `query` and `input` are the digest of the query and the id of the input's table.
    """

    version: int
    query: str
    input: str
    covered: int


def read_note(folder: Path, view: LakeTable) -> ViewMetadata | None:
    """The metadata beside a checkpoint, if it matches the view's current version."""
    path = folder / FILE
    try:
        note = checked_json.decode(path.read_bytes(), ViewMetadata, path, accept_unchecked=True)
    except (OSError, StorageError):
        return None
    return note if note.version == view.version else None


def commit_view(
    view: LakeTable,
    files: list[NewFile],
    based_on: TableState,
    folder: Path,
    note: ViewMetadata | None,
    *,
    is_added: bool = False,
) -> None:
    """Replace the rows of a view, or add to them, and record which they are.

    Raises:
        Conflict: another writer changed the table meanwhile; nothing changed.
    """
    remove = [] if is_added else list(based_on.files)
    add = [one for one in files if one.file.rows or not is_added]
    if add or not is_added:
        view.commit(add, remove=remove, writer="view", batch_id=None, based_on=based_on.version)
        tidy(view)
    if note is not None:
        Disk().make_folder(folder)
        noted = msgspec.structs.replace(note, version=view.version)
        replace_file(folder / FILE, checked_json.encode(noted))


class ViewFlow:
    """A materialized view."""

    def __init__(self, names: Names, query: Query) -> None:
        self._names = names
        self._query = query
        self._view = names.table(query.target)
        self._seen: dict[Input, Any] = {}
        self._increment: Increment | None = None
        self._expected = names.pipeline.expectations(query)
        self._counts: list[ExpectationCount] = []

    def refresh(self, context: FlowContext) -> None:
        """Bring the table up to date, unless no input has changed since the last time."""
        if self._seen and self._seen == self._versions(self._seen):
            return
        # A failure leaves it empty, and the next call tries again.
        before, self._seen, self._counts = self._seen, {}, []
        activate_in_thread(self._names.spark)
        with self._settings():
            # Later refreshes need not read the old rows again.
            seen = self._add_new_rows(before, context.checkpoint)
            if seen is None:
                analysed = self._names.analyse(self._query, run=True)
                # Read before the rows: a change in between causes one unnecessary refresh.
                found = self._versions(analysed.inputs) | analysed.read
                self._increment = self.increment(analysed)
                seen = self._add_new_rows(found, context.checkpoint)
                if seen is None:
                    self._replace(self._increment, analysed, context.checkpoint)
                    seen = found
        context.figures.expected(self._counts)
        context.figures.rows = self._view.rows
        self._seen = seen

    def increment(self, analysed: Analysed) -> Increment:
        """How the view is refreshed."""
        inputs = [one for one in analysed.inputs if self._holds_rows(one)]
        is_one = len(inputs) == 1 and inputs == list(analysed.read)
        settings = {**self._names.pipeline.conf, **self._query.spark_conf}
        found = increment_of(
            analysed.frame, settings | {"expected": repr(self._expected)}, has_one_table=is_one
        )
        if self._expected and found.is_grouped:
            # A group that is left out now may belong to the view later.
            return Increment("its expectations")
        if is_one and not found.reason and self._is_changing(inputs[0]):
            return Increment(f"its input {inputs[0].name}, whose rows change")
        return found

    def _is_changing(self, one: Input) -> bool:
        """Whether rows of a table are changed in place, so it never only grows."""
        is_rule = one.kind == "dataset" and one.name in self._names.pipeline.rules
        return is_rule or has_feed(self._table_of(one).settings)

    def _holds_rows(self, one: Input) -> bool:
        outputs = self._names.pipeline.outputs
        return one.kind != "dataset" or not isinstance(outputs[one.name], TemporaryView)

    def _settings(self) -> AbstractContextManager[None]:
        # Other flows cannot start while the session has settings of this one.
        has_settings = self._names.pipeline.conf or self._query.spark_conf
        return self._names.settings_of(self._query) if has_settings else nullcontext()

    def _replace(self, increment: Increment, analysed: Analysed, folder: Path) -> None:
        """Compute all rows."""
        staged = self._stage(self._shaped(analysed))
        note = None
        if not increment.reason:
            ((source, covered),) = analysed.read.items()
            note = ViewMetadata(-1, increment.digest, self._identity(source), covered)
        for _ in range(_ATTEMPTS_MAX):
            try:
                commit_view(self._view, staged, self._view.state, folder, note)
                return
            except Conflict:
                continue
        raise Conflict(self._view.name)

    def _add_new_rows(self, inputs: dict[Input, Any], folder: Path) -> dict[Input, Any] | None:
        """Read only the new rows of the input; return the versions, or None if impossible."""
        state, increment = self._view.state, self._increment
        known = read_note(folder, self._view)
        if increment is None or increment.reason or known is None or known.version != state.version:
            return None
        (source,) = [one for one in inputs if self._holds_rows(one)]
        table, identity = self._table_of(source), self._identity(source)
        version = table.version
        if (known.query, known.input) != (increment.digest, identity):
            return None
        files = appended(table.folder, known.covered, version)
        if files is None or not all((table.path / path).exists() for path in files):
            return None
        seen = inputs | {source: version}
        if not files:
            return seen
        fresh = FreshRows(table.name, table.state, files)
        rows = self._shaped(self._names.analyse(self._query, run=True, fresh=fresh))
        if increment.is_grouped:
            rows = increment.combined(tables.read(self._names.spark, self._view, state), rows)
        note = ViewMetadata(-1, increment.digest, identity, version)
        is_added = not increment.is_grouped
        staged = self._stage(rows)
        try:
            commit_view(self._view, staged, state, folder, note, is_added=is_added)
        except Conflict:
            return None
        return seen

    def _stage(self, rows: Any) -> list[NewFile]:
        """Raises UsageError `pipeline.expectation` for a forbidden row."""
        checked = CheckedRows(rows, self._expected)
        staged = tables.stage(checked.rows, self._view, ())
        self._counts = checked.counts()
        try:
            check(self._counts)
        except UsageError:
            tables.discard(self._view, staged)
            raise
        return staged

    def _shaped(self, analysed: Analysed) -> Any:
        return in_schema_of(analysed.frame, self._names.pipeline.outputs[self._query.target])

    def _table_of(self, source: Input) -> LakeTable:
        if source.kind == "dataset":
            return self._names.table(source.name)
        return open_table(self._names.bus.data, source.name)

    def _identity(self, source: Input) -> str:
        return str((self._table_of(source).state.identity or {}).get("id"))

    def _versions(self, inputs: Any) -> dict[Input, Any]:
        """The version of every input; the same versions mean the same rows."""
        return {one: self._version(one) for one in inputs}

    def _version(self, one: Input) -> Any:
        bus = self._names.bus
        if one.kind in ("dataset", "table"):
            return self._table_of(one).version
        if bus.url is not None:
            return object()  # counts as changed, which is cheaper than a request each second
        from polybus.log.opening import open_reader

        try:
            bounds = open_reader(bus.data).bounds(one.name)
        except PolybusError:
            return None
        return (bounds.epoch, bounds.start, bounds.stop)
