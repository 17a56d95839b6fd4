"""/v1/graph: how messages flow: producers, topics, subscriptions, sessions, consumers, tables.

Rates of topics and the numbers of their subscribers are exact; those of producers are estimated
(senders).
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from polybus import names
from polybus.edges.http.calls import Call, Viewer
from polybus.lake.folders import name_in, table_folders
from polybus.services.events import iso_time
from polybus.services.pipeline_watch import FlowReport
from polybus.wire.msgstream import PROTOCOL as MSGSTREAM

TOPICS_MAX = 200
PRODUCERS_MAX = 100
SESSIONS_MAX = 100
STANDARD = "standard"
"""A pipeline whose flows are one consumer."""


class GraphNode(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A producer, topic, subscription, session, flow or table."""

    id: str
    kind: str
    label: str
    protocol: str = ""
    count: int = 0
    lag: int | None = None


class GraphEdge(msgspec.Struct, rename="kebab", omit_defaults=True, kw_only=True):
    """Messages from one node to another; `sampled`: the rate is estimated."""

    from_: str = msgspec.field(name="from")
    to: str
    messages_per_s: float
    sampled: bool = False


class Graph(msgspec.Struct):
    """How messages flow; `truncated`: some topics are missing."""

    time: str
    nodes: list[GraphNode]
    edges: list[GraphEdge]
    truncated: bool


class _Drawing:
    """Collects nodes and edges, each once."""

    def __init__(self) -> None:
        self.nodes: dict[str, GraphNode] = {}
        self.edges: list[GraphEdge] = []
        self.counts: Counter[str] = Counter()
        """Nodes by kind."""

    def node(self, kind: str, name: str, **about: Any) -> str:
        key = f"{kind}:{name}"
        if key not in self.nodes:
            self.nodes[key] = GraphNode(id=key, kind=kind, **{"label": name} | about)
            self.counts[kind] += 1
        return key

    def edge(self, source: str, target: str, rate: float, *, sampled: bool = False) -> None:
        rate = round(rate, 3)
        self.edges.append(GraphEdge(from_=source, to=target, messages_per_s=rate, sampled=sampled))


async def graph(call: Call) -> Graph:
    """How messages flow now."""
    return await draw(call)


async def live_graph(viewer: Viewer, _about: Mapping[str, str]) -> Graph:
    return await draw(viewer)


async def draw(viewer: Viewer) -> Graph:
    """The graph, limited to what the viewer may see."""
    state, drawing = viewer.state, _Drawing()
    tables: list[str] = []
    flows: list[FlowReport] = []
    if viewer.sees_bus:
        found = await asyncio.to_thread(table_folders, state.context.data)
        tables = [name_in(folder) for folder in found]
        flows = (await state.pipelines.look()).flows
    topics, truncated = _topics(viewer)
    for topic in topics:
        drawing.node("topic", viewer.access.shown(topic))
    _draw_producers(viewer, drawing, set(topics))
    sessions = _sessions_of(viewer)
    for topic in topics:
        rate_in = _rate_in(viewer, topic)
        source = f"topic:{viewer.access.shown(topic)}"
        if viewer.sees_bus:
            counts = Counter(one.protocol for one in state.bus.topic(topic).subscribers)
            counts.pop(MSGSTREAM, None)
            for protocol, count in counts.items():
                name = f"{protocol}:{viewer.access.shown(topic)}"
                to = drawing.node("subscription", name, label=protocol, count=count)
                drawing.edge(source, to, rate_in * count)
        _draw_sessions(drawing, source, sessions.get(topic, []), rate_in)
    _draw_consumers(viewer, drawing)
    _draw_flows(drawing, flows, tables)
    now = iso_time(state.context.clock_us())
    return Graph(now, list(drawing.nodes.values()), drawing.edges, truncated)


def _rate_in(viewer: Viewer, topic: str) -> float:
    rate = viewer.state.figures.of_topic(topic)
    return 0.0 if rate is None else rate.rates[0]


def _topics(viewer: Viewer) -> tuple[list[str], bool]:
    """The topics to draw: those with traffic first, then those with readers, then others."""
    state = viewer.state
    busy = [one.topic.name for one in state.figures.busy(TOPICS_MAX)]
    followed = [one.name for one in state.bus.every_topic() if one.subscribers]
    found: dict[str, None] = {}
    for name in (*busy, *followed, *state.bus.topic_names()):
        if not names.is_reserved(name) and viewer.access.may_read(name):
            found[name] = None
            if len(found) > TOPICS_MAX:
                break
    return list(found)[:TOPICS_MAX], len(found) > TOPICS_MAX


def _draw_producers(viewer: Viewer, drawing: _Drawing, topics: set[str]) -> None:
    senders = viewer.state.senders.look()
    for (topic, protocol, host), rate in sorted(senders.items(), key=lambda one: -one[1]):
        if topic not in topics:
            continue
        name = f"{protocol}:{host}"
        is_full = drawing.counts["producer"] >= PRODUCERS_MAX
        if is_full and f"producer:{name}" not in drawing.nodes:
            continue
        producer = drawing.node("producer", name, label=host, protocol=protocol)
        drawing.edge(producer, f"topic:{viewer.access.shown(topic)}", rate, sampled=True)


def _sessions_of(viewer: Viewer) -> dict[str, list[str]]:
    """The sessions that the viewer may see, by topic."""
    found: dict[str, list[str]] = {}
    for session in viewer.state.inboxes.sessions():
        if viewer.is_admin or session.account == viewer.access.account:
            for topic in session.follows:
                found.setdefault(topic, []).append(session.digest.hex())
    return found


def _draw_sessions(drawing: _Drawing, source: str, sessions: list[str], rate: float) -> None:
    others = 0
    for one in sessions:
        if drawing.counts["session"] < SESSIONS_MAX or f"session:{one}" in drawing.nodes:
            to = drawing.node("session", one, label=f"session {one[:8]}")
            drawing.edge(source, to, rate)
        else:
            others += 1
    if others:
        key = drawing.node("session", "*", label="more sessions")
        drawing.nodes[key].count = max(others, drawing.nodes[key].count)
        drawing.edge(source, key, rate * others)


def _draw_consumers(viewer: Viewer, drawing: _Drawing) -> None:
    for view in viewer.state.consumers.views():
        group = viewer.access.mine(view.group)
        if group is None:
            continue
        to = drawing.node("flow", group, lag=view.lag)
        # It reports one rate: divide it in proportion to the traffic of its topics.
        rates = [_rate_in(viewer, at.topic) for at in view.topics]
        arriving = sum(rates)
        for at, rate_in in zip(view.topics, rates, strict=True):
            source = f"topic:{viewer.access.shown(at.topic)}"
            if source in drawing.nodes:
                part = rate_in / arriving if arriving else 1 / len(rates)
                drawing.edge(source, to, view.rows_per_s * part, sampled=len(rates) > 1)


def _draw_flows(drawing: _Drawing, flows: list[FlowReport], tables: list[str]) -> None:
    """Flows of a pipeline, what they read besides their positions, and what they write."""
    drawn = {(one.from_, one.to) for one in drawing.edges}
    for flow in flows:
        is_standard = flow.pipeline == STANDARD
        node = drawing.node("flow", STANDARD if is_standard else f"{flow.pipeline}.{flow.flow}")
        edges = [(node, end) for one in flow.outputs for end in _ends(drawing, one, tables)]
        edges += [(end, node) for one in flow.inputs for end in _ends(drawing, one, tables)]
        for edge in edges:
            # A table that a flow of the same node writes is not drawn as its input, too.
            if edge not in drawn and edge[::-1] not in drawn:
                drawn.add(edge)
                # The rate that it reads; it does not report rates by output.
                drawing.edge(*edge, flow.rows_per_s, sampled=True)


def _ends(drawing: _Drawing, end: str, tables: list[str]) -> list[str]:
    """The nodes that a flow reads or writes; a table is drawn when it exists."""
    kind, _, name = end.partition(":")
    if kind != "table":
        return [drawing.node(kind, name)]
    prefix = name.removesuffix("*")
    is_meant = prefix.__eq__ if prefix == name else lambda one: one.startswith(prefix)
    return [drawing.node(kind, one) for one in tables if is_meant(one)]
