"""`polybus replay`: history into any topic and protocol, and dead letters back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pyarrow as pa
import pytest
from cli_kit import COMMAND, ServedBus, environment, polybus, serve
from click.testing import CliRunner

import polybus as library
from polybus.cli import main
from polybus.cli.replay import once
from polybus.cli.replay.dead_letters import DeadLetters, LetterFilter
from polybus.cli.replay.history import range_of, rows_of
from polybus.cli.replay.once import OncePublisher, PublishedPart
from polybus.cli.replay.pace import ROWS_MAX, ReplayPace, Schedule, Slot, parse_rate, parse_speed
from polybus.cli.replay.publishing import OutgoingRows, ndjson, split_url
from polybus.errors import UsageError
from polybus.lake.compact import compact, vacuum
from polybus.lake.table import LakeTable, open_table
from polybus.log.disk import FileLock, replace_file
from polybus.log.interface import Bounds
from polybus.spark.location import BusLocation
from polybus.spark.origin import open_origin

TARGETS = ("copy", "boson", "props", "goms", "http", "max", "rated", "slow", "json")


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBus]:
    with serve(tmp_path_factory.mktemp("bus"), "news", "empty", *TARGETS) as served:
        lines = [
            {"value": number, "key": f"k{number}", "headers": {"n": str(number)}}
            for number in range(5)
        ]
        body = "\n".join(map(json.dumps, lines))
        answer = httpx.post(
            f"{served.url('http')}/v1/topics/news/messages",
            content=body,
            headers={"content-type": "application/x-ndjson"},
        )
        assert answer.status_code == 200
        yield served


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command in this process: quicker, and the same otherwise."""
    result = CliRunner().invoke(main, arguments, env={"POLYBUS_URL": None})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(
        arguments, result.exit_code, result.stdout_bytes, result.stderr_bytes
    )


def stored(bus: ServedBus, topic: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{bus.url('http')}/v1/topics/{topic}/messages")
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


def values(bus: ServedBus, topic: str) -> list[Any]:
    return [message["value"] for message in stored(bus, topic)]


# The command


def test_history_goes_into_a_topic_with_its_keys_and_headers(bus: ServedBus) -> None:
    done = run(
        *("replay", "news", "--into", "copy", "--from", "1", "--to", "4", "--data", str(bus.data))
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"replayed 3 messages of news into copy at http://127.0.0.1:")
    assert [(one["value"], one["key"], one["headers"]) for one in stored(bus, "copy")] == [
        (number, f"k{number}", {"n": str(number)}) for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("scheme", "topic", "headers", "keys"),
    [
        ("boson", "boson", False, False),
        ("boson+properties", "props", True, False),
        ("goms", "goms", True, False),
        ("ws", "http", True, True),
    ],
)
def test_history_goes_out_over_any_protocol_and_says_what_it_cannot_carry(
    bus: ServedBus, scheme: str, topic: str, headers: bool, keys: bool
) -> None:
    into = f"{bus.url(scheme)}/{topic}"
    done = run("replay", "news", "--into", into, "--url", bus.url(scheme), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["messages"], told["done"], told["next"]) == (5, True, 5)
    assert told["keys-left-out"] == (0 if keys else 5)
    assert told["headers-left-out"] == (0 if headers else 5)
    found = stored(bus, topic)
    assert [one["value"] for one in found] == list(range(5))
    assert [bool(one["headers"]) for one in found] == [headers] * 5
    assert [one["key"] is not None for one in found] == [keys] * 5


@pytest.mark.parametrize("source", ["files", "http"])
def test_large_payloads_are_replayed_not_their_references(bus: ServedBus, source: str) -> None:
    films, copy = f"films-{source}", f"reels-{source}"
    url = bus.url("http")
    for topic in (films, copy):
        assert httpx.post(f"{url}/v1/topics", json={"name": topic}).status_code == 201
    large = [source.encode() * 300_000, source[::-1].encode() * 300_000]
    path = f"{url}/v1/topics/{films}"
    httpx.post(f"{path}/messages", content=b"1")
    assert httpx.put(f"{path}/blob", content=large[0]).status_code == 200
    keyed = {"text": large[1].decode(), "key": "k", "headers": {"n": "2"}}
    head = {"content-type": "application/x-ndjson"}
    httpx.post(f"{path}/messages", content=json.dumps(keyed), headers=head)
    httpx.post(f"{path}/messages", content=b"3")
    where = ["--data", str(bus.data)] if source == "files" else ["--url", url]
    done = run("replay", films, "--into", f"{url}/{copy}", "--speed", "max", *where)
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = stored(bus, copy)
    assert (first["value"], fourth["value"]) == (1, 3)
    assert (third["key"], third["headers"]) == ("k", {"n": "2"})
    for message, payload in zip((second, third), large, strict=True):
        assert httpx.get(f"{url}/v1/blobs/{message['reference']['id']}").content == payload


def test_ranges_of_many_topics_go_to_their_topics_again(bus: ServedBus, tmp_path: Path) -> None:
    epochs = {}
    for topic in ("ranged-a", "ranged-b"):
        answer = httpx.post(f"{bus.url('http')}/v1/topics", json={"name": topic})
        epochs[topic] = answer.json()["epoch"]
        lines = "\n".join(json.dumps({"value": number, "key": "k"}) for number in range(5))
        head = {"content-type": "application/x-ndjson"}
        path = f"{bus.url('http')}/v1/topics/{topic}/messages"
        assert httpx.post(path, content=lines, headers=head).status_code == 200
    a, b = (f"{topic}:{epoch}" for topic, epoch in epochs.items())
    chosen = tmp_path / "ranges"
    chosen.write_text(f"{a}:0:1\n{a}:3:5\n\n{b}:2:3\n")
    command = ["replay", "--ranges", str(chosen), "--speed", "max", "--json"]
    command += ["--data", str(bus.data)]
    planned = json.loads(run(*command, "--dry-run").stdout)
    assert (planned["messages"], planned["topics"]) == (4, {"ranged-a": 3, "ranged-b": 1})
    assert [len(stored(bus, topic)) for topic in epochs] == [5, 5]
    done = run(*command, "--progress")
    assert done.returncode == 0, done.stderr
    *parts, end = map(json.loads, done.stdout.splitlines())
    assert [one["published"] for one in parts] == [1, 3, 4]
    assert (end["messages"], end["done"], end["expired"]) == (4, True, 0)
    assert values(bus, "ranged-a")[5:] == [0, 3, 4] and values(bus, "ranged-b")[5:] == [2]
    assert [one["key"] for one in stored(bus, "ranged-a")] == ["k"] * 8


def test_a_rate_holds_for_all_ranges_together(bus: ServedBus, tmp_path: Path) -> None:
    topics = f"{bus.url('http')}/v1/topics"
    epoch = httpx.post(topics, json={"name": "paced"}).json()["epoch"]
    assert httpx.post(f"{topics}/paced/messages", content="x").status_code == 200
    chosen = tmp_path / "ranges"
    chosen.write_text(f"paced:{epoch}:0:1\n" * 3)
    arguments = ("--speed", "max", "--rate", "5/s", "--data", str(bus.data))
    began_s = time.monotonic()
    done = run("replay", "--ranges", str(chosen), *arguments)
    assert (done.returncode, done.stdout) == (0, b"published 3 of 3 messages again\n"), done.stderr
    assert time.monotonic() - began_s >= 0.4


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("news:1:2", 2, b"is not TOPIC:EPOCH:FIRST:STOP"),
        ("news:1:-2:3", 2, b"is not TOPIC:EPOCH:FIRST:STOP"),
        ("$events:1:0:1", 1, b"topic.reserved"),
        ("nix:1:0:1", 1, b"topic.unknown"),
        ("news:1:0:1", 1, b"log.offset-unknown"),
    ],
)
def test_ranges_that_the_log_does_not_have_are_refused(
    bus: ServedBus, tmp_path: Path, line: str, code: int, said: bytes
) -> None:
    chosen = tmp_path / "ranges"
    chosen.write_text(line)
    done = run("replay", "--ranges", str(chosen), "--data", str(bus.data))
    assert done.returncode == code and said in done.stderr, done.stderr


def test_what_retention_removed_of_ranges_is_left_out(
    bus: ServedBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = open_origin(BusLocation(bus.data, None))
    held = origin.bounds("news")
    left = Bounds(held.epoch, 2, held.stop)
    monkeypatch.setattr(type(origin), "bounds", lambda self, topic: left)
    chosen = tmp_path / "ranges"
    chosen.write_text(f"news:{held.epoch}:0:2\nnews:{held.epoch}:1:4\n")
    done = run(*("replay", "--ranges", str(chosen), "--dry-run", "--json", "--data", str(bus.data)))
    told = json.loads(done.stdout)
    assert (told["messages"], told["expired"]) == (2, 3)


def test_a_dry_run_says_what_would_go_and_publishes_nothing(bus: ServedBus) -> None:
    arguments = ["replay", "news", "--into", "empty", "--rate", "2/s", "--dry-run"]
    done = run(*arguments, "--data", str(bus.data))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"would replay 5 messages of news, offsets 0 to 5, into empty at")
    assert b"in 2.5 s or more" in done.stdout
    told = json.loads(run(*arguments, "--json", "--data", str(bus.data)).stdout)
    assert (told["messages"], told["from"], told["to"], told["dry-run"]) == (5, 0, 5, True)
    assert stored(bus, "empty") == []


@pytest.mark.parametrize(
    ("start", "stop", "count"),
    [
        ("2020-01-01T00:00:00Z", "latest", 5),
        ("2100-01-01T00:00:00Z", "latest", 0),
        ("earliest", "2020-01-01T00:00:00Z", 0),
        ("latest", "latest", 0),
        ("2", "4", 2),
    ],
)
def test_offsets_and_times_choose_what_is_replayed_from_files_and_over_http(
    bus: ServedBus, start: str, stop: str, count: int
) -> None:
    for location in (BusLocation(bus.data), BusLocation(url=bus.url("http"))):
        origin = open_origin(location)
        offsets = range_of(origin, "news", start, stop)
        assert len(offsets) == count
        assert sum(rows.num_rows for rows in rows_of(origin, "news", offsets)) == count


def test_a_rate_is_kept(bus: ServedBus) -> None:
    arguments = ["replay", "news", "--into", "rated", "--speed", "max", "--rate", "10", "--json"]
    done = run(*arguments, "--data", str(bus.data))
    told = json.loads(done.stdout)
    assert told["messages"] == 5 and told["seconds"] >= 0.4


def test_a_replay_that_is_stopped_says_where_and_how_to_go_on(bus: ServedBus) -> None:
    arguments = ["replay", "news", "--into", "slow", "--speed", "max", "--rate", "0.5"]
    with subprocess.Popen(
        [*COMMAND, *arguments, "--data", str(bus.data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        deadline = time.monotonic() + 30
        while not stored(bus, "slow") and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    sent = len(stored(bus, "slow"))
    assert process.returncode == 1
    assert f"replayed {sent} messages".encode() in out
    assert (
        f"stopped at offset {sent}; continue with: polybus replay news --from {sent}".encode()
        in err
    )
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["news"], 2, b"--into"),
        (["nix", "--into", "copy"], 1, b"topic.unknown"),
        (["news", "--into", "nix"], 1, b"topic.unknown"),
        (["news", "--into", "$events"], 1, b"topic.reserved"),
        (["news", "--into", "copy", "--from", "99"], 1, b"the topic has 0 to 5"),
        (["news", "--into", "copy", "--from", "5:1"], 1, b"another epoch"),
        (["news", "--into", "copy", "--from", "yesterday"], 2, b"position.invalid"),
        (["news", "--into", "copy", "--speed", "fast"], 2, b"original, max or a multiple"),
        (["news", "--into", "copy", "--rate", "0"], 2, b"messages a second"),
        (["news", "--into", "copy", "--reason", "x"], 2, b"--dead-letters"),
        (["news", "--into", "gopher://x/y"], 2, b"client.scheme"),
        (["news", "--dead-letters"], 2, b"--dead-letters cannot be used with"),
        (["--dead-letters"], 1, b"lake.unknown"),
        (["news", "--ranges", os.devnull], 2, b"--ranges cannot be used with"),
        (["--ranges", os.devnull, "--reason", "x"], 2, b"need --dead-letters"),
        (["--dead-letters", "--ranges", os.devnull], 2, b"--dead-letters cannot be used with"),
    ],
)
def test_what_cannot_be_done_is_said(
    bus: ServedBus, arguments: list[str], code: int, said: bytes
) -> None:
    done = run("replay", *arguments, "--data", str(bus.data))
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_replay_into_a_stopped_bus_says_that_none_runs(tmp_path: Path) -> None:
    with serve(tmp_path, "news"):
        pass
    done = run("replay", "news", "--into", "news", "--data", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(b"polybus: client.unreachable: no bus runs on")


def test_there_is_a_clear_error_where_there_is_no_log(tmp_path: Path) -> None:
    done = run("replay", "news", "--into", "news", "--data", str(tmp_path / "nowhere"))
    assert done.returncode == 1 and b"data.not-found" in done.stderr


# Dead letters


def quarantine(data: Path, *rows: tuple[str, int, bytes, str], cut: bool | None = None) -> None:
    table = pa.table(
        {
            "topic": [topic for topic, *_ in rows],
            "epoch": pa.array([7] * len(rows), pa.int64()),
            "offset": pa.array([offset for _, offset, *_ in rows], pa.int64()),
            "timestamp": pa.array([0] * len(rows), pa.timestamp("us", "UTC")),
            "protocol": ["goms"] * len(rows),
            "sender": ["x"] * len(rows),
            "key": pa.array([b"k"] * len(rows), pa.binary()),
            "value": pa.array([value for *_, value, _ in rows], pa.binary()),
            "headers": pa.array([[("a", b"1")]] * len(rows), pa.map_(pa.string(), pa.binary())),
            "reason": [reason for *_, reason in rows],
            "quarantined_at": pa.array([0] * len(rows), pa.timestamp("us", "UTC")),
        }
    )
    if cut is not None:
        table = table.append_column("cut", pa.array([cut] * len(rows)))
    open_table(data, "quarantine").append(table, writer="test", batch_id=None)


def test_each_dead_letter_is_given_once_while_the_table_is_compacted(tmp_path: Path) -> None:
    for offset in range(4):
        quarantine(tmp_path, ("news", offset, b"x", "json"))
    letters = DeadLetters(tmp_path, LetterFilter()).rows()
    given = next(letters).column("offset").to_pylist()
    table = open_table(tmp_path, "quarantine")
    assert compact(table) == 4
    assert vacuum(table, grace_s=-1) >= 3
    for rows in letters:
        given += rows.column("offset").to_pylist()
    assert given == [0, 1, 2, 3]


def test_notes_of_many_small_replays_do_not_pile_up(tmp_path: Path) -> None:
    quarantine(tmp_path, ("news", 0, b"x", "json"))
    letters = DeadLetters(tmp_path, LetterFilter())
    for batch in range(70):
        letters.record(PublishedPart("q", batch, "", [("news", 7, 0)]))
    assert len(open_table(tmp_path, "replayed").files()) < 40


def test_dead_letters_go_back_once_with_the_place_they_were_at(tmp_path: Path) -> None:
    with serve(tmp_path, "news", "sport") as bus:
        quarantine(
            tmp_path,
            ("news", 3, b"{", "not JSON"),
            ("sport", 9, b"\xff", "not text"),
            ("news", 4, b"}", "wrong schema"),
        )
        dead = ["replay", "--dead-letters", "--json", "--data", str(tmp_path)]
        told = json.loads(run(*dead, "--dry-run").stdout)
        assert told["messages"] == 3 and len(told["waiting"]) == 3
        assert stored(bus, "news") == []

        done = run(*dead, "--topic", "News", "--reason", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["topics"] == {"news": 1}
        (letter,) = stored(bus, "news")
        assert (letter["text"], letter["key"]) == ("{", "k")
        assert letter["headers"] == {"a": "1", "replayed-from": "news:7:3"}

        assert json.loads(run(*dead).stdout)["messages"] == 2
        assert json.loads(run(*dead).stdout)["messages"] == 0
        assert (len(stored(bus, "news")), len(stored(bus, "sport"))) == (2, 1)
        quarantine(tmp_path, ("news", 5, b"x", "late"))
        done = run(*dead[:2], "--rate", "5/s", "--data", str(tmp_path))
        assert (done.returncode, done.stdout) == (0, b"put 1 of 1 dead letters back\n")


class Crash(BaseException):
    """The process dies."""


def crash_before(position: int, patched: pytest.MonkeyPatch) -> list[str]:
    """Die before the write of this number; returns the names of those that were done."""

    def around(write: Any, name_of: Callable[..., str]) -> Any:
        def crashing(*arguments: Any, **options: Any) -> Any:
            name = name_of(*arguments)
            # The report of a reader's position comes at any time, and is not a write of the run.
            if name != "consumers":
                if len(done) == position:
                    raise Crash
                done.append(name)
            return write(*arguments, **options)

        return crashing

    def called(bus: BusLocation, method: str, path: str, *_: Any) -> str:
        return path.split("/")[2]

    done: list[str] = []
    patched.setattr(BusLocation, "call", around(BusLocation.call, called))
    patched.setattr(once, "replace_file", around(replace_file, lambda *_: "note"))
    patched.setattr(LakeTable, "append", around(LakeTable.append, lambda table, *_: table.name))
    forget = OncePublisher._forget
    patched.setattr(OncePublisher, "_forget", around(forget, lambda _: "note removed"))
    return done


def test_dead_letters_go_back_once_whenever_a_run_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = ["staging", "note", "commits", "replayed", "note removed"]
    dead = ["replay", "--dead-letters", "--data", str(tmp_path)]
    with serve(tmp_path, "news", "more") as bus:
        for position in range(len(writes)):
            quarantine(tmp_path, ("news", position, b"%d" % position, "why"))
            with monkeypatch.context() as patched:
                done = crash_before(position, patched)
                with pytest.raises(Crash):
                    run(*dead)
            assert done == writes[:position]
            # The next run asks for other letters; the part that was begun is finished anyway.
            is_begun = "note" in done
            assert run(*dead, "--topic", "more").returncode == 0
            assert values(bus, "news") == list(range(position + is_begun))
            assert run(*dead).returncode == 0
            assert values(bus, "news") == list(range(position + 1))
        assert run(*dead).stdout == b"put 0 of 0 dead letters back\n"


def test_a_part_that_the_bus_refuses_still_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = ["replay", "--dead-letters", "--data", str(tmp_path)]
    with serve(tmp_path, "news") as bus:
        quarantine(tmp_path, ("news", 1, b"1", "why"))
        with monkeypatch.context() as patched:
            crash_before(2, patched)
            with pytest.raises(Crash):
                run(*dead)
        for path in (tmp_path / "staging").rglob("*.arrows"):
            path.unlink()
        done = run(*dead)
        assert (done.returncode, done.stdout) == (0, b"put 1 of 1 dead letters back\n")
        assert values(bus, "news") == [1]
        with FileLock(tmp_path / "pipeline" / "replay" / "lock"):
            done = run(*dead)
        assert done.returncode == 1 and b"lake.busy: another run" in done.stderr


def test_many_and_large_dead_letters_go_back_in_several_parts(tmp_path: Path) -> None:
    size = 1 << 20
    with serve(tmp_path, "news") as bus:
        large = [("news", n, b"%d" % n + b" " * size, "why") for n in range(6)]
        quarantine(tmp_path, *large, ("news", 6, b"6" + b" " * 5 * size, "why"))
        done = run("replay", "--dead-letters", "--data", str(tmp_path))
        assert (done.returncode, done.stdout) == (0, b"put 7 of 7 dead letters back\n")
        last = httpx.get(f"{bus.url('http')}/v1/commits/dead-letters").json()
        assert last["batch"] > 0
        assert last["offsets"]["news"][0][1:] == [6, 7]
    assert open_table(tmp_path, "replayed").rows == 7


def test_a_letter_of_which_only_the_beginning_is_there_is_told_and_not_published(
    tmp_path: Path,
) -> None:
    with serve(tmp_path, "news") as bus:
        quarantine(tmp_path, ("news", 1, b"1", "of an older version"))
        quarantine(tmp_path, ("news", 2, b"2", "why"), cut=False)
        quarantine(tmp_path, ("news", 4, b"4", "large"), ("news", 3, b"3", "large"), cut=True)
        done = run("replay", "--dead-letters", "--data", str(tmp_path))
        assert (done.returncode, done.stdout) == (0, b"put 2 of 2 dead letters back\n")
        assert b"2 more are over value-bytes-max" in done.stderr
        assert b"polybus replay news --from 3 --to 4 --into news" in done.stderr
        assert values(bus, "news") == [1, 2]


def test_a_dead_letter_whose_topic_is_gone_stays(tmp_path: Path) -> None:
    with serve(tmp_path, "news") as bus:
        quarantine(tmp_path, ("news", 1, b"1", "why"), ("gone", 2, b"2", "why"))
        done = run("replay", "--dead-letters", "--data", str(tmp_path))
        assert done.returncode == 1
        assert b"put 1 of 2 dead letters back" in done.stdout
        assert b"topic.unknown" in done.stderr
        run("topics", "create", "gone", "--data", str(tmp_path))
        done = run("replay", "--dead-letters", "--data", str(tmp_path))
        assert (done.returncode, done.stdout) == (0, b"put 1 of 1 dead letters back\n")
        assert values(bus, "news") == [1]


# Its parts


def test_the_original_pace_is_that_of_the_timestamps() -> None:
    times_us = [1_000_000, 1_005_000, 1_500_000, 3_000_000]
    slots = list(Schedule(ReplayPace(speed=2.0)).slots(times_us))
    assert slots == [Slot(0, 2, 0.0), Slot(2, 3, 0.25), Slot(3, 4, 1.0)]


def test_at_full_speed_messages_go_in_batches() -> None:
    slots = list(Schedule(ReplayPace()).slots([5] * (ROWS_MAX + 1)))
    assert slots == [Slot(0, ROWS_MAX, 0.0), Slot(ROWS_MAX, ROWS_MAX + 1, 0.0)]


def test_a_rate_holds_over_batches() -> None:
    schedule = Schedule(ReplayPace(rate=100.0))
    first = list(schedule.slots([0] * 4))
    second = list(schedule.slots([0] * 2))
    assert [slot.due_s for slot in (*first, *second)] == [0.0, 0.02, 0.04]


def test_a_clock_that_went_backwards_delays_nothing() -> None:
    slots = list(Schedule(ReplayPace(speed=1.0)).slots([2_000_000, 1_000_000, 2_500_000]))
    assert slots == [Slot(0, 2, 0.0), Slot(2, 3, 0.5)]


@pytest.mark.parametrize(
    ("text", "speed"), [("max", None), ("original", 1.0), ("2x", 2.0), ("0.5x", 0.5)]
)
def test_a_speed_is_read(text: str, speed: float | None) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize("text", ["0x", "x", "-1x", "2"])
def test_an_invalid_speed_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_speed(text)


def test_a_rate_is_read_with_and_without_its_unit() -> None:
    assert (parse_rate("500"), parse_rate("2.5/s"), parse_rate(None)) == (500.0, 2.5, None)


def test_a_url_names_its_topic_or_keeps_the_replayed_one() -> None:
    assert split_url("boson://h:1/a%20b", "news") == ("boson://h:1", "a b")
    assert split_url("http://h:1", "news") == ("http://h:1", "news")
    with pytest.raises(UsageError):
        split_url("http://h:1//", "news")


def test_bodies_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polybus.cli.replay.publishing.REQUEST_BYTES_MAX", 100)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k"] * 3, pa.binary()),
            "value": pa.array([b"x" * 60] * 3, pa.binary()),
            "headers": pa.array([None] * 3, pa.map_(pa.string(), pa.binary())),
        }
    )
    bodies = ndjson(OutgoingRows(batch))
    assert len(bodies) == 3 and all(json.loads(body)["base64"] for body in bodies)


def test_a_replayed_message_reaches_live_subscribers(bus: ServedBus) -> None:
    async def follow() -> bytes:
        async with library.connect(bus.url("goms")) as client, client.subscribe("json") as messages:
            done = await asyncio.to_thread(
                polybus,
                *("replay", "news", "--to", "1", "--into", "json", "--data", str(bus.data)),
            )
            assert done.returncode == 0, done.stderr
            return (await anext(messages)).value

    assert asyncio.run(follow()) == b"0"
