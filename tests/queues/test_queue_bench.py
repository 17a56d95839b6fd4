"""The queue benchmark measures every system, checks deliveries and prints ratios."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from polybus.bench.errors import BenchError
from polybus.bench.queues import (
    BARS,
    MEASURES,
    Load,
    Row,
    as_json,
    has_zmq,
    ratio,
    render,
    run_count,
    run_queue_bench,
)
from polybus.cli.bench import bench


@pytest.mark.slow
def test_every_system_is_measured_at_every_size() -> None:
    said: list[str] = []
    rows = run_queue_bench((16, 100_000), rounds=1, scale=0.001, progress=said.append)
    systems = [key for key in MEASURES if has_zmq() or "pyzmq" not in key[1]]
    assert [(row.where, row.system) for row in rows] == systems * 2
    assert all(row.messages_per_s > 0 for row in rows)
    assert len(said) == len(rows) == run_count(1, (16, 100_000))


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_and_every_bar() -> None:
    result = CliRunner().invoke(bench, ["--queues", "--rounds", "1", "--seconds", "0.05"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len([line for line in lines if line.startswith(("tcp ", "in process "))]) == run_count(1)
    assert len([line for line in lines if line.rstrip().endswith("×")]) >= len(BARS)
    assert any(line.endswith(f"of {len(BARS)} bars met.") for line in lines)


def test_pyzmq_is_there_to_be_measured() -> None:
    """It is one of the development tools; without it half of the comparison would be missing."""
    assert has_zmq()


@pytest.mark.parametrize("option", [["--only", "latency"], ["--data-root", "."]])
def test_queues_go_with_no_option_of_the_brokers(option: list[str]) -> None:
    result = CliRunner().invoke(bench, ["--queues", *option])
    assert result.exit_code == 2
    assert "--queues" in result.output


def test_a_missed_bar_is_said_and_a_met_one_is_not() -> None:
    rows = [
        Row("tcp", "polybus", 1024, 90.0),
        Row("tcp", "pyzmq", 1024, 100.0),
        Row("tcp", "multiprocessing", 1024, 10.0),
        Row("tcp", "polybus", 16, 30.0),
        Row("tcp", "multiprocessing", 16, 10.0),
    ]
    said = render(rows)
    assert "1 of 2 bars met." in said
    assert "Not met: tcp, 1,024 bytes: 0.90 × pyzmq, the bar is ≥ 1 ×." in said
    assert said.count("Not met") == 1
    assert [(row["ratio"], row["bar"]) for row in as_json(rows)] == [
        (1.0, None),
        (0.9, 1.0),
        (9.0, None),
        (1.0, None),
        (3.0, 3.0),
    ]


def test_a_delivery_that_is_not_complete_fails_the_run() -> None:
    with pytest.raises(BenchError, match="9 of 10"):
        Load(16, 10).check(9, 144)


def test_a_ratio_is_of_one_place_and_size() -> None:
    rows = [Row("tcp", "polybus", 16, 30.0), Row("tcp", "pyzmq", 16, 10.0)]
    assert ratio(rows, "tcp", 16, "pyzmq") == 3.0
    assert ratio(rows, "tcp", 16, "multiprocessing") is None
