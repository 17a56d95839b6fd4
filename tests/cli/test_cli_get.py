"""`polybus publish --file` of a large file and `polybus get`, through the real commands."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import COMMAND, ServedBus, environment, polybus, serve
from docs_kit import run_by

from polybus.cli import get  # noqa: F401  this is what is tested

PAGE = "docs/howto/large-payloads.md"
EPOCH = re.compile(r"\b\d{13,16}\b")
LARGE = bytes(range(256)) * 10_000
ID = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBus]:
    with serve(tmp_path_factory.mktemp("data"), "films", "reels") as served:
        yield served


def test_a_large_file_is_published_and_downloaded(bus: ServedBus, tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(LARGE)
    done = polybus("publish", "reels", "--file", str(film), "--url", bus.url())
    assert done.returncode == 0, done.stderr
    position, blob_id = done.stdout.decode().split()
    assert position.endswith(":0") and blob_id == ID
    again = polybus("publish", "reels", "--file", str(film), "--json", "--url", bus.url("goms"))
    printed = json.loads(again.stdout)
    assert printed["reference"] == {"id": ID, "size": len(LARGE), "type": "video/mp4"}

    copy = tmp_path / "copy.mp4"
    Path(f"{copy}.part").write_bytes(LARGE[:12345])
    got = polybus("get", ID, "--output", str(copy), "--url", bus.url())
    assert (got.returncode, got.stdout) == (0, b""), got.stderr
    assert copy.read_bytes() == LARGE
    assert str(len(LARGE)) in got.stderr.decode()
    named = polybus("get", ID, "--json", "--output", str(copy), "--url", bus.url("http"))
    assert json.loads(named.stdout) == {"id": ID, "file": str(copy), "bytes": len(LARGE)}


def test_an_upload_of_a_killed_command_continues_after_a_kill_of_the_bus(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(LARGE * 20)
    arriving = tmp_path / "data/accounts/default/blobs"
    command = [*COMMAND, "publish", "films", "--file", str(film)]
    with serve(tmp_path / "data", "films", killed=True) as first:
        with subprocess.Popen([*command, "--url", first.url()]) as publishing:
            while not any(path.stat().st_size for path in arriving.glob("unfinished-*/content")):
                assert publishing.poll() is None
                time.sleep(0.001)
            publishing.kill()
        first.process.kill()
    [content] = arriving.glob("unfinished-*/content")
    kept = content.stat().st_size
    assert 0 < kept < len(LARGE) * 20
    with serve(tmp_path / "data", "films") as second:
        with Counted(second.port) as counted:
            url = f"http://127.0.0.1:{counted.port}"
            done = polybus("publish", "films", "--file", str(film), "--url", url)
        assert done.returncode == 0, done.stderr
        assert counted.sent_bytes < len(LARGE) * 20 - kept + 10_000
        assert os.listdir(arriving) == [done.stdout.decode().split()[1]]


class Counted:
    """Forwards connections to a port, and counts the bytes that are sent there."""

    def __init__(self, target_port: int) -> None:
        self.sent_bytes = 0
        self._target_port = target_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve)]

    def __enter__(self) -> Counted:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # The server is closed.
            while True:
                client, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._forward, args=[client]))
                self._threads[-1].start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target_port)) as bus:
            while True:
                for ready in select.select([client, bus], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    (bus if ready is client else client).sendall(data)
                    self.sent_bytes += len(data) * (ready is client)


def test_an_unknown_id_is_an_error_with_advice(bus: ServedBus, tmp_path: Path) -> None:
    target = tmp_path / "none"
    got = polybus("get", "0" * 64, "--output", str(target), "--url", bus.url())
    assert got.returncode != 0 and b"blob.unknown" in got.stderr
    assert not target.exists()


def test_the_page_shows_what_the_commands_print(bus: ServedBus, tmp_path: Path) -> None:
    for verb in (["delete", "--yes"], ["create"]):
        done = polybus("topics", *verb, "films", "--data", str(bus.data))
        assert done.returncode == 0, done.stderr
    path = f"{Path(COMMAND[0]).parent}:{os.environ['PATH']}"
    blocks = [one for one in run_by("cli/test_cli_get.py", PAGE) if one.kind == "console"]
    shown = [line for block in blocks for line in block.text.splitlines()]
    commands = [line for line in shown if line.startswith("$ ")]
    printed = []
    for command in commands:
        text = command.removeprefix("$ ").replace("55545", str(bus.port))
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=tmp_path,
            env=environment(PATH=path, POLYBUS_URL=bus.url()),
            capture_output=True,
            timeout=40,
            check=True,
        )
        printed += [command, *(done.stdout + done.stderr).decode().splitlines()]
    assert [EPOCH.sub("EPOCH", line) for line in printed] == [
        EPOCH.sub("EPOCH", line) for line in shown
    ]


# In place of the first upload: one that is interrupted.
BREAKS_OFF = """
curl() { unset -f curl; python "$BREAKS" "$2" "$3"; }
"""
UPLOAD = """
import pathlib, socket, sys, urllib.parse
content = pathlib.Path(sys.argv[1]).read_bytes()
url = urllib.parse.urlsplit(sys.argv[2])
head = f"PUT {url.path}?{url.query} HTTP/1.1\\r\\nhost: {url.netloc}\\r\\n"
with socket.create_connection((url.hostname, url.port)) as upload:
    upload.sendall(f"{head}content-length: {len(content)}\\r\\n\\r\\n".encode())
    upload.sendall(content[: 2 << 20])
    upload.shutdown(socket.SHUT_WR)
    while upload.recv(4096):
        pass
"""


def test_an_upload_that_broke_off_goes_on_as_the_page_says(bus: ServedBus, tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(UPLOAD)
    (tmp_path / "film.mp4").write_bytes(LARGE)
    (block,) = [one for one in run_by("cli/test_cli_get.py", PAGE) if one.kind == "sh"]
    path = f"{Path(COMMAND[0]).parent}:{os.environ['PATH']}"
    # What is still on its way when the connection breaks may be lost.
    script = f"{BREAKS_OFF}{block.text}\necho; echo $there".replace("55545", str(bus.port))
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env=environment(PATH=path, BREAKS=str(tmp_path / "breaks.py")),
        capture_output=True,
        timeout=40,
        check=True,
    )
    published, there = done.stdout.decode().splitlines()
    assert 0 < int(there) <= 2 << 20
    assert json.loads(published)["reference"]["id"] == ID, done.stdout
