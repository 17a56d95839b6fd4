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
# A generator that is late by more than this many messages sends them in groups and below the rate.
LATE_MESSAGES_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound for a ratio or, if it is `absolute`, for the figure itself.

    With `margin` it is a bound for the difference: how much Polybus may exceed the figure.
    """

    value: float | None
    """None: there is only a goal."""
    at_least: bool = False
    absolute: bool = False
    margin: bool = False
    goal: float | None = None
    """A further bound that is not checked."""
    p99: bool = False
    """Whether the ratio of the 99th percentiles has the same bound."""
    p99_max: float | None = None
    """A bound for the 99th percentile itself."""

    def admits(self, compared: float) -> bool:
        if self.value is None:
            return True
        return compared >= self.value if self.at_least else compared <= self.value

    def shown(self, unit: str) -> str:
        sign = "≤ +" if self.margin else "≥ " if self.at_least else "≤ "
        if self.value is None:
            return f"goal {sign}{self.goal:g} {unit}"
        goal = "" if self.goal is None else f" (goal {self.goal:g})"
        if self.absolute and unit.endswith("/s"):
            return f"{sign}{shown_rate(self.value)}"
        p99 = ", p99 too" if self.p99 else ""
        if self.p99_max is not None:
            p99 = f", p99 ≤ {self.p99_max:g} {unit}"
        return f"{sign}{self.value:g} {unit}{goal}{p99}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFigure:
    """One measured number of one contestant.

    Attributes:
        work: what was done; `scenario` is its short name, if it has one.
        value: the median, in `unit`; None if no run succeeded.
        p99: the 99th percentile, where it was measured.
        ratio: the figure of Polybus divided by this one, which is another contestant's; `p99_ratio`
            the same of the 99th percentiles.
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
    p99_ratio: float | None = None
    target: Target | None = None
    polybus_failed: bool = False
    error: str | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target, or without a figure to compare."""
        target = self.target
        if target is None or target.value is None:
            return None
        if self.polybus_failed and (target.absolute or self.value is not None):
            return False
        compared = self.value if target.absolute else self.ratio
        if target.margin:
            compared = self.excess
        if compared is None:
            return None
        p99_met = not target.p99 or self.p99_ratio is None or target.admits(self.p99_ratio)
        if target.p99_max is not None and self.p99 is not None:
            p99_met = self.p99 <= target.p99_max
        return target.admits(compared) and p99_met

    @property
    def excess(self) -> float | None:
        """By how much Polybus exceeds this figure, in its unit."""
        if self.value is None or self.ratio is None:
            return None
        return self.value * (self.ratio - 1)

    @property
    def shown_ratio(self) -> str:
        if self.target is not None and self.target.margin:
            return "" if self.excess is None else f"{self.excess:+.0f} {self.unit}"
        p99 = "" if self.p99_ratio is None else f", p99 {self.p99_ratio:.2f} ×"
        return "" if self.ratio is None else f"{self.ratio:.2f} ×{p99}"

    @property
    def shown(self) -> str:
        if self.value is None:
            missing = (self.error or "").startswith(NOT_INSTALLED)
            return NOT_INSTALLED if missing else "failed"
        if self.unit.endswith("/s"):
            return shown_rate(self.value)
        digits = {"s": 2, "KiB": 1}.get(self.unit, 0)
        p99 = "" if self.p99 is None else f", p99 {self.p99:.0f}"
        return f"{self.value:.{digits}f} {self.unit}{p99}"

    @property
    def shown_target(self) -> str:
        target = self.target
        if target is None:
            return ""
        return target.shown(self.unit if target.absolute or target.margin else "×")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def figures_of(scenario: Scenario, outcomes: Sequence[EntryOutcome]) -> list[BenchFigure]:
    """The figures of one scenario; the first is that of the bus."""
    bus, metric = outcomes[0], scenario.metric
    ours, ours_p99, more = bus.value(metric), bus.p99_us(), metric is Metric.RATE
    figures = []
    for outcome in outcomes:
        entry, value = outcome.entry, outcome.value(metric)
        p99 = outcome.p99_us()
        ratio, p99_ratio, target = None, None, None
        if outcome is bus and scenario.limit is not None:
            target = Target(value=scenario.limit, absolute=True, at_least=more)
        elif outcome is not bus:
            ratio = ours / value if ours is not None and value else None
            p99_ratio = ours_p99 / p99 if ours_p99 is not None and p99 else None
            if entry.margin is not None:
                target = Target(value=entry.margin, margin=True)
            elif entry.target is not None or entry.goal is not None:
                target = Target(value=entry.target, at_least=more, goal=entry.goal, p99=entry.p99)
        figures.append(
            BenchFigure(
                scenario=scenario.name,
                work=scenario.title,
                who=entry.label or outcome.broker.title,
                value=value,
                unit=metric.value,
                p99=p99,
                cpu_s_per_million=outcome.cpu_s_per_million(),
                ratio=ratio,
                p99_ratio=p99_ratio,
                target=target,
                polybus_failed=bool(bus.errors),
                error=outcome.errors[0] if outcome.errors else None,
                note=_note(scenario, outcome),
            )
        )
    return figures


def _note(scenario: Scenario, outcome: EntryOutcome) -> str:
    """The rate of the flood, and whether the generator could not keep its own pace."""
    notes = []
    floods = [sample["flood"] for sample in outcome.samples if "flood" in sample]
    if floods:
        rate = median(flood["delivered"] / flood["seconds"] for flood in floods)
        notes.append(f"flood {shown_rate(rate)}")
    late = [sample["late_p50_us"] for sample in outcome.samples if "late_p50_us" in sample]
    late_us = median(late) if late else 0.0
    if late_us * scenario.load.rate_per_s >= 1e6 * LATE_MESSAGES_MAX:
        notes.append(f"generator late by {late_us:.0f} µs")
    return ", ".join(notes)


def shown_rate(rate_per_s: float) -> str:
    return f"{rate_per_s / 1e6:.2f} M/s" if rate_per_s >= 1e5 else f"{rate_per_s:,.0f} /s"


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
        cpu = figure.cpu_s_per_million
        rows.append(
            [
                "" if work == last else work,
                figure.who,
                figure.shown,
                "" if cpu is None else f"{cpu:.2f}",
                figure.shown_ratio,
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
    checked = [figure for figure in figures if figure.target and figure.target.value is not None]
    unmeasured = len(checked) - len(judged)
    if unmeasured:
        lines.append(f"{unmeasured} more could not be measured: their peers did not run.")
    for figure in missed:
        reached = f"{figure.who}: {figure.shown}"
        if figure.polybus_failed:
            reached = "the bus failed"
        elif figure.ratio is not None:
            over = "over " if figure.target is not None and figure.target.margin else ""
            reached = f"{figure.shown_ratio} {over}{figure.who}"
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
