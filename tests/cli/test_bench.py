"""The benchmark: its generator finds every wrong delivery, its report says what was measured."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_brokers import SPEECHES, FakeBroker
from loadgen_kit import loadgen

from polybus import config
from polybus.batch import Batch
from polybus.bench import BenchError, generator, machine, report
from polybus.bench.brokers import all_brokers, running
from polybus.bench.measure import EntryOutcome
from polybus.bench.scenarios import SCENARIOS, Entry, Metric, Scenario, Workload
from polybus.cli.bench import bench
from polybus.cli.common.output import table_lines
from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.journal.segment import Segment
from polybus.testing import ManualClock

__all__ = ["loadgen"]

# A Boson frame of the generator: 7 bytes of header, 10 of topic, 100 of payload. Probes are as
# long, so a multiple of it is always where a frame begins.
FRAME_BYTES = 117
HEADER_BYTES = 7
MESSAGES = 3000


@contextmanager
def relay(loadgen: Path, fault: str | None = None) -> Iterator[list[str]]:
    """A running relay; gives the options that lead the generator to it."""
    command = [str(loadgen), "relay", *(["--fault", fault] if fault else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        _, port, subscribe_port = process.stdout.readline().split()
        try:
            yield ["--protocol", "boson", "--port", port, "--subscribe-port", subscribe_port]
        finally:
            process.terminate()


def drive(loadgen: Path, arguments: list[str], *more: str) -> Any:
    few = ["--messages", str(MESSAGES)]
    return generator.call(loadgen, "run", [*arguments, *few, *more], deadline_s=10.0)


@pytest.mark.parametrize(
    "load",
    [
        Workload(),
        Workload(subscribers=8),
        Workload(topics=16),
        Workload(topics=1000, payload_bytes=1024),
        Workload(one_per_write=True),
    ],
)
def test_a_faithful_broker_passes_with_every_message_counted(loadgen: Path, load: Workload) -> None:
    with relay(loadgen) as place:
        result = drive(loadgen, place, *load.arguments())

    assert result["verified"] is True
    assert result["messages"] == MESSAGES
    assert result["delivered"] == MESSAGES * load.subscribers
    assert result["seconds"] > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (f"flip:{FRAME_BYTES * 500 + 80}", "wrong content"),
        (f"flip:{FRAME_BYTES * 500 + HEADER_BYTES + 9}", "wrong topic"),
        (f"flip:{FRAME_BYTES * 500 + HEADER_BYTES + 17}", "missing, repeated or out of order"),
        (f"flip:{FRAME_BYTES * 500 + 3}", "wrong size"),
        (f"drop:{FRAME_BYTES * 500}:{FRAME_BYTES}", "missing, repeated or out of order"),
        (f"repeat:{FRAME_BYTES * 500}:{FRAME_BYTES}", "missing, repeated or out of order"),
    ],
)
def test_one_wrong_delivery_fails_the_run_and_is_named(
    loadgen: Path, fault: str, said: str
) -> None:
    with relay(loadgen, fault) as place, pytest.raises(BenchError, match=said):
        drive(loadgen, place)


def test_a_message_lost_at_the_very_end_is_found_by_the_deadline(loadgen: Path) -> None:
    # The last frame of the stream: nothing follows that could be out of order.
    with (
        relay(loadgen, f"drop:{FRAME_BYTES * MESSAGES}:{FRAME_BYTES * 1000}") as place,
        pytest.raises(BenchError, match=r"deadline: \d+ messages delivered"),
    ):
        generator.call(loadgen, "run", [*place, "--messages", str(MESSAGES)], deadline_s=0.4)


def test_a_broker_that_never_answers_ends_the_run_at_the_deadline(loadgen: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = ["--protocol", "boson", "--port", str(silent.getsockname()[1])]
        with pytest.raises(BenchError, match="did not get a first message before the deadline"):
            generator.call(loadgen, "run", place, deadline_s=0.2)


@pytest.mark.parametrize("protocol", sorted(SPEECHES))
async def test_the_generator_speaks_every_protocol(loadgen: Path, protocol: str) -> None:
    speech = SPEECHES[protocol]
    server = await asyncio.start_server(FakeBroker(speech).serve, "127.0.0.1", 0)
    async with server:
        port = str(server.sockets[0].getsockname()[1])
        arguments = ["--protocol", protocol, "--port", port, "--messages", "500", "--topics", "4"]
        if speech.receipt and protocol != "resp":
            arguments += ["--receipts", "64"]
        arguments += ["--subscribers", "2"]
        result = await asyncio.to_thread(generator.call, loadgen, "run", arguments, deadline_s=10.0)

    assert result["delivered"] == 1000
    assert result["receipts"] == (500 if "--receipts" in arguments else 0)


def test_a_paced_run_measures_latency(loadgen: Path) -> None:
    with relay(loadgen) as place:
        result = drive(loadgen, place, "--rate", "20000", "--duration-s", "0.1")

    assert result["messages"] == 2000
    assert 0 < result["p50_us"] <= result["p99_us"] < 1_000_000
    assert 0 <= result["late_p50_us"] <= result["late_p99_us"]


async def test_a_paced_run_with_receipts_measures_the_time_to_each(loadgen: Path) -> None:
    broker = FakeBroker(SPEECHES["boson"])
    async with await asyncio.start_server(broker.serve, "127.0.0.1", 0) as server:
        port = str(server.sockets[0].getsockname()[1])
        arguments = ["--protocol", "boson", "--port", port, "--receipts", "64", "--rate", "2000"]
        arguments += ["--messages", "100"]
        result = await asyncio.to_thread(generator.call, loadgen, "run", arguments, deadline_s=10.0)

    assert (result["delivered"], result["receipts"]) == (100, 100)
    assert 0 < result["p50_us"] <= result["p99_us"] < 1_000_000
    assert 0 < result["delivery_p50_us"] <= result["delivery_p99_us"] < 1_000_000


def test_the_disk_alone_writes_as_much_as_the_journal_for_one_message(tmp_path: Path) -> None:
    log = FileLog(
        tmp_path,
        durability="fsync",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=ManualClock(),
        maintenance=False,
    )
    log.create_topic("bench.0000")
    for _ in range(2):
        log.append(Batch.of("bench.0000", [os.urandom(100)]))
        log.sync()
    (segment,) = layout.segments(tmp_path)
    written_bytes = Segment(segment).entries[-1].size
    log.close()

    assert abs(machine.COMMIT_BYTES - written_bytes) < 512
    assert machine.commit_times_us(tmp_path, 1000, 0.003)[0] > 0


def test_receipts_are_compared_with_the_disk_by_their_difference(loadgen: Path) -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "receipt-latency")
    brokers = all_brokers(loadgen)

    def row(p50_us: float) -> report.BenchFigure:
        outcomes = [
            EntryOutcome(entry, brokers[entry.broker], [{"p50_us": value, "p99_us": 900.0}])
            for entry, value in zip(scenario.entries, (p50_us, 300.0), strict=False)
        ]
        return report.figures_of(scenario, outcomes)[1]

    assert [row(p50_us).met for p50_us in (250.0, 449.9, 451.0)] == [True, True, False]
    text = rendered([row(451.0)])
    assert re.search(r"the disk alone .* \+151 µs .* ≤ \+150 µs .* not met", text)
    assert "receipt-latency: +151 µs over the disk alone, the target is ≤ +150 µs." in text


def test_with_one_message_in_flight_each_waits_for_the_delivery_before(loadgen: Path) -> None:
    with relay(loadgen) as place:
        result = drive(loadgen, place, "--ping-pong", "--messages", "200", "--subscribers", "2")

    assert (result["messages"], result["delivered"]) == (200, 400)
    assert 0 < result["p50_us"] <= result["p99_us"] < 1_000_000


def test_a_lost_message_in_flight_ends_the_run_at_the_deadline(loadgen: Path) -> None:
    with (
        relay(loadgen, f"drop:{FRAME_BYTES * 50}:{FRAME_BYTES}") as place,
        pytest.raises(BenchError, match=r"message \d+ was not delivered before the deadline"),
    ):
        generator.call(loadgen, "run", [*place, "--ping-pong"], deadline_s=0.4)


async def beside_flood(loadgen: Path, flood: str, *, by_topic: bool) -> Any:
    broker = FakeBroker(SPEECHES["nats"], by_topic=by_topic)
    async with await asyncio.start_server(broker.serve, "127.0.0.1", 0) as server:
        port = str(server.sockets[0].getsockname()[1])
        arguments = ["--protocol", "nats", "--port", port, "--beside", flood, "--rate", "1000"]
        arguments += ["--messages", "20", "--window-bytes", "20000"]
        return await asyncio.to_thread(generator.call, loadgen, "run", arguments, deadline_s=10.0)


@pytest.mark.parametrize("flood", ["bulk", "single"])
async def test_a_probe_runs_beside_a_flood_and_both_are_counted(loadgen: Path, flood: str) -> None:
    result = await beside_flood(loadgen, flood, by_topic=True)

    assert (result["messages"], result["delivered"]) == (20, 20)
    assert result["flood"]["delivered"] > 0


def test_a_flood_asks_for_no_receipts_though_the_peer_beside_it_does(
    loadgen: Path, tmp_path: Path
) -> None:
    topics = ["bench.0000", "bench.0001"]
    with running(all_brokers(loadgen)["polybus-memory"], tmp_path, topics) as server:
        arguments = ["--protocol", "boson", "--port", str(server.port), "--beside", "single"]
        arguments += ["--receipts", "1", "--one-per-write", "--messages", "20"]
        result = generator.call(loadgen, "run", arguments, deadline_s=30.0)

    assert (result["delivered"], result["receipts"]) == (20, 20)
    assert result["flood"]["delivered"] > 0


async def test_a_message_of_the_flood_that_reaches_the_probe_fails_the_run(loadgen: Path) -> None:
    with pytest.raises(BenchError, match="topic bench\\.0001"):
        await beside_flood(loadgen, "bulk", by_topic=False)


def test_the_cpu_time_and_memory_of_the_server_are_measured(loadgen: Path, tmp_path: Path) -> None:
    with running(all_brokers(loadgen)["relay"], tmp_path, []) as server:
        place = ["--protocol", "boson", "--port", str(server.port)]
        place += ["--subscribe-port", str(server.subscribe_port), "--server-pid", str(server.pid)]
        result = generator.call(loadgen, "idle", [*place, "--subscribers", "20"], deadline_s=10.0)

    assert result["connections"] == 20
    assert result["before_kib"] > 0


def test_the_generator_is_compiled_once_and_then_taken_from_the_cache(
    loadgen: Path, tmp_path: Path
) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    program = generator.compiled(environ)

    assert program.is_relative_to(tmp_path)
    assert generator.compiled({**environ, "PATH": ""}) == program
    assert [path.name for path in program.parent.iterdir()] == [program.name]


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="needs a C compiler: apt-get install gcc"):
        generator.compiled({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})


def test_a_broker_that_does_not_start_is_quoted(loadgen: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    with (
        pytest.raises(BenchError, match="did not start: .+"),
        running(all_brokers(loadgen)["polybus"], tmp_path, ["$reserved"]),
    ):
        pass


def outcome(loadgen: Path, broker: str, *rates: float, error: str | None = None) -> EntryOutcome:
    entry = next(entry for entry in RATE_SCENARIO.entries if entry.broker == broker)
    samples = [
        {"delivered": rate, "seconds": 1.0, "server_cpu_s": rate / 1e6 / 2} for rate in rates
    ]
    errors = [error] if error else []
    return EntryOutcome(entry, all_brokers(loadgen)[broker], samples, errors)


RATE_SCENARIO = Scenario(
    name="made-up",
    title="made up work",
    load=Workload(),
    entries=(
        Entry(broker="polybus"),
        Entry(broker="nats", target=3.0),
        Entry(broker="redis", target=5.0),
        Entry(broker="mosquitto", target=35.0),
    ),
)


def test_the_report_compares_medians_with_the_targets(loadgen: Path) -> None:
    outcomes = [
        outcome(loadgen, "polybus", 9e6, 6e6, 1e6),
        outcome(loadgen, "nats", 2e6, 1e6, 9e6),
        outcome(loadgen, "redis", 2e6),
        outcome(loadgen, "mosquitto", error="not installed: apt-get install mosquitto"),
    ]

    bus, nats, redis, mosquitto = report.figures_of(RATE_SCENARIO, outcomes)

    assert (bus.value, bus.cpu_s_per_million, bus.met) == (6e6, 0.5, None)
    assert (nats.value, nats.ratio, nats.met) == (2e6, 3.0, True)
    assert (redis.ratio, redis.met) == (3.0, False)
    assert (mosquitto.value, mosquitto.met) == (None, None)
    text = rendered([bus, nats, redis, mosquitto])
    assert re.search(r"redis-server .* 2\.00 M/s .* 3\.00 × .* ≥ 5 × .* not met", text)
    assert re.search(r"mosquitto .* not installed", text)
    assert "1 of 2 targets met" in text
    assert "Not met: made-up: 3.00 × redis-server, the target is ≥ 5 ×." in text


def test_a_bus_that_fails_misses_its_targets_and_the_report_says_why(loadgen: Path) -> None:
    outcomes = [outcome(loadgen, "polybus", error="wrong content"), outcome(loadgen, "nats", 1e6)]

    text = rendered(report.figures_of(RATE_SCENARIO, outcomes))

    assert "0 of 1 targets met" in text
    assert "Not met: made-up: the bus failed, the target is ≥ 3 ×." in text
    assert "Failed: made-up, polybus (interval): wrong content" in text


def test_one_failed_run_of_the_bus_outweighs_its_good_ones(loadgen: Path) -> None:
    outcomes = [
        outcome(loadgen, "polybus", 9e6, 9e6, error="wrong content"),
        outcome(loadgen, "nats", 1e6),
    ]

    _, nats = report.figures_of(RATE_SCENARIO, outcomes)

    assert (nats.ratio, nats.met) == (9.0, False)


def test_less_is_better_for_latency_and_memory(loadgen: Path) -> None:
    latency, idle = (
        next(scenario for scenario in SCENARIOS if scenario.metric is metric)
        for metric in (Metric.LATENCY, Metric.MEMORY)
    )
    brokers = all_brokers(loadgen)
    waits = [
        EntryOutcome(entry, brokers[entry.broker], [{"p50_us": p50_us, "p99_us": 900.0}])
        for entry, p50_us in zip(latency.entries, (99, 100, 50), strict=True)
    ]
    sizes = [EntryOutcome(idle.entries[0], brokers["polybus"], [{"connection_bytes": 12289}])]

    rows = report.figures_of(latency, waits) + report.figures_of(idle, sizes)

    assert [row.met for row in rows] == [None, True, None, False]
    assert rows[0].p99 == 900
    text = rendered(rows)
    assert re.search(r"nats-server .* 0\.99 ×, p99 1\.00 × .* ≤ 1 ×, p99 too .* met", text)
    assert re.search(r"redis-server .* 1\.98 ×, p99 1\.00 × .* goal ≤ 1 ×", text)
    assert "≤ 6 KiB" in text
    assert "1 of 2 targets met.\nNot met: idle" in text


def test_a_late_99th_percentile_misses_the_target_of_a_latency(loadgen: Path) -> None:
    latency = next(scenario for scenario in SCENARIOS if scenario.metric is Metric.LATENCY)
    brokers = all_brokers(loadgen)
    waits = [
        EntryOutcome(entry, brokers[entry.broker], [{"p50_us": 100.0, "p99_us": p99_us}])
        for entry, p99_us in zip(latency.entries, (901.0, 900.0), strict=False)
    ]

    assert [row.met for row in report.figures_of(latency, waits)] == [None, False]


def test_the_report_says_when_the_generator_could_not_keep_the_pace(loadgen: Path) -> None:
    latency = next(one for one in SCENARIOS if one.load.rate_per_s == 50_000)
    bus = latency.entries[0]

    def note(late_us: float) -> str:
        sample = {"p50_us": 100.0, "p99_us": 900.0, "late_p50_us": late_us}
        outcomes = [EntryOutcome(bus, all_brokers(loadgen)["polybus"], [sample])]
        return report.figures_of(latency, outcomes)[0].note

    assert note(99.0) == ""
    assert note(101.0) == "generator late by 101 µs"


def rendered(figures: list[report.BenchFigure]) -> str:
    return "\n".join([*table_lines(*report.table(figures)), *report.summary(figures)])


def polybus(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    start = "from polybus.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=110,
        check=False,
    )


def test_help_has_examples_and_names_every_scenario() -> None:
    done = polybus("bench", "--help")

    assert done.returncode == 0
    assert "polybus bench --quick" in done.stdout
    assert all(scenario.name in done.stdout for scenario in SCENARIOS)
    assert re.search(r"\[(\w+\|)*latency\|", done.stdout)


def test_the_page_about_it_names_every_scenario_and_option() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/benchmark.md").read_text()

    assert [scenario.name for scenario in SCENARIOS if f"`{scenario.name}`" not in page] == []
    options = {option for word in bench.params for option in word.opts}
    assert [option for option in options if f"`{option}" not in page] == []


def test_an_unknown_scenario_is_a_usage_error() -> None:
    assert polybus("bench", "--only", "nonsense").returncode == 2


@pytest.mark.slow
def test_the_bus_is_measured_and_leaves_nothing_behind(tmp_path: Path) -> None:
    only = ["--only", "memory-1-1", "--only", "receipt-latency"]
    options = [*only, "--rounds", "1", "--seconds", "0.2", "--json"]
    done = polybus("bench", *options, "--data-root", str(tmp_path))

    assert done.returncode == 0, done.stderr
    rows = {(row["scenario"], row["who"]): row for row in json.loads(done.stdout)["rows"]}
    assert rows["memory-1-1", "polybus (memory)"]["value"] > 0
    assert rows["memory-1-1", "bare relay"]["value"] > 0
    assert rows["receipt-latency", "polybus (fsync)"]["p99"] > 0
    assert rows["receipt-latency", "the disk alone"]["p99"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_logins_and_open_consoles_are_measured(tmp_path: Path) -> None:
    options = [
        "--only",
        "login",
        "--only",
        "console-1-1",
        "--only",
        "console-page",
        "--rounds",
        "1",
        "--seconds",
        "0.2",
        "--json",
    ]
    done = polybus("bench", *options, "--data-root", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    found = [(row["scenario"], bool(row["value"])) for row in result["rows"]]
    names = ["console-1-1", "console-1-1", "console-page"]
    names += ["login-1-1", "login-1-1", "login-beside", "login-beside"]
    assert found == [(name, True) for name in names], result
