"""`polybus topics`: of the bus that runs on a data folder or, if none does, in its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from polybus import names
from polybus.cli import admin
from polybus.cli.options import data_options, existing_data, json_option, load_config
from polybus.cli.output import echo_json, echo_table
from polybus.cli.topics.consumers import consumers, forget, kept_consumers, of_topic
from polybus.config import Config
from polybus.errors import StorageError, UsageError
from polybus.log.interface import Log, TopicSettings

if TYPE_CHECKING:
    from polybus.services.consumers.consumers import Consumer


@click.group(
    epilog="""\b
Examples:
  polybus topics create news --retention-age-s 604800
  polybus topics list --data /var/lib/polybus --json
"""
)
def topics() -> None:
    """List, create, delete and describe topics.

    Works whether the bus runs or not; topics survive a restart.
    """


@topics.command("list", epilog="Example: polybus topics list --json")
@click.option("--system", is_flag=True, help="The system's own topics too, such as $events.")
@data_options
@json_option
def list_topics(system: bool, data: str | None, config_path: str | None, as_json: bool) -> None:
    """List all topics with what they hold."""

    def list_offline(log: Log) -> list[dict[str, Any]]:
        known = kept_consumers(Path(config.data))
        found = sorted(log.topics())
        return [_summary(log, one, known) for one in found if system or not names.is_reserved(one)]

    config = load_config(data, config_path)
    found = _ask(config, "topics.list", list_offline, system=system)
    if as_json:
        echo_json(found)
        return
    columns = ("name", "epoch", "start", "stop", "messages-in", "subscribers", "lag")
    rows = [[topic.get(column) for column in columns] for topic in found]
    echo_table(columns, [["-" if cell is None else cell for cell in row] for row in rows])


@topics.command(epilog="Example: polybus topics create news --retention-bytes 1000000000")
@click.argument("name")
@click.option("--retention-age-s", type=click.FloatRange(0, min_open=True), help="Keep so long.")
@click.option("--retention-bytes", type=click.IntRange(1), help="Keep so much.")
@data_options
@json_option
def create(
    name: str,
    retention_age_s: float | None,
    retention_bytes: int | None,
    data: str | None,
    config_path: str | None,
    as_json: bool,
) -> None:
    """Create a topic."""

    def create_offline(log: Log) -> dict[str, Any]:
        topic = names.canonical(name, topic_bytes_max=config.limits.topic_bytes_max)
        if names.is_reserved(topic):
            raise UsageError("topic.reserved", f"{topic}: names that begin with $ are the system's")
        settings = TopicSettings(retention_age_s=retention_age_s, retention_bytes=retention_bytes)
        return {"name": topic, "epoch": log.create_topic(topic, settings).epoch}

    config = load_config(data, config_path)
    Path(config.data).mkdir(parents=True, exist_ok=True)
    result = _ask(
        config,
        "topics.create",
        create_offline,
        name=name,
        retention_age_s=retention_age_s,
        retention_bytes=retention_bytes,
    )
    echo_json(result) if as_json else click.echo(f"created {result['name']}")


@topics.command(epilog="Example: polybus topics delete news --yes")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@data_options
@json_option
def delete(name: str, yes: bool, data: str | None, config_path: str | None, as_json: bool) -> None:
    """Delete a topic with all its messages."""

    def delete_offline(log: Log) -> dict[str, Any]:
        topic = names.canonical(name)
        if names.is_reserved(topic):
            raise UsageError("topic.reserved", f"'{topic}' is a system topic; it stays")
        log.delete_topic(topic)
        return {"name": topic}

    config = load_config(data, config_path)
    if not yes:
        # Nobody should have to confirm what cannot be done.
        _ask(config, "topics.describe", lambda log: log.bounds(names.canonical(name)), name=name)
        click.confirm(f"Delete {name} and all its messages?", abort=True)
    result = _ask(config, "topics.delete", delete_offline, name=name)
    echo_json(result) if as_json else click.echo(f"deleted {result['name']}")


@topics.command(epilog="Example: polybus topics describe news")
@click.argument("name")
@data_options
@json_option
def describe(name: str, data: str | None, config_path: str | None, as_json: bool) -> None:
    """Say what a topic holds, its settings, and what its history takes."""

    def describe_offline(log: Log) -> dict[str, Any]:
        topic = names.canonical(name)
        log.bounds(topic)
        settings = log.settings(topic)
        known = kept_consumers(Path(config.data))
        return _summary(log, topic, known) | {
            "settings": {
                "retention-age-s": settings.retention_age_s,
                "retention-bytes": settings.retention_bytes,
            },
            **log.describe(topic),
            "consumers": [msgspec.to_builtins(one) for one in of_topic(known, topic, log)],
        }

    config = load_config(data, config_path)
    result = _ask(config, "topics.describe", describe_offline, name=name)
    if as_json:
        echo_json(result)
        return
    for consumer in result.pop("consumers", []):
        loss = f" (data loss: {consumer['data-loss']})" if consumer["data-loss"] else ""
        where = f"at {consumer['offset']}, lag {consumer['lag']}{loss}"
        result[f"consumer {consumer['group']}"] = where
    for key, value in result.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        click.echo(f"{key}: {text}")


topics.add_command(consumers)
topics.add_command(forget)


def _ask(config: Config, verb: str, offline: Callable[[Log], Any], **fields: Any) -> Any:
    """Let the running bus do it, else do it in the files, which are locked meanwhile."""
    data = existing_data(config)
    run = admin.running(data)
    if run is not None:
        return admin.ask(run, verb, **fields)
    # Heavy: the files are Arrow and Parquet.
    from polybus.edges.node import open_log

    log = open_log(config)
    try:
        return offline(log)
    finally:
        log.close()


def _summary(log: Log, topic: str, known: list[Consumer]) -> dict[str, Any]:
    try:
        bounds = log.bounds(topic)
    except StorageError as error:
        # A damaged topic must not hide the others.
        return {"name": topic, "epoch": 0, "start": 0, "stop": 0, "damaged": error.text}
    lags = [one.lag or 0 for one in of_topic(known, topic, log)]
    lag = {"lag": max(lags)} if lags else {}
    return {"name": topic, "epoch": bounds.epoch, "start": bounds.start, "stop": bounds.stop} | lag
