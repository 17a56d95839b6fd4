"""/healthz, /readyz, and /metrics in Prometheus' text format."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from starlette.responses import PlainTextResponse, Response

from polybus import names
from polybus.edges.http.calls import Call
from polybus.edges.http.logins import is_administrator, is_trusted
from polybus.edges.http.metrics.of_pipeline import pipeline_families
from polybus.edges.http.metrics.of_process import (
    Family,
    Labels,
    Sample,
    build_family,
    disk_families,
    histogram,
    process_families,
)
from polybus.edges.http.state import HttpState
from polybus.errors import PolybusError
from polybus.log.journal.timings import Timings
from polybus.services.accounts.storage import stored_bytes

METRICS = "text/plain; version=0.0.4; charset=utf-8"
PlainText = Annotated[Response, str]
NOTES_MAX = 100
NAMES = ("topic", "group")
"""Labels with names of an account's objects."""
SLICE = 500
"""Topics or lines per piece: some milliseconds of work, then other tasks run."""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metrics(NamedTuple):
    """Counters and gauges, and histograms with their descriptions."""

    families: Sequence[Family]
    timings: Mapping[str, tuple[str, Timings]]


async def healthz(call: Call) -> PlainText:
    """Liveness: the log and state.db take writes. Further lines name unusable files."""
    error = call.state.storage_error
    if error is not None:
        # Its text names files.
        text = f": {error.text}" if is_trusted(call.state, call.request) else ""
        return PlainTextResponse(f"{error.code}{text}\n", 503)
    return _ok(call)


async def readyz(call: Call) -> PlainText:
    """Readiness: it accepts connections. Further lines: damaged or stopped topics, bad files."""
    if call.state.stopping:
        return PlainTextResponse("stopping\n", 503)
    if call.state.storage_error is not None:
        return await healthz(call)
    damaged = list(call.state.bus.log.frozen.items())[:NOTES_MAX]
    notes = [f"{one.code}: {one.text}" for topic, one in damaged if _names(call, topic)]
    notes += [
        f"consumer {group}: topic {topic} is {reason}"
        for group, topic, reason in call.state.consumers.stopped()[:NOTES_MAX]
        if _names(call, topic) and _names(call, group)
    ]
    return _ok(call, *notes)


def _ok(call: Call, *notes: str) -> Response:
    """The answer of a healthy bus, with its problems for callers who may see them."""
    problems = call.state.accounts.configs.problems.items()
    configs = [
        f"config.invalid: account {name}: {text}"
        if _names(call, f"{name}/")
        else "config.invalid: the config of an account is not used; administrators see which"
        for name, text in problems
    ]
    notes = (*call.state.certificates.failures.values(), *configs[:NOTES_MAX], *notes)
    if not is_trusted(call.state, call.request):
        notes = ()
    return PlainTextResponse("\n".join(["ok", *notes, ""]))


def _names(call: Call, name: str) -> bool:
    """Whether the caller may see names of an account's objects."""
    if is_administrator(call.state, call.request):
        return True
    return call.state.accounts.admin.owner_of(name) == names.ACCOUNT


async def metrics(call: Call) -> PlainText:
    """Metrics for Prometheus, text format 0.0.4; for the default account and administrators.

    The default account gets the figures of the bus, and of topics and groups that it may know.
    """
    read = await asyncio.to_thread(_read_families, call.state.context.data, call.sees_bus)
    return Response(await render(call.state, read, call.knows), headers={"content-type": METRICS})


def _read_families(data: Path, sees_bus: bool) -> list[Family]:
    """The metrics that are read from the disk. Flows have the names of topics of all accounts."""
    return [*disk_families(data), *(pipeline_families(data) if sees_bus else ())]


async def render(
    state: HttpState, read: Sequence[Family] = (), knows: Callable[[str], bool] | None = None
) -> bytes:
    """All metrics of the bus, with only the names that `knows` allows.

    With many topics it takes long, so other tasks run meanwhile.
    """
    lines: list[str] = []
    found = await _found(state, read)
    for name, kind, text, samples in found.families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for number, (labels, value) in enumerate(samples, 1):
            if knows is None or all(knows(labels[one]) for one in NAMES if one in labels):
                lines.append(f"{name}{_labels(labels)} {_number(value)}")
            if number % SLICE == 0:
                await asyncio.sleep(0)
    for name, (text, timings) in found.timings.items():
        lines += histogram(f"polybus_{name}", text, timings)
    return ("\n".join(lines) + "\n").encode()


async def gather(state: HttpState) -> Metrics:
    """All metrics of the bus."""
    return await _found(state, await asyncio.to_thread(_read_families, state.context.data, True))


async def _found(state: HttpState, read: Sequence[Family]) -> Metrics:
    own: list[Family] = [
        (f"polybus_{name}", kind, text, samples)
        for name, kind, text, samples in (*await _traffic(state), *_families(state))
    ]
    families = [build_family(), *process_families(), *read, *own]
    return Metrics(families, getattr(state.bus.log, "timings", {}))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6f}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _families(state: HttpState) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    bus, inboxes = state.bus, state.inboxes
    yield "connections", "gauge", "Open TCP connections.", [({}, state.count_connections())]
    yield "websockets", "gauge", "Open WebSockets.", [({}, len(state.websockets))]
    yield "polls", "gauge", "Open long polls.", [({}, state.polls_hanging)]
    yield "sessions", "gauge", "msgstream sessions.", [({}, len(inboxes))]
    held = sum(session.pack_count for session in inboxes.sessions())
    yield "session_packs", "gauge", "Packs that wait to be confirmed.", [({}, held)]
    yield "session_packs_out_total", "counter", "Packs sent.", [({}, inboxes.packs_out)]
    waiting = state.context.memory.ledger.bytes
    yield "outbox_bytes", "gauge", "Bytes that wait for slow peers.", [({}, waiting)]
    yield "log_pending_bytes", "gauge", "Bytes not yet written.", [({}, bus.log.pending_bytes)]
    yield "receipts_total", "counter", "Receipts given.", [({}, bus.receipts_given)]
    yield "receipts_waiting", "gauge", "Receipts not yet due.", [({}, bus.receipts_waiting)]
    syncs, sync_s = getattr(bus.log, "sync_figures", (0, 0.0))
    yield "fsync_seconds_total", "counter", "Seconds in fsync of the journal.", [({}, sync_s)]
    yield "fsyncs_total", "counter", "Fsyncs of the journal.", [({}, syncs)]
    errors = state.bad_peers.counts
    drops = [
        ({"reason": "outbox"}, errors["outbox.dropped"] + errors["outbox.full"]),
        ({"reason": "session"}, inboxes.messages_lost),
    ]
    yield "drops_total", "counter", "Peers and messages dropped for being slow.", drops
    by_code = [({"code": code}, float(count)) for code, count in sorted(errors.items())]
    yield "errors_total", "counter", "Errors by code.", by_code
    yield from _consumers(state)
    damages = Counter(one.kind or "file" for one in state.state_db.damages)
    lost: list[Sample] = [({"kind": kind}, count) for kind, count in sorted(damages.items())]
    yield "state_damages", "gauge", "Damaged state.db entries found in the last 30 days.", lost
    frozen = float(len(bus.log.frozen))
    yield "topics_damaged", "gauge", "Topics that are frozen because of damage.", [({}, frozen)]
    bad = float(len(state.certificates.failures))
    unread = float(len(state.accounts.configs.problems))
    yield "account_config_failures", "gauge", "Accounts whose config is not used.", [({}, unread)]
    yield "tls_reload_failures", "gauge", "Changed certificates that cannot be used.", [({}, bad)]
    count, size = state.blobs.figures
    yield "blobs", "gauge", "Large payloads that are stored.", [({}, count)]
    yield "blob_bytes", "gauge", "Their size.", [({}, size)]
    healthy = float(state.storage_error is None)
    yield "storage_healthy", "gauge", "1 while the log and state.db take writes.", [({}, healthy)]


def _consumers(state: HttpState) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    views = state.consumers.views()
    lags: list[Sample] = [
        ({"group": one.group, "topic": topic.topic}, float(topic.lag))
        for one in views
        for topic in one.topics
        if topic.lag is not None
    ]
    yield "consumer_lag", "gauge", "Messages that a consumer has yet to read.", lags
    rates: list[Sample] = [({"group": one.group}, one.rows_per_s) for one in views]
    yield "consumer_rows_per_second", "gauge", "Rows a consumer takes a second.", rates
    ages: list[Sample] = [({"group": one.group}, one.seen_s_ago) for one in views]
    yield "consumer_seen_seconds_ago", "gauge", "Since a consumer's last report.", ages
    failed: list[Sample] = [({"group": one.group}, float(one.failed)) for one in views]
    yield "consumer_failed", "gauge", "1 if a consumer's last report was an error.", failed
    stopped: list[Sample] = [({"group": one.group}, float(len(one.stopped))) for one in views]
    yield "consumer_stopped_topics", "gauge", "Topics that a consumer does not read.", stopped
    lost: list[Sample] = [({"group": one.group}, float(one.data_loss)) for one in views]
    yield "consumer_data_loss", "gauge", "1 if a consumer will miss messages.", lost


async def _traffic(state: HttpState) -> list[Family]:
    taken: dict[str, list[Sample]] = {"messages": [], "bytes": []}
    given: dict[str, list[Sample]] = {"messages": [], "bytes": []}
    listeners: list[Sample] = []
    held: list[Sample] = []
    stored: list[Sample] = []
    for number, topic in enumerate(state.bus.topics(system=True), 1):
        listeners.append(({"topic": topic.name}, len(topic.subscribers)))
        # Some may have been deleted since.
        with contextlib.suppress(PolybusError):
            size = state.bus.log.describe(topic.name).get("history-bytes", 0)
            held.append(({"topic": topic.name}, float(size)))
            whole = stored_bytes(state.bus, topic.name)
            stored.append(({"topic": topic.name}, float(whole)))
        delivered = state.delivered(topic)
        for by_protocol, samples in ((topic.taken, taken), (delivered, given)):
            for protocol, traffic in by_protocol.items():
                labels = {"protocol": protocol, "topic": topic.name}
                samples["messages"].append((labels, traffic.messages))
                samples["bytes"].append((labels, traffic.value_bytes))
        if number % SLICE == 0:
            await asyncio.sleep(0)
    return [
        ("messages_in_total", "counter", "Messages published.", taken["messages"]),
        ("bytes_in_total", "counter", "Bytes of values published.", taken["bytes"]),
        ("messages_out_total", "counter", "Messages delivered.", given["messages"]),
        ("bytes_out_total", "counter", "Bytes of values delivered.", given["bytes"]),
        ("subscriptions", "gauge", "Live subscriptions.", listeners),
        ("topic_history_bytes", "gauge", "Size of a topic's history on disk.", held),
        ("topic_stored_bytes", "gauge", "Size of a topic, estimated before history.", stored),
    ]
