"""`polybus topics consumers` and `forget`: who reads the topics from outside, and how far."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from polybus.cli import admin
from polybus.cli.options import data_options, existing_data, json_option, load_config
from polybus.cli.output import echo_json, echo_table, shown
from polybus.config import Config
from polybus.errors import UsageError

if TYPE_CHECKING:
    from polybus.log.interface import Log
    from polybus.services.consumers.book import TopicConsumer
    from polybus.services.consumers.consumers import Consumer

COLUMNS = ("group", "topic", "position", "lag", "rows/s", "batch-ms", "seen", "state")


@click.command(epilog="Example: polybus topics consumers --json")
@data_options
@json_option
def consumers(data: str | None, config_path: str | None, as_json: bool) -> None:
    """List who reads the topics from outside: position, lag, rows a second, last error.

    Spark queries report themselves; others do with PUT /v1/consumers/GROUP.
    """
    config = load_config(data, config_path)
    folder = existing_data(config)
    run = admin.running(folder)
    found = _offline(config, folder) if run is None else admin.ask(run, "consumers.list")
    if as_json:
        echo_json(found)
        return
    echo_table(COLUMNS, [row for consumer in found for row in _rows(consumer)])
    for consumer in found:
        if consumer["last-error"]:
            click.echo(f"{consumer['group']}: last error: {shown(consumer['last-error'].encode())}")


@click.command(epilog="Example: polybus topics forget my-query")
@click.argument("group")
@data_options
@json_option
def forget(group: str, data: str | None, config_path: str | None, as_json: bool) -> None:
    """Forget a consumer that will not come back; it holds no history any more."""
    folder = existing_data(load_config(data, config_path))
    run = admin.running(folder)
    if run is None:
        _forget_offline(folder, group)
    else:
        admin.ask(run, "consumers.forget", name=group)
    echo_json({"group": group}) if as_json else click.echo(f"forgot {group}")


def _rows(consumer: dict[str, Any]) -> list[list[object]]:
    state = "failed" if consumer["failed"] else "ok"
    ago = _ago(consumer["seen-s-ago"])
    figures = (round(consumer["rows-per-s"], 1), round(consumer["batch-ms"], 1), ago)
    rows: list[list[object]] = []
    for topic in consumer["topics"]:
        loss = topic["data-loss"]
        lag = "-" if topic["lag"] is None else topic["lag"]
        position = f"{topic['epoch']}:{topic['offset']}"
        said = f"{state}, data loss: {_loss(topic)}" if loss else state
        rows.append([consumer["group"], topic["topic"], position, lag, *figures, said])
    return rows or [[consumer["group"], "-", "-", "-", *figures, state]]


def _loss(topic: dict[str, Any]) -> str:
    reasons = {
        "epoch": "the topic was created anew",
        "expired": f"{topic['lost']} messages expired before they were read",
        "ahead": "the topic ends before its position",
        "topic": "there is no such topic any more",
        "damaged": "the topic is damaged",
    }
    return reasons.get(topic["data-loss"], str(topic["data-loss"]))


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"


def kept_consumers(data: Path) -> list[Consumer]:
    """The consumers of a stopped bus, by group."""
    from polybus.services.consumers.book import decode_rows
    from polybus.services.state import consumers_in

    return sorted(decode_rows(consumers_in(data / "state.db")), key=lambda one: one.group)


def of_topic(known: list[Consumer], topic: str, log: Log) -> list[TopicConsumer]:
    """How far each is that reads the topic."""
    from polybus.services.consumers.book import TopicConsumer
    from polybus.services.consumers.consumers import lag_of

    lags = [
        (one.group, lag_of(topic, one.positions[topic], log.bounds))
        for one in known
        if topic in one.positions
    ]
    return [
        TopicConsumer(group=group, offset=one.offset, lag=one.lag, data_loss=one.data_loss)
        for group, one in lags
    ]


def _offline(config: Config, data: Path) -> list[dict[str, Any]]:
    # Heavy: the files are Arrow and Parquet.
    from polybus.edges.node import open_log
    from polybus.services.consumers.book import view_of
    from polybus.services.consumers.consumers import lag_of

    found = kept_consumers(data)
    log = open_log(config)
    try:
        views = [
            view_of(
                one,
                [lag_of(topic, at, log.bounds) for topic, at in sorted(one.positions.items())],
                time.time_ns() // 1000,
            )
            for one in found
        ]
    finally:
        log.close()
    return [msgspec.to_builtins(view) for view in views]


def _forget_offline(data: Path, group: str) -> None:
    from polybus.log.layout import DataLock
    from polybus.services.state import forget_consumer

    lock = DataLock(data)
    try:
        if not forget_consumer(data / "state.db", group):
            raise UsageError("consumer.unknown", f"there is no consumer {group[:80]!r}")
    finally:
        lock.release()
