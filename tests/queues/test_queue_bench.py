"""The queue benchmark measures every system, checks deliveries and prints ratios."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from polybus.bench import BenchError
from polybus.bench.queues import (
    MEASURES,
    TARGETS,
    QueueLoad,
    figures_of,
    has_zmq,
    run_count,
    run_queue_bench,
)
from polybus.bench.report import summary
from polybus.cli.bench import bench


@pytest.mark.slow
def test_every_system_is_measured_at_every_size() -> None:
    said: list[str] = []
    figures = run_queue_bench((16, 100_000), rounds=1, scale=0.001, tell=said.append)
    systems = [(place, system) for place, measures in MEASURES.items() for system in measures]
    found = [(figure.work.partition(",")[0], figure.who) for figure in figures]
    assert found == systems * 2
    assert all(figure.value and figure.value > 0 for figure in figures)
    assert len(said) == len(figures) == run_count(1, (16, 100_000))


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_and_every_target() -> None:
    result = CliRunner().invoke(bench, ["--queues", "--rounds", "1", "--seconds", "0.05"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len([line for line in lines if line.endswith(" MB/s")]) == run_count(1)
    assert len([line for line in lines if " ≥ " in line and "Not met" not in line]) == len(TARGETS)
    assert any(line.endswith(f"of {len(TARGETS)} targets met.") for line in lines)


def test_pyzmq_is_there_to_be_measured() -> None:
    """It is one of the development tools; without it half of the comparison would be missing."""
    assert has_zmq()


@pytest.mark.parametrize("option", [["--only", "latency"], ["--data-root", "."]])
def test_queues_go_with_no_option_of_the_brokers(option: list[str]) -> None:
    result = CliRunner().invoke(bench, ["--queues", *option])
    assert result.exit_code == 2
    assert "--queues" in result.output


def test_a_missed_target_is_reported_and_a_met_one_is_not() -> None:
    tcp = {"polybus": 90.0, "pyzmq": 100.0, "multiprocessing": 10.0}
    small = {"polybus": 30.0, "multiprocessing": 10.0}
    figures = [
        *figures_of("tcp", 1024, tcp),
        *figures_of("tcp", 16, small),
    ]
    assert summary(figures) == [
        "1 of 2 targets met.",
        "Not met: tcp, 1,024 bytes: 0.90 × pyzmq, the target is ≥ 1 ×.",
    ]
    ratios = [(figure.ratio, figure.met) for figure in figures]
    assert ratios == [(None, None), (0.9, False), (9.0, None), (None, None), (3.0, True)]


def test_an_incomplete_delivery_fails_the_run() -> None:
    with pytest.raises(BenchError, match="9 of 10"):
        QueueLoad(16, 10).check(9, 144)
