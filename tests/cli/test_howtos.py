"""The commands and programs of the how-to pages run as they are written.

Each page is followed in a folder with a `.venv` that is activated and a bus that runs there. Only
the port differs. A block that cannot run here has a comment before it, `<!-- not run: why -->`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cli_kit import environment
from docs_kit import CODE, FOLLOWED, ROOT, RUNNERS, Block, blocks_of, pages, run_by
from quarantine_kit import quarantine

import polybus
from polybus import config_file
from polybus.config import Config

TOPICS = ["news", "sport", "orders", "orders-test", "orders-copy", "shop/orders"]
# Folders of a service, in place of which the test has its own.
FOLDERS = {"/var/lib/polybus": "polybus-data", "/backups": "backups"}
PASSWORD = "correct-horse-battery"
PROMPT = re.compile(r"^(?:Password|Repeat for confirmation): ", re.MULTILINE)
POLL_S = 0.05
# The epoch that a page shows, and that a topic has here.
EPOCH = "1795010653152"
ENDLESS_S = 1.0
TIMEOUT_S = 60
NOT_RUN_MAX = 8


class Followed:
    """A folder with a bus, as the pages suppose it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._words = {**FOLDERS, "55545": str(port)}
        self.port = port
        bin_folder = Path(sys.executable).parent
        (folder / "film.mp4").write_bytes(bytes(2 << 20))
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(bin_folder)
        self._environment = environment(
            PATH=f"{folder}/.venv/bin:{os.environ['PATH']}",
            POLYBUS_URL=f"boson://127.0.0.1:{port}",
            PASSWORD=PASSWORD,
            HOME=str(folder),
            HTTP=f"http://127.0.0.1:{port}/v1/consumers",
        )
        self.use_account()
        reported = self.sh("curl -X PUT -H 'content-type: application/json' -d '{}' $HTTP/orders")
        assert reported.returncode == 0
        lines = "".join(f"echo '{{\"id\": {n}}}';" for n in range(10))
        sent = self.sh(f"({lines}) | polybus publish orders --lines --receipt")
        assert sent.returncode == 0, sent.stderr
        epoch = json.loads(self.sh("polybus topics describe orders --json").stdout)["epoch"]
        self._words[EPOCH] = str(epoch)
        quarantine(folder / "polybus-data", "orders", [b"{"], "json: at 1")

    def use_account(self) -> None:
        """Make the account `shop`, if it is not there, with its topic and a token."""
        self.sh('printf "%s" "$PASSWORD" | polybus accounts create shop --password-stdin')
        self.sh("polybus topics create shop/orders")
        token = self.sh("polybus accounts token create shop")
        assert token.returncode == 0, token.stderr
        self._environment["TOKEN"] = token.stdout.split()[-1]

    @contextlib.contextmanager
    def without_account(self) -> Iterator[None]:
        """For the page that makes it."""
        assert self.sh("polybus accounts delete shop --yes").returncode == 0
        try:
            yield
        finally:
            self.sh("polybus login --out")
            self.use_account()

    def sh(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run commands, and type the password when they ask; what still runs then ends."""
        for one, ours in self._words.items():
            text = text.replace(one, ours)
        command = ["bash", "-e", "-o", "pipefail", "-c", text]
        with open(self.folder / "out", "w+") as out, open(self.folder / "errors", "w+") as errors:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.PIPE if "asks for" in text else subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                # Without a terminal, passwords are read from the input.
                start_new_session=True,
            )
            try:
                self._type_passwords(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait(TIMEOUT_S)
            said = [(self.folder / one).read_text() for one in ("out", "errors")]
        return subprocess.CompletedProcess(command, process.returncode, *said)

    def _type_passwords(self, process: subprocess.Popen[bytes]) -> None:
        typed, until_s = 0, time.monotonic() + TIMEOUT_S
        while process.stdin is not None and process.poll() is None:
            asked = len(PROMPT.findall((self.folder / "errors").read_text()))
            # One line for each question: a program may read ahead.
            process.stdin.write(f"{PASSWORD}\n".encode() * (asked - typed))
            process.stdin.flush()
            typed = asked
            assert time.monotonic() < until_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        process.wait(TIMEOUT_S)
        if process.stdin is not None:
            process.stdin.close()

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
    # The page of accounts supposes that people may sign up.
    given = environment(POLYBUS_ACCOUNTS='{"signup": true}')
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, env=given) as bus:
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
    with followed.without_account() if name == "accounts" else contextlib.nullcontext():
        follow(followed, page)


def follow(followed: Followed, page: str) -> None:
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
