"""What `polybus up` says once the bus is ready: where it all is, and what to try."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

from polybus.cli.up.config import ORDERS
from polybus.cli.up.demo_traffic import Ports
from polybus.config import PORT, Config


def addresses_text(ports: Ports, config: Config, *, demo: bool, pipeline: bool) -> list[str]:
    """Where everything is, and commands to copy."""
    shown = program()
    at = "" if ports.tcp == PORT else f" --url boson://127.0.0.1:{ports.tcp}"
    topic = ORDERS if demo else "news"
    lines = [
        "",
        f"Boson, goMS, msgstream and HTTP on 127.0.0.1:{ports.tcp}"
        + (f", goMS datagrams on {ports.udp}" if ports.udp else "")
        + (f", the queue {queue_topic(config)} on {ports.queue}" if ports.queue else ""),
        f"The log and the tables are in {config.data} (plain Arrow and Parquet files).",
        "",
        "Try, in another terminal:",
        "",
    ]
    if not demo:
        lines.append(f"  {shown} topics create {topic} --data {config.data}")
    lines.append(f'  {shown} publish {topic} "hello from me"{at}')
    lines.append(f"  {shown} tail {topic} --from earliest{at}")
    if pipeline:
        lines.append(f"  {shown} tail '$alerts'{at}")
        query = "SELECT topic, count(*) FROM silver GROUP BY topic"
        lines.append(f'  {shown} sql "{query}" --data {config.data}')
    lines += [
        "",
        f"or open http://127.0.0.1:{ports.tcp}/ in a browser. Ctrl-C stops all of it.",
        "",
    ]
    return lines


def program() -> str:
    """Our command as the reader must type it."""
    path = Path(sys.executable).parent / "polybus"
    on_path = shutil.which("polybus")
    if on_path is not None and Path(on_path).resolve() == path.resolve():
        return "polybus"
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def queue_topic(config: Config) -> str:
    return next((one.topic or "" for one in config.connectors if "queue" in one.protocols), "")
