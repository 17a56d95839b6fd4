"""The command line: `polybus VERB`. Each verb is a module or folder, imported when it is used."""

import importlib
from typing import Any, NamedTuple

import click

from polybus import __version__
from polybus.errors import PolybusError


class Verb(NamedTuple):
    """Where a verb is, and its line in `polybus --help`, which imports no verb."""

    target: str
    summary: str


VERBS: dict[str, Verb] = {
    "up": Verb("polybus.cli.up:up", "Run the bus and the data pipeline."),
    "serve": Verb("polybus.cli.serve:serve", "Run the bus."),
    "publish": Verb("polybus.cli.publish:publish", "Publish messages to a topic."),
    "tail": Verb("polybus.cli.tail:tail", "Print messages of topics as they arrive."),
    "topics": Verb("polybus.cli.topics:topics", "List, create, delete and describe topics."),
    "pipeline": Verb("polybus.cli.pipeline:pipeline", "Run your own pipelines on Spark."),
    "sessions": Verb("polybus.cli.sessions:sessions", "Open, fill and end msgstream sessions."),
    "sql": Verb("polybus.cli.sql:sql", "Query topics and tables with SQL."),
    "replay": Verb("polybus.cli.replay:replay", "Publish history or quarantined messages again."),
    "verify": Verb("polybus.cli.verify:verify", "Check everything that a stopped bus has stored."),
    "compact": Verb(
        "polybus.cli.compact:compact", "Turn the journal of a stopped bus into history."
    ),
    "bench": Verb("polybus.cli.bench:bench", "Measure the bus and other brokers."),
    "doctor": Verb("polybus.cli.doctor:doctor", "Check whether this machine can run a bus."),
    "config": Verb("polybus.cli.config:config", "Show or check the settings."),
}


class LazyGroup(click.Group):
    """Imports a verb when it is called, and turns Polybus errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        module, _, attribute = verb.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PolybusError as error:
            from polybus.cli.exits import failure

            raise failure(error) from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Example:
  polybus serve --topic news &
  polybus tail news &
  polybus publish news "hello"

`polybus VERB --help` describes a verb.
""",
)
@click.version_option(__version__, prog_name="polybus")
def main() -> None:
    """One message bus that speaks five wire protocols on one durable log."""
