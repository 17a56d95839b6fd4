"""What changed in a pipeline since its last run, and which of its flows start over.

A changed query may continue from an old checkpoint only if its sources, its state and its output
are the same. Spark detects a mismatch late, or not at all: a flow that reads another topic would
use the old topic's offsets. So a fingerprint of each flow is stored beside its checkpoint
(`flow.json`) and compared before the flow starts.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from polybus.errors import StorageError
from polybus.lake.dimension import CHANGES, Dimension
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.internals import JOIN, STATEFUL, PlanNode, StreamingTable, analysed_plan
from polybus.spark.internals import Flow as Query
from polybus.spark.pipelines.declared.names import Names
from polybus.spark.pipelines.declared.registry import PipelineError, place_of
from polybus.spark.pipelines.declared.reset import Reset, begun_reset, start_over

FILE = "flow.json"
# Options that select what is read. Others (rates, locations, names) may change at any time.
_SELECTING = (
    *("subscribe", "subscribepattern", "assign", "path", "table", "columns", "includeheaders"),
)
_EXPRESSION_IDS = re.compile(r"#\d+L?|-T\d+ms|\bplan_id=\d+")
_STRING_FIELDS_MAX = 1000


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The sources, the stateful operators, the output and its columns of a flow."""

    flow: str
    target: str
    sources: tuple[str, ...]
    state: tuple[str, ...]
    columns: dict[str, str]
    partition_by: tuple[str, ...] = ()


def fingerprint(query: Query, frame: Any, partition_by: Sequence[str], rule: str) -> Fingerprint:
    """The fingerprint of a stream that is analysed and not started; `rule` is for auto CDC."""
    sources: list[str] = []
    state: list[str] = [rule] if rule else []
    plan = analysed_plan(frame)
    if plan is not None:  # Spark Connect keeps its plans on the server
        _walk(plan, sources, state)
    return Fingerprint(
        flow=query.name,
        target=query.target,
        sources=tuple(sources),
        state=tuple(state),
        columns={field.name: field.dataType.simpleString() for field in frame.schema},
        partition_by=tuple(partition_by),
    )


def _walk(node: PlanNode, sources: list[str], state: list[str]) -> None:
    if not node.is_streaming:
        return
    name, children = node.name, node.children()
    if node.source():
        sources.append(_source(node))
    joins_streams = name == JOIN and all(child.is_streaming for child in children)
    if name in STATEFUL or joins_streams:
        state.append(_EXPRESSION_IDS.sub("", node.text(_STRING_FIELDS_MAX)).lstrip("~'"))
    for child in children:
        _walk(child, sources, state)


def _source(node: PlanNode) -> str:
    """`polybus subscribe=orders`: the format, and the options that select what is read."""
    given = node.source_options(_SELECTING)
    if "subscribe" in given:
        topics = sorted(topic.strip().lower() for topic in given["subscribe"].split(","))
        given["subscribe"] = ",".join(topics)
    return " ".join([node.source(), *(f"{key}={value}" for key, value in given.items())])


def differences(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Why a flow cannot continue from its checkpoint; empty if it can."""
    found = []
    if old.target != new.target:
        found.append(f"it wrote to {old.target} and now writes to {new.target}")
    if old.sources != new.sources:
        found.append(f"it read {_listed(old.sources)} and now reads {_listed(new.sources)}")
    if old.state != new.state:
        found.append(f"its state was for {_listed(old.state)} and is now for {_listed(new.state)}")
    if old.partition_by != new.partition_by:
        was, now = _listed(old.partition_by), _listed(new.partition_by)
        found.append(f"its table was partitioned by {was} and now is by {now}")
    for name, kind in old.columns.items():
        if new.columns.get(name, kind) != kind:
            found.append(f"column {name} was {kind} and now is {new.columns[name]}")
    return found


def _listed(items: tuple[str, ...]) -> str:
    return "; ".join(item if len(item) <= 200 else f"{item[:200]}…" for item in items) or "nothing"


def read_fingerprint(checkpoint: Path) -> Fingerprint | None:
    """The fingerprint of the flow that created a checkpoint; None if it never began a batch."""
    try:
        path = checkpoint / FILE
        stored = checked_json.decode(path.read_bytes(), Fingerprint, path, accept_unchecked=True)
        return stored if Checkpoint(checkpoint).has_batches() else None
    except (OSError, StorageError):
        return None


class Changes:
    """The flows of one pipeline, compared with their checkpoints.

    `prints` are the fingerprints of its streams as they are now.
    """

    def __init__(self, names: Names, checkpoints: Path, prints: Mapping[str, Fingerprint]) -> None:
        """Raises StorageError `pipeline.storage`."""
        self._names = names
        self._pipeline = names.pipeline
        self._checkpoints = checkpoints
        self._prints = prints
        self._begun = begun_reset(checkpoints)

    def store(self, flows: Collection[str]) -> None:
        """Write the fingerprints of flows beside their checkpoints, for the next run."""
        for name, made in self._prints.items():
            if name not in flows:
                continue
            Disk().make_folder(self._checkpoints / name)
            replace_file(self._checkpoints / name / FILE, checked_json.encode(made))

    def check(self, queries: list[Query]) -> None:
        """Raise PipelineError `pipeline.changed` if a query cannot continue."""
        for query in queries:
            made = self._prints.get(query.name)
            if made is None:
                continue
            stored = read_fingerprint(self._checkpoints / query.name)
            found = None
            if stored is None:
                found = self._renamed(query, made) or self._lost(query)
            elif changes := differences(stored, made):
                text = (
                    f"flow {query.name} cannot continue from its checkpoint: {'; '.join(changes)}"
                )
                found = f"{text}. Undo the change, or {self._start_over_hint(query)}"
            else:
                found = self._dropped(query)
            if found is not None:
                raise PipelineError("pipeline.changed", found, **place_of(query))

    def _renamed(self, query: Query, made: Fingerprint) -> str | None:
        """A flow that replaces one that no longer exists would write the same rows again."""
        for _, gone in self._gone():
            if gone.target == made.target:
                return (
                    f"flow {query.name} is new and writes to {query.target}, as flow {gone.flow} "
                    f"did, which no longer exists: it would write the same rows again. Name it "
                    f"{gone.flow} to continue, or {self._start_over_hint(query)}"
                )
        return None

    def _lost(self, query: Query) -> str | None:
        """A flow without a checkpoint whose rows the table has: it would write them again."""
        if not self._fills_table(query):
            return None
        table = self._names.table(query.target)
        fillers = self._pipeline.queries_into(query.target)
        is_filled = any(read_fingerprint(self._checkpoints / one.name) for one in fillers)
        # The table also lists writers whose rows a reset removed; these have a fingerprint again.
        is_writer = any(one.startswith(f"{query.name}:") for one in table.writers())
        is_gone = is_writer and not (self._checkpoints / query.name / FILE).exists()
        if not table.rows or (is_filled and not is_gone):
            return None
        return (
            f"table {table.name} has {table.rows} rows, but the checkpoint of flow {query.name} "
            f"is missing ({self._checkpoints / query.name}): the flow would write them again. "
            f"Restore the checkpoint, or start over with --reset {query.name}"
        )

    def _dropped(self, query: Query) -> str | None:
        """A flow that has stored batches, whose table is gone: a new one would lack their rows."""
        checkpoint = Checkpoint(self._checkpoints / query.name)
        if not self._fills_table(query) or not checkpoint.has_commits():
            return None
        table = self._names.table(query.target)
        tables = [table]
        if query.target in self._pipeline.rules:
            tables.append(Dimension(table, ()).changes)
        gone = [one.name for one in tables if not one.exists]
        if not gone:
            return None
        return (
            f"table {' and '.join(gone)} was removed, and flow {query.name} would continue after "
            f"the rows that it had: {self._start_over_hint(query)}"
        )

    def _start_over_hint(self, query: Query) -> str:
        what = f"table {query.target} is rebuilt" if self._fills_table(query) else "from the start"
        return f"start over with --reset {query.name} ({what})"

    def _fills_table(self, query: Query) -> bool:
        return isinstance(self._pipeline.outputs[query.target], StreamingTable)

    def _gone(self) -> Iterator[tuple[Path, Fingerprint]]:
        """The checkpoints of flows that no longer exist."""
        for folder in sorted(self._checkpoints.glob("*/")):
            stored = read_fingerprint(folder)
            if stored is not None and stored.flow not in self._pipeline.queries:
                yield folder, stored

    def is_reset(self, query: Query, resets: set[str]) -> bool:
        """Whether a flow starts over: a table does so with all flows that fill it.

        A reset that an earlier start began counts, too.
        """
        if self._pipeline.table_name(query.target) in self._begun.tables:
            return True
        queries = self._pipeline.queries_into(query.target) if self._fills_table(query) else [query]
        named = any(resets & self.spellings(one) for one in queries)
        return named or query.name in self._begun.checkpoints

    def spellings(self, query: Query) -> set[str]:
        """The names by which `--reset` knows a flow."""
        short = {query.name.lower(), query.target.lower()}
        return short | {f"{self._pipeline.name}.{name}" for name in short}

    def start_over(self, queries: list[Query]) -> None:
        """Remove the checkpoints and rows of flows, and of a reset that was begun.

        Raises StorageError; the next start continues.
        """
        targets = {query.target for query in queries}
        gone = [folder.name for folder, stored in self._gone() if stored.target in targets]
        tables = {query.target for query in queries if self._fills_table(query)}
        rules = self._pipeline.rules.keys()
        reset = self._begun | Reset(
            frozenset([*(query.name for query in queries), *gone]),
            frozenset(map(self._pipeline.table_name, tables))
            | {f"{self._pipeline.table_name(one)}.{CHANGES}" for one in tables & rules},
        )
        if reset != Reset():
            start_over(self._names.bus.data, self._checkpoints, reset)
