"""`polybus up`: run the bus and the data pipeline as child processes, and show live figures."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from polybus.cli.common import exits
from polybus.cli.common.options import (
    config_option,
    data_option,
    load_config,
    port_option,
    topics_option,
)
from polybus.cli.up.children import Child
from polybus.cli.up.demo import BusPorts, DemoTraffic, is_way_in, with_demo
from polybus.cli.up.display import STARTING, PlainDisplay, display, first_steps
from polybus.cli.up.figures import Figures
from polybus.config import Config
from polybus.config_file import check
from polybus.errors import ConfigError
from polybus.processes import scratch_folder, sweep
from polybus.services.pipeline_watch import DRIVER_VARIABLE, driver_command, write_errors

UPDATE_EVERY_S = 1.0
STOP_TIMEOUT_S = 30.0
# A child that was never ready has nothing to finish; Spark cannot be interrupted while it starts.
START_STOP_TIMEOUT_S = 1.0
# A class-data archive makes the next start faster; creating it must not slow this one.
ARCHIVE_AFTER_S = 30.0
PIPELINES = "pipelines"
READY = "polybus ready: "
NO_WAY_IN = (
    "connectors: polybus up needs one with protocol tcp that speaks http, without tls, for its "
    'display and the pipeline; add {"protocol": "tcp", "ip": "127.0.0.1", "port": 0}, or run '
    "polybus serve"
)


@click.command(
    epilog="""\b
Examples:
  polybus up
  polybus up --demo
  polybus up --data /var/lib/polybus --master spark://cluster:7077
"""
)
@config_option
@data_option
@port_option
@topics_option
@click.option("--demo", is_flag=True, help="Send traffic on every protocol.")
@click.option(
    "--no-pipeline", is_flag=True, help="Run the bus alone; needs neither Java nor Spark."
)
@click.option("--master", help="Spark master, or sc://HOST of Spark Connect.  [default: embedded]")
@click.option(
    "--pipelines",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Folder of your own pipelines.  [default: ./{PIPELINES} if it exists]",
)
@click.option(
    "--for",
    "seconds",
    type=click.FloatRange(0),
    help="Stop this many seconds after the bus is ready.",
)
def up(
    config_path: str | None,
    data: str | None,
    topics: tuple[str, ...],
    demo: bool,
    pipelines: Path | None,
    **given: Any,
) -> None:
    """Run the bus and the data pipeline, and show what they do.

    One Ctrl-C stops both: the pipeline first, then the bus. Without Java or PySpark the bus runs
    alone, and the output says what is missing.
    """
    config = load_config(data, config_path, topics)
    if demo:
        config = with_demo(config)
    check(config)
    if not any(map(is_way_in, config.connectors)):
        raise ConfigError("config.invalid", NO_WAY_IN)
    if pipelines is None and Path(PIPELINES).is_dir():
        pipelines = Path(PIPELINES)
    with scratch_folder("up") as folder:
        config_file = folder / "polybus.json"
        # `load` has copied the topics file into `topics`.
        written = msgspec.structs.replace(config, topic_config=None)
        config_file.write_bytes(msgspec.json.encode(written))
        with display() as screen:
            run = Up(
                config=config,
                config_file=config_file,
                demo=demo,
                pipelines=pipelines,
                screen=screen,
                **given,
            )
            code = asyncio.run(run.run())
    if code == exits.DONE:
        click.echo(f"stopped cleanly, data in {config.data}")
    exits.end_with(code)


@dataclass(kw_only=True)
class Up:
    """One run, from the first process to the last; its fields are the command line's options."""

    config: Config
    config_file: Path
    port: int | None
    demo: bool
    no_pipeline: bool
    master: str | None
    pipelines: Path | None
    seconds: float | None
    screen: PlainDisplay

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._figures = Figures()
        self._ports: BusPorts | None = None
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Future[Any]] = []
        self._bus = Child("bus", self._bus_command, on_line=self._on_bus_line, screen=self.screen)
        self._driver: Child | None = None
        self._errors_written: tuple[int, list[str]] = (0, [])
        self._is_fake = DRIVER_VARIABLE in os.environ
        self._traffic: asyncio.Future[None] | None = None

    async def run(self) -> int:
        """Run until Ctrl-C, SIGTERM or the end of `--for`; return the exit code."""
        loop = asyncio.get_running_loop()
        # SIGHUP: the terminal was closed.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        try:
            return await self._run()
        finally:
            what = "the bus" if self._driver is None else "the pipeline, then the bus"
            self.screen.step("stopping", what)
            for task in self._tasks:
                task.cancel()
            for child in self._children():
                was_ready = child.ready.is_set()
                await child.stop(timeout_s=STOP_TIMEOUT_S if was_ready else START_STOP_TIMEOUT_S)
            # Of a driver that had to be killed.
            sweep("spark")
            self.screen.step("stopping", "done", done=True)

    async def _run(self) -> int:
        self.screen.step("bus", STARTING)
        waits = [asyncio.ensure_future(one.wait()) for one in (self._bus.ready, self._stop)]
        bus = self._background(self._bus.run())
        await asyncio.wait([bus, *waits], return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._stop.is_set():
            return exits.DONE
        if self._ports is None:
            return self._bus.exit_code or exits.FAILED
        if self.seconds is not None:
            asyncio.get_running_loop().call_later(self.seconds, self._stop.set)
        missing = self._start_pipeline()
        has_driver = self._driver is not None
        self.screen.say(first_steps(self._ports, self.config, demo=self.demo, pipeline=has_driver))
        if missing:
            self.screen.say(missing)
        flows = self._figures.flows
        figures = self._figures = Figures(self._ports.tcp, Path(self.config.data))
        figures.flows = flows
        self._background(figures.follow_alerts())
        if self.demo:
            self._send_traffic(self._ports)
        has_rows = False
        while not self._stop.is_set():
            await figures.update()
            await asyncio.to_thread(self._write_errors)
            if self._driver is not None and self._driver.stopped:
                figures.flows = await asyncio.to_thread(_flows_of_another, figures.data)
            if not has_rows and figures.has_new_rows:
                has_rows = True
                seconds = time.monotonic() - self._began
                self.screen.say(f"first new rows in a table after {seconds:.1f} s")
            self.screen.show(figures)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), UPDATE_EVERY_S)
        return exits.DONE

    def _interrupt(self) -> None:
        if self._stop.is_set():
            # The second Ctrl-C does not wait.
            for child in self._children():
                child.kill()
        self._stop.set()

    def _children(self) -> list[Child]:
        """In the order in which they are stopped."""
        return [child for child in (self._driver, self._bus) if child is not None]

    def _background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        self._tasks.append(asyncio.ensure_future(work))
        return self._tasks[-1]

    # The bus.

    def _bus_command(self) -> list[str]:
        command = [sys.executable, "-m", "polybus.cli", "serve", "--stop-with-stdin"]
        command += ["--config", str(self.config_file)]
        port = self.port
        if port == 0 and self._ports is not None:
            # A restarted bus keeps its port, because clients reconnect to it.
            port = self._ports.tcp
        return command if port is None else [*command, "--port", str(port)]

    def _on_bus_line(self, line: str) -> None:
        if not line.startswith(READY):
            return
        addresses = line.removeprefix(READY).partition(" data=")[0].split()
        self._ports = BusPorts.of(addresses, self.config)
        if self._traffic is not None:
            # The queue of a restarted bus may have another port.
            self._send_traffic(self._ports)
        self._bus.ready.set()
        self.screen.step("bus", f"ready at {' '.join(addresses)}", done=True)

    def _send_traffic(self, ports: BusPorts) -> None:
        if self._traffic is not None:
            self._traffic.cancel()
        self._traffic = self._background(DemoTraffic(ports).run())

    # The pipeline.

    def _start_pipeline(self) -> str:
        """Start the driver, or return what is missing for it."""
        if self.no_pipeline:
            return ""
        if not self._is_fake:
            from polybus.cli.doctor import missing_for_pipeline

            missing = missing_for_pipeline(self.master)
            if missing:
                return missing
        where = f"on {self.master}" if self.master else "in this machine"
        self.screen.step("pipeline", f"starting Spark {where}: this takes some seconds")
        self._driver = Child(
            "pipeline",
            self._driver_command,
            on_line=self._on_driver_line,
            screen=self.screen,
            stays_stopped=True,
        )
        self._background(self._driver.run())
        return ""

    def _driver_command(self) -> list[str]:
        command = [*driver_command(), "--data", self.config.data]
        if self.master is not None:
            command += ["--master", self.master]
        if self.pipelines is not None:
            command += ["--pipelines", str(self.pipelines)]
        return command

    def _on_driver_line(self, line: str) -> None:
        try:
            event = json.loads(line)
            kind, text = event["event"], event.get("text", "")
        except (ValueError, TypeError, KeyError):
            return
        assert self._driver is not None
        if kind == "progress":
            flows = event.get("flows", [])
            self._figures.flows = [flow for flow in flows if isinstance(flow, dict)]
        elif kind == "ready":
            self._driver.ready.set()
            seconds = time.monotonic() - self._began
            self.screen.step("pipeline", f"ready after {seconds:.1f} s", done=True)
            self._background(self._make_archive())
        elif kind in ("starting", "waiting"):
            self.screen.step("pipeline", text)
        elif kind in ("failed", "problem", "warning"):
            flow = f"{event['flow']}: " if "flow" in event else ""
            self.screen.say(f"pipeline: {flow}{text}")

    def _write_errors(self) -> None:
        """Store the driver's standard error for the bus to show. May block."""
        if self._driver is None:
            return
        errors = self._driver.pid, list(self._driver.error_lines)
        if errors != self._errors_written and errors[1]:
            # The disk may be full, which other parts report.
            with contextlib.suppress(OSError):
                write_errors(Path(self.config.data), *errors)
                self._errors_written = errors

    async def _make_archive(self) -> None:
        """Create the class-data archive of Spark if it does not exist."""
        if self._is_fake or self.master is not None:
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


def _flows_of_another(data: Path) -> list[dict[str, Any]]:
    """The flows of a driver that another process, usually the bus, has started."""
    from polybus.spark.pipelines.running import service

    found = service.running(data)
    return [] if found is None else found.flows
