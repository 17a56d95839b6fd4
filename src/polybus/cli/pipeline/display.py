"""What `polybus pipeline run` shows: a live table in a terminal, else a line per change."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from polybus.cli.common.output import shown

COLUMNS = ("flow", "state", "rows", "rows/s", "lag", "batch ms", "error")
EXPECTATION_COLUMNS = ("flow", "topic", "expectation", "consequence", "passed", "failed")
_COLOURS = {"failed": "red", "waiting": "yellow", "running": "green", "done": "green"}
_ERROR_CHARS_MAX = 200


def flow_rows(flows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[object]]]:
    """The headings and rows of a table of flows."""
    rows: list[list[object]] = [
        [
            f"{flow['pipeline']}.{flow['flow']}",
            flow["state"],
            flow["rows"],
            round(flow["rows_per_s"], 1),
            flow["lag"],
            flow["batch_ms"],
            (flow["error"] or "")[:_ERROR_CHARS_MAX],
        ]
        for flow in flows
    ]
    return COLUMNS, rows


def expectation_rows(
    flows: list[dict[str, Any]],
) -> tuple[tuple[str, ...], list[list[object]]]:
    """The headings and rows of a table of expectations."""
    rows: list[list[object]] = [
        [
            f"{flow['pipeline']}.{flow['flow']}",
            one["topic"] or None,
            one["name"],
            one["consequence"],
            one["passed"],
            one["failed"],
        ]
        for flow in flows
        for one in flow.get("expectations", [])
    ]
    return EXPECTATION_COLUMNS, rows


def is_failing(flow: Mapping[str, Any]) -> bool:
    """Whether a flow has failed, or is retried after an error: it is not idle."""
    return flow.get("state") == "failed" or bool(flow.get("error"))


class RunDisplay:
    """Shows the events of a run."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._states: dict[str, tuple[str, str | None]] = {}

    def show(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("done", "stopped"):
            self.close()
            self._console.print(flow_table(event["flows"]))
        elif kind == "progress":
            self._progress(event["flows"])
        elif kind == "problem":
            self._console.print(f"[red]{event['code']}[/]: {escape(event['text'])}")
        elif kind == "ready":
            flows = event["flows"]
            self._console.print(f"{flows} flows started after {event['seconds']} s")
        elif "flow" not in event:  # the progress shows the state of each flow
            self._console.print(escape(event["text"]))

    def _progress(self, flows: list[dict[str, Any]]) -> None:
        if not self._console.is_terminal:
            self._changes(flows)
            return
        self._live.start()
        self._live.update(flow_table(flows), refresh=True)

    def _changes(self, flows: list[dict[str, Any]]) -> None:
        for flow in flows:
            name = f"{flow['pipeline']}.{flow['flow']}"
            now = (flow["state"], flow["error"])
            if self._states.get(name) != now:
                self._states[name] = now
                cause = f": {flow['error']}" if flow["error"] else ""
                self._console.print(escape(f"{name} {flow['state']}{cause}"), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def flow_table(flows: list[dict[str, Any]]) -> Table:
    columns, rows = flow_rows(flows)
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in ("rows", "rows/s", "lag", "batch ms")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        cells = ["-" if cell is None else escape(shown(str(cell))) for cell in row]
        colour = _COLOURS.get(str(row[1]))
        if colour:
            cells[1] = f"[{colour}]{cells[1]}[/]"
        table.add_row(*cells)
    return table
