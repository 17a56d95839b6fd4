"""One large payload through the bus, beside `cp` and nginx with the same file: bytes per second.

All write to the same disk and sync, except nginx, which does not sync. Each GET
is read to its end and not stored. `grown` is how much the bus grew at most meanwhile.
"""

import http.client
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from polybus.bench import BenchError
from polybus.bench.brokers import HOST, BenchBroker, RunningBroker, bus, running
from polybus.bench.report import NOT_INSTALLED, BenchFigure, Target, medians

TOPIC = "large"
SIZE = 1 << 30
QUICK_SIZE = 64 << 20
PIECE_BYTES = 1 << 20
GROWTH_MIB_MAX = 64.0
NGINX_RATIO = 0.5
TIMEOUT_S = 300.0
_NGINX = (
    # Its workers would be another user, who may not write to our folder.
    ("user root;\n" if os.getuid() == 0 else "")
    + "daemon off;\nworker_processes 1;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log;\n"
    "events {}\nhttp {\n  access_log off;\n  client_max_body_size 0;\n"
    "  client_body_temp_path {folder}/body;\n  proxy_temp_path {folder}/proxy;\n"
    "  fastcgi_temp_path {folder}/fastcgi;\n  uwsgi_temp_path {folder}/uwsgi;\n"
    "  scgi_temp_path {folder}/scgi;\n  sendfile on;\n"
    "  server {\n    listen 127.0.0.1:{port};\n    root {folder}/files;\n"
    "    dav_methods PUT;\n  }\n}\n"
)
NGINX = BenchBroker(
    "nginx", "http", "-c {config} -p {folder}", _NGINX, program="nginx", package="nginx"
)


def run_blob_bench(
    data_root: Path | None, *, size: int, rounds: int, tell: Callable[[str], object]
) -> list[BenchFigure]:
    """Measure PUT and GET of a file of this size. Raises BenchError."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory(prefix="polybus-bench-", dir=data_root)))
        source = root / "source"
        _make_file(source, size)
        folders = {name: root / name for name in ("bus", "nginx")}
        for folder in folders.values():
            folder.mkdir()
        server = stack.enter_context(running(_bus(), folders["bus"], [TOPIC]))
        puts: dict[str, Callable[[], float]] = {"polybus": partial(_put_bus, server, source)}
        gets: dict[str, Callable[[], float]] = {}
        _put_bus(server, source)
        gets["polybus"] = partial(_get, server.port, _blob_path(server))
        puts["cp"] = partial(_copy, source, root / "copy")
        if NGINX.find() is not None:
            (folders["nginx"] / "files").mkdir()
            nginx = stack.enter_context(running(NGINX, folders["nginx"], []))
            puts["nginx"] = partial(_put, nginx.port, "/file", source)
            _put(nginx.port, "/file", source)
            gets["nginx"] = partial(_get, nginx.port, "/file")
        _forget_peak(server.pid)
        before_kib = _status_kib(server.pid, "VmRSS")
        shown = f"{size / (1 << 20):,.0f} MiB"
        figures = _figures(f"PUT {shown}", medians(puts, rounds, tell, work="PUT"), size)
        figures += _figures(f"GET {shown}", medians(gets, rounds, tell, work="GET"), size)
        grown_mib = (_status_kib(server.pid, "VmHWM") - before_kib) / 1024
        target = Target(value=GROWTH_MIB_MAX, absolute=True)
        growth = BenchFigure(
            work=f"growth, {shown}", who="polybus", value=grown_mib, unit="MiB", target=target
        )
        return [*figures, growth]


def run_count(rounds: int) -> int:
    """How many runs `run_blob_bench` makes."""
    return rounds * (5 if NGINX.find() is not None else 3)


def _bus() -> BenchBroker:
    connectors = [{"protocol": "tcp", "ip": HOST, "port": 0, "speaks": "http"}]
    limits = {"message-bytes-max": 1 << 31}
    return bus("polybus", limits=limits, durability="fsync", connectors=connectors)


def _figures(work: str, taken_s: dict[str, float], size: int) -> list[BenchFigure]:
    figures = []
    for who, seconds in taken_s.items():
        rate = size / seconds
        is_nginx = who == "nginx"
        figures.append(
            BenchFigure(
                work=work,
                who=who,
                value=seconds,
                unit="s",
                # By speed, not by time: more is better.
                ratio=None if who == "polybus" else seconds / taken_s["polybus"],
                target=Target(value=NGINX_RATIO, at_least=True) if is_nginx else None,
                note=f"{rate / 1e6:,.0f} MB/s",
            )
        )
    if "nginx" not in taken_s:
        missing = f"{NOT_INSTALLED}: apt-get install nginx"
        figures.append(BenchFigure(work=work, who="nginx", value=None, unit="s", error=missing))
    return figures


def _make_file(path: Path, size: int) -> None:
    """A file that no layer can compress or leave out."""
    piece = os.urandom(PIECE_BYTES)
    with path.open("wb") as file:
        for number in range(size // PIECE_BYTES):
            # Another content in each piece, without the cost of random bytes.
            file.write(number.to_bytes(8, "big") + piece[8:])


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _copy(source: Path, target: Path) -> float:
    def copy() -> None:
        with source.open("rb") as read, target.open("wb") as written:
            shutil.copyfileobj(read, written, PIECE_BYTES)
            written.flush()
            os.fsync(written.fileno())

    return _timed(copy)


def _put_bus(server: RunningBroker, source: Path) -> float:
    return _put(server.port, f"/v1/topics/{TOPIC}/blob", source)


def _put(port: int, path: str, source: Path) -> float:
    def put() -> None:
        caller = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S, blocksize=PIECE_BYTES)
        with closing(caller), source.open("rb") as file:
            head = {"content-length": str(source.stat().st_size)}
            caller.request("PUT", path, file, head)
            answer = caller.getresponse()
            answer.read()
            if answer.status >= 300:
                raise BenchError(f"PUT {path} was answered with {answer.status}")

    return _timed(put)


def _get(port: int, path: str) -> float:
    def get() -> None:
        caller = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
        with closing(caller):
            caller.request("GET", path)
            answer = caller.getresponse()
            if answer.status != 200:
                raise BenchError(f"GET {path} was answered with {answer.status}")
            room = bytearray(PIECE_BYTES)
            while answer.readinto(room):
                pass

    return _timed(get)


def _blob_path(server: RunningBroker) -> str:
    caller = http.client.HTTPConnection(HOST, server.port, timeout=TIMEOUT_S)
    with closing(caller):
        caller.request("GET", f"/v1/topics/{TOPIC}/messages?offset=0&limit=1")
        read = msgspec.json.decode(caller.getresponse().read())
    return f"/v1/blobs/{read['messages'][0]['reference']['id']}"


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_kib(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])
