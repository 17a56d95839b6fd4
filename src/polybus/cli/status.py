"""`polybus status`: the state of the bus of a data folder, in a few lines."""

import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from polybus import __version__
from polybus.cli.common import admin, exits
from polybus.cli.common.options import existing_data, json_option, settings_options
from polybus.cli.common.output import count, echo_json, shown, size, span
from polybus.client.http.blocking import request
from polybus.config import Config
from polybus.errors import PolybusError

ANSWER_TIMEOUT_S = 10.0
LOW_DISK_SHARE = 0.05


@click.command(epilog="Example: polybus status --data /var/lib/polybus")
@settings_options
@json_option
def status(config: Config, as_json: bool) -> None:
    """Show the state of the bus in a few lines: health, traffic, consumers, disk.

    Exit 0 if the bus runs without problems, else 1.
    """
    data = existing_data(config)
    run = admin.running(data)
    found = _disk(data) | {"data": str(data), "running": run is not None, "problems": []}
    if run is None:
        found["problems"].append("no bus runs on this folder; polybus serve starts one")
    else:
        found |= _figures(run, data)
    if found["disk-free"] < LOW_DISK_SHARE * found["disk-total"]:
        found["problems"].append("the disk is almost full")
    if as_json:
        echo_json(found)
    else:
        for line in _lines(found):
            click.echo(line)
    exits.end(good=not found["problems"])


def _figures(run: admin.RunningBus, data: Path) -> dict[str, Any]:
    topics = admin.ask(run, "GET", "/v1/topics")["topics"]
    consumers = admin.ask(run, "GET", "/v1/consumers")["consumers"]
    lags = [topic["lag"] or 0 for one in consumers for topic in one["topics"]]
    problems = _health(run)
    problems += [f"consumer {one['group']} failed" for one in consumers if one["failed"]]
    problems += [f"consumer {one['group']} loses data" for one in consumers if one["data-loss"]]
    return {
        "pid": run.pid,
        "version": __version__,
        "addresses": run.addresses,
        "uptime-s": round(time.time() - (data / "run.json").stat().st_mtime, 1),
        "topics": len(topics),
        "messages-held": sum(one["stop"] - one["start"] for one in topics),
        "messages-in": sum(one["messages-in"] for one in topics),
        "messages-out": sum(one["messages-out"] for one in topics),
        "subscribers": sum(one["subscribers"] for one in topics),
        "consumers": len(consumers),
        "lag": max(lags, default=0),
        "problems": problems,
    }


def _health(run: admin.RunningBus) -> list[str]:
    """The problems that the bus itself reports."""
    url = f"http+unix://{quote(run.admin, safe='')}"
    try:
        answer = request(url, "GET", "/readyz", timeout_s=ANSWER_TIMEOUT_S).decode()
    except PolybusError as error:
        return [str(error)]
    return [shown(line) for line in answer.splitlines()[1:]]


def _disk(data: Path) -> dict[str, Any]:
    used = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    disk = shutil.disk_usage(data)
    return {"disk-used": used, "disk-free": disk.free, "disk-total": disk.total}


def _plural(number: int, what: str) -> str:
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def _lines(found: dict[str, Any]) -> list[str]:
    disk = f"{found['data']}, {size(found['disk-used'])} used, {size(found['disk-free'])} free"
    lines = [f"data: {disk}"]
    if found["running"]:
        lines = [
            f"bus: runs as process {found['pid']} for {span(found['uptime-s'])}, "
            f"version {found['version']}",
            f"addresses: {' '.join(found['addresses'])}",
            f"topics: {count(found['topics'])}, {count(found['messages-held'])} messages held",
            f"since the start: {count(found['messages-in'])} messages in, "
            f"{count(found['messages-out'])} out",
            f"readers: {_plural(found['subscribers'], 'subscription')}, "
            f"{_plural(found['consumers'], 'consumer')}, largest lag {count(found['lag'])}",
            *lines,
        ]
    problems = [f"problem: {text}" for text in found["problems"]]
    return [*lines, *(problems or ["health: ok"])]
