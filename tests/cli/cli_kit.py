"""What the command line's tests share: the real command, and a real bus beside it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COMMAND = [sys.executable, "-m", "polybus.cli"]


def environment(**extra: str) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("POLYBUS_")}
    return clean | extra


def polybus(
    *arguments: str, stdin: bytes = b"", cwd: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        timeout=40,
        cwd=cwd,
        env=environment(**extra),
        check=False,
    )


class ServedBus:
    """A bus that runs as `polybus serve`."""

    def __init__(self, process: subprocess.Popen[bytes], data: Path, port: int) -> None:
        self.process = process
        self.data = data
        self.port = port

    def url(self, scheme: str = "boson") -> str:
        return f"{scheme}://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serve(data: Path, *topics: str, killed: bool = False) -> Iterator[ServedBus]:
    """Run the bus on a free port until the block ends; it must end cleanly, unless it is killed."""
    options = [word for topic in topics for word in ("--topic", topic)]
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--data", str(data), *options],
        stdout=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            found = re.search(r"ready.*tcp://127\.0\.0\.1:(\d+)", line)
            assert found, f"no ready line: {line!r}"
            yield ServedBus(process, data, int(found[1]))
        finally:
            process.terminate()
            code = process.wait(20)
        assert code == (-signal.SIGKILL if killed else 0)
