"""`polybus pipeline`: create, check, run, watch and stop the user's own pipelines."""

import contextlib
import re
import signal
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from polybus.cli.common.exits import end
from polybus.cli.common.options import (
    F,
    data_option,
    existing_data,
    json_option,
    load_config,
    without_secret,
)
from polybus.cli.common.output import echo_json, echo_table
from polybus.cli.pipeline.display import RunDisplay, expectation_rows, flow_rows, is_failing
from polybus.client.options import environment_token, read_token
from polybus.errors import PolybusError, UsageError
from polybus.processes import is_alive

STOP_TIMEOUT_S = 30.0
# The small pipeline that `init` writes; it runs on any bus.
FLOWS = '''"""Counts the messages of every topic. Change it as you need."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()


@dp.table
def messages() -> DataFrame:
    """One row for each message: a streaming table, which only grows."""
    topics = spark.readStream.format("polybus").option("subscribePattern", ".*")
    rows = topics.option("startingOffsets", "earliest").load()
    return rows.select("topic", "offset", "timestamp", F.length("value").alias("bytes"))
'''
TOTALS = """-- Messages and bytes per topic: a materialized view, replaced when messages arrive.
CREATE MATERIALIZED VIEW totals AS
SELECT topic, count(*) AS messages, sum(bytes) AS bytes, max(timestamp) AS last
FROM messages
GROUP BY topic
"""
# Required by Spark's own runner (spark-pipelines run --spec …), and used by ours too.
SPEC = """name: {name}
storage: file://{storage}
libraries:
  - glob:
      include: transformations/**
"""
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
_folder_option = click.option(
    "--folder",
    "-f",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("pipelines"),
    show_default=True,
    help="Folder of the pipelines.",
)


_url = click.option(
    "--url",
    callback=without_secret,
    help="The bus, if it is on another machine: http://host:port.",
)
# Not the token itself: all users of the machine see the arguments of a process.
_token = click.option(
    "--token-file",
    "token",
    callback=lambda _context, _option, path: read_token(path) if path else environment_token(),
    help="File with the token for the bus at --url.  [default: POLYBUS_TOKEN, or the file that "
    "POLYBUS_TOKEN_FILE names]",
)
_master = click.option(
    "--master",
    default="local[2,3]",
    show_default=True,
    help="Spark master: local[…], spark://host:port, or sc://host:port (Spark Connect).",
)


def _spark_options(command: F) -> F:
    """Options of the verbs that start Spark."""
    return data_option(_folder_option(_url(_token(_master(command)))))


@click.group(
    epilog="""\b
Examples:
  polybus pipeline init clicks
  polybus pipeline check
  polybus pipeline run --continuous
"""
)
def pipeline() -> None:
    """Run your own pipelines: tables and topics from topics, in Python or SQL.

    A pipeline is a folder or a file in pipelines/, written with pyspark.pipelines or in SQL. See
    docs/howto/pipelines.md.
    """


@pipeline.command(epilog="Example: polybus pipeline init clicks")
@click.argument("name")
@_folder_option
def init(name: str, folder: Path) -> None:
    """Create a small pipeline that runs, as a template."""
    path = _write_template(folder, name)
    click.echo(f"{path} is a pipeline that counts the messages of every topic. Run it:")
    click.echo(f"  polybus pipeline run {name.lower()}")


@pipeline.command("list", epilog="Example: polybus pipeline list --json")
@_folder_option
@data_option
@json_option
def list_pipelines(folder: Path, data: str | None, as_json: bool) -> None:
    """List the pipelines of the folder, and the last known states of their flows."""
    from polybus.spark.pipelines.declared.loader import find_pipelines, source_files

    flows = _last_status(_data(data))[1].get("flows", [])
    found = []
    for name, path in find_pipelines(folder).items():
        states = sorted({flow["state"] for flow in flows if flow["pipeline"] == name})
        found.append((name, str(path), len(list(source_files(path))), states))
    if as_json:
        keys = ("name", "path", "files", "states")
        echo_json([dict(zip(keys, one, strict=True)) for one in found])
        return
    rows = [(*one, ", ".join(states) or "-") for *one, states in found]
    echo_table(("name", "path", "files", "last seen"), rows)


@pipeline.command(epilog="Example: polybus pipeline check orders")
@click.argument("names", nargs=-1)
@_spark_options
@json_option
def check(names: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Load pipelines and analyse every flow, without running anything.

    Reports errors with file and line: syntax, unknown names and columns, cycles, and changes that
    do not fit a flow's checkpoint. The exit code is 1 if there are any.
    """
    from polybus.spark.pipelines.running import driver

    prepared = driver.check(_options(names, given))
    problems = [
        {"pipeline": name, "code": error.code, "text": error.text}
        for name, error in prepared.problems.items()
    ]
    flows = [
        {
            "flow": flow.full_name,
            "reads": flow.reads,
            "writes": flow.writes,
            "refresh": flow.refresh,
        }
        for flow in prepared.flows
    ]
    if as_json:
        echo_json({"flows": flows, "problems": problems})
    else:
        rows = [
            [one["flow"], ", ".join(one["reads"]) or "-", one["writes"], one["refresh"] or "-"]
            for one in flows
        ]
        echo_table(("flow", "reads", "writes", "refresh"), rows)
        for problem in problems:
            click.echo(f"{problem['code']}: {problem['text']}", err=True)
    end(good=not problems)


@pipeline.command(epilog="Example: polybus pipeline run orders --continuous")
@click.argument("names", nargs=-1)
@click.option("--continuous", is_flag=True, help="Run until stopped, with low latency.")
@click.option(
    "--reset",
    multiple=True,
    metavar="FLOW",
    help="Start this flow or table over, with a new checkpoint and without its old rows.",
)
@click.option(
    "--refresh",
    multiple=True,
    metavar="TABLE",
    help="Run only the flows into this table; with --reset, fill it again from the start.",
)
@_spark_options
@json_option
def run(names: tuple[str, ...], continuous: bool, as_json: bool, **given: Any) -> None:
    """Run pipelines: one pass over new messages, or continuously.

    With --json each event is a line: starting, ready, progress (each second), waiting, warning,
    failed, problem, done or stopped. The exit code is 1 if a pipeline did not start or a flow
    failed.
    """
    from polybus.log import file_modes
    from polybus.spark.pipelines.running.driver import Supervisor

    options = _options(names, given, continuous=continuous)
    file_modes.adopt(options.data)
    display = RunDisplay()
    with contextlib.closing(display):
        supervisor = Supervisor(options, echo_json if as_json else display.show)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: supervisor.stop())
        is_good = supervisor.run()
    end(good=is_good)


@pipeline.command(epilog="Example: polybus pipeline status --json")
@data_option
@json_option
def status(data: str | None, as_json: bool) -> None:
    """Show the progress of every flow of the running pipeline, else of the last run."""
    state, found = _last_status(_data(data))
    if as_json:
        echo_json({"state": state, **found})
        return
    since = f" at {found['time']}" if "time" in found else ""
    failing = sum(map(is_failing, found.get("flows", [])))
    failing_text = f": {failing} of {len(found['flows'])} flows failing" if failing else ""
    click.echo(f"{state}{since}{failing_text}")
    if found.get("flows"):
        echo_table(*flow_rows(found["flows"]))
        expectations = expectation_rows(found["flows"])
        if expectations[1]:
            click.echo()
            echo_table(*expectations)
    for flow in found.get("flows", []):
        if flow.get("warning"):
            click.echo(f"{flow['pipeline']}.{flow['flow']}: {flow['warning']}", err=True)
    for problem in found.get("problems", []):
        click.echo(problem, err=True)


@pipeline.command(epilog="Example: polybus pipeline stop")
@data_option
def stop(data: str | None) -> None:
    """Stop the pipeline that runs or starts on the data folder; its results are safe."""
    from polybus.spark.pipelines.running import service

    folder = _data(data)
    found = service.present(folder)
    if found is None:
        raise UsageError("pipeline.not-running", f"no pipeline runs on {folder}")
    service.stop(found)
    until_s = time.monotonic() + STOP_TIMEOUT_S
    while True:
        try:
            # The pipeline has ended when its lock is free.
            with service.only_one(folder):
                break
        except UsageError as error:
            if time.monotonic() > until_s:
                text = f"the pipeline (process {found.pid}) still runs after {STOP_TIMEOUT_S:.0f} s"
                raise PolybusError("pipeline.stop-timeout", text) from error
            time.sleep(0.05)
    click.echo(f"stopped (process {found.pid})")


def _write_template(folder: Path, name: str) -> Path:
    """Create the pipeline's folder. Raises UsageError `pipeline.name`, `pipeline.exists`."""
    if not _NAME.fullmatch(name):
        text = f"{name!r} is not a valid name: use a letter, then letters, digits, _ and -"
        raise UsageError("pipeline.name", text)
    path = folder / name.lower()
    files = path / "transformations"
    try:
        files.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError("pipeline.exists", f"{path} already exists; use another name") from error
    (files / "messages.py").write_text(FLOWS)
    (files / "totals.sql").write_text(TOTALS)
    storage = path.absolute() / "pipeline-storage"
    (path / "spark-pipeline.yml").write_text(SPEC.format(name=path.name, storage=storage))
    return path


def _last_status(data: Path) -> tuple[str, dict[str, Any]]:
    """`running` or how the last run ended, and the last known progress."""
    from polybus.spark.pipelines.running import service

    last = service.read_status(data)
    if last is None:
        return "never run", {}
    found = msgspec.to_builtins(last)
    state = found.pop("state")
    if service.running(data) is not None:
        del found["time"]
    elif state == "running" or (state == "starting" and not is_alive(last.pid)):
        state = "killed"  # it could not write its final status
    return state, found


def _data(data: str | None) -> Path:
    return Path(load_config(data).data)


def _options(names: tuple[str, ...], given: dict[str, Any], **more: Any) -> Any:
    from polybus.spark.pipelines.declared.loader import choose, find_pipelines
    from polybus.spark.pipelines.running.driver import PipelineOptions

    config = load_config(given.pop("data"))
    data = Path(config.data) if given["url"] else existing_data(config)
    folder = given.pop("folder")
    choose(find_pipelines(folder), names)  # fails before Spark starts
    return PipelineOptions(
        data=data.absolute(),
        pipelines=folder,
        only=names,
        standard=False,
        until_stopped=False,
        **given,
        **more,
    )
