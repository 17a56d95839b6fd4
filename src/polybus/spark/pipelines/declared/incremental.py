"""Which materialized views can be refreshed with the new rows of their input alone.

A view can be if it reads one table, which has only grown since the last refresh, and if its query
handles each row by itself (columns, conditions, generated rows), or then groups them and computes
only sums, counts, minima and maxima. New rows are added to the first kind. For the second, the
query runs over the new rows, and its groups are merged with those of the view. All other views are
computed completely: joins, averages, distinct counts, windows, limits, the current time, functions
in Python, whose code may have changed, and everything over Spark Connect, which hides the plan.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from polybus.spark.internals import AGGREGATE, ROW_BY_ROW, VOLATILE, PlanNode, analysed_plan

_MERGED = {"Sum": F.sum, "Count": F.sum, "Min": F.min, "Max": F.max}
_EXPRESSION_IDS = re.compile(r"#\d+L?|\bplan_id=\d+")
_STRING_FIELDS_MAX = 1000


@dataclass(frozen=True)
class Increment:
    """How the rows of a query are brought up to date.

    `reason` says why they must be computed completely; otherwise it is empty. `digest` identifies
    the query. `keys` and `merged` are the columns of a grouping query.
    """

    reason: str = ""
    digest: str = ""
    is_grouped: bool = False
    keys: tuple[str, ...] = ()
    merged: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"full, because of {self.reason}" if self.reason else "incremental"

    def combined(self, known: DataFrame, fresh: DataFrame) -> DataFrame:
        """The groups of a view and those of new rows, merged."""
        together = known.unionByName(fresh)
        columns = [merge(F.col(f"`{name}`")).alias(name) for name, merge in self.merged.items()]
        groups = together.groupBy(*(F.col(f"`{name}`") for name in self.keys)).agg(*columns)
        # A sum of sums may be of a wider type.
        return groups.select(
            *(F.col(f"`{one.name}`").cast(one.dataType).alias(one.name) for one in known.schema)
        )


class _Complete(Exception):
    """The query must be computed completely."""


def increment_of(frame: Any, settings: Mapping[str, str], *, has_one_table: bool) -> Increment:
    """How a query over one table, or other inputs, can be brought up to date.

    Different `settings` of the session make it another query.
    """
    if not has_one_table:
        return Increment("its inputs, which are not one table")
    plan = analysed_plan(frame)
    if plan is None:
        return Increment("Spark Connect")
    try:
        return _analysed(plan, repr(sorted(settings.items())))
    except _Complete as error:
        return Increment(str(error))


def _analysed(node: PlanNode, settings: str) -> Increment:
    texts = [settings]
    is_grouped = node.name == AGGREGATE
    keys, merged = _groups(node) if is_grouped else ([], {})
    first = node
    while children := node.children():
        if len(children) > 1 or not (node.name in ROW_BY_ROW or (is_grouped and node is first)):
            raise _Complete(node.name)
        for expression in node.expressions():
            _check(expression)
        text = node.text(_STRING_FIELDS_MAX)
        texts.append(_EXPRESSION_IDS.sub("", text).lstrip("~'"))
        (node,) = children
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()
    return Increment("", digest, is_grouped, tuple(keys), merged)


def _groups(node: PlanNode) -> tuple[list[str], dict[str, Any]]:
    """The columns of an Aggregate: those of its groups, and how to merge the others."""
    groupings = node.groupings()
    keys: list[str] = []
    merged: dict[str, Any] = {}
    found: set[int] = set()
    for name, inner in node.aggregates():
        same = [index for index, one in enumerate(groupings) if one.is_same(inner)]
        if same:
            keys.append(name)
            found.update(same)
            continue
        function, is_distinct = inner.aggregate_function()
        if not function:
            raise _Complete(f"the computed column {name}")
        if function not in _MERGED or is_distinct:
            distinct = "distinct " if is_distinct else ""
            raise _Complete(f"the {distinct}{function.lower()} in column {name}")
        merged[name] = _MERGED[function]
    if len(found) < len(groupings) or len({*keys, *merged}) < len(keys) + len(merged):
        raise _Complete("a group that is not among the columns")
    return keys, merged


def _check(expression: PlanNode) -> None:
    """Raise _Complete if the value of an old row may have changed."""
    kind = expression.kind
    if VOLATILE.match(kind) or not expression.is_deterministic:
        raise _Complete(kind)
    for child in expression.children():
        _check(child)
