"""Figures of every benchmark: medians, ratios, targets, and the rows of their table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from polybus.bench.measure import EntryOutcome
from polybus.bench.scenarios import Metric, Scenario

Unit = Literal["messages/s", "rows/s", "µs", "ms", "s", "KiB", "MiB"]
COLUMNS = ("work", "who", "figure", "CPU s per M", "polybus is", "target", "", "note")
NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound for the ratio of a figure or, if it is `absolute`, for the figure itself."""

    value: float
    at_least: bool = False
    absolute: bool = False
    goal: float | None = None
    """A further bound that is not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFigure:
    """One measured number of one contestant.

    Attributes:
        work: what was done; `scenario` is its short name, if it has one.
        value: the median, in `unit`; None if no run succeeded.
        p99: the 99th percentile, where it was measured.
        ratio: the figure of Polybus divided by this one, which is another contestant's.
        polybus_failed: a run of Polybus failed, so that it misses every target.
    """

    work: str
    who: str
    value: float | None
    unit: Unit
    scenario: str = ""
    p99: float | None = None
    cpu_s_per_million: float | None = None
    ratio: float | None = None
    target: Target | None = None
    polybus_failed: bool = False
    error: str | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target, or without a figure to compare."""
        target = self.target
        if target is None:
            return None
        if self.polybus_failed and (target.absolute or self.value is not None):
            return False
        compared = self.value if target.absolute else self.ratio
        if compared is None:
            return None
        return compared >= target.value if target.at_least else compared <= target.value

    @property
    def shown(self) -> str:
        if self.value is None:
            missing = (self.error or "").startswith(NOT_INSTALLED)
            return NOT_INSTALLED if missing else "failed"
        if self.unit.endswith("/s"):
            value = self.value
            return f"{value / 1e6:.2f} M/s" if value >= 1e5 else f"{value:,.0f} /s"
        digits = {"s": 2, "KiB": 1}.get(self.unit, 0)
        p99 = "" if self.p99 is None else f", p99 {self.p99:.0f}"
        return f"{self.value:.{digits}f} {self.unit}{p99}"

    @property
    def shown_target(self) -> str:
        target = self.target
        if target is None:
            return ""
        goal = "" if target.goal is None else f" (goal {target.goal:g})"
        unit = self.unit if target.absolute else "×"
        return f"{'≥' if target.at_least else '≤'} {target.value:g} {unit}{goal}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def figures_of(scenario: Scenario, outcomes: Sequence[EntryOutcome]) -> list[BenchFigure]:
    """The figures of one scenario; the first is that of the bus."""
    bus, metric = outcomes[0], scenario.metric
    ours, more = bus.value(metric), metric is Metric.RATE
    figures = []
    for outcome in outcomes:
        entry, value = outcome.entry, outcome.value(metric)
        ratio, target = None, None
        if outcome is bus and scenario.limit is not None:
            target = Target(value=scenario.limit, absolute=True)
        elif outcome is not bus:
            ratio = ours / value if ours is not None and value else None
            if entry.target is not None:
                target = Target(value=entry.target, at_least=more, goal=entry.goal)
        late = sorted(sample["p99_us"] for sample in outcome.samples if "p99_us" in sample)
        figures.append(
            BenchFigure(
                scenario=scenario.name,
                work=scenario.title,
                who=entry.label or outcome.broker.title,
                value=value,
                unit=metric.value,
                p99=late[len(late) // 2] if late else None,
                cpu_s_per_million=outcome.cpu_s_per_million(),
                ratio=ratio,
                target=target,
                polybus_failed=bool(bus.errors),
                error=outcome.errors[0] if outcome.errors else None,
            )
        )
    return figures


def versus(
    work: str, ours: tuple[str, float], peer: tuple[str, float], unit: Unit, target: Target | None
) -> list[BenchFigure]:
    """The figures of Polybus and of one peer: each a name and a value."""
    return [
        BenchFigure(work=work, who=ours[0], value=ours[1], unit=unit),
        BenchFigure(
            work=work, who=peer[0], value=peer[1], unit=unit, ratio=ours[1] / peer[1], target=target
        ),
    ]


def medians(
    runs: Mapping[str, Callable[[], float]],
    rounds: int,
    tell: Callable[[str], object],
    *,
    work: str,
    warm_up: bool = False,
) -> dict[str, float]:
    """The median figure of each contestant: single runs vary. They take turns in each round."""
    figures: dict[str, list[float]] = {who: [] for who in runs}
    for number in range(0 if warm_up else 1, rounds + 1):
        for who, run in runs.items():
            tell(f"{work}, {f'round {number}' if number else 'warming up'}: {who}")
            figure = run()
            if number:
                figures[who].append(figure)
    return {who: median(taken) for who, taken in figures.items()}


def table(figures: Sequence[BenchFigure]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; a column without content is left out."""
    rows: list[list[str]] = []
    last = ""
    for figure in figures:
        work = f"{figure.work} ({figure.scenario})" if figure.scenario else figure.work
        cpu, ratio = figure.cpu_s_per_million, figure.ratio
        rows.append(
            [
                "" if work == last else work,
                figure.who,
                figure.shown,
                "" if cpu is None else f"{cpu:.2f}",
                "" if ratio is None else f"{ratio:.2f} ×",
                figure.shown_target,
                {None: "", True: "met", False: "not met"}[figure.met],
                figure.note,
            ]
        )
        last = work
    used = [index for index in range(len(COLUMNS)) if any(row[index] for row in rows)]
    return [COLUMNS[index] for index in used], [[row[index] for index in used] for row in rows]


def summary(figures: Sequence[BenchFigure]) -> list[str]:
    """How many targets were met, and each that was not."""
    judged = [figure for figure in figures if figure.met is not None]
    missed = [figure for figure in judged if not figure.met]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets met."]
    unmeasured = sum(figure.target is not None for figure in figures) - len(judged)
    if unmeasured:
        lines.append(f"{unmeasured} more could not be measured: their peers did not run.")
    for figure in missed:
        reached = f"{figure.who}: {figure.shown}"
        if figure.polybus_failed:
            reached = "the bus failed"
        elif figure.ratio is not None:
            reached = f"{figure.ratio:.2f} × {figure.who}"
        work = figure.scenario or figure.work
        lines.append(f"Not met: {work}: {reached}, the target is {figure.shown_target}.")
    lines += [
        f"Failed: {figure.scenario or figure.work}, {figure.who}: {figure.error}"
        for figure in figures
        if figure.error and not figure.error.startswith(NOT_INSTALLED)
    ]
    return lines


def quantiles(samples: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile (the maximum of few samples)."""
    ordered = sorted(samples)
    return median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
