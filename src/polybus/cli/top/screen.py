"""The screen of `polybus top`: renders figures and the user's selection."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.text import Text

from polybus.cli.common.output import count, shown, size, span, table_lines

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "in/s": lambda topic: -topic["in-per-s"],
    "out/s": lambda topic: -topic["out-per-s"],
    "bytes/s": lambda topic: -topic["bytes-in-per-s"],
    "lag": lambda topic: -(topic["lag"] or 0),
    "name": lambda topic: topic["name"],
}
COLUMNS = ("", "topic", "messages", "in/s", "out/s", "bytes/s", "readers", "lag")
CONSUMERS_SHOWN = 3
ALERTS_SHOWN = 2
EVENTS_SHOWN = 3
WIDTH = 80
HELP = "↑↓ choose · Enter open · Esc close · s order · q end"


@dataclass
class TopFigures:
    """The last figures of the bus, as in its API."""

    topics: list[dict[str, Any]] = field(default_factory=list)
    consumers: list[dict[str, Any]] = field(default_factory=list)
    sample: dict[str, Any] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class TopView:
    """The user's selection, and since when no bus has answered."""

    sort: str = "in/s"
    chosen: int = 0
    opened: str = ""
    is_over: bool = False
    lost_at: str = ""

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
    """The screen, in at most `lines_max` lines."""
    head = _head(figures, view)
    room = max(lines_max - len(head) - 1, 1)
    body = _open_topic(figures, view) if view.opened else _topics(figures, view, room)
    help_line = Text(f"{HELP} · order: {view.sort}", style="dim")
    return [*head, *body[:room], help_line][:lines_max]


def _head(figures: TopFigures, view: TopView) -> list[Text]:
    series: dict[str, float] = {
        name: value or 0 for name, value in figures.sample.get("series", {}).items()
    }
    text = f"no answer from the bus since {view.lost_at}, trying again"
    lost = [Text(text, style="bold red")] if view.lost_at else []
    problems = figures.sample.get("alerts", [])
    health = _health(figures, series)
    wrong = [f"! {shown(one['code'])}: {shown(one['text'])}" for one in problems[:ALERTS_SHOWN]]
    wrong += [f"! {_alert_text(one)}" for one in reversed(figures.alerts)]
    alerts = [Text(one, style="red") for one in wrong[:ALERTS_SHOWN]]
    return [*lost, _traffic(series), _protocols(series), _state(series), health, *alerts]


def _traffic(series: dict[str, float]) -> Text:
    def rate(way: str) -> str:
        messages, value_bytes = series.get(f"{way}.messages", 0), series.get(f"{way}.bytes", 0)
        return f"{way} {count(messages)}/s, {size(value_bytes)}/s"

    fsync = f"fsync {series.get('fsync-ms', 0):.1f} ms"
    return Text(f"{rate('in')} · {rate('out')} · {fsync}", style="bold")


def _protocols(series: dict[str, float]) -> Text:
    """In and out by protocol, the busiest first, as far as they fit on a line."""
    rates: dict[str, list[float]] = {}
    for index, prefix in enumerate(("in.messages.", "out.messages.")):
        for name, value in series.items():
            if name.startswith(prefix):
                rates.setdefault(name.removeprefix(prefix), [0, 0])[index] = value
    text = "in and out by protocol: "
    for name, (into, out) in sorted(rates.items(), key=lambda one: (-sum(one[1]), one[0])):
        part = f"{name} {count(into)}/{count(out)}"
        if len(text) + len(part) > WIDTH:
            break
        text += f"{part} · "
    return Text(text.removesuffix(" · ") if rates else f"{text}none yet")


def _state(series: dict[str, float]) -> Text:
    numbers = {name: series.get(f"{name}s", 0) for name in ("connection", "session")}
    parts = [f"{count(many)} {name}{'' if many == 1 else 's'}" for name, many in numbers.items()]
    parts.append(f"outboxes {size(series.get('outbox-bytes', 0))}")
    parts.append(f"memory {size(series.get('memory-bytes', 0))}")
    parts.append(f"cpu {100 * series.get('cpu', 0):.0f} %")
    return Text(" · ".join(parts))


def _health(figures: TopFigures, series: dict[str, float]) -> Text:
    problems = len(figures.sample.get("alerts", []))
    most = max(figures.sample.get("groups", {}).values(), default=0)
    oldest_s = max(figures.sample.get("group-lag-s", {}).values(), default=0)
    lag = f"lag {count(most)} messages, {_age(oldest_s)}"
    health = f"problems: {problems}" if problems else "healthy"
    free = f"disk free {size(series.get('disk-free-bytes', 0))}"
    return Text(f"{health} · {lag} · {free}", style="red" if problems else "")


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else span(seconds)


def _alert_text(message: dict[str, Any]) -> str:
    value = message.get("value")
    about = value if isinstance(value, dict) else {}
    text = about.get("text") or message.get("text") or json.dumps(value)
    return f"{_time(message['timestamp'])} {shown(str(text))}"


def _events(figures: TopFigures) -> list[Text]:
    """The last events, the newest first; a message has several."""
    found: list[dict[str, Any]] = []
    for message in figures.events:
        value = message.get("value")
        events = value.get("events") if isinstance(value, dict) else None
        found += [one for one in events or [] if isinstance(one, dict)]
    lines = []
    for one in reversed(found[-EVENTS_SHOWN:]):
        about = {name: value for name, value in one.items() if name not in ("kind", "time")}
        text = f"{_time(one.get('time'))} {one.get('kind')} {json.dumps(about)}"
        lines.append(Text(shown(text), style="dim"))
    return lines


def _time(text: object) -> str:
    """The local time of day of a time as the API has it."""
    try:
        return datetime.fromisoformat(str(text)).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return "--:--:--"


def _topics(figures: TopFigures, view: TopView, lines_max: int) -> list[Text]:
    topics = sorted_topics(figures, view)
    below = [*_consumers(figures), *_events(figures)]
    # Excluding the heading, and the line that counts the others.
    room = max(lines_max - len(below) - 2, 1)
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
    return [Text(heading, style="dim"), *shown_lines, *more, *below]


def _consumers(figures: TopFigures) -> list[Text]:
    worst = sorted(figures.consumers, key=lambda one: (not one["failed"], -one["lag"]))
    lines = []
    for one in worst[:CONSUMERS_SHOWN]:
        state = "failed" if one["failed"] else f"{count(one['rows-per-s'])} rows/s"
        behind = "" if one.get("lag-s") is None else f" ({_age(one['lag-s'])})"
        text = f"consumer {shown(one['group'])}: lag {count(one['lag'])}{behind}, {state}"
        lines.append(Text(text, style="red" if one["failed"] else ""))
    return lines


def _open_topic(figures: TopFigures, view: TopView) -> list[Text]:
    lines = [Text(shown(view.opened), style="bold")]
    for message in reversed(figures.messages):
        value = message.get("text", message.get("base64"))
        text = json.dumps(message["value"]) if "value" in message else str(value)
        lines.append(Text(f"{message['offset']:>10}  {message['protocol']:<16} {shown(text)}"))
    return lines if figures.messages else [*lines, Text("no messages")]
