"""The console's files: what a browser may keep and run, and where the bundles come from."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_kit import Http, http_bus

from polybus.edges.http import console_files

ROOT = Path(__file__).parent.parent.parent
CONSOLE = ROOT / "src" / "polybus" / "edges" / "http" / "console"
FIRST_LOAD_BYTES_MAX = 130 << 10
# Loaded when a page needs them.
LAZY = {"codemirror.js", "dagre.js", "flechette.js", "NOTICE.txt"}


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with http_bus() as http:
        yield http


def imported(name: str) -> set[str]:
    """A module and everything that it imports when it is loaded."""
    found, waiting = set(), [name]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            text = (CONSOLE / path).read_text()
            for target in re.findall(r'from "(\.[^"]+)"', text):
                other = (CONSOLE / path).parent / target
                waiting.append(os.path.relpath(other.resolve(), CONSOLE))
    return found


def test_the_first_load_is_small() -> None:
    first = {"index.html", "console.css", "icon.svg", "vendor/uplot.css", "vendor/geist.woff2"}
    first |= imported("main.js") | imported("pages/overview.js")
    size = sum(len(gzip.compress((CONSOLE / one).read_bytes())) for one in first)
    assert size < FIRST_LOAD_BYTES_MAX
    assert not {Path(one).name for one in first} & LAZY


def test_every_module_imports_files_that_exist() -> None:
    for path in CONSOLE.rglob("*.js"):
        if path.parent.name != "vendor":
            for target in re.findall(r'(?:from|import\() ?"(\.[^"]+)"', path.read_text()):
                assert (path.parent / target).is_file(), f"{path.name} imports {target}"


def test_no_module_makes_html_of_text_or_names_another_server() -> None:
    for path in CONSOLE.rglob("*.js"):
        text = path.read_text()
        assert "eval(" not in text.replace("interval(", ""), path
        if path.parent.name != "vendor":
            assert not re.search("innerHTML|dangerouslySet|insertAdjacent|https?://", text), path


def region(text: str, start: int) -> int:
    """Where the brackets that open at `start` are closed."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if not depth:
            return at + 1
    raise AssertionError(f"not closed: {text[start : start + 80]}")


def unguarded(text: str) -> str:
    """What is in components and hooks, without what shows its own failure."""
    components = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    start = r"(export )?(default )?(function|const) ([A-Z]|use[A-Z])"
    left = "".join(one for one in components if re.match(f"{start}|export default", one))
    while found := re.search(r"use(?:Action|Load)(?=\()|act=\$(?=\{)|\btry (?=\{)", left):
        left = left[: found.start()] + left[region(left, found.end()) :]
    return left


def test_whatever_a_component_asks_of_the_bus_shows_why_it_failed() -> None:
    """By useAction, useLoad, the dialog that confirms, or a try of its own."""
    modules = {path: path.read_text() for path in CONSOLE.rglob("*.js") if path.name != "api.js"}
    modules = {path: text for path, text in modules.items() if path.parent.name != "vendor"}
    calls = {"get", "post", "put", "patch", "remove", "ask", "download", "logIn", "logInByToken"}
    for text in modules.values():
        if "api.js" in text:
            calls |= set(re.findall(r"^(?:export )?async function (\w+)", text, re.MULTILINE))
    called = re.compile(
        rf"(?<![.\w])({'|'.join(calls)})\(|on[A-Z]\w*=\$\{{(?:async|{'|'.join(calls)})\b"
    )
    found = {path.name: called.findall(unguarded(text)) for path, text in modules.items()}
    assert {name: names for name, names in found.items() if names} == {}
    assert called.search(unguarded("function Button() {\n  const act = () => post(1);\n}\n"))
    assert not called.search(unguarded("function Button() {\n  useAction(() => post(1));\n}\n"))


async def test_the_page_is_asked_for_each_time_and_its_files_are_kept(http: Http) -> None:
    page = await http.client.get("/console/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache"
    again = await http.client.get("/console/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")

    for path in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        file = await http.client.get(path)
        assert file.status_code == 200, path
        assert "immutable" in file.headers["cache-control"]


async def test_the_address_of_the_bus_alone_leads_to_the_console(http: Http) -> None:
    for path in ("/", "/console"):
        answer = await http.client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, "/console/")


async def test_only_the_consoles_own_files_style_and_run_it(http: Http) -> None:
    page = await http.client.get("/console/topics")
    script = await http.client.get(f"/console/{console_files.digest()}/main.js")
    for answer in (page, script):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "<style" not in page.text and "<script>" not in page.text


@pytest.mark.parametrize("path", ["old/main.js", "{digest}/nothing.js", "{digest}/%2e%2e/app.py"])
async def test_a_file_that_is_not_the_consoles_is_not_found(http: Http, path: str) -> None:
    answer = await http.client.get(f"/console/{path.format(digest=console_files.digest())}")
    assert answer.status_code == 404


async def test_a_file_is_sent_compressed_to_those_who_take_it(http: Http) -> None:
    path = f"/console/{console_files.digest()}/vendor/preact.js"
    packed = await http.client.get(path, headers={"accept-encoding": "gzip"})
    plain = await http.client.get(path, headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < len(plain.content) / 2


def test_the_notice_names_every_bundled_package_and_its_licence() -> None:
    locked = json.loads((ROOT / "vendor" / "package-lock.json").read_text())["packages"]
    bundled: set[str] = set()
    waiting = locked[""]["devDependencies"].keys() - {"axe-core", "esbuild"}
    while waiting:
        name = waiting.pop()
        bundled.add(name)
        waiting |= locked[f"node_modules/{name}"].get("dependencies", {}).keys() - bundled
    notice = (CONSOLE / "vendor" / "NOTICE.txt").read_text()
    named = re.findall(r"^(\S+) ([\d.]+), licence (\S+)$", notice, re.MULTILINE)
    packages = {name: locked[f"node_modules/{name}"] for name in bundled}
    assert sorted(named) == sorted(
        (name, package["version"], package["license"]) for name, package in packages.items()
    )


@pytest.mark.slow
def test_the_lock_file_gives_the_same_bundles_byte_for_byte(tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        text = "Node.js and npm are missing; on Debian: apt-get install nodejs npm"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    work = tmp_path / "vendor"
    shutil.copytree(ROOT / "vendor", work, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "ci", "--ignore-scripts", "--no-fund", "--no-audit"]
    subprocess.run(install, cwd=work, check=True, capture_output=True)
    subprocess.run(["node", "build.js", str(tmp_path / "made")], cwd=work, check=True)

    made = {one.name: one.read_bytes() for one in (tmp_path / "made").iterdir()}
    assert made == {one.name: one.read_bytes() for one in (CONSOLE / "vendor").iterdir()}
