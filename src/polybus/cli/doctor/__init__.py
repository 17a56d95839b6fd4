"""`polybus doctor`: what this machine has and lacks for a bus."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from polybus import __version__
from polybus.cli import admin
from polybus.cli.options import data_options, json_option, load_config
from polybus.cli.output import echo_json
from polybus.config import Config

FSYNC_COUNT = 20
FSYNC_SLOW_MS = 20.0
FILES_SPARE = 256
CLOCK_SANE_AFTER_S = 1_700_000_000


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; `todo` says what to do about a warning or a failure."""

    name: str
    state: str
    text: str
    todo: str = ""


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def warn(name: str, text: str, todo: str) -> Check:
    return Check(name, "warn", text, todo)


def fail(name: str, text: str, todo: str) -> Check:
    return Check(name, "fail", text, todo)


@click.command(epilog="Example: polybus doctor --data /var/lib/polybus")
@data_options
@json_option
def doctor(data: str | None, config_path: str | None, as_json: bool) -> None:
    """Say what this machine has and lacks for a bus, and what to do about it.

    Exit 1 if a bus could not run; warnings alone are 0.
    """
    config = load_config(data, config_path)
    checks = [check for run in CHECKS for check in run(config)]
    if as_json:
        echo_json(msgspec.to_builtins(checks))
    else:
        for check in checks:
            click.echo(f"{check.state:4}  {check.name}: {check.text}")
            if check.todo:
                click.echo(f"      → {check.todo}")
    if any(check.state == "fail" for check in checks):
        sys.exit(1)


def _python(config: Config) -> Iterator[Check]:
    yield ok("polybus", __version__)
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _scanner(config: Config) -> Iterator[Check]:
    from polybus import scan

    if scan.COMPILED:
        yield ok("scanner", "compiled")
    elif os.environ.get("POLYBUS_PURE", "") not in ("", "0"):
        todo = "unset POLYBUS_PURE"
        yield warn("scanner", "pure Python, as POLYBUS_PURE asks; some 5 times slower", todo)
    else:
        todo = "install a C compiler (apt install gcc python3-dev), then reinstall polybus"
        yield warn("scanner", "pure Python, some 5 times slower than compiled", todo)


def _libraries(config: Config) -> Iterator[Check]:
    yield ok("msgspec", importlib.metadata.version("msgspec"))
    try:
        yield ok("uvloop", importlib.metadata.version("uvloop"))
    except importlib.metadata.PackageNotFoundError:
        yield warn("uvloop", "not there; asyncio's own loop is used", "pip install uvloop")


def _spark(config: Config) -> Iterator[Check]:
    from polybus.cli.doctor import spark as doctor_spark

    for name, text, todo in doctor_spark.findings():
        yield warn(name, text, todo) if todo else ok(name, text)


def _ports(config: Config) -> Iterator[Check]:
    run = admin.running(Path(config.data))
    if run is not None:
        yield ok("bus", f"runs as process {run.pid} at {' '.join(run.addresses)}")
        return
    for connector in config.connectors:
        name = f"{connector.protocol}://{connector.ip}:{connector.port}"
        kind = socket.SOCK_STREAM if connector.protocol == "tcp" else socket.SOCK_DGRAM
        family = socket.AF_INET6 if ":" in connector.ip else socket.AF_INET
        with socket.socket(family, kind) as probe:
            if connector.protocol == "tcp":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((connector.ip, connector.port))
            except OSError as error:
                todo = "stop what listens there (ss -lntup), or choose another port"
                yield fail("port", f"{name}: {error.strerror}", todo)
            else:
                yield ok("port", f"{name} is free")


def _data(config: Config) -> Iterator[Check]:
    data = Path(config.data)
    folder = data
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        fsync_ms = _fsync_ms(folder)
    except OSError as error:
        todo = "choose another folder (--data), or give this user the right to write there"
        yield fail("data", f"cannot write to {folder}: {error.strerror}", todo)
        return
    what = "is writable" if data.exists() else f"can be created in {folder}"
    yield ok("data", f"{data} {what}")
    text = f"{fsync_ms:.2f} ms each: a receipt takes at least that long"
    if fsync_ms > FSYNC_SLOW_MS:
        todo = 'use a faster disk, or durability = "interval" if receipts may wait for a timer'
        yield warn("fsync", text, todo)
    else:
        yield ok("fsync", text)


def _fsync_ms(folder: Path) -> float:
    """The median time of a small write with fsync, in milliseconds."""
    times = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(FSYNC_COUNT):
            begin = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return sorted(times)[FSYNC_COUNT // 2] * 1000


def _files(config: Config) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.limits.connections_max + FILES_SPARE
    text = f"{soft} at once (hard limit {hard})"
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield ok("files", text)
    else:
        todo = (
            f"ulimit -n {wanted}, or lower limits.connections-max to {max(soft - FILES_SPARE, 1)}"
        )
        yield warn("files", f"{text}; too few for {wanted - FILES_SPARE} connections", todo)


def _clock(config: Config) -> Iterator[Check]:
    now = time.time()
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    if now < CLOCK_SANE_AFTER_S:
        todo = "set the clock (timedatectl set-ntp true): messages carry its time"
        yield warn("clock", f"{text} is in the past", todo)
    else:
        yield ok("clock", text)


CHECKS: tuple[Callable[[Config], Iterator[Check]], ...] = (
    _python,
    _scanner,
    _libraries,
    _spark,
    _ports,
    _data,
    _files,
    _clock,
)
