"""/healthz, /readyz, and /metrics in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated

from starlette.responses import PlainTextResponse, Response

from polybus import names
from polybus.edges.http.calls import Call, denied
from polybus.edges.http.logins import is_trusted
from polybus.edges.http.state import HttpState

METRICS = "text/plain; version=0.0.4; charset=utf-8"
PlainText = Annotated[Response, str]
Labels = dict[str, str]
Sample = tuple[Labels, float]
DAMAGED_SHOWN_MAX = 100
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


async def healthz(call: Call) -> PlainText:
    """Liveness: the log and state.db take writes. Further lines name unusable certificates."""
    error = call.state.storage_error
    if error is not None:
        # Its text names files.
        text = f": {error.text}" if is_trusted(call.state, call.request) else ""
        return PlainTextResponse(f"{error.code}{text}\n", 503)
    return _ok(call)


async def readyz(call: Call) -> PlainText:
    """Readiness: it accepts connections. Further lines: damaged topics, unusable certificates."""
    if call.state.stopping:
        return PlainTextResponse("stopping\n", 503)
    if call.state.storage_error is not None:
        return await healthz(call)
    damaged = list(call.state.bus.log.frozen.values())[:DAMAGED_SHOWN_MAX]
    return _ok(call, *(f"{one.code}: {one.text}" for one in damaged))


def _ok(call: Call, *notes: str) -> Response:
    """What is not as it should be is named to those who know the bus, not to strangers."""
    notes = (*call.state.certificates.failures.values(), *notes)
    if not is_trusted(call.state, call.request):
        notes = ()
    return PlainTextResponse("\n".join(["ok", *notes, ""]))


async def metrics(call: Call) -> PlainText:
    """Metrics for Prometheus, text format 0.0.4; for the default account and administrators."""
    access = call.access
    is_limited = access.token is not None and bool(access.token.topics or access.token.rights)
    if not call.is_admin and (access.account != names.ACCOUNT or is_limited):
        # They name the topics of all accounts.
        raise denied("only the default account and administrators see the metrics")
    return Response(render(call.state), headers={"content-type": METRICS})


def render(state: HttpState) -> bytes:
    """All metrics of the bus."""
    lines: list[str] = []
    for name, kind, text, samples in _families(state):
        lines += [f"# HELP polybus_{name} {text}", f"# TYPE polybus_{name} {kind}"]
        lines += [f"polybus_{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6f}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _families(state: HttpState) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    yield from _traffic(state)
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
    yield "tls_reload_failures", "gauge", "Changed certificates that cannot be used.", [({}, bad)]
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
    yield "consumer_lag", "gauge", "Messages a consumer has still to read.", lags
    rates: list[Sample] = [({"group": one.group}, one.rows_per_s) for one in views]
    yield "consumer_rows_per_second", "gauge", "Rows a consumer takes a second.", rates
    ages: list[Sample] = [({"group": one.group}, one.seen_s_ago) for one in views]
    yield "consumer_seen_seconds_ago", "gauge", "Since a consumer's last report.", ages
    failed: list[Sample] = [({"group": one.group}, float(one.failed)) for one in views]
    yield "consumer_failed", "gauge", "1 if a consumer's last report was an error.", failed
    lost: list[Sample] = [({"group": one.group}, float(one.data_loss)) for one in views]
    yield "consumer_data_loss", "gauge", "1 if a consumer will miss messages.", lost


def _traffic(state: HttpState) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    taken: dict[str, list[Sample]] = {"messages": [], "bytes": []}
    given: dict[str, list[Sample]] = {"messages": [], "bytes": []}
    listeners: list[Sample] = []
    for topic in state.bus.topics(system=True):
        listeners.append(({"topic": topic.name}, len(topic.subscribers)))
        delivered = state.delivered(topic)
        for by_protocol, samples in ((topic.taken, taken), (delivered, given)):
            for protocol, traffic in by_protocol.items():
                labels = {"protocol": protocol, "topic": topic.name}
                samples["messages"].append((labels, traffic.messages))
                samples["bytes"].append((labels, traffic.value_bytes))
    yield "messages_in_total", "counter", "Messages published.", taken["messages"]
    yield "bytes_in_total", "counter", "Bytes of values published.", taken["bytes"]
    yield "messages_out_total", "counter", "Messages delivered.", given["messages"]
    yield "bytes_out_total", "counter", "Bytes of values delivered.", given["bytes"]
    yield "subscriptions", "gauge", "Live subscriptions.", listeners
