"""A bus without a network, on a read-only system: all it needs is its data folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import environment

SPACES = ("unshare", "--map-root-user", "--net", "--mount")
MOUNTS = 'mount --bind "$1" "$1" && mount -o remount,bind,ro / && shift && exec "$@"'
INSIDE = """
import errno, fcntl, os, socket, struct
from pathlib import Path
from cli_kit import polybus, serve
from polybus.client.http.blocking import request_json

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
with socket.socket() as any_socket:
    assert any_socket.connect_ex(("192.0.2.1", 80)) == errno.ENETUNREACH
assert os.statvfs("/").f_flag & os.ST_RDONLY

def done(*arguments):
    found = polybus(*arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout.decode().split()

data = Path.cwd() / "data"
with serve(data, "news") as bus:
    for url in (bus.url(), bus.url("http")):
        done("publish", "news", "hello", "--receipt", "--url", url)
        read = done("tail", "news", "--from", "earliest", "--count", "1", "--url", url)
        assert read == ["hello"], read
    rows = done("sql", "SELECT text(value) AS v, count(*) AS n FROM news GROUP BY 1", "--csv",
                "--data", str(data))
    assert rows == ["v,n", "hello,2"], rows
    found = request_json(bus.url("http"), "POST", "/v1/sql", {"query": "SELECT 1 FROM news"})
    assert found["rows"] == [[1], [1]], found
print("all is well")
"""


def test_a_bus_works_without_a_network_on_a_read_only_system(tmp_path: Path) -> None:
    allowed = subprocess.run([*SPACES, "true"], capture_output=True, check=False)
    if allowed.returncode != 0:
        text = f"no namespaces here: {allowed.stderr.decode().strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    here = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*SPACES, "sh", "-c", MOUNTS, "sh", str(tmp_path), sys.executable, "-c", INSIDE],
        cwd=tmp_path,
        env=environment(PYTHONPATH=os.pathsep.join(here), **own),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "all is well\n", done.stderr
