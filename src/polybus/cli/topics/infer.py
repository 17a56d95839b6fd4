"""`polybus topics infer`: a schema for a topic, proposed from its messages."""

from collections.abc import Iterator
from pathlib import Path

import click

from polybus import names
from polybus.cli.common.options import existing_data, json_option, settings_options
from polybus.cli.common.output import echo_json, echo_table, shown
from polybus.config import Config


@click.command(epilog="Example: polybus topics infer orders --messages 100000")
@click.argument("name")
@click.option(
    "--messages",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Read the newest messages, at most this many.",
)
@click.option(
    "--outliers-max",
    type=click.FloatRange(0.0, 0.5),
    default=0.01,
    show_default=True,
    help="The share of messages that the type of a field may send to quarantine.",
)
@settings_options
@json_option
def infer(config: Config, name: str, messages: int, outliers_max: float, as_json: bool) -> None:
    """Propose a schema for a topic, from its messages.

    It prints what to put into the config, and how many of the messages the schema would send to
    quarantine, with the reasons. It changes nothing.
    """
    from polybus.lake.infer import infer as propose

    topic = names.canonical(name)
    found = propose(
        _values(existing_data(config), topic, messages),
        outliers_max=outliers_max,
    )
    if as_json:
        echo_json(
            {
                "topic": topic,
                "schema": found.schema,
                "messages": found.messages,
                "fitting": found.fitting,
                "quarantined": found.quarantined,
                "left-out": found.left_out,
            }
        )
        return
    click.echo(f"[[topics]]\nname = {_toml(topic)}\nschema = {_toml(found.schema)}\n")
    bad = found.messages - found.fitting
    click.echo(f"{found.messages} messages read: {found.fitting} fit, {bad} would be quarantined")
    if found.quarantined:
        echo_table(("messages", "reason"), [[n, text] for text, n in found.quarantined.items()])
    if found.left_out:
        click.echo(f"fields that a schema cannot have: {shown(', '.join(found.left_out))}")


def _values(data: Path, topic: str, count: int) -> Iterator[bytes]:
    from polybus.log.opening import open_reader

    reader = open_reader(data)
    held = reader.bounds(topic)
    start = max(held.start, held.stop - count)
    for batch in reader.read(topic, start, held.stop, columns=["value"]):
        yield from batch.column(0).to_pylist()


def _toml(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{shown(escaped)}"'
