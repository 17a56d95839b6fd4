"""The maintenance thread: it starts the hand-over, survives its failures, and ends at once."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from polybus.batch import Batch
from polybus.config import Journal, Retention
from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.history.maintenance import Maintenance


class FakeLog:
    """What maintenance asks of a log, remembered."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.sealed = [data / "1.arrows", data / "2.arrows"]
        self.handed_over: list[list[Path]] = []
        self.retained: list[int] = []

    def sealed_segments(self) -> list[Path]:
        return list(self.sealed)

    def after_handover(self, segments: list[Path]) -> None:
        self.handed_over.append(segments)
        self.sealed = [path for path in self.sealed if path not in segments]

    def apply_retention(self, now_us: int) -> None:
        self.retained.append(now_us)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def saying(*segments: Path) -> list[str]:
    lines = [f'{{"segment": "{path}"}}' for path in segments]
    return python(f"print({chr(10).join(lines)!r})")


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def open_log(data: Path, *, interval_s: float = 0.05, maintenance: bool = True) -> FileLog:
    return FileLog(
        data,
        durability="interval",
        journal=Journal(segment_bytes_max=256 << 10, handover_interval_s=interval_s),
        retention=Retention(),
        clock=lambda: time.time_ns() // 1000,
        maintenance=maintenance,
    )


def test_what_the_process_handed_over_is_told_to_the_log(tmp_path: Path) -> None:
    log = FakeLog(tmp_path)
    first, second = log.sealed
    other = tmp_path / "3.arrows"
    maintenance = Maintenance(log, interval_s=1, command=saying(first, other), clock_us=lambda: 7)
    maintenance.run_once()
    assert log.handed_over == [[first]], "a segment that was not sealed before is left alone"
    assert log.sealed == [second]
    assert log.retained == [7]


def test_a_segment_that_stays_does_not_start_a_process_each_time(tmp_path: Path) -> None:
    log = FakeLog(tmp_path)
    maintenance = Maintenance(log, interval_s=1, command=saying(log.sealed[0]))
    maintenance.run_once()
    maintenance.run_once()
    assert len(log.handed_over) == 1
    assert len(log.retained) == 2
    log.sealed.append(tmp_path / "3.arrows")
    maintenance.run_once()
    assert len(log.handed_over) == 2


def test_a_failing_process_is_logged_within_limits_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = FakeLog(tmp_path)
    code = "import sys; sys.stderr.write('bad disk\\n' * 1000); sys.exit(1)"
    with caplog.at_level(logging.WARNING):
        Maintenance(log, interval_s=1, command=python(code)).run_once()
    assert log.handed_over == [[]]
    assert "bad disk" in caplog.text
    assert "ended with 1" in caplog.text
    assert len(caplog.records) <= 12


def test_what_was_done_before_a_failure_counts(tmp_path: Path) -> None:
    log = FakeLog(tmp_path)
    first, second = log.sealed
    code = f'import sys; print(\'{{"segment": "{first}"}}\'); sys.exit(1)'
    Maintenance(log, interval_s=1, command=python(code)).run_once()
    assert log.handed_over == [[first]]
    assert log.sealed == [second]


def test_retention_is_applied_although_a_hand_over_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as floor.json cannot be read, the log deletes no segment."""
    log = FakeLog(tmp_path)

    def refuse(segments: list[Path]) -> None:
        raise StorageError("log.failed", "cannot read floor.json")

    log.after_handover = refuse  # type: ignore[method-assign]
    command = saying(log.sealed[0])
    Maintenance(log, interval_s=1, command=command, clock_us=lambda: 7).run_once()
    assert log.retained == [7]
    assert [one.getMessage() for one in caplog.records] == [
        "maintenance failed and will be retried: log.failed: cannot read floor.json"
    ]


def test_output_that_is_no_json_is_logged_not_obeyed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = FakeLog(tmp_path)
    Maintenance(log, interval_s=1, command=python("print('hello')")).run_once()
    assert log.handed_over == [[]]
    assert "hello" in caplog.text


def test_after_a_failure_it_tries_again(tmp_path: Path) -> None:
    log = FakeLog(tmp_path)
    marker = tmp_path / "tried"
    code = (
        f"import os, sys; tried = os.path.exists({str(marker)!r}); open({str(marker)!r}, 'w');"
        f'sys.stdout.write(\'{{"segment": "{log.sealed[0]}"}}\') if tried else sys.exit(1)'
    )
    maintenance = Maintenance(log, interval_s=0.01, command=python(code))
    maintenance.start()
    wait_for(lambda: len(log.sealed) == 1)
    maintenance.stop()


def test_a_stop_does_not_wait_for_the_process(tmp_path: Path) -> None:
    log = FakeLog(tmp_path)
    started = tmp_path / "started"
    code = f"import time; open({str(started)!r}, 'w'); time.sleep(60)"
    maintenance = Maintenance(log, interval_s=0.01, command=python(code))
    maintenance.start()
    wait_for(started.exists)
    before = time.monotonic()
    maintenance.stop()
    assert time.monotonic() - before < 20
    assert log.handed_over == []


def test_a_stop_without_a_start_is_harmless(tmp_path: Path) -> None:
    Maintenance(FakeLog(tmp_path), interval_s=1).stop()


@pytest.mark.slow
def test_a_bus_s_log_becomes_history_by_itself(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.create_topic("news")
    log.append(Batch.of("news", [b"%d" % number for number in range(1000)]))
    log.seal()
    wait_for(lambda: not layout.segments(tmp_path)[:-1] and not log.sealed_segments())
    folder = layout.topic_folder(tmp_path, "news")
    query = f"SELECT count(*) FROM read_parquet('{folder}/history/**/*.parquet')"
    assert duckdb.connect().execute(query).fetchall() == [(1000,)]
    assert sum(len(batch) for batch in log.read("news", 0, bytes_max=1 << 20)) == 1000
    log.close()


def read_all(log: FileLog, topic: str, stop: int) -> list[bytes]:
    values: list[bytes] = []
    while len(values) < stop:
        for batch in log.read(topic, len(values), bytes_max=20_000):
            assert batch.first_offset == len(values)
            values += batch.values()
    return values


@pytest.mark.slow
def test_a_reader_sees_each_message_once_while_hand_overs_work_and_are_killed(
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("POLYBUS_SEED", time.time_ns() % 1_000_000))
    sys.stdout.write(f"POLYBUS_SEED={seed}\n")
    chance = random.Random(seed)
    log = open_log(tmp_path)
    topics = ["news", "sport"]
    for topic in topics:
        log.create_topic(topic)
    appended = dict.fromkeys(topics, 0)
    stopping = threading.Event()
    killed = 0

    def kill_now_and_then() -> None:
        nonlocal killed
        while not stopping.wait(chance.uniform(0.3, 1.5)):
            child = log._maintenance._child
            if child is not None:
                child.kill()
                killed += 1

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline or not killed:
        for topic in topics:
            first = appended[topic]
            values = [b"%s %d" % (topic.encode(), number) for number in range(first, first + 500)]
            log.append(Batch.of(topic, values))
            appended[topic] += 500
        topic = chance.choice(topics)
        values = read_all(log, topic, appended[topic])
        expected = [b"%s %d" % (topic.encode(), number) for number in range(appended[topic])]
        assert values == expected, seed
        time.sleep(0.02)
    stopping.set()
    killer.join()
    log.seal()
    wait_for(lambda: not log.sealed_segments(), timeout_s=40)
    assert killed > 0
    assert log._topics["news"].handed_over == appended["news"]
    for topic in topics:
        assert len(read_all(log, topic, appended[topic])) == appended[topic]
    log.close()
