"""`polybus topics` and consumers: listed, described and forgotten, on a running bus and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from cli_kit import ServedBus, serve
from click.testing import CliRunner

from polybus.cli import main
from polybus.log.layout import topic_folder


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["topics", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def report(bus: ServedBus, group: str, offset: int, **fields: Any) -> None:
    topic = httpx.get(f"{bus.url('http')}/v1/topics/news").json()
    positions = {"news": {"epoch": topic["epoch"], "offset": offset}}
    answer = httpx.put(
        f"{bus.url('http')}/v1/consumers/{group}", json={"positions": positions, **fields}
    )
    assert answer.status_code == 204, answer.text


def test_consumers_are_shown_with_their_lag_while_the_bus_runs_and_after(tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    with serve(tmp_path, "news") as bus:
        httpx.post(f"{bus.url('http')}/v1/topics/news/messages", content=b"1")
        report(bus, "etl", 0, **{"rows-per-s": 5})
        report(bus, "old", 0, **{"last-error": "no\x1b[31m disk"})
        running = run("consumers", *data)
        (line,) = [one.split() for one in running.splitlines() if one.startswith("etl")]
        assert line[1] == "news" and line[2].endswith(":0") and line[3:5] == ["1", "5.0"]
        assert "old: last error: no\\x1b[31m disk" in running
        assert [one["lag"] for one in json.loads(run("consumers", "--json", *data))] == [1, 1]
        assert "consumer etl: at 0, lag 1" in run("describe", "news", *data)
        listed = run("list", *data).splitlines()
        assert listed[0].split()[-1] == "lag" and listed[1].split()[-1] == "1"
        assert run("forget", "old", *data) == "forgot old\n"
    stopped = json.loads(run("consumers", "--json", *data))
    assert [(one["group"], one["lag"], one["failed"]) for one in stopped] == [("etl", 1, False)]
    assert run("list", *data).splitlines()[1].split()[-1] == "1"
    assert "consumer etl: at 0, lag 1" in run("describe", "news", *data)
    assert run("forget", "etl", *data) == "forgot etl\n"
    assert json.loads(run("consumers", "--json", *data)) == []
    result = CliRunner().invoke(main, ["topics", "forget", "etl", *data])
    assert result.exit_code == 1 and "consumer.unknown" in result.stderr


def test_data_loss_is_said_in_words(tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    with serve(tmp_path, "news") as bus:
        report(bus, "etl", 7)
        assert "data loss: the topic ends before its position" in run("consumers", *data)
        run("delete", "news", "--yes", *data)
        assert "data loss: the topic no longer exists" in run("consumers", *data)


def test_system_topics_are_listed_when_asked_for_and_stay(tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]

    def check() -> None:
        names = [one["name"] for one in json.loads(run("list", "--json", *data))]
        assert names == ["news"]
        system = [one["name"] for one in json.loads(run("list", "--json", "--system", *data))]
        assert {"$alerts", "$events", "$stats", "news"} <= set(system)
        result = CliRunner().invoke(main, ["topics", "delete", "$events", "--yes", *data])
        assert result.exit_code == 1 and "topic.reserved" in result.stderr

    with serve(tmp_path, "news"):
        check()
    check()


def test_a_damaged_topic_does_not_hide_the_others_of_a_stopped_bus(tmp_path: Path) -> None:
    data = ["--data", str(tmp_path)]
    run("create", "news", *data)
    run("create", "olds", *data)
    (topic_folder(tmp_path, "olds") / "manifest.json").write_text("{")
    found = {one["name"]: one for one in json.loads(run("list", "--json", *data))}
    assert "damaged" not in found["news"] and "manifest" in found["olds"]["damaged"]
