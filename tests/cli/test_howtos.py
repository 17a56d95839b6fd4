"""The commands and programs of the how-to pages run as they are written.

Each page is followed in a folder with a `.venv` that is activated and a bus that runs there. Only
the port differs. A block that cannot run here has a comment before it, `<!-- not run: why -->`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cli_kit import environment
from docs_kit import CODE, FOLLOWED, ROOT, RUNNERS, Block, blocks_of, pages, run_by

import polybus
from polybus import config_file
from polybus.config import Config

TOPICS = ["news", "sport", "orders", "orders-test", "orders-copy", "shop/orders"]
# Folders of a service, in place of which the test has its own.
FOLDERS = {"/var/lib/polybus": "polybus-data", "/backups": "backups"}
ENDLESS_S = 1.0
TIMEOUT_S = 60
NOT_RUN_MAX = 19


class Followed:
    """A folder with a bus, as the pages suppose it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        bin_folder = Path(sys.executable).parent
        (folder / "film.mp4").write_bytes(bytes(2 << 20))
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(bin_folder)
        self._environment = environment(
            PATH=f"{folder}/.venv/bin:{os.environ['PATH']}",
            POLYBUS_URL=f"boson://127.0.0.1:{port}",
            PASSWORD="correct-horse-battery",
            HOME=str(folder),
            HTTP=f"http://127.0.0.1:{port}/v1/consumers",
        )
        made = self.sh('printf "%s" "$PASSWORD" | polybus accounts create shop --password-stdin')
        assert made.returncode == 0, made.stderr
        self.sh("polybus topics create shop/orders")
        token = self.sh("polybus accounts token create shop").stdout.split()[-1]
        self._environment["TOKEN"] = token
        reported = self.sh("curl -X PUT -H 'content-type: application/json' -d '{}' $HTTP/orders")
        assert reported.returncode == 0
        self.sh("for n in 1 2 3; do polybus publish orders '{\"id\": 1}' --receipt; done")

    def sh(self, text: str) -> subprocess.CompletedProcess[str]:
        for one, ours in FOLDERS.items():
            text = text.replace(one, ours)
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text.replace("55545", str(self.port))],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def python(self, text: str, before: dict[str, object]) -> None:
        """Run a program, or lines of one in which the page has connected already."""
        text = text.replace("127.0.0.1:55545", "127.0.0.1").replace(
            "127.0.0.1", f"127.0.0.1:{self.port}"
        )
        is_endless = "async for" in text or "events.run()" in text
        seconds = ENDLESS_S if is_endless else TIMEOUT_S
        if "asyncio.run(" in text:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = [sys.executable, "-c", text]
                done = subprocess.run(command, timeout=2 * seconds, env=self._environment)
                assert done.returncode == 0
            return
        code = compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

        async def run() -> None:
            result = eval(code, before)
            if asyncio.iscoroutine(result):
                await asyncio.wait_for(result, seconds)

        try:
            asyncio.run(run())
        except TimeoutError:
            assert is_endless


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    folder = tmp_path_factory.mktemp("howto")
    command = [sys.executable, "-m", "polybus.cli", "serve", "--port", "0"]
    for topic in TOPICS[:-1]:
        command += ["--topic", topic]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, env=environment()) as bus:
        assert bus.stdout is not None
        try:
            port = re.search(rb"tcp://127\.0\.0\.1:(\d+)", bus.stdout.readline())
            assert port is not None
            yield Followed(folder, int(port[1]))
        finally:
            bus.terminate()
            bus.wait(20)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOLLOWED, "monitor"])
def test_the_commands_of_a_page_work_in_its_order(
    followed: Followed, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(followed.folder)
    page = f"docs/howto/{name}.md"
    # What another page has published there need not be text.
    followed.sh("polybus topics delete news --yes && polybus topics create news")
    names: dict[str, object] = {"polybus": polybus}
    for block in run_by("cli/test_howtos.py", page):
        if block.kind == "sh":
            done = followed.sh(block.text)
            place = f"{page}:{block.line}"
            assert done.returncode == 0, f"{place}: {done.stdout}{done.stderr}"
            assert '"code":' not in done.stdout, f"{place}: {done.stdout}"
        else:
            followed.python(block.text, names)


def all_blocks() -> list[tuple[Path, Block]]:
    return [(page, block) for page in pages() for block in blocks_of(page)]


def test_settings_on_the_pages_are_settings(tmp_path: Path) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(Config)}
    for page, block in all_blocks():
        if block.kind == "toml" and set(tomllib.loads(block.text)) <= known:
            path = tmp_path / "page.toml"
            path.write_text(block.text)
            try:
                config_file.load(path, {})
            except Exception as error:
                pytest.fail(f"{page.name}:{block.line}: {error}")


def test_json_on_the_pages_is_json() -> None:
    for page, block in all_blocks():
        if block.kind == "json":
            try:
                # One value, or one in each line.
                msgspec.json.Decoder().decode_lines(block.text.replace("\n}\n", "}\n"))
            except msgspec.DecodeError as error:
                pytest.fail(f"{page.name}:{block.line}: {error}")


def test_every_block_says_its_kind() -> None:
    kinds = {*CODE, "text", "toml", "json"}
    unknown = [f"{page.name}:{b.line}" for page, b in all_blocks() if b.kind not in kinds]
    assert unknown == []


def test_all_code_is_run_or_says_why_it_is_not() -> None:
    every_page = {*pages(), *(ROOT / "docs").rglob("*.md")}
    missed = []
    for page in sorted(every_page):
        name = page.relative_to(ROOT).as_posix()
        runners = [one for one in RUNNERS if one.page == name]
        code = [block for block in blocks_of(page) if block.kind in CODE and block.is_run]
        not_run = [block for block in code if not any(one.runs(block) for one in runners)]
        missed += [f"{name}:{block.line}" for block in not_run]
    assert missed == [], "add a runner to docs_kit.RUNNERS, or a comment `not run: why`"
    left_out = [block for _, block in all_blocks() if not block.is_run]
    assert all(len(block.mark) > len("not run: why") for block in left_out)
    assert len(left_out) <= NOT_RUN_MAX


def test_who_is_said_to_run_a_page_takes_its_blocks() -> None:
    for one in RUNNERS:
        assert run_by(one.test, one.page)
        assert f'run_by("{one.test}"' in (ROOT / "tests" / one.test).read_text(), one
