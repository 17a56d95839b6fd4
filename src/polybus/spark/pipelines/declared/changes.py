"""What changed in a pipeline since its last run, and starting over where that is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from pyspark.pipelines.flow import Flow as Query
from pyspark.pipelines.output import StreamingTable

from polybus.spark.pipelines.declared import fingerprint
from polybus.spark.pipelines.declared.names import Names
from polybus.spark.pipelines.declared.problems import PipelineError, place_of


class Changes:
    """The flows of one pipeline beside their checkpoints.

    `prints` are the fingerprints of its streams as they are now.
    """

    def __init__(
        self, names: Names, checkpoints: Path, prints: Mapping[str, fingerprint.Fingerprint]
    ) -> None:
        self._names = names
        self._pipeline = names.pipeline
        self._checkpoints = checkpoints
        self._prints = prints

    def keep(self) -> None:
        """Write the fingerprints beside the checkpoints, for the next run."""
        for name, made in self._prints.items():
            fingerprint.write(self._checkpoints / name, made)

    def check(self, queries: list[Query]) -> None:
        """Raise PipelineError `pipeline.changed` if one of them cannot go on where it was."""
        for query in queries:
            made = self._prints.get(query.name)
            if made is None:
                continue
            kept = fingerprint.kept(self._checkpoints / query.name)
            if kept is None:
                self._check_renamed(query, made)
                self._check_lost(query)
                continue
            found = fingerprint.differences(kept, made)
            if found:
                text = f"flow {query.name} cannot go on where it was: {'; '.join(found)}"
                raise PipelineError(
                    "pipeline.changed", f"{text}. {self._what_to_do(query)}", **place_of(query)
                )

    def _check_renamed(self, query: Query, made: fingerprint.Fingerprint) -> None:
        """A flow that takes the place of one that is gone would bring its rows again."""
        if not self._checkpoints.is_dir():
            return
        for folder in sorted(self._checkpoints.iterdir()):
            kept = fingerprint.kept(folder)
            if kept is None or kept.flow in self._pipeline.queries:
                continue
            if kept.target == made.target:
                text = (
                    f"flow {query.name} is new and writes to {query.target}, as flow {kept.flow} "
                    f"did, which is gone: it would bring the same rows again. Name it "
                    f"{kept.flow} to go on, or {self._what_to_do(query, lower=True)}"
                )
                raise PipelineError("pipeline.changed", text, **place_of(query))

    def _check_lost(self, query: Query) -> None:
        """A table with rows whose flows have no checkpoint: they would bring the rows again."""
        if not isinstance(self._pipeline.outputs[query.target], StreamingTable):
            return
        table = self._names.table(query.target)
        others = self._pipeline.queries_into(query.target)
        known = any(fingerprint.kept(self._checkpoints / other.name) for other in others)
        if table.rows and not known:
            text = (
                f"table {table.name} has {table.rows} rows, but the checkpoint of flow "
                f"{query.name} is gone ({self._checkpoints / query.name}): it would bring them "
                f"again. Put it back, or start over with --reset {query.name}"
            )
            raise PipelineError("pipeline.changed", text, **place_of(query))

    def _what_to_do(self, query: Query, *, lower: bool = False) -> str:
        into_table = isinstance(self._pipeline.outputs[query.target], StreamingTable)
        what = f"table {query.target} anew" if into_table else "from the start of its topics"
        text = f"Undo the change, or start over with --reset {query.name} ({what})"
        return text[0].lower() + text[1:] if lower else text

    def is_reset(self, query: Query, resets: set[str]) -> bool:
        """A table starts over with all the flows that fill it."""
        names = {
            name
            for other in self._pipeline.queries_into(query.target)
            for name in self.spellings(other)
        }
        own = isinstance(self._pipeline.outputs[query.target], StreamingTable)
        return bool(resets & (names if own else self.spellings(query)))

    def spellings(self, query: Query) -> set[str]:
        """The names by which `--reset` knows a flow."""
        short = {query.name.lower(), query.target.lower()}
        return short | {f"{self._pipeline.name}.{name}" for name in short}

    def start_over(self, queries: list[Query]) -> None:
        """Forget the checkpoints, then the rows: what is cut off in between is found by `check`."""
        targets = {query.target for query in queries}
        for query in queries:
            shutil.rmtree(self._checkpoints / query.name, ignore_errors=True)
        self._forget_gone(targets)
        for target in targets:
            table = self._names.table(target)
            if isinstance(self._pipeline.outputs[target], StreamingTable) and table.exists:
                files = [str(path.relative_to(table.path)) for path in table.files()]
                table.commit([], remove=files, writer="reset", batch_id=None)

    def _forget_gone(self, targets: set[str]) -> None:
        """Remove checkpoints of flows that are gone and filled what now starts over."""
        for folder in self._checkpoints.iterdir() if self._checkpoints.is_dir() else ():
            kept = fingerprint.kept(folder)
            if kept is None or kept.flow in self._pipeline.queries:
                continue
            if kept.target in targets:
                shutil.rmtree(folder, ignore_errors=True)
