"""The benchmark of sessions: what it measures is checked, and it measures all it says."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_brokers import UPGRADED, FakeBroker, Speech
from loadgen_kit import loadgen

from polybus.bench import BenchError, generator, report
from polybus.bench.msgstream import SessionBench, open_sessions, scenarios
from polybus.bench.scenarios import Metric
from polybus.cli.bench import bench
from polybus.testing import run_bus

__all__ = ["loadgen"]

SMALL = {scenario.name: scenario for scenario in scenarios(idle=20, listeners=10)}
PUBLISH = re.compile(rb"\0\0\0\x64\0\0\x0a(bench\.\d{4})(.{100})", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_each_scenario_is_measured_and_leaves_nothing_behind(
    loadgen: Path, tmp_path: Path, name: str
) -> None:
    scenario = SMALL[name]
    plan = SessionBench(program=loadgen, data_root=tmp_path, rounds=1, run_s=0.2)

    outcomes = plan.measure(scenario, lambda text: None)

    assert [outcome.errors for outcome in outcomes] == [[] for _ in scenario.entries]
    assert list(tmp_path.iterdir()) == []
    rows = report.figures_of(scenario, outcomes)
    assert all(row.value is not None and row.value > 0 for row in rows)
    assert (rows[0].p99 is not None) == (scenario.metric is Metric.LATENCY)
    assert report.table(rows)[1][0][0] == f"{scenario.title} ({name})"


def test_the_targets_of_idle_sessions_and_fan_out() -> None:
    idle, fan_out = scenarios()[:2]

    assert (idle.load.subscribers, idle.limit) == (10_000, 13)
    assert fan_out.load.subscribers == 1_000
    assert [(entry.broker, entry.target) for entry in fan_out.entries] == [
        ("polybus", None),
        ("websockets", 20.0),
    ]


def pack(number: int, topic: bytes, payload: bytes) -> bytes:
    text = b'{"%d":[["%b","%b"]]}' % (number, topic, payload)
    return b"\x81\x7e" + len(text).to_bytes(2, "big") + text


async def drive(loadgen: Path, tmp_path: Path, speech: Speech) -> Any:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server = await asyncio.start_server(FakeBroker(speech).serve, "127.0.0.1", 0)
    async with server:
        port = str(server.sockets[0].getsockname()[1])
        arguments = ["--protocol", "msgstream", "--port", port, "--keys", str(keys)]
        arguments += ["--subscribers", "2", "--messages", "500"]
        return await asyncio.to_thread(generator.call, loadgen, "run", arguments, deadline_s=10.0)


async def test_the_generator_takes_packs_and_confirms_them(loadgen: Path, tmp_path: Path) -> None:
    numbers = itertools.count(1)
    confirmations: list[bytes] = []

    class Listening(FakeBroker):
        def _publish(self, data: bytes, sender: asyncio.StreamWriter) -> bytes:
            confirmations.extend(re.findall(rb"\x81[\x81-\xfd]\0{4}([0-9,]+)", data))
            return super()._publish(data, sender)

    speech = Speech(
        publish=PUBLISH,
        deliver=lambda match: pack(next(numbers), *match.groups()),
        hello=(UPGRADED,),
    )
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    server = await asyncio.start_server(Listening(speech).serve, "127.0.0.1", 0)
    async with server:
        port = str(server.sockets[0].getsockname()[1])
        arguments = ["--protocol", "msgstream", "--port", port, "--keys", str(keys)]
        arguments += ["--messages", "500"]
        result = await asyncio.to_thread(generator.call, loadgen, "run", arguments, deadline_s=10.0)

    assert result["delivered"] == 500
    confirmed = {int(one) for ids in confirmations for one in ids.split(b",")}
    assert {*range(1, 500)} <= confirmed


async def test_a_notice_of_loss_fails_the_run(loadgen: Path, tmp_path: Path) -> None:
    speech = Speech(
        publish=PUBLISH, deliver=lambda match: pack(0, *match.groups()), hello=(UPGRADED,)
    )

    with pytest.raises(BenchError, match='the broker answered: .*"0'):
        await drive(loadgen, tmp_path, speech)


async def test_a_pack_that_comes_twice_fails_the_run(loadgen: Path, tmp_path: Path) -> None:
    speech = Speech(
        publish=PUBLISH, deliver=lambda match: pack(7, *match.groups()), hello=(UPGRADED,)
    )

    with pytest.raises(BenchError, match="pack 7 came after pack 7"):
        await drive(loadgen, tmp_path, speech)


async def test_a_session_that_cannot_be_opened_is_quoted() -> None:
    async with run_bus("another") as node:
        with pytest.raises(BenchError, match="not opened: 404 .*there is no topic"):
            await asyncio.to_thread(open_sessions, node.tcp_port, 1)


@pytest.mark.parametrize("others", [["--only", "idle"], ["--queues"]])
def test_it_is_measured_alone(others: list[str]) -> None:
    done = CliRunner().invoke(bench, ["--msgstream", *others])

    assert done.exit_code == 2
    assert "give only one of" in done.output
