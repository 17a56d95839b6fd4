"""The command line: `polybus VERB`. Each verb is a module or folder, imported when it is used."""

import importlib
import os
import signal
import sys
from typing import Any

import click

from polybus import __version__
from polybus.cli import allocator
from polybus.errors import PolybusError, UsageError

# Each verb is `polybus.cli.VERB.VERB`. Its line in `polybus --help` is here: that imports no verb.
VERBS = {
    "up": "Run the bus and the data pipeline.",
    "serve": "Run the bus.",
    "publish": "Publish messages to a topic.",
    "tail": "Print messages of topics as they arrive.",
    "topics": "List, create, delete and describe topics.",
    "pipeline": "Run your own pipelines on Spark.",
    "accounts": "Create accounts, share topics, make tokens.",
    "login": "Log in to an account, for all further commands.",
    "sessions": "Open, fill and end msgstream sessions.",
    "sql": "Query topics and tables with SQL.",
    "tables": "Convert tables of an earlier version.",
    "replay": "Publish history or quarantined messages again.",
    "verify": "Check everything that a stopped bus has stored.",
    "backup": "Copy the data folder of a running or stopped bus.",
    "restore": "Make a data folder from a backup.",
    "compact": "Turn the journal of a stopped bus into history.",
    "bench": "Measure the bus and other brokers.",
    "torture": "Inject faults into a private bus and check its guarantees.",
    "doctor": "Check whether this machine can run a bus.",
    "config": "Show or check the settings.",
}
# These handle signals themselves once they have started.
RUN_UNTIL_STOPPED = ("serve", "up")


class LazyGroup(click.Group):
    """Imports a verb when it is called, and turns Polybus errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = getattr(importlib.import_module(f"polybus.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def main(self, *given: Any, **named: Any) -> Any:
        # Before anything large is imported. With arguments the caller is a program, not a shell.
        if not given and "args" not in named and sys.argv[1:2] and sys.argv[1] in RUN_UNTIL_STOPPED:
            end_quietly_until_started()
            if sys.argv[1] == "serve":
                allocator.tune()
        return super().main(*given, **named)

    def invoke(self, ctx: click.Context) -> Any:
        from polybus.cli.exits import failure

        try:
            return super().invoke(ctx)
        except PolybusError as error:
            raise failure(error) from error
        except ModuleNotFoundError as error:
            if error.name != "deltalake":
                raise
            missing = UsageError("lake.library-missing", "deltalake is not installed")
            raise failure(missing) from error


def end_quietly_until_started() -> None:
    """End with 0 at once if a signal asks for it during the start; ignore a request to reload.

    The data folder is then as after a kill, and a start accepts whatever a kill leaves.
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
