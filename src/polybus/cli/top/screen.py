"""The picture of `polybus top`: lines made of figures and of what the user has chosen."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from polybus.cli.common.output import count, shown, size, table_lines

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "in/s": lambda topic: -topic["in-per-s"],
    "out/s": lambda topic: -topic["out-per-s"],
    "bytes/s": lambda topic: -topic["bytes-in-per-s"],
    "lag": lambda topic: -(topic["lag"] or 0),
    "name": lambda topic: topic["name"],
}
COLUMNS = ("", "topic", "messages", "in/s", "out/s", "bytes/s", "readers", "lag")
CONSUMERS_SHOWN = 5
HELP = "↑↓ choose · Enter open · Esc close · s order · q end"


@dataclass
class TopFigures:
    """What the bus said last, as its API has it."""

    topics: list[dict[str, Any]] = field(default_factory=list)
    consumers: list[dict[str, Any]] = field(default_factory=list)
    series: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class TopView:
    """What the user has chosen."""

    sort: str = "in/s"
    chosen: int = 0
    opened: str = ""
    is_over: bool = False

    def press(self, key: str, figures: TopFigures) -> None:
        """Take a key: up, down, enter, escape, or a letter."""
        last = max(0, len(figures.topics) - 1)
        if key == "q":
            self.is_over = True
        elif key == "s":
            order = list(SORTS)
            self.sort = order[(order.index(self.sort) + 1) % len(order)]
        elif key in ("up", "down"):
            self.chosen = min(max(self.chosen + (1 if key == "down" else -1), 0), last)
        elif key == "enter" and figures.topics:
            self.opened = sorted_topics(figures, self)[min(self.chosen, last)]["name"]
        elif key == "escape":
            self.opened = ""


def sorted_topics(figures: TopFigures, view: TopView) -> list[dict[str, Any]]:
    return sorted(figures.topics, key=lambda topic: (SORTS[view.sort](topic), topic["name"]))


def frame(figures: TopFigures, view: TopView, lines_max: int) -> list[Text]:
    """The picture, in at most `lines_max` lines."""
    head = [_traffic(figures.series), _state(figures.series)]
    body = _open_topic(figures, view) if view.opened else _topics(figures, view, lines_max)
    room = max(lines_max - len(head) - 2, 1)
    return [*head, *body[:room], Text(f"{HELP} · order: {view.sort}", style="dim")][:lines_max]


def _traffic(series: dict[str, float]) -> Text:
    def rate(way: str) -> str:
        messages, value_bytes = series.get(f"{way}.messages", 0), series.get(f"{way}.bytes", 0)
        return f"{way} {count(messages)}/s, {size(value_bytes)}/s"

    fsync = f"fsync {series.get('fsync-ms', 0):.1f} ms"
    return Text(f"{rate('in')} · {rate('out')} · {fsync}", style="bold")


def _state(series: dict[str, float]) -> Text:
    parts = [f"{count(series.get(name, 0))} {name}" for name in ("connections", "sessions")]
    parts.append(f"outboxes {size(series.get('outbox-bytes', 0))}")
    parts.append(f"memory {size(series.get('memory-bytes', 0))}")
    parts.append(f"cpu {100 * series.get('cpu', 0):.0f} %")
    parts.append(f"disk free {size(series.get('disk-free-bytes', 0))}")
    return Text(" · ".join(parts))


def _topics(figures: TopFigures, view: TopView, lines_max: int) -> list[Text]:
    topics = sorted_topics(figures, view)
    consumers = _consumers(figures)
    room = max(lines_max - len(consumers) - 6, 1)
    view.chosen = min(view.chosen, max(0, len(topics) - 1))
    first = max(0, view.chosen - room + 1)
    rows = [
        [
            "▶" if first + number == view.chosen else "",
            topic["name"],
            count(topic["stop"] - topic["start"]),
            *(count(topic["in-per-s"]), count(topic["out-per-s"])),
            size(topic["bytes-in-per-s"]),
            topic["subscribers"],
            topic["lag"],
        ]
        for number, topic in enumerate(topics[first : first + room])
    ]
    heading, *lines = table_lines(COLUMNS, rows)
    shown_lines = [
        Text(line, style="reverse" if first + number == view.chosen else "")
        for number, line in enumerate(lines)
    ]
    left = len(topics) - first - len(rows)
    more = [Text(f"… and {left} more topics", style="dim")] if left else []
    return [Text(heading, style="dim"), *shown_lines, *more, *consumers]


def _consumers(figures: TopFigures) -> list[Text]:
    worst = sorted(figures.consumers, key=lambda one: (not one["failed"], -one["lag"]))
    lines = []
    for one in worst[:CONSUMERS_SHOWN]:
        state = "failed" if one["failed"] else f"{count(one['rows-per-s'])} rows/s"
        text = f"consumer {shown(one['group'])}: lag {count(one['lag'])}, {state}"
        lines.append(Text(text, style="red" if one["failed"] else ""))
    return lines


def _open_topic(figures: TopFigures, view: TopView) -> list[Text]:
    lines = [Text(shown(view.opened), style="bold")]
    for message in reversed(figures.messages):
        value = message.get("text", message.get("base64"))
        text = json.dumps(message["value"]) if "value" in message else str(value)
        lines.append(Text(f"{message['offset']:>10}  {message['protocol']:<16} {shown(text)}"))
    return lines if figures.messages else [*lines, Text("no messages")]
