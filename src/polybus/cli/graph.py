"""`polybus graph`: how messages flow, as text or as a drawing."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from polybus.cli.common import admin
from polybus.cli.common.options import existing_data, json_option, settings_options
from polybus.cli.common.output import count, echo_json, say, shown
from polybus.config import Config
from polybus.errors import UsageError

DrawnNode = dict[str, Any]
DrawnEdge = dict[str, Any]
COLUMNS = {"producer": 0, "topic": 1, "subscription": 2, "session": 2, "flow": 2, "table": 3}
COLOURS = ("#4e79a7", "#59a14f", "#f28e2b", "#9c6ade")
WIDTH, HEIGHT, GAP, SPACE, MARGIN = 190, 28, 12, 110, 20
LABEL_CHARS_MAX = 26


@click.command(
    epilog="""\b
Examples:
  polybus graph
  polybus graph --svg flow.svg
"""
)
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw it in this file.")
@settings_options
@json_option
def graph(config: Config, svg: str | None, as_json: bool) -> None:
    """Draw how messages flow: senders, topics, readers, flows and tables, with rates.

    Rates are of the last seconds; ≈ marks an estimate. A bus must run on the data folder.
    """
    run = admin.running(existing_data(config))
    if run is None:
        text = f"no bus runs on {config.data}: start it with polybus serve"
        raise UsageError("client.unreachable", text)
    found = admin.ask(run, "GET", "/v1/graph")
    if as_json:
        echo_json(found)
    elif svg is not None:
        Path(svg).write_text(drawing(found["nodes"], found["edges"]))
        say(f"drew {svg}")
    else:
        for line in lines_of(found["nodes"], found["edges"]):
            click.echo(line)


def lines_of(nodes: Sequence[DrawnNode], edges: Sequence[DrawnEdge]) -> list[str]:
    """Each topic with its senders and readers; then the outputs of flows."""
    by_id = {node["id"]: node for node in nodes}
    lines: list[str] = []
    for node in nodes:
        arriving = [edge for edge in edges if edge["to"] == node["id"]]
        leaving = [edge for edge in edges if edge["from"] == node["id"]]
        if node["kind"] not in ("topic", "flow") or not (arriving or leaving):
            continue
        head = click.style(shown(_label(node)), bold=True)
        lines.append(f"{node['kind']} {head}")
        lines += [f"  ← {_side(by_id, edge, 'from')}" for edge in arriving]
        lines += [f"  → {_side(by_id, edge, 'to')}" for edge in leaving]
    return lines or ["nothing flows yet: publish a message, or subscribe"]


def _side(by_id: dict[str, DrawnNode], edge: DrawnEdge, end: str) -> str:
    node = by_id.get(edge[end], {"kind": "?", "label": edge[end]})
    return f"{node['kind']:<12} {shown(_label(node)):<30} {_rate(edge):>10}"


def _label(node: DrawnNode) -> str:
    label = str(node["label"])
    if node.get("protocol") and node["protocol"] != label:
        label = f"{label} ({node['protocol']})"
    label += f" ×{node['count']}" if node.get("count", 1) > 1 else ""
    return label + (f", lag {count(node['lag'])}" if node.get("lag") else "")


def _rate(edge: DrawnEdge) -> str:
    about = "≈ " if edge.get("sampled") else ""
    return f"{about}{count(edge.get('messages-per-s') or 0)}/s"


def drawing(nodes: Sequence[DrawnNode], edges: Sequence[DrawnEdge]) -> str:
    """An SVG with a column each for senders, topics, readers and tables."""
    columns: list[list[DrawnNode]] = [[], [], [], []]
    for node in nodes:
        columns[COLUMNS.get(node["kind"], 2)].append(node)
    places = {
        node["id"]: (MARGIN + index * (WIDTH + SPACE), MARGIN + row * (HEIGHT + GAP))
        for index, column in enumerate(columns)
        for row, node in enumerate(column)
    }
    width = 2 * MARGIN + 4 * WIDTH + 3 * SPACE
    height = 2 * MARGIN + max(1, *map(len, columns)) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="12"><title>How messages flow</title>'
    ]
    parts += [_curve(places, edge) for edge in edges if {edge["from"], edge["to"]} <= set(places)]
    for node in nodes:
        x, y = places[node["id"]]
        colour = COLOURS[COLUMNS.get(node["kind"], 2)]
        label = shown(_label(node))
        short = label if len(label) <= LABEL_CHARS_MAX else f"{label[: LABEL_CHARS_MAX - 1]}…"
        parts.append(
            f'<g><title>{escape(label)}</title><rect x="{x}" y="{y}" width="{WIDTH}" '
            f'height="{HEIGHT}" rx="6" fill="{colour}"/><text x="{x + 10}" y="{y + 18}" '
            f'fill="#fff">{escape(short)}</text></g>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _curve(places: dict[str, tuple[int, int]], edge: DrawnEdge) -> str:
    (x1, y1), (x2, y2) = places[edge["from"]], places[edge["to"]]
    x1, y1, y2 = x1 + WIDTH, y1 + HEIGHT // 2, y2 + HEIGHT // 2
    bend = max(SPACE // 2, abs(x2 - x1) // 2)
    line = f"M{x1},{y1} C{x1 + bend},{y1} {x2 - bend},{y2} {x2},{y2}"
    is_live = bool(edge.get("messages-per-s"))
    stroke = 'stroke="#555" stroke-width="2"' if is_live else 'stroke="#bbb" stroke-dasharray="4"'
    rate = (
        f'<text x="{(x1 + x2) // 2}" y="{(y1 + y2) // 2 - 4}" text-anchor="middle" fill="#333">'
        f"{_rate(edge)}</text>"
        if is_live
        else ""
    )
    return f'<path d="{line}" fill="none" {stroke}/>{rate}'
