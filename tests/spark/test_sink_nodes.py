"""The sink and the source with several nodes of a cluster: any one of them may die anytime."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_spark_kit import ClusterNode, cluster_node
from sink_kit import proxied, staged_files, values
from source_kit import offsets_of

from polybus.errors import PolybusError, UsageError
from polybus.spark import nodes
from polybus.spark.location import BusLocation, Retry, find_location
from polybus.spark.sink import any_node, commit, parse, staging
from polybus.spark.sink.staging import SinkColumns, StagedFile
from polybus.spark.source import options as source
from polybus.spark.source.readers import PolybusReader
from polybus.testing.kafka import KafkaBrokers

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, brokers: KafkaBrokers
) -> Iterator[tuple[ClusterNode, ClusterNode]]:
    """Two nodes of one bus. A test that kills one starts it again."""
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(cluster_node(tmp_path_factory.mktemp("a"), brokers))
        folder = tmp_path_factory.mktemp("b")
        yield a, stack.enter_context(cluster_node(folder, brokers, prefix=a.prefix))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PATIENCE_S", 2.0)
    monkeypatch.setattr(any_node, "PATIENCE_S", 2.0)


class Sink:
    """A batch of the sink, as tasks and the driver do it."""

    def __init__(self, url: str, topic: str) -> None:
        self.options = parse({"url": url, "topic": topic})
        self._topic = topic

    def stage(self, batch: int, *texts: str) -> StagedFile:
        rows = pa.record_batch({"value": pa.array([text.encode() for text in texts], pa.binary())})
        columns = SinkColumns(self._topic, has_key=False, has_headers=False)
        writer = (self._topic, "query")
        return staging.stage(iter([rows]), columns, self.options.location, writer, batch)

    def commit(self, batch: int, *staged: StagedFile) -> None:
        commit(self.options, self._topic, "query", batch, staged)


def test_rows_are_staged_at_two_nodes_and_leave_no_copy_behind(
    pair: tuple[ClusterNode, ClusterNode],
) -> None:
    a, b = pair
    a.create("copies")
    sink = Sink(f"{a.bus.url},{b.bus.url}", "copies")
    one, two = sink.stage(0, '"1"'), sink.stage(0, '"2"')
    assert set(one.nodes) == {a.bus.url, b.bus.url}
    for node in pair:
        assert staged_files(node.bus) == sorted(str(staged.name) for staged in (one, two))
    sink.commit(0, one, two)
    assert sorted(values(b.bus, "copies")) == ["1", "2"]
    assert staged_files(a.bus) == staged_files(b.bus) == []
    # A batch without rows, and one that is done already, need no files.
    sink.commit(1, StagedFile(None, "copies", "query"))
    sink.commit(0, one, two)
    assert sorted(values(a.bus, "copies")) == ["1", "2"]


def test_a_node_that_dies_between_staging_and_commit_loses_nothing(
    pair: tuple[ClusterNode, ClusterNode],
) -> None:
    a, b = pair
    a.create("between")
    sink = Sink(f"{a.bus.url},{b.bus.url}", "between")
    first = sink.stage(0, '"1"')
    a.bus.kill()
    try:
        # Another task of the batch, which finds only one node.
        second = sink.stage(0, '"2"')
        assert second.nodes == (b.bus.url,)
        sink.commit(0, first, second)
        sink.commit(1, sink.stage(1, '"3"'))
        assert sorted(values(b.bus, "between")) == ["1", "2", "3"]
    finally:
        a.bus.start()
    sink.commit(1, first)
    assert sorted(values(a.bus, "between")) == ["1", "2", "3"]


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_node_that_is_gone_when_it_should_answer_a_commit_is_replaced_and_it_is_done_once(
    pair: tuple[ClusterNode, ClusterNode], cut: str
) -> None:
    a, b = pair
    topic = f"answer-{cut}"
    a.create(topic)
    with proxied(a.bus) as proxy:
        sink = Sink(f"{proxy.url},{b.bus.url}", topic)
        staged = [sink.stage(0, '"1"'), sink.stage(0, '"2"')]
        assert {one.nodes for one in staged} == {(proxy.url, b.bus.url)}
        setattr(proxy, cut, lambda method, path: path != "/v1/commits")
        sink.commit(0, *staged)
    assert sorted(values(b.bus, topic)) == ["1", "2"]


def test_a_batch_whose_nodes_have_all_died_names_what_to_do(
    pair: tuple[ClusterNode, ClusterNode],
) -> None:
    a, b = pair
    a.create("lost")
    sink = Sink(f"{a.bus.url},{b.bus.url}", "lost")
    staged = [StagedFile(f"0-{'x' * 8}.arrows", "lost", "query", (one.bus.url,)) for one in pair]
    with pytest.raises(PolybusError) as caught:
        sink.commit(0, *staged)
    assert caught.value.code == "sink.staging-lost"
    # What every node refuses is not tried elsewhere.
    with pytest.raises(UsageError) as refused:
        sink.commit(0, StagedFile("0-missing1.arrows", "lost", "query", (a.bus.url, b.bus.url)))
    assert refused.value.code == "commit.file"
    with pytest.raises(PolybusError) as away:
        Sink(f"{NOBODY},http://127.0.0.1:2", "lost").stage(0, "x")
    assert away.value.code == "client.unreachable"


def test_a_reader_goes_on_at_another_node(pair: tuple[ClusterNode, ClusterNode]) -> None:
    a, b = pair
    a.create("read")
    a.commit(read=[b"0", b"1"])
    a.bus.publish("read", ["3"])
    given = {"url": f"{NOBODY},{a.bus.url},{b.bus.url}", "subscribe": "read"}
    reader = PolybusReader(source.parse(given, streaming=False))
    assert [offset for _, offset in offsets_of(reader, reader.partitions())] == [0, 1, 3]
    parts = reader.partitions()
    a.bus.kill()
    try:
        assert [offset for _, offset in offsets_of(reader, parts)] == [0, 1, 3]
    finally:
        a.bus.start()


# Without a cluster.


def test_addresses_have_the_scheme_of_the_first() -> None:
    assert nodes.nodes_of("https://a:1/, b:2,http://c:3,b:2") == [
        "https://a:1",
        "https://b:2",
        "http://c:3",
    ]
    place = find_location({"url": "http://a:1/,b:2"})
    assert place.url == "http://a:1,http://b:2"
    assert place.options() == {"url": "http://a:1,http://b:2"}
    assert place.others == 1
    assert [one.url for one in place.each_node()] == ["http://a:1", "http://b:2"]


def test_a_node_that_failed_is_asked_last_from_then_on() -> None:
    url = "http://x:1,http://y:1,http://z:1"
    nodes.leave(url, "http://y:1")  # Not the one that is asked: it changes nothing.
    assert nodes.in_order(url)[0] == "http://x:1"
    nodes.leave(url, "http://x:1")
    nodes.leave(url, "http://x:1")
    assert nodes.in_order(url) == ["http://y:1", "http://z:1", "http://x:1"]


def test_every_node_is_asked_once_before_a_call_without_patience_fails() -> None:
    asked: list[str] = []
    place = BusLocation(url="http://x:2,http://y:2,http://z:2")

    def ask() -> Any:
        asked.append(place.address()[0])
        with place.leaving(asked[-1]):
            raise PolybusError("client.unreachable", "gone")

    retry = Retry(0.0, others=place.others)
    with pytest.raises(PolybusError):
        while True:
            try:
                ask()
            except PolybusError as error:
                retry.wait(error)
    assert asked == ["http://x:2", "http://y:2", "http://z:2"]


def test_a_single_bus_keeps_one_attempt_without_patience() -> None:
    with pytest.raises(PolybusError):
        Retry(0.0).wait(PolybusError("client.unreachable", "gone"))
    place = BusLocation(Path("data"), "http://a:1")
    assert place.others == 0


@pytest.mark.parametrize("code", ["client.disconnected", "log.unreachable"])
def test_patience_begins_with_the_first_failure(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("polybus.spark.location.time.monotonic", lambda: now_s)
    monkeypatch.setattr("polybus.spark.location.time.sleep", lambda _: None)
    retry = Retry(10.0)
    now_s += 60
    retry.wait(PolybusError(code, "gone"))
    now_s += 11
    with pytest.raises(PolybusError):
        retry.wait(PolybusError(code, "gone"))
