"""Moving topics between files and a Kafka cluster, over real brokers."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from docs_kit import run_by

from polybus import references
from polybus.batch import Batch
from polybus.cli.migrate import migrate
from polybus.config import Journal, Retention
from polybus.edges.node import clock_us
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.blobs import BlobMark, BlobWriter, blobs_folder
from polybus.log.copying import FilesTarget, TopicMessages, copied_topics, copy_topic
from polybus.log.disk import Disk
from polybus.log.files import FileLog
from polybus.log.interface import Bounds, TopicSettings
from polybus.log.kafka.importing import KafkaTarget
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.registry import KafkaOptions
from polybus.testing import run_bus
from polybus.testing.kafka import KafkaBrokers

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(brokers: KafkaBrokers, prefix: str) -> Iterator[KafkaLog]:
    options = KafkaOptions(node="m", prefix=prefix, replicas=1, insync_min=1)
    log = KafkaLog(brokers.url, options=options, clock=clock_us)
    yield log
    log.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileLog]:
    log = opened(tmp_path / "files")
    yield log
    log.close()


def opened(data: Path) -> FileLog:
    return FileLog(
        data, durability="fsync", journal=Journal(), retention=Retention(), clock=clock_us
    )


def append(log: Any, topic: str, *values: bytes, **about: Any) -> None:
    batch = Batch.of(topic, values, keys=about.get("keys"), headers=about.get("headers"))
    batch.protocol, batch.sender = about.get("protocol", "goms"), about.get("sender", "s")
    batch.timestamp_us = about.get("time_us", 1_700_000_000_000_000)
    log.append(batch)
    log.sync()


def numbers(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def values_of(log: Any, topic: str) -> list[bytes]:
    return [one for batch in TopicMessages(log, topic).read() for one in batch.values()]


def test_a_copy_has_the_same_positions_and_everything_of_each_message(
    files: FileLog, cluster: KafkaLog
) -> None:
    files.create_topic("t", TopicSettings(retention_bytes=1 << 30))
    append(files, "t", b"one", b"two", keys=[b"k", None], headers=[None, {"h": b"v"}])
    append(files, "t", b"three", protocol="boson-frames", sender="p", time_us=1_700_000_001_000_000)
    files.create_topic("$events")

    assert copied_topics(files) == ["t"]
    copied = copy_topic("t", files, KafkaTarget(cluster))

    assert (copied.messages, copied.keeps_positions) == (3, True)
    assert cluster.bounds("t") == files.bounds("t")
    assert cluster.settings("t") == files.settings("t")
    first, *_, last = TopicMessages(cluster, "t").read()
    assert (first.protocol, first.sender, first.keys) == ("goms", "s", [b"k", None])
    assert (last.protocol, last.sender, last.timestamp_us) == (
        "boson-frames",
        "p",
        1_700_000_001_000_000,
    )


def test_a_topic_whose_first_messages_were_removed_keeps_its_offsets(cluster: KafkaLog) -> None:
    cluster.import_topic("t", TopicSettings(), Bounds(77, 250_000, 250_000))
    append(cluster, "t", b"next")
    assert cluster.bounds("t") == Bounds(77, 250_000, 250_001)
    assert values_of(cluster, "t") == [b"next"]


@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_copy_that_broke_off_continues_behind_its_last_message(
    files: FileLog, cluster: KafkaLog, done: int
) -> None:
    files.create_topic("t")
    for number in range(4):
        append(files, "t", b"%d" % number)
    cluster.import_topic("t", TopicSettings(), files.bounds("t"))
    for number in range(done):
        append(cluster, "t", b"%d" % number)

    assert copy_topic("t", files, KafkaTarget(cluster)).keeps_positions
    assert values_of(cluster, "t") == numbers(0, 4)


def test_a_topic_of_the_target_that_is_not_a_copy_is_left_alone(
    files: FileLog, cluster: KafkaLog
) -> None:
    files.create_topic("t")
    append(files, "t", b"ours")
    cluster.create_topic("t")
    append(cluster, "t", b"theirs")
    with pytest.raises(UsageError) as found:
        copy_topic("t", files, KafkaTarget(cluster))
    assert found.value.code == "topic.exists"
    assert values_of(cluster, "t") == [b"theirs"]


def test_a_copy_that_differs_is_reported(files: FileLog, cluster: KafkaLog) -> None:
    files.create_topic("t")
    append(files, "t", b"right")
    cluster.import_topic("t", TopicSettings(), files.bounds("t"))
    append(cluster, "t", b"wrong")
    with pytest.raises(PolybusError) as found:
        copy_topic("t", files, KafkaTarget(cluster))
    assert (found.value.code, "other messages" in found.value.text) == ("log.damaged", True)


def in_transaction(cluster: KafkaLog, topic: str, *values: bytes) -> None:
    """Leaves an offset without a message behind them."""
    batch = Batch.of(topic, values)
    batch.protocol, batch.sender, batch.timestamp_us = "goms", "s", clock_us()
    transaction = cluster.begin("p")
    transaction.append([batch])
    transaction.commit()


def test_the_way_back_has_all_messages_in_order_also_after_a_break(
    cluster: KafkaLog, tmp_path: Path
) -> None:
    cluster.create_topic("t")
    for number in range(0, 6, 2):
        in_transaction(cluster, "t", *numbers(number, 2))
    data = tmp_path / "back"
    log = opened(data)
    epoch = log.create_topic("t").epoch
    target = FilesTarget(data, log)
    # A break right after the creation, and one after three messages.
    assert target.messages_in("t", cluster.bounds("t")) == 0
    append(log, "t", *numbers(0, 3), time_us=next(TopicMessages(cluster, "t").read()).timestamp_us)
    log.close()

    log = opened(data)
    target = FilesTarget(data, log)
    assert target.messages_in("t", cluster.bounds("t")) == 3
    for batch in TopicMessages(cluster, "t").read(3):
        log.append(batch)
    log.sync()
    assert values_of(log, "t") == numbers(0, 6)
    assert log.bounds("t") == Bounds(epoch, 0, 6)
    with pytest.raises(UsageError):
        target.messages_in("t", Bounds(1, 0, 0))
    log.close()


def run(prefix: str, *arguments: str) -> Callable[[], Any]:
    settings = {"PREFIX": prefix, "REPLICAS": "1", "INSYNC_MIN": "1"}
    env = {f"POLYBUS_CLUSTER__{name}": value for name, value in settings.items()}
    done = CliRunner().invoke(migrate, arguments, env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return lambda: json.loads(done.stdout)


def put_blob(data: Path, topic: str, content: bytes) -> tuple[bytes, dict[str, bytes]]:
    folder = blobs_folder(data, "default")
    os.makedirs(folder, exist_ok=True)
    writer = BlobWriter(folder, Disk())
    writer.write(content)
    blob_id = writer.finish()
    writer.place(folder / blob_id, BlobMark(1, 0))
    made = references.make(blob_id, len(content))
    return references.encode(made), {references.HEADER: blob_id.encode()}


def test_the_command_moves_a_bus_to_kafka_and_back(
    brokers: KafkaBrokers, prefix: str, tmp_path: Path
) -> None:
    data, back = tmp_path / "data", tmp_path / "back"
    log = opened(data)
    log.create_topics({"a": TopicSettings(), "b": TopicSettings()})
    append(log, "a", *numbers(0, 5))
    value, header = put_blob(data, "a", b"large payload")
    append(log, "a", value, headers=[header])
    log.close()

    (block,) = run_by("kafka/test_moving.py", "docs/howto/cluster.md")
    (settings := tmp_path / "polybus.toml").touch()
    ours = {"/var/lib/polybus": str(data), "polybus.toml": str(settings)}
    words = [ours.get(one, one) for one in shlex.split(block.text)]
    words = [brokers.url if one.startswith("kafka://") else one for one in words]
    assert words[:2] == ["polybus", "migrate"]
    there = run(prefix, *words[2:], "--json")
    found = {one["topic"]: (one["messages"], one["keeps-positions"]) for one in there()}
    assert found == {"a": (6, True), "b": (0, True)}
    run(prefix, "--from", brokers.url, "--to", str(back), "--json")

    log = opened(back)
    assert values_of(log, "a") == [*numbers(0, 5), b"large payload"]
    assert log.bounds("b").stop == 0
    log.close()
    assert not (back / "migration.json").exists()

    # One topic alone leaves no note either.
    run(prefix, "--from", brokers.url, "--to", str(tmp_path / "one"), "--topic", "b", "--json")
    assert not (tmp_path / "one" / "migration.json").exists()


def test_folders_and_clusters_are_told_apart(tmp_path: Path) -> None:
    done = CliRunner().invoke(migrate, ["--from", str(tmp_path), "--to", str(tmp_path)])
    assert done.exit_code == 2 and "kafka://" in done.output
    missing = CliRunner().invoke(migrate, ["--from", str(tmp_path / "no"), "--to", "kafka://x:1"])
    assert isinstance(missing.exception, UsageError) and missing.exception.code == "log.no-data"


async def test_a_bus_does_not_start_on_a_folder_that_is_not_copied_to_its_end(
    tmp_path: Path,
) -> None:
    log = opened(tmp_path)
    FilesTarget(tmp_path, log).begin({"t": Bounds(1, 0, 5)})
    log.close()
    with pytest.raises(StorageError) as caught:
        async with run_bus(data=str(tmp_path)):
            pass
    assert (caught.value.code, " t;" in caught.value.text) == ("migrate.incomplete", True)
