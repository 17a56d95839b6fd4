"""`polybus verify` against a cluster: all that is intact, and each damage by its name."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from cluster_kit import nodes, open_session, publish, url
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from polybus.batch import Batch
from polybus.cli import main
from polybus.log.interface import SHARED
from polybus.log.kafka import verifying
from polybus.log.kafka.log import KafkaLog
from polybus.log.kafka.reader import close_links
from polybus.log.kafka.record_batch import RecordFrame, frames
from polybus.log.kafka.registry import KafkaOptions
from polybus.log.layout import admin_token_path
from polybus.testing.kafka import KafkaBrokers

sys.path.insert(0, str(Path(__file__).parents[1] / "edges"))

from commit_kit import stage

pytestmark = pytest.mark.slow
Verify = Callable[..., Result]


@pytest.fixture
def verify(brokers: KafkaBrokers, prefix: str, tmp_path: Path) -> Iterator[Verify]:
    """The command, for the bus of the test, by its settings or the folder of a node."""
    file = tmp_path / "polybus.json"
    file.write_text(json.dumps({"log": brokers.url, "cluster": {"prefix": prefix}}))

    def run(*options: str, data: Path | None = None) -> Result:
        place = ["--config", str(file)] if data is None else ["--data", str(data)]
        return CliRunner().invoke(main, ["verify", *place, *options])

    yield run
    close_links()


@pytest.fixture
def log(brokers: KafkaBrokers, prefix: str) -> Iterator[KafkaLog]:
    """The log of a node, with three RecordBatches of two messages in `t`."""
    options = KafkaOptions(node="n", prefix=prefix)
    found = KafkaLog(brokers.url, options=options, clock=lambda: time.time_ns() // 1000)
    found.create_topic("t")
    for number in range(3):
        found.append(Batch.of("t", [b"%d-%d" % (number, one) for one in range(2)]))
        found.sync()
    yield found
    found.close()


def produce(brokers: KafkaBrokers, name: str, value: bytes, key: bytes = b"k") -> None:
    producer = Producer({"bootstrap.servers": ",".join(brokers.addresses)})
    producer.produce(name, value, key)
    assert producer.flush(30) == 0


async def test_all_that_nodes_have_stored_is_intact(
    brokers: KafkaBrokers, prefix: str, verify: Verify
) -> None:
    """While they run: messages, a transaction that was aborted, and entries of all kinds."""
    async with nodes(brokers, prefix, "t", "u") as (a, b), httpx.AsyncClient() as http:
        await publish(http, url(a), "t", "1", "2")
        await open_session(http, url(b), "t")
        token = admin_token_path(a.data).read_text().strip()
        made = {"name": "shop", "password": "long enough 1"}
        headers = {"authorization": f"Bearer {token}"}
        for path, body in (("accounts", made), ("broadcast", [["note", "all"]])):
            answer = await http.post(f"{url(a)}/v1/{path}", json=body, headers=headers)
            assert answer.status_code < 300, answer.text
        wanted = {"query": "q", "batch": 0, "files": [stage(a.data, "p", 0, {"u": [b"3"]})]}
        answer = await http.post(f"{url(a)}/v1/commits", json={"producer": "p"} | wanted)
        assert answer.status_code == 200, answer.text
        position = {"epoch": a.bus.log.bounds("t").epoch, "offset": 1}
        about = {"kind": "etl", "positions": {"t": position}}
        answer = await http.put(f"{url(a)}/v1/consumers/g", json=about)
        assert answer.status_code == 204, answer.text
        cluster = a.bus.log.cluster
        assert cluster is not None
        left = await asyncio.to_thread(cluster.begin, "other")
        await asyncio.to_thread(left.append, [Batch.of("u", [b"aborted"])])
        await asyncio.to_thread(left.abort)
        done = await asyncio.to_thread(verify, "--json")
        by_folder = await asyncio.to_thread(verify, data=b.data)
    report = json.loads(done.stdout)
    assert (done.exit_code, report["damages"], report["notes"]) == (0, [], []), report
    assert (report["topics"], report["messages"]) == (2, 3)
    assert report["system_messages"] >= 1
    assert by_folder.exit_code == 0
    assert by_folder.stdout.startswith("intact: 2 topics, 3 messages, ")
    assert "segments" not in by_folder.stdout


def test_bytes_that_changed_on_the_disk_of_a_broker_are_named(
    brokers: KafkaBrokers, prefix: str, log: KafkaLog, verify: Verify
) -> None:
    for path in brokers.folder.glob(f"broker-*/data/{prefix}t-0/*0.log"):
        content = bytearray(path.read_bytes())
        first, second = list(frames(bytes(content)))[:2]
        content[len(first.data) + len(second.data) - 1] ^= 1
        path.write_bytes(content)
    done = verify("--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    (damage,) = report["damages"]
    assert (damage["topic"], damage["first"], damage["last"]) == ("t", 2, 3)
    assert damage["file"] == f"Kafka {prefix}t"
    assert "checksum" in damage["reason"]
    assert report["messages"] == 4
    assert "damaged: topic 't', Kafka " in verify().stdout


@pytest.mark.parametrize(
    ("change", "reason", "offsets"),
    [
        (lambda found: found[:1] + found[2:], "missing", (2, 3)),
        (lambda found: [*found[:2], found[0], *found[2:]], "repeat", (0, 1)),
        (lambda found: [_counting(found[0], 1), *found[1:]], "1 messages for 2", (0, 1)),
        (lambda found: [_counting(found[0], 3), *found[1:]], "offset 0 is not above", (0, 1)),
        (lambda found: [], "not a RecordBatch", (0, 1)),
    ],
)
def test_record_batches_out_of_order_are_named(
    log: KafkaLog,
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[RecordFrame]], list[RecordFrame]],
    reason: str,
    offsets: tuple[int, int],
) -> None:
    def changed(data: bytes) -> list[RecordFrame]:
        found = list(frames(data))
        return change(found) if b"0-0" in data else found

    monkeypatch.setattr(verifying, "frames", changed)
    done = verify("--json")
    (damage,) = json.loads(done.stdout)["damages"]
    assert done.exit_code == 1
    assert reason in damage["reason"]
    assert (damage["topic"], damage["first"], damage["last"]) == ("t", *offsets)


def _counting(frame: RecordFrame, count: int) -> RecordFrame:
    """The same with another number of messages in its header; the checksum follows."""
    from aiokafka.record.util import calc_crc32c

    from polybus.log.kafka.record_batch import CHECKED_FROM, HEADER

    data = bytearray(frame.data)
    data[HEADER.size - 4 : HEADER.size] = count.to_bytes(4)
    record = bytes(data[HEADER.size :])
    # The first message again, if there are to be more.
    data += record[: len(record) // 2] * (count - 2)
    data[CHECKED_FROM - 4 : CHECKED_FROM] = calc_crc32c(data[CHECKED_FROM:]).to_bytes(4)
    return RecordFrame(memoryview(data), HEADER.unpack_from(data))


def test_a_topic_that_another_program_deleted_is_named(
    brokers: KafkaBrokers, prefix: str, log: KafkaLog, verify: Verify
) -> None:
    log.create_topic("u")
    log.delete_topic("u")
    log.close()
    admin = AdminClient({"bootstrap.servers": ",".join(brokers.addresses)})
    name = f"{prefix}t"
    admin.delete_topics([name])[name].result(30)
    done = verify()
    assert done.exit_code == 1
    assert f"topic 't', Kafka {name}: Kafka does not have it" in done.stdout
    assert "1 damage: 0 topics" in done.stdout


BAD: dict[str, tuple[str, bytes, bytes, str]] = {
    "registry": ("Polybus-topics", b"t", b"{", "is not the record of a topic"),
    "account": (SHARED, b"account/shop/n.1", b"{}", "the entry account shop/n.1"),
    "consumer": (SHARED, b"consumer/c", b"[]", "the entry consumer c"),
    "session": (SHARED, b"session/00/n", b"\x93", "the entry session 00/n"),
    "broadcast": (SHARED, b"broadcast/n.1", b"\x93", "the entry broadcast n.1"),
    "commit": ("X24commits", b"p", b"{}", "is not the record of a transaction"),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_a_message_of_the_nodes_that_they_cannot_read_is_named(
    brokers: KafkaBrokers, prefix: str, log: KafkaLog, verify: Verify, kind: str
) -> None:
    log.create_topic("$commits")
    name, key, value, said = BAD[kind]
    produce(brokers, prefix + SHARED, b"x", b"of-a-newer-version/n")
    produce(brokers, prefix + name, value, key)
    done = verify()
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("damaged: ")]
    assert said in line and "offsets " in line and f"Kafka {prefix}{name}" in line
    assert "1 damage: 1 topic, 6 messages" in done.stdout


def test_a_cluster_that_no_node_has_used_is_an_error(verify: Verify) -> None:
    done = verify()
    assert done.exit_code == 1
    assert "data.not-found" in done.output
