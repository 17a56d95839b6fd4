"""`polybus doctor`, `polybus config`, and what all verbs have in common."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from cli_kit import environment, polybus, serve

from polybus import cli as polybus_cli
from polybus.cli import VERBS, doctor, main
from polybus.cli.common import output
from polybus.cli.common.exits import failure
from polybus.cli.config import as_toml
from polybus.cli.reference import pages
from polybus.errors import ConfigError, UsageError


def diagnosed(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = polybus("doctor", "--json", *arguments)
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)}


def free_config(tmp_path: Path, port: int = 0) -> str:
    path = tmp_path / "bus.json"
    path.write_text(json.dumps({"connectors": [{"protocoll": "tcp", "port": port}]}))
    return str(path)


def test_the_folder_of_the_command_line_has_one_entry_a_verb() -> None:
    folder = Path(polybus_cli.__file__).parent
    entries = {path.stem for path in folder.iterdir() if not path.name.startswith("__")}
    assert entries == {*VERBS, "common", "reference"}


def test_doctor_finds_a_usable_machine_usable(tmp_path: Path) -> None:
    config = free_config(tmp_path)
    code, checks = diagnosed("--data", str(tmp_path), "--config", config)
    assert code == 0
    expected = {"python", "scanner", "pyarrow", "uvloop", "port", "data", "fsync", "files", "clock"}
    assert expected <= set(checks)
    assert checks["fsync"]["state"] in ("ok", "warn")
    assert checks["port"]["state"] == "ok"


def test_doctor_says_what_to_do_about_each_thing_that_is_not_ok(tmp_path: Path) -> None:
    config = free_config(tmp_path)
    done = polybus("doctor", "--data", str(tmp_path), "--config", config, POLYBUS_PURE="1")
    lines = done.stdout.decode().splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith("warn  scanner")]
    assert "unset POLYBUS_PURE" in lines[number + 1]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith(("ok", " ")):
            assert following.startswith("      → ")


def test_doctor_checks_the_python_that_spark_starts(tmp_path: Path) -> None:
    arguments = ["doctor", "--json", "--data", str(tmp_path), "--config", free_config(tmp_path)]
    found = {}
    for python in (sys.executable, "/bin/false"):
        done = polybus(*arguments, PYSPARK_PYTHON=python, PYSPARK_DRIVER_PYTHON="")
        found[python] = next(c for c in json.loads(done.stdout) if c["name"] == "spark python")
    assert found[sys.executable]["state"] == "ok"
    assert found["/bin/false"]["state"] == "warn"
    assert "/bin/false cannot import Polybus" in found["/bin/false"]["text"]
    assert "export PYSPARK_PYTHON=" in found["/bin/false"]["todo"]


def test_doctor_finds_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = free_config(tmp_path, taken.getsockname()[1])
        code, checks = diagnosed("--data", str(tmp_path), "--config", config)
    assert (code, checks["port"]["state"]) == (1, "fail")


def test_doctor_knows_the_bus_that_runs(tmp_path: Path) -> None:
    with serve(tmp_path) as bus:
        code, checks = diagnosed("--data", str(tmp_path))
    assert code == 0
    assert f":{bus.port}" in checks["bus"]["text"]


def test_doctor_finds_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    config = free_config(tmp_path)
    code, checks = diagnosed("--data", str(file / "data"), "--config", config)
    assert (code, checks["data"]["state"]) == (1, "fail")


def test_config_show_prints_toml_that_means_the_same(tmp_path: Path) -> None:
    source = tmp_path / "server.json"
    (tmp_path / "topics.json").write_text('{"topics": ["a \\"quoted\\" topic", "b"]}')
    settings = {
        "topic-config": "topics.json",
        "connectors": [{"protocoll": "tcp", "ip": "127.0.0.1", "port": 1, "default-topic": "b"}],
        "limits": {"parts-max": 7},
        "topics": [{"name": "c", "retention": {"age-s": 5.0}}],
    }
    source.write_text(json.dumps(settings))
    shown = polybus("config", "show", "--config", str(source))
    assert shown.returncode == 0, shown.stderr
    assert tomllib.loads(shown.stdout.decode())["limits"]["parts-max"] == 7
    copy = tmp_path / "elsewhere" / "copy.toml"
    copy.parent.mkdir()
    copy.write_bytes(shown.stdout)
    assert polybus("config", "show", "--config", str(copy)).stdout == shown.stdout
    as_json = polybus("config", "show", "--json", "--config", str(copy))
    assert json.loads(as_json.stdout)["connectors"][0]["default-topic"] == "b"


def test_config_check_warns_about_what_is_open(tmp_path: Path) -> None:
    path = tmp_path / "open.json"
    path.write_text(
        '{"connectors": [{"ip": "0.0.0.0"}, {"ip": "0.0.0.0", "protocol": "udp"}],'
        ' "accounts": {"default": "open", "signup": true}, "http": {"cors-origins": ["*"]}}'
    )
    done = polybus("config", "check", "--config", str(path))
    assert done.returncode == 0
    warnings = done.stderr.decode()
    for key in ("accounts.default", "tls.required", "UDP", "accounts.signup", "cors-origins"):
        assert key in warnings
    path.write_text('{"accounts": {"default": "off"}}')
    assert polybus("config", "check", "--config", str(path)).stderr == b""


def test_config_check_accepts_the_defaults() -> None:
    done = polybus("config", "check")
    assert (done.returncode, done.stdout) == (0, b"ok: 2 connectors, 0 topics\n")
    assert json.loads(polybus("config", "check", "--json").stdout)["ok"] is True


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"datta": "x"}', "datta"),
        ('{"limits": {"parts-max": "many"}}', "limits.parts-max"),
        ('{"connectors": [{"port": 70000}]}', "connectors[0].port"),
        ("{", "bus.json"),
    ],
)
def test_config_check_names_the_key_in_one_line(tmp_path: Path, content: str, key: str) -> None:
    path = tmp_path / "bus.json"
    path.write_text(content)
    done = polybus("config", "check", "--config", str(path))
    assert done.returncode == 2
    first = done.stderr.decode().splitlines()[0]
    assert first.startswith("polybus: config.") and key in first


def test_the_environment_of_clients_is_no_setting_of_the_bus() -> None:
    done = polybus("config", "check", POLYBUS_URL="goms://127.0.0.1", POLYBUS_PURE="1")
    assert done.returncode == 0, done.stderr


def test_help_imports_no_verb() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from polybus.cli import main;"
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0;"
        "heavy = {'pyarrow', 'asyncio', 'rich', 'polybus.client'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_every_verb_and_the_version_is_told() -> None:
    listed = polybus("--help").stdout.decode()
    for name, summary in VERBS.items():
        assert f"  {name}" in listed and summary in listed
    assert polybus("--version").stdout.startswith(b"polybus, version ")


def commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, click.Command]]:
    found = [(" ".join(path), command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found += commands(below, (*path, name))
    return found


@pytest.mark.parametrize("name", [name for name, _ in commands(main) if name])
def test_every_verb_has_help_with_an_example(name: str) -> None:
    help_text = dict(commands(main))[name].get_help(click.Context(main, info_name="polybus"))
    assert "Example" in help_text
    assert "polybus " in help_text


def test_pages_of_the_reference_are_made_from_the_source() -> None:
    made = pages()
    assert set(made) == {"access.md", "cli.md", "config.md", "errors.md"}
    assert all(page.endswith("\n") for page in made.values())


def test_every_key_on_the_config_page_has_a_meaning() -> None:
    rows = [line for line in pages()["config.md"].splitlines() if line.startswith("| `")]
    meanings = {row: row.strip("| ").rpartition(" | ")[2] for row in rows}
    assert rows and [row for row, meaning in meanings.items() if not meaning] == []


def test_config_and_usage_errors_exit_2_and_refusals_1() -> None:
    assert failure(ConfigError("config.file", "x")).exit_code == 2
    assert failure(UsageError("client.url", "x")).exit_code == 2
    assert failure(UsageError("topic.unknown", "x")).exit_code == 1


def test_values_are_shown_on_one_line() -> None:
    assert output.shown(b"a\tb") == "a\tb"
    assert output.shown(b"a\r\n\x00") == "a\\r\\n\\x00"
    assert output.shown(b"\xff") == "base64:/w=="


def test_toml_has_tables_lists_and_strings() -> None:
    text = as_toml({"a": 'x"y', "n": None, "l": [{"b": True}], "t": {"f": 1.5}})
    assert tomllib.loads(text) == {"a": 'x"y', "l": [{"b": True}], "t": {"f": 1.5}}
    assert "# n is not set" in text


def test_a_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polybus.config import Config

    monkeypatch.setattr(doctor, "sync_ms", lambda *_: 99.0)
    states = {check.name: check.state for check in doctor._data(Config(data=str(tmp_path)))}
    assert states == {"data": "ok", "fsync": "warn"}
