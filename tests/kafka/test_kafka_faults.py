"""What a node over Kafka does while one topic has no leader: the others continue."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from cluster_kit import eventually, url

import polybus
from polybus.batch import Batch
from polybus.errors import PolybusError
from polybus.log.kafka import producing
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.registry import KafkaOptions
from polybus.testing import run_bus
from polybus.testing.kafka import KafkaBrokers

pytestmark = pytest.mark.slow


def make_lonely(brokers: KafkaBrokers, prefix: str) -> int:
    """Create the topic `lonely` with one replica; return the broker that has it."""
    options = KafkaOptions(node="n", prefix=prefix, replicas=1, insync_min=1)
    log = KafkaLog(brokers.url, options=options, clock=lambda: time.time_ns() // 1000)
    try:
        log.create_topic("lonely")
        log.append(Batch.of("lonely", [b"first"]))
        log.sync()
        leader = log.link.leader_of(f"{prefix}lonely")
        assert leader is not None
        return leader
    finally:
        log.close()


async def test_a_topic_without_a_leader_refuses_or_delays_its_own_publishes_only(
    brokers: KafkaBrokers, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With `durability = "interval"` publishes to it wait, otherwise they are refused."""
    monkeypatch.setattr(producing, "STALL_S", 3.0)
    shared = {"log": brokers.url, "cluster": {"prefix": prefix}}
    async with (
        run_bus("t", **shared, data=str(tmp_path / "a")) as strict,
        run_bus("t", **shared, data=str(tmp_path / "b"), durability="interval") as patient,
        httpx.AsyncClient(timeout=60) as http,
    ):
        leader = await asyncio.to_thread(make_lonely, brokers, prefix)

        async def both_know() -> bool:
            return all(node.bus.has_topic("lonely") for node in (strict, patient))

        await eventually(both_know, 30)
        await asyncio.to_thread(brokers.kill, leader)

        async def is_red() -> bool:
            answers = [await http.get(f"{url(node)}/healthz") for node in (strict, patient)]
            return all(answer.status_code == 503 for answer in answers)

        ways = [f"boson://127.0.0.1:{node.tcp_port}" for node in (strict, patient)]
        async with (
            polybus.connect(ways[0], receipt_timeout_s=90) as a,
            polybus.connect(ways[1], receipt_timeout_s=90) as b,
        ):
            late = [
                asyncio.create_task(client.publish("lonely", text, receipt=True))
                for client, text in ((a, "strict"), (b, "patient"))
            ]
            await eventually(is_red, 60)
            async with polybus.connect(ways[0]) as refused:
                with pytest.raises(PolybusError) as caught:
                    await refused.publish("lonely", "refused", receipt=True)
            assert caught.value.code == "log.unreachable"
            late.append(asyncio.create_task(b.publish("lonely", "patient again", receipt=True)))
            # The other topic is taken and delivered, and changes nothing about the health.
            async with a.subscribe("t") as subscription:
                await b.publish("t", "beside")
                assert (await asyncio.wait_for(anext(aiter(subscription)), 60)).text == "beside"
            assert await is_red()
            await asyncio.to_thread(brokers.launch, leader)
            await asyncio.wait_for(asyncio.gather(*late), 90)
            async with b.subscribe("lonely", "earliest") as all_of_it:
                found = [(await anext(aiter(all_of_it))).text for _ in range(4)]
        assert found[0] == "first"
        assert sorted(found[1:]) == ["patient", "patient again", "strict"]
        assert (await http.get(f"{url(strict)}/healthz")).status_code == 200
