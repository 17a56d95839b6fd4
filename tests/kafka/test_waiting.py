"""Nothing waits for Kafka on the loop of a node: all of its peers would wait, too."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_kit import ONE_BROKER, nodes

from polybus import names
from polybus.batch import Batch
from polybus.config import Config
from polybus.edges.node import Node
from polybus.errors import StorageError
from polybus.log.interface import Bounds, TopicSettings
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.registry import KafkaOptions, KafkaTopics
from polybus.testing.kafka import KafkaBrokers

pytestmark = pytest.mark.slow
WAITS: dict[str, Callable[[KafkaLog], object]] = {
    "create_topic": lambda log: log.create_topic("u"),
    "create_topics": lambda log: log.create_topics({"u": TopicSettings()}),
    "import_topic": lambda log: log.import_topic("u", TopicSettings(), Bounds(1, 0, 0)),
    "change_settings": lambda log: log.change_settings("t", TopicSettings()),
    "delete_topic": lambda log: log.delete_topic("t"),
    "catch_up": lambda log: log.catch_up("t"),
    "catch_up_all": KafkaLog.catch_up_all,
    "settle": lambda log: log.settle("t"),
    "read": lambda log: log.read("t", 0),
    "offset_at": lambda log: log.offset_at("t", 0),
    "begin": lambda log: log.begin("producer"),
    "shared_stop": KafkaLog.shared_stop,
    "forget_shared": lambda log: log.forget_shared([b"key"]),
    "sync": KafkaLog.sync,
    "close": KafkaLog.close,
}


@pytest.fixture(scope="module")
def log(brokers: KafkaBrokers) -> Iterator[KafkaLog]:
    """A log with a message of `t` that left memory."""
    options = KafkaOptions(node="n", prefix="waits.", recent_bytes_max=1)
    found = KafkaLog(brokers.url, options=options, clock=lambda: time.time_ns() // 1000)
    found.create_topic("t")
    for value in (b"old", b"new"):
        found.append(Batch.of("t", [value]))
        found.sync()
    yield found
    found.close()


@pytest.mark.parametrize("name", list(WAITS))
async def test_a_call_that_waits_for_kafka_is_refused_on_an_event_loop(
    log: KafkaLog, name: str
) -> None:
    with pytest.raises(RuntimeError, match="waits for Kafka"):
        WAITS[name](log)


async def test_reloaded_settings_create_topics_while_the_node_goes_on(
    brokers: KafkaBrokers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    make = KafkaTopics.make

    async def make_later(*given: Any) -> Any:
        assert await asyncio.to_thread(goes_on.wait, 20), "the loop waits for Kafka"
        return await make(*given)

    async with nodes(brokers, prefix, "t", count=1) as (node,):
        monkeypatch.setattr(KafkaTopics, "make", make_later)
        asyncio.get_running_loop().call_later(0.05, goes_on.set)
        assert node.reload(declaring(node, "t", "u")) == []
        await node.create_declared()
        assert node.bus.has_topic("u")


def declaring(node: Node, *topics: str) -> Config:
    return msgspec.convert(msgspec.to_builtins(node.config) | {"topics": [*topics]}, Config)


async def test_a_start_creates_the_missing_system_topics_of_an_account(
    brokers: KafkaBrokers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StorageError("log.unreachable", "no broker answers")

    async with nodes(brokers, prefix, count=1) as (node,):
        with monkeypatch.context() as patched:
            patched.setattr("polybus.services.accounts.accounts.make_account_topics", fail)
            await node.accounts.create("shop", "secret")
        wanted = [names.full("shop", one) for one in names.ACCOUNT_SYSTEM_TOPICS]
        assert not any(map(node.bus.has_topic, wanted))
        async with nodes(brokers, prefix, count=2) as later:
            assert all(one.bus.has_topic(topic) for one in later for topic in wanted)


async def test_sighup_and_the_demo_create_topics_in_a_cluster(
    brokers: KafkaBrokers, prefix: str, tmp_path: Path
) -> None:
    """The command does both on its loop, which refuses to wait."""
    cluster = {"prefix": prefix, **ONE_BROKER}
    settings = tmp_path / "polybus.json"
    whole: dict[str, Any] = {"log": brokers.url, "data": str(tmp_path / "data"), "cluster": cluster}
    settings.write_bytes(msgspec.json.encode(whole))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polybus.cli", "serve", "--verbose", "--config", str(settings)),
        *("--demo", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said: list[str] = []

    async def until_said(text: str) -> None:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while text not in "".join(said[-1:]):
                line = (await process.stdout.readline()).decode()
                assert line, said
                said.append(line)

    try:
        await until_said("The bus is still running")
        for topics in (["u"], ["u", "v"]):
            settings.write_bytes(msgspec.json.encode(whole | {"topics": topics}))
            process.send_signal(signal.SIGHUP)
            await until_said("the settings were reloaded")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
