"""Expectations: conditions that rows should meet. What happens to a row that fails one; counts.

    expect            the row is kept, and counted
    expect_or_drop    the row is left out of the table, and counted
    expect_or_fail    the batch fails, before anything of it is committed

A row meets a condition if that is true; null is not true. The counts come from the Spark job that
writes the rows, so they cost no job of their own, and they are counted when the batch is committed.
For a table, `CheckedRows` has the counts before the commit. For a stream into a sink, and a
temporary view in a stream, the progress of the query has them (`observed`), and a forbidden row
makes its task raise.

In a pipeline of yours, decorate a dataset's function, below `@dp.table`:

    @dp.table
    @expect_or_drop("has a price", "price > 0")
    def orders(): ...
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from polybus.config import DeclaredTable, DeclaredTopic
from polybus.errors import UsageError
from polybus.spark.declared_fields import literal

Consequence = Literal["expect", "expect_or_drop", "expect_or_fail"]
Function = TypeVar("Function", bound=Callable[..., Any])
_ATTRIBUTE = "__polybus_expectations__"


@dataclass(frozen=True)
class Expectation:
    """A condition with a name, and what happens to rows that do not meet it.

    `where` limits it to some rows: an SQL condition, `true` for all.
    """

    name: str
    condition: str
    consequence: Consequence = "expect"
    topic: str = ""
    where: str = "true"

    @property
    def is_met(self) -> str:
        return f"COALESCE(({self.condition}), false)"

    @property
    def reason(self) -> str:
        """Why a row that does not meet it was dropped."""
        return f"expectation: {self.name}"


@dataclass
class ExpectationCount:
    """How many rows met an expectation, and how many did not."""

    topic: str
    name: str
    consequence: Consequence
    passed: int = 0
    failed: int = 0


class CheckedRows:
    """Rows with expectations. `rows` is what to write; then `counts` and `check` have the result.

    They must be written once: every action on `rows` counts them again.
    """

    def __init__(self, rows: DataFrame, expectations: Sequence[Expectation]) -> None:
        self._expectations = list(expectations)
        self._observed: Observation | None = None
        self.kept = _without_dropped(rows, self._expectations)
        """The rows, not counted."""
        if self._expectations:
            self._observed = Observation()
            rows = rows.observe(self._observed, *_figures(self._expectations))
        self.rows = _without_dropped(rows, self._expectations)

    def counts(self) -> list[ExpectationCount]:
        """The counts, after the rows were written. Without expectations it is empty."""
        return [] if self._observed is None else counts_in(self._observed.get, self._expectations)


def _figures(expectations: Sequence[Expectation]) -> Iterable[Any]:
    for number, one in enumerate(expectations):
        for figure, is_counted in (("passed", one.is_met), ("failed", f"NOT {one.is_met}")):
            counted = F.expr(f"COUNT_IF(({one.where}) AND {is_counted})")
            yield counted.alias(f"{figure}_{number}")


def counts_in(
    found: Mapping[str, Any], expectations: Sequence[Expectation]
) -> list[ExpectationCount]:
    """The counts in figures that Spark has observed."""
    return [
        ExpectationCount(
            one.topic,
            one.name,
            one.consequence,
            int(found.get(f"passed_{number}") or 0),
            int(found.get(f"failed_{number}") or 0),
        )
        for number, one in enumerate(expectations)
    ]


def _without_dropped(rows: DataFrame, expectations: Iterable[Expectation]) -> DataFrame:
    for one in expectations:
        if one.consequence == "expect_or_drop":
            rows = rows.where(f"NOT ({one.where}) OR {one.is_met}")
    return rows


def enforced(rows: DataFrame, expectations: Iterable[Expectation]) -> DataFrame:
    """The rows without those to drop; a forbidden one makes its task raise."""
    expectations = list(expectations)
    for one in expectations:
        if one.consequence == "expect_or_fail":
            text = f"pipeline.expectation: a row does not meet the expectation {one.name!r}"
            of = f" of {one.topic}" if one.topic else ""
            raised = f"CAST(RAISE_ERROR({literal(text + of)}) AS BOOLEAN)"
            rows = rows.where(f"IF(NOT ({one.where}) OR {one.is_met}, true, {raised})")
    return _without_dropped(rows, expectations)


def observed(rows: DataFrame, expectations: Sequence[Expectation], name: str) -> DataFrame:
    """Rows of a stream, enforced; the progress of its query has the counts under the name."""
    return enforced(rows.observe(name, *_figures(expectations)), expectations)


def check(counts: Iterable[ExpectationCount]) -> None:
    """Refuse a batch with forbidden rows.

    Raises:
        UsageError: `pipeline.expectation`.
    """
    for one in counts:
        if one.consequence == "expect_or_fail" and one.failed:
            of = f"topic {one.topic}: " if one.topic else ""
            rows = f"{one.failed} of {one.failed + one.passed} rows of the batch"
            text = f"{of}{rows} do not meet the expectation {one.name!r}"
            raise UsageError("pipeline.expectation", text)


def added(totals: list[ExpectationCount], counts: Iterable[ExpectationCount]) -> None:
    """Add the counts of a batch to the totals."""
    known = {(one.topic, one.name, one.consequence): one for one in totals}
    for one in counts:
        total = known.get((one.topic, one.name, one.consequence))
        if total is None:
            total = ExpectationCount(one.topic, one.name, one.consequence)
            totals.append(total)
        total.passed += one.passed
        total.failed += one.failed


def declared(one: DeclaredTopic | DeclaredTable) -> list[Expectation]:
    """The expectations that the config has for a topic or table, by its name."""
    given: dict[Consequence, dict[str, str]] = {
        "expect": one.expect,
        "expect_or_drop": one.expect_or_drop,
        "expect_or_fail": one.expect_or_fail,
    }
    return [
        Expectation(name, condition, consequence, one.name)
        for consequence, conditions in given.items()
        for name, condition in conditions.items()
    ]


# For the functions of pipelines.


def expect(name: str, condition: str) -> Callable[[Function], Function]:
    """Count the rows of a dataset that do not meet a condition."""
    return _decorator(Expectation(name, condition, "expect"))


def expect_or_drop(name: str, condition: str) -> Callable[[Function], Function]:
    """Leave rows that do not meet a condition out of a dataset, and count them."""
    return _decorator(Expectation(name, condition, "expect_or_drop"))


def expect_or_fail(name: str, condition: str) -> Callable[[Function], Function]:
    """Fail the flow of a dataset if a row does not meet a condition."""
    return _decorator(Expectation(name, condition, "expect_or_fail"))


def _decorator(one: Expectation) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, (one, *expectations_of(function)))
        return function

    return decorate


def expectations_of(function: Any) -> tuple[Expectation, ...]:
    """The expectations with which a dataset's function is decorated."""
    found: tuple[Expectation, ...] = getattr(function, _ATTRIBUTE, ())
    return found
