"""`polybus topics`: topics and consumers of a running bus, or in the files of a stopped one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
import msgspec

from polybus import names
from polybus.cli.common import admin, exits
from polybus.cli.common.lookup import suggested
from polybus.cli.common.options import existing_data, json_option, settings_options
from polybus.cli.common.output import (
    Quantity,
    count,
    echo,
    echo_json,
    echo_table,
    shown,
    size,
    span,
)
from polybus.cli.topics.infer import infer
from polybus.config import Config
from polybus.errors import StorageError, UsageError
from polybus.log.interface import Log, TopicSettings

if TYPE_CHECKING:
    from polybus.services.consumers import Consumers

TOPIC_COLUMNS = (
    *("topic", "messages", "size", "in/s", "age", "last message", "subscribers", "lag"),
)
CONSUMER_COLUMNS = ("group", "topic", "position", "lag", "rows/s", "batch-ms", "seen", "state")
DATA_LOSS = {
    "epoch": "the topic was recreated",
    "expired": "{lost} messages expired before they were read",
    "ahead": "the topic ends before its position",
    "topic": "the topic no longer exists",
    "damaged": "the topic is damaged",
}


@click.group(
    epilog="""\b
Examples:
  polybus topics create news --retention-age-s 604800
  polybus topics list --data /var/lib/polybus --json
"""
)
def topics() -> None:
    """List, create, delete and describe topics.

    Works whether the bus runs or not. Topics survive a restart.
    """


topics.add_command(infer)


@topics.command("list", epilog="Example: polybus topics list --json")
@click.option("--system", is_flag=True, help="Include system topics such as $events.")
@settings_options
@json_option
def list_topics(config: Config, system: bool, as_json: bool) -> None:
    """List all topics: what they hold, their traffic, their age and the largest lag.

    The size is that on disk: exact for history, estimated for newer messages, without blobs.
    --json has the epochs and offsets, and the counters since the bus started.
    """

    def list_offline(log: Log) -> dict[str, Any]:
        lags = _saved_consumers(config, log).lags()
        shown = [one for one in sorted(log.topics()) if system or not names.is_reserved(one)]
        return {"topics": [_summary(log, one, lags) for one in shown]}

    query = "?system=true" if system else ""
    found = _ask(config, list_offline, "GET", f"/v1/topics{query}")["topics"]
    if as_json:
        echo_json(found)
    else:
        echo_table(TOPIC_COLUMNS, [_topic_row(topic) for topic in found])


@topics.command(epilog="Example: polybus topics create news --retention-bytes 1000000000")
@click.argument("name")
@click.option(
    "--retention-age-s",
    type=click.FloatRange(0, min_open=True),
    help="Remove history older than this many seconds.",
)
@click.option(
    "--retention-bytes", type=click.IntRange(1), help="Remove the oldest history beyond this size."
)
@settings_options
@json_option
def create(
    config: Config,
    name: str,
    retention_age_s: float | None,
    retention_bytes: int | None,
    as_json: bool,
) -> None:
    """Create a topic."""
    topic = names.canonical(name, topic_bytes_max=config.limits.topic_bytes_max)
    if names.is_reserved(topic):
        text = f"{topic}: names that begin with $ are reserved for system topics"
        raise UsageError("topic.reserved", text)
    settings = TopicSettings(retention_age_s=retention_age_s, retention_bytes=retention_bytes)

    def create_offline(log: Log) -> dict[str, Any]:
        return {"epoch": log.create_topic(topic, settings).epoch}

    Path(config.data).mkdir(parents=True, exist_ok=True)
    wanted = {"name": topic, **msgspec.to_builtins(settings)}
    made = _ask(config, create_offline, "POST", "/v1/topics", wanted)
    echo(as_json, {"name": topic, "epoch": made["epoch"]}, f"created {topic}")


@topics.command(epilog="Example: polybus topics delete news --yes")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@settings_options
@json_option
def delete(config: Config, name: str, yes: bool, as_json: bool) -> None:
    """Delete a topic with all its messages; a system topic only if it is damaged."""
    topic = names.canonical(name)

    def delete_offline(log: Log) -> None:
        if names.is_reserved(topic) and topic not in log.frozen:
            raise UsageError(
                "topic.reserved", f"{topic}: a system topic can be deleted only if it is damaged"
            )
        log.delete_topic(topic)

    if not yes:
        # Ask for confirmation only if it can be done.
        _ask(config, lambda log: log.bounds(topic), "GET", _path(topic))
        click.confirm(f"Delete {name} and all its messages?", abort=True)
    _ask(config, delete_offline, "DELETE", _path(topic))
    echo(as_json, {"name": topic}, f"deleted {topic}")


@topics.command(epilog="Example: polybus topics describe news")
@click.argument("name")
@settings_options
@json_option
def describe(config: Config, name: str, as_json: bool) -> None:
    """Show what a topic holds, its settings, its consumers and the size of its history."""
    topic = names.canonical(name)

    def describe_offline(log: Log) -> dict[str, Any]:
        log.bounds(topic)
        settings, known = log.settings(topic), _saved_consumers(config, log)
        return _summary(log, topic, known.lags()) | {
            "settings": {
                "retention-age-s": settings.retention_age_s,
                "retention-bytes": settings.retention_bytes,
            },
            **log.describe(topic),
            "consumers": msgspec.to_builtins(known.of_topic(topic)),
        }

    result = _ask(config, describe_offline, "GET", _path(topic))
    if as_json:
        echo_json(result)
        return
    for consumer in result.pop("consumers", []):
        loss = f" (data loss: {consumer['data-loss']})" if consumer["data-loss"] else ""
        text = f"at {consumer['offset']}, lag {consumer['lag']}{loss}"
        result[f"consumer {consumer['group']}"] = text
    for key, value in result.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        click.echo(f"{key}: {text}")


@topics.command(epilog="Example: polybus topics consumers --json")
@settings_options
@json_option
def consumers(config: Config, as_json: bool) -> None:
    """List programs that read topics: position, lag, rows per second, last error.

    Spark queries report themselves; other programs report with PUT /v1/consumers/GROUP.
    """

    def list_offline(log: Log) -> dict[str, Any]:
        return {"consumers": msgspec.to_builtins(_saved_consumers(config, log).views())}

    found = _ask(config, list_offline, "GET", "/v1/consumers")["consumers"]
    if as_json:
        echo_json(found)
        return
    echo_table(CONSUMER_COLUMNS, [row for consumer in found for row in _consumer_rows(consumer)])
    for consumer in found:
        if consumer["last-error"]:
            click.echo(f"{consumer['group']}: last error: {shown(consumer['last-error'])}")


@topics.command(epilog="Example: polybus topics forget my-query")
@click.argument("group")
@settings_options
@json_option
def forget(config: Config, group: str, as_json: bool) -> None:
    """Forget a consumer that will not come back; retention no longer waits for it."""

    def forget_offline(log: Log) -> None:
        from polybus.services.consumers import forget_saved

        forget_saved(Path(config.data), group, fsync=config.durability != "memory")

    _ask(config, forget_offline, "DELETE", f"/v1/consumers/{quote(group, safe='')}")
    echo(as_json, {"group": group}, f"forgot {group}")


def _path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


def _ask(
    config: Config, offline: Callable[[Log], Any], method: str, path: str, body: Any = None
) -> Any:
    """Use the running bus or, if there is none, its files under the lock."""
    data = existing_data(config)
    run = admin.running(data)
    if run is not None:
        try:
            return admin.ask(run, method, path, body)
        except UsageError as error:
            known = admin.ask(run, "GET", "/v1/topics")["topics"]
            raise suggested(error, [one["name"] for one in known]) from error
    # Slow to import: Arrow and Parquet.
    from polybus.edges.node import open_log

    try:
        log = open_log(config)
    except StorageError as error:
        raise exits.at_start(error) from error
    try:
        return offline(log)
    except UsageError as error:
        raise suggested(error, log.topics()) from error
    finally:
        log.close()


def _saved_consumers(config: Config, log: Log) -> Consumers:
    """The consumers of a stopped bus."""
    from polybus.edges.node import clock_us
    from polybus.services.consumers import saved_consumers

    return saved_consumers(Path(config.data), log.bounds, clock_us)


def _summary(log: Log, topic: str, lags: dict[str, int]) -> dict[str, Any]:
    try:
        bounds = log.bounds(topic)
    except StorageError as error:
        # A damaged topic must not hide the others.
        return {"name": topic, "epoch": 0, "start": 0, "stop": 0, "damaged": error.text}
    held = {"name": topic, "epoch": bounds.epoch, "start": bounds.start, "stop": bounds.stop}
    held["stored-bytes"] = log.stored_bytes(topic)
    return held | ({"lag": lags[topic]} if topic in lags else {})


def _topic_row(topic: dict[str, Any]) -> list[object]:
    now_s = time.time()
    last = topic.get("last-time")
    if "damaged" in topic:
        return [topic["name"], "damaged", *[None] * (len(TOPIC_COLUMNS) - 2)]
    return [
        topic["name"],
        count(topic["stop"] - topic["start"]),
        size(topic["stored-bytes"]),
        count(topic["in-per-s"]) if "in-per-s" in topic else None,
        span(now_s - topic["epoch"] / 1000),
        Quantity(_ago(now_s - datetime.fromisoformat(last).timestamp())) if last else None,
        topic.get("subscribers"),
        topic.get("lag"),
    ]


def _consumer_rows(consumer: dict[str, Any]) -> list[list[object]]:
    state = "failed" if consumer["failed"] else "ok"
    ago = _ago(consumer["seen-s-ago"])
    figures = (round(consumer["rows-per-s"], 1), round(consumer["batch-ms"], 1), ago)
    rows: list[list[object]] = []
    for topic in consumer["topics"]:
        loss = DATA_LOSS.get(topic["data-loss"], topic["data-loss"]).format(**topic)
        text = f"{state}, data loss: {loss}" if loss else state
        text = consumer.get("stopped", {}).get(topic["topic"], text)
        position = f"{topic['epoch']}:{topic['offset']}"
        rows.append([consumer["group"], topic["topic"], position, topic["lag"], *figures, text])
    return rows or [[consumer["group"], None, None, None, *figures, state]]


def _ago(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"
