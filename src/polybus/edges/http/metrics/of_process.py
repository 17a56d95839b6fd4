"""Metrics of the process, its build and its disk, and histograms, for /metrics.

Those of the process have the names that Prometheus' own clients give them.
"""

import contextlib
import os
import platform
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from polybus import scan
from polybus.log.journal.timings import BOUNDS_S, Timings
from polybus.processes import memory_bytes
from polybus.version import __version__

Labels = dict[str, str]
Sample = tuple[Labels, float]
Family = tuple[str, str, str, Iterable[Sample]]
_STARTED_S = time.time()


def process_families() -> Iterator[Family]:
    """CPU, memory, open files and the start of this process."""
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = cpu.ru_utime + cpu.ru_stime
    yield "process_cpu_seconds_total", "counter", "CPU time.", [({}, spent_s)]
    reserved, resident = memory_bytes()
    if resident:
        yield "process_resident_memory_bytes", "gauge", "Memory in use.", [({}, resident)]
        yield "process_virtual_memory_bytes", "gauge", "Memory reserved.", [({}, reserved)]
    with contextlib.suppress(OSError):
        files = len(os.listdir("/proc/self/fd"))
        yield "process_open_fds", "gauge", "Open files and sockets.", [({}, files)]
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield "process_max_fds", "gauge", "Open files and sockets allowed.", [({}, files_max)]
    yield "process_start_time_seconds", "gauge", "Start, since 1970.", [({}, _STARTED_S)]


def build_family() -> Family:
    build = {
        "version": __version__,
        "python": platform.python_version(),
        "scanner": "compiled" if scan.COMPILED else "pure",
    }
    return "polybus_build_info", "gauge", "1; its labels describe the build.", [(build, 1.0)]


def disk_families(data: Path) -> list[Family]:
    """The space of the data folder. Reads the disk: not for the event loop's thread."""
    free, total, journal = 0.0, 0.0, 0
    with contextlib.suppress(OSError):
        disk = os.statvfs(data)
        free, total = float(disk.f_bavail * disk.f_frsize), float(disk.f_blocks * disk.f_frsize)
        journal = sum(one.stat().st_size for one in os.scandir(data / "journal"))
    return [
        ("polybus_disk_free_bytes", "gauge", "Free space of the data folder.", [({}, free)]),
        ("polybus_disk_total_bytes", "gauge", "Size of the data folder's disk.", [({}, total)]),
        ("polybus_journal_bytes", "gauge", "Size of the journal.", [({}, float(journal))]),
    ]


def histogram(name: str, text: str, timings: Timings) -> list[str]:
    """The lines of a histogram; `le` counts everything up to its bound."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
    counts, seen = list(timings.counts), 0
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), counts, strict=True):
        seen += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
    return [*lines, f"{name}_sum {timings.total_s:.6f}", f"{name}_count {seen}"]
