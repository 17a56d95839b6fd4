"""Verbs that work on a data folder: topics, verify, compact, through the real command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from cli_kit import COMMAND, environment, polybus, serve

from polybus.cli import compact, topics, verify  # noqa: F401
from polybus.cli.common import admin, options  # noqa: F401
from polybus.error_codes import CODES

pytestmark = pytest.mark.slow  # each test runs the command many times


def listed(data: Path) -> dict[str, dict[str, object]]:
    done = polybus("topics", "list", "--data", str(data), "--json")
    assert done.returncode == 0, done.stderr
    return {topic["name"]: topic for topic in json.loads(done.stdout)}


def test_topics_of_a_running_bus_are_managed_and_survive_a_restart(tmp_path: Path) -> None:
    data = str(tmp_path)
    with serve(tmp_path, "declared") as bus:
        done = polybus("topics", "create", "News", "--retention-age-s", "60", "--data", data)
        assert (done.returncode, done.stdout) == (0, b"created news\n")
        polybus("publish", "news", "x", "--receipt", "--url", bus.url())
        assert set(listed(tmp_path)) == {"declared", "news"}
        assert listed(tmp_path)["news"]["stop"] == 1
        done = polybus("topics", "delete", "declared", "--yes", "--data", data)
        assert done.stdout == b"deleted declared\n"
        done = polybus("topics", "describe", "news", "--json", "--data", data)
        described = json.loads(done.stdout)
        assert described["settings"] == {"retention-age-s": 60.0, "retention-bytes": None}
        assert {"history-files", "history-bytes", "subscribers"} <= set(described)
        assert (described["stored-bytes"], described["history-bytes"]) == (1, 0)
    assert listed(tmp_path)["news"]["stored-bytes"] == 1
    with serve(tmp_path):
        assert set(listed(tmp_path)) == {"news"}
        assert listed(tmp_path)["news"]["stored-bytes"] == 1


def test_topics_of_a_stopped_bus_are_managed_in_its_files(tmp_path: Path) -> None:
    data = str(tmp_path / "new")
    done = polybus("topics", "create", "a", "--retention-bytes", "9", "--json", "--data", data)
    assert json.loads(done.stdout)["name"] == "a"
    polybus("topics", "create", "b", "--data", data)
    polybus("topics", "delete", "b", "--data", data, stdin=b"y\n")
    assert set(listed(Path(data))) == {"a"}
    done = polybus("topics", "describe", "a", "--data", data)
    assert b'settings: {"retention-age-s":null,"retention-bytes":9}' in done.stdout
    assert b"history-bytes: 0" in done.stdout
    done = polybus("topics", "list", "--data", data)
    heading, row = done.stdout.decode().splitlines()
    assert heading.split()[:4] == ["topic", "messages", "size", "in/s"]
    assert row.split()[:4] == ["a", "0", "0", "B"]


@pytest.mark.parametrize("running", [True, False])
def test_what_cannot_be_done_to_topics_is_said_the_same_way(tmp_path: Path, running: bool) -> None:
    data = str(tmp_path)

    def refusals() -> list[tuple[int, str]]:
        out = []
        for arguments in (
            ["create", "there"],
            ["create", "$mine"],
            ["delete", "nowhere", "--yes"],
            ["describe", "nowhere"],
        ):
            done = polybus("topics", *arguments, "--data", data)
            out.append((done.returncode, done.stderr.decode().split(": ")[1]))
        return out

    polybus("topics", "create", "there", "--data", data)
    if running:
        with serve(tmp_path):
            told = refusals()
    else:
        told = refusals()
    codes = ["topic.exists", "topic.reserved", "topic.unknown", "topic.unknown"]
    assert told == [(1, code) for code in codes]


def test_deleting_asks_first(tmp_path: Path) -> None:
    polybus("topics", "create", "a", "--data", str(tmp_path))
    done = polybus("topics", "delete", "a", "--data", str(tmp_path), stdin=b"n\n")
    assert done.returncode == 1
    assert set(listed(tmp_path)) == {"a"}


@pytest.mark.parametrize("running", [True, False])
def test_nobody_is_asked_to_confirm_what_cannot_be_deleted(tmp_path: Path, running: bool) -> None:
    polybus("topics", "create", "a", "--data", str(tmp_path))
    with serve(tmp_path) if running else contextlib.nullcontext():
        done = polybus("topics", "delete", "nosuch", "--data", str(tmp_path), stdin=b"y\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"polybus: topic.unknown: ")


@pytest.mark.parametrize("running", [True, False])
def test_a_system_topic_can_be_deleted_only_if_it_is_damaged(tmp_path: Path, running: bool) -> None:
    with serve(tmp_path):
        pass
    delete = ("topics", "delete", "$commits", "--yes", "--data", str(tmp_path))
    note = tmp_path / "accounts/default/topics/$commits/topic.json"
    with serve(tmp_path) if running else contextlib.nullcontext():
        assert b"topic.reserved" in polybus(*delete).stderr
    note.write_bytes(note.read_bytes().replace(b"1", b"2"))
    assert polybus("verify", "--data", str(tmp_path)).returncode == 1
    with serve(tmp_path) if running else contextlib.nullcontext():
        assert polybus(*delete).returncode == 0
    with serve(tmp_path):
        pass
    assert polybus("verify", "--data", str(tmp_path)).returncode == 0


def test_a_second_bus_on_the_same_data_says_what_to_do(tmp_path: Path) -> None:
    with serve(tmp_path):
        done = polybus("serve", "--port", "0", "--data", str(tmp_path))
    said, advice = done.stderr.decode().splitlines()
    assert done.returncode == 1
    assert said.startswith("polybus: log.locked: ")
    assert advice.strip() == CODES["log.locked"].advice


def test_a_wrong_setting_keeps_the_bus_from_starting_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("nonsense = 1\n")
    done = polybus("serve", "--config", str(tmp_path / "bad.toml"))
    assert done.returncode == 2
    assert done.stderr.startswith(b"polybus: config.")


def test_a_folder_that_is_not_there_is_not_made_by_looking(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for arguments in (["topics", "list"], ["verify"], ["compact"]):
        done = polybus(*arguments, "--data", str(nowhere))
        assert done.returncode == 1
        assert b"polybus: log.no-data: " in done.stderr
    assert not nowhere.exists()


def test_leftovers_of_a_killed_bus_do_not_count_as_running(tmp_path: Path) -> None:
    polybus("topics", "create", "a", "--data", str(tmp_path))
    run = {"pid": 2**22 + 1, "addresses": [], "admin": str(tmp_path / "admin.sock")}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert set(listed(tmp_path)) == {"a"}


def test_verify_refuses_a_running_bus_then_finds_all_intact(tmp_path: Path) -> None:
    data = str(tmp_path)
    with serve(tmp_path, "news") as bus:
        polybus("publish", "news", "x", "--count", "10", "--receipt", "--url", bus.url())
        for verb in ("verify", "compact"):
            done = polybus(verb, "--data", data)
            assert done.returncode == 1
            assert b"polybus: log.locked: " in done.stderr
    done = polybus("verify", "--data", data)
    assert done.returncode == 0, done.stderr
    assert re.match(rb"intact: 1 topic, 10 messages, 1 journal segment, .* KiB\n", done.stdout)
    done = polybus("verify", "--data", data, "--json")
    assert json.loads(done.stdout)["intact"] is True


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    with serve(tmp_path, "news") as bus:
        polybus("publish", "news", "x" * 500, "--count", "9", "--receipt", "--url", bus.url())
    polybus("compact", "--data", str(tmp_path))
    (file,) = tmp_path.glob("accounts/default/topics/news/history/**/*.parquet")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done = polybus("verify", "--data", str(tmp_path))
    assert done.returncode == 1
    line = done.stdout.decode().splitlines()[0]
    assert "topic 'news'" in line and file.name in line and "offsets 0 to 8" in line
    done = polybus("verify", "--data", str(tmp_path), "--json")
    (damage,) = json.loads(done.stdout)["damages"]
    assert (done.returncode, damage["first"], damage["last"]) == (1, 0, 8)


def test_compact_leaves_history_only_and_every_message(tmp_path: Path) -> None:
    data = str(tmp_path)
    with serve(tmp_path, "news") as bus:
        polybus("publish", "news", "x", "--count", "100", "--receipt", "--url", bus.url())
    done = polybus("compact", "--data", data, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["segments"]) == 1
    assert not list(tmp_path.glob("journal/*.arrows"))
    report = json.loads(polybus("verify", "--data", data, "--json").stdout)
    assert (report["messages"], report["segments"]) == (100, 0)
    with serve(tmp_path) as bus:
        arguments = ("tail", "news", "--from", "earliest", "--count", "100")
        done = polybus(*arguments, "--url", bus.url())
        assert done.stdout == b"x\n" * 100


@pytest.mark.parametrize("command", ["verify", "compact", "topics list", "sql SELECT+1"])
def test_a_folder_of_others_is_refused_and_stays_as_it_is(tmp_path: Path, command: str) -> None:
    (tmp_path / "work").mkdir(mode=0o755)
    done = polybus(*(word.replace("+", " ") for word in command.split()), "--data", str(tmp_path))
    assert (done.returncode, b"log.no-data" in done.stderr) == (1, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_an_empty_folder_is_not_intact(tmp_path: Path) -> None:
    """The disk with the backups may not be mounted."""
    done = polybus("verify", "--data", str(tmp_path))
    assert done.returncode == 1 and b"log.no-data" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("verify", "topics list", "topics create x", "sql -", "status"),
        *("pipeline status", "pipeline stop", "accounts list", "tables list", "top"),
    ],
)
def test_a_folder_of_another_user_is_an_error_that_says_so(tmp_path: Path, command: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0)
    done = as_others(*command.split(), "--data", str(tmp_path / "data"))
    assert done.returncode == 1 and done.stderr.startswith(b"polybus: log.denied: "), done.stderr


@pytest.mark.parametrize(
    ("command", "file"), [("pipeline status", "pipeline/status.json"), ("top", "run.json")]
)
def test_a_file_of_another_user_is_not_a_missing_one(
    tmp_path: Path, command: str, file: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch(mode=0)
    (tmp_path / "polybus.json").touch()
    done = as_others(*command.split(), "--data", str(tmp_path))
    assert done.returncode == 1 and done.stdout == b""
    assert done.stderr.startswith(f"polybus: log.denied: cannot read {path}: ".encode())


def test_the_doctor_says_that_a_folder_is_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0)
    done = as_others("doctor", "--data", str(tmp_path / "other" / "data"))
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"fail  data: cannot write to" in done.stdout


def as_others(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command by a user whom the modes of files bind, also if root runs the tests."""
    rights = "-dac_override,-dac_read_search"
    bound = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    return subprocess.run(
        [*(bound if os.getuid() == 0 else []), *COMMAND, *arguments],
        input=b"SELECT 1",
        capture_output=True,
        env=environment(),
        check=False,
    )
