"""The queue benchmark measures every system, checks deliveries and prints ratios."""

from __future__ import annotations

import pytest
from click import ClickException
from click.testing import CliRunner

from polybus.bench.queues import MEASURES, Load, Row, has_zmq, queues, ratio, run_queue_bench


@pytest.mark.slow
def test_every_system_is_measured_at_every_size() -> None:
    said: list[str] = []
    rows = run_queue_bench((16, 100_000), rounds=1, scale=0.001, progress=said.append)
    systems = [key for key in MEASURES if has_zmq() or "pyzmq" not in key[1]]
    assert [(row.where, row.system) for row in rows] == systems * 2
    assert all(row.messages_per_s > 0 for row in rows)
    assert len(said) == len(rows)


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_with_its_ratio() -> None:
    result = CliRunner().invoke(queues, ["--rounds", "1", "--scale", "0.0005"])
    assert result.exit_code == 0, result.output
    assert "multiprocessing" in result.output
    assert result.output.count(" x\n") == len([key for key in MEASURES if _is_peer(key)]) * 3


def _is_peer(key: tuple[str, str]) -> bool:
    return key[1] != "polybus" and (has_zmq() or "pyzmq" not in key[1])


def test_a_delivery_that_is_not_complete_fails_the_run() -> None:
    with pytest.raises(ClickException, match="9 of 10"):
        Load(16, 10).check(9, 144)


def test_a_ratio_is_of_one_place_and_size() -> None:
    rows = [Row("tcp", "polybus", 16, 30.0), Row("tcp", "pyzmq", 16, 10.0)]
    assert ratio(rows, "tcp", 16, "pyzmq") == 3.0
    assert ratio(rows, "tcp", 16, "multiprocessing") is None
