"""Describes the machine on which figures were measured."""

import os
import platform
import re
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from statistics import median

from polybus import scan
from polybus.bench.brokers import BenchBroker
from polybus.log.disk import Disk

VERSION_TIMEOUT_S = 5.0
SYNC_BYTES = 1 << 20
SYNC_COUNT = 40
COMMIT_BYTES = 1520


def describe(brokers: dict[str, BenchBroker], data_root: Path | None) -> dict[str, str]:
    """The machine, the versions, and where the data is stored, as names and texts."""
    folder = data_root or Path(tempfile.gettempdir())
    kind = _file_system(folder)
    facts = {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "polybus": metadata.version("polybus"),
        "scanner": "compiled" if scan.COMPILED else "pure Python (slow: see `polybus doctor`)",
        "data": f"{folder} ({kind})"
        + (": in memory, so fsync costs nothing; use --data-root" if kind == "tmpfs" else ""),
    }
    for broker in brokers.values():
        if broker.package is not None:
            facts[broker.program] = _version(broker)
    return facts


def sync_ms(folder: Path | None, size: int = SYNC_BYTES, count: int = SYNC_COUNT) -> float:
    """The median time to write and fsync `size` bytes, in milliseconds.

    It bounds the log and receipts. On a shared disk it varies, so the report shows it from before
    and after the benchmark.
    """
    content = os.urandom(size)
    taken = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(count):
            began = time.perf_counter()
            file.write(content)
            os.fsync(file.fileno())
            taken.append(1000 * (time.perf_counter() - began))
    return median(taken)


def commit_times_us(folder: Path | None, rate_per_s: int, run_s: float) -> list[float]:
    """How long the disk takes for commits of one message, at this rate; sorted.

    The journal's own code writes as many bytes as it writes for a message of 100 bytes, and syncs.
    """
    content = os.urandom(COMMIT_BYTES)
    taken = []
    with tempfile.TemporaryDirectory(prefix="polybus-bench-", dir=folder) as own:
        file = Disk().open(Path(own) / "commits")
        start = time.perf_counter()
        for number in range(max(1, int(rate_per_s * run_s))):
            time.sleep(max(0.0, start + number / rate_per_s - time.perf_counter()))
            began = time.perf_counter()
            file.append(content)
            file.sync()
            taken.append(1e6 * (time.perf_counter() - began))
        file.close()
    return sorted(taken)


def _version(broker: BenchBroker) -> str:
    program = broker.find()
    if program is None:
        return f"not installed (apt-get install {broker.package})"
    # mosquitto prints its version only at the beginning of its help.
    flag = "-h" if broker.program == "mosquitto" else "--version"
    done = subprocess.run(
        [program, flag], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
    )
    found = re.search(r"\d+\.\d+[.\d]*", done.stdout + done.stderr)
    return found[0] if found else "of unknown version"


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _file_system(folder: Path) -> str:
    """The file system of a folder: that of the longest mount point that contains it."""
    path = folder.resolve()
    best, kind = -1, "unknown"
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        _, mount, mount_kind, *_ = line.split(" ")
        # The later of two mounts on the same point is visible.
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), mount_kind
    return kind
