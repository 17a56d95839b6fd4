"""`polybus up`: the bus and the data pipeline in one process tree, with live figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from polybus import config as configuration
from polybus.cli.options import load_config
from polybus.cli.up import config as up_config
from polybus.cli.up.addresses import addresses_text
from polybus.cli.up.children import Child
from polybus.cli.up.demo_traffic import Ports, Traffic
from polybus.cli.up.display import STARTING, Display, display
from polybus.cli.up.figures import Figures, Watcher
from polybus.config import Config

LOOK_EVERY_S = 1.0
STOP_TIMEOUT_S = 30.0
# One that has not come up yet has nothing to finish.
START_PATIENCE_S = 5.0
# An archive of classes makes the next start faster; making it must not slow this one.
ARCHIVE_AFTER_S = 30.0
PIPELINES = "pipelines"
DRIVER_VARIABLE = "POLYBUS_SPARK_DRIVER"
"""Another program to run in the driver's place, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `polybus up` was asked for."""

    config: Config
    config_file: Path
    port: int | None
    demo: bool
    pipeline: bool
    master: str | None
    pipelines: Path | None
    seconds: float | None
    driver: str | None

    @property
    def data(self) -> Path:
        return Path(self.config.data)


@click.command(
    epilog="""\b
Examples:
  polybus up
  polybus up --demo
  polybus up --data /var/lib/polybus --master spark://cluster:7077
"""
)
@click.option("--config", "config_path", type=click.Path(dir_okay=False), help="TOML or JSON file.")
@click.option("--data", help="Folder of the log.  [default: ./polybus-data]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of all connectors but queues'; 0 = any free.",
)
@click.option("--topic", "topics", multiple=True, help="Declare a topic; may be repeated.")
@click.option("--demo", is_flag=True, help="Send traffic on every protocol.")
@click.option(
    "--no-pipeline", is_flag=True, help="Run the bus alone; needs neither Java nor Spark."
)
@click.option("--master", help="Spark master, or sc://HOST of Spark Connect.  [default: embedded]")
@click.option(
    "--pipelines",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Folder of your own pipelines.  [default: ./{PIPELINES} if it is there]",
)
@click.option(
    "--for",
    "seconds",
    type=click.FloatRange(0),
    help="Stop so many seconds after the bus is ready.",
)
def up(
    config_path: str | None,
    data: str | None,
    port: int | None,
    topics: tuple[str, ...],
    demo: bool,
    no_pipeline: bool,
    master: str | None,
    pipelines: Path | None,
    seconds: float | None,
) -> None:
    """Run the bus and the data pipeline, and show what they do.

    One Ctrl-C stops all of it: the pipeline first, then the bus. Without Java or PySpark the bus
    runs alone, and says what is missing.
    """
    config = load_config(data, config_path)
    config = msgspec.structs.replace(config, topics=[*config.topics, *topics])
    if demo:
        config = up_config.with_demo(config)
    configuration.check(config)
    if pipelines is None and Path(PIPELINES).is_dir():
        pipelines = Path(PIPELINES)
    with tempfile.TemporaryDirectory(prefix="polybus-up-") as folder:
        config_file = Path(folder) / "polybus.json"
        up_config.write(config, config_file)
        plan = Plan(
            config=config,
            config_file=config_file,
            port=port,
            demo=demo,
            pipeline=not no_pipeline,
            master=master,
            pipelines=pipelines,
            seconds=seconds,
            driver=os.environ.get(DRIVER_VARIABLE),
        )
        with display() as screen:
            code = asyncio.run(Up(plan, screen).run())
    sys.exit(code)


class Up:
    """One run, from the first process to the last."""

    def __init__(self, plan: Plan, screen: Display) -> None:
        self._plan = plan
        self._screen = screen
        self._began = time.monotonic()
        self._figures = Figures()
        self._ports: Ports | None = None
        self._first_result = False
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Future[Any]] = []
        self._bus = Child("bus", self._bus_command, on_line=self._bus_said, say=screen.say)
        self._driver: Child | None = None
        self._traffic: asyncio.Future[None] | None = None

    async def run(self) -> int:
        """Run until Ctrl-C, SIGTERM or the end of the time given; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        try:
            return await self._run()
        finally:
            what = "the bus" if self._driver is None else "the pipeline, then the bus"
            self._screen.step("stopping", what)
            for task in self._tasks:
                task.cancel()
            children = [child for child in (self._driver, self._bus) if child is not None]
            for child in children:
                patience_s = STOP_TIMEOUT_S if child.was_ready else START_PATIENCE_S
                await child.stop(timeout_s=patience_s)
            self._screen.step("stopping", "done", done=True)

    async def _run(self) -> int:
        plan = self._plan
        self._screen.step("bus", STARTING)
        self._background(self._bus.run())
        if not await self._settled(self._bus):
            return 0
        if self._ports is None:
            return self._bus.exit_code or 1
        if plan.seconds is not None:
            asyncio.get_running_loop().call_later(plan.seconds, self._stop.set)
        missing = self._start_pipeline()
        self._say_addresses(self._ports)
        if missing:
            self._screen.say(missing)
        watcher = Watcher(self._figures, port=self._ports.tcp, data=plan.data)
        self._background(watcher.follow_alerts())
        if plan.demo:
            self._send_traffic(self._ports)
        while not self._stop.is_set():
            await watcher.look()
            self._tell_first_result()
            self._tell_trouble()
            self._screen.show(self._figures)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_EVERY_S)
        return 0

    async def _settled(self, child: Child) -> bool:
        """Wait until the child is ready or down; False if we are to stop before."""
        waits = [
            asyncio.ensure_future(child.until_settled()),
            asyncio.ensure_future(self._stop.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        return not self._stop.is_set()

    def _interrupted(self) -> None:
        if self._stop.is_set():
            # The second Ctrl-C: no more patience.
            for child in (self._driver, self._bus):
                if child is not None:
                    child.kill()
        self._stop.set()

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    # The bus.

    def _bus_command(self) -> list[str]:
        plan = self._plan
        command = [sys.executable, "-m", "polybus.cli", "serve", "--stop-with-stdin"]
        command += ["--config", str(plan.config_file)]
        port = plan.port
        if port == 0 and self._ports is not None:
            # Started again: clients look for it where it was.
            port = self._ports.tcp
        return command if port is None else [*command, "--port", str(port)]

    def _bus_said(self, line: str) -> None:
        if not line.startswith("polybus ready: "):
            return
        addresses = line.removeprefix("polybus ready: ").partition(" data=")[0].split()
        connectors = self._plan.config.connectors
        queue = next(
            (index for index, one in enumerate(connectors) if "queue" in one.protocols), None
        )
        self._ports = Ports.of(addresses, queue)
        if self._traffic is not None:
            # Started again, perhaps with another port for the queue.
            self._send_traffic(self._ports)
        self._bus.ready()
        self._screen.step("bus", f"ready at {' '.join(addresses)}", done=True)

    def _send_traffic(self, ports: Ports) -> None:
        if self._traffic is not None:
            self._traffic.cancel()
        self._traffic = asyncio.ensure_future(Traffic(ports).run())
        self._tasks.append(self._traffic)

    # The pipeline.

    def _start_pipeline(self) -> str:
        """Start the driver, or return what is missing for it."""
        plan = self._plan
        if not plan.pipeline:
            return ""
        if plan.driver is None:
            missing = what_is_missing(plan.master)
            if missing:
                return missing
        where = f"on {plan.master}" if plan.master else "in this machine"
        self._screen.step("pipeline", f"starting Spark {where}: this takes some seconds")
        self._driver = Child(
            "pipeline", self._driver_command, on_line=self._driver_said, say=self._screen.say
        )
        self._background(self._driver.run())
        return ""

    def _driver_command(self) -> list[str]:
        plan = self._plan
        command = [
            sys.executable,
            *([plan.driver] if plan.driver else ["-m", "polybus.spark.pipelines.running.driver"]),
        ]
        command += ["--data", str(plan.data)]
        if plan.master is not None:
            command += ["--master", plan.master]
        if plan.pipelines is not None:
            command += ["--pipelines", str(plan.pipelines)]
        return command

    def _driver_said(self, line: str) -> None:
        try:
            event = json.loads(line)
            kind, text = event["event"], event.get("text", "")
        except (ValueError, TypeError, KeyError):
            return
        assert self._driver is not None
        if kind == "progress":
            self._figures.flows = [
                flow for flow in event.get("flows", []) if isinstance(flow, dict)
            ]
        elif kind == "ready":
            self._driver.ready()
            seconds = time.monotonic() - self._began
            self._screen.step("pipeline", f"ready after {seconds:.1f} s", done=True)
            self._background(self._make_archive())
        elif kind in ("starting", "waiting"):
            self._screen.step("pipeline", text)
        elif kind in ("failed", "problem", "warning"):
            self._screen.say(f"pipeline: {text}")

    def _tell_first_result(self) -> None:
        if not self._first_result and any(self._figures.tables.values()):
            self._first_result = True
            seconds = time.monotonic() - self._began
            self._screen.say(f"first rows in a table after {seconds:.1f} s")

    def _tell_trouble(self) -> None:
        for child in (self._bus, self._driver):
            if child is not None and child.state in ("restarting", "down"):
                self._screen.step(child.name, child.state)

    async def _make_archive(self) -> None:
        """Once, make what lets Spark start faster the next time."""
        if self._plan.driver is not None or self._plan.master is not None:
            return
        from polybus.spark.session import archive

        await asyncio.sleep(ARCHIVE_AFTER_S)
        process = archive.start_making()
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait)
        finally:
            process.terminate()

    # What to try.

    def _say_addresses(self, ports: Ports) -> None:
        plan, pipeline = self._plan, self._driver is not None
        for line in addresses_text(ports, plan.config, demo=plan.demo, pipeline=pipeline):
            self._screen.say(line)


def what_is_missing(master: str | None) -> str:
    """What the pipeline lacks to run here, and how to get it; empty if nothing."""
    from polybus.cli.doctor import missing_for_pipeline

    return missing_for_pipeline(master)
