"""Reading over HTTP: the same rows as from the files, and errors when the bus is away."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from source_kit import offsets_of, rows_of, source_options
from spark_kit import RunningBus, running_bus

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.columns import SCHEMA
from polybus.log.reading.offset_reader import OffsetReader
from polybus.log.reading.pieces import ReadPlan
from polybus.spark import origin as remote
from polybus.spark.location import BusLocation
from polybus.spark.origin import RemoteLog
from polybus.spark.source.options import parse
from polybus.spark.source.positions import HeldTopics
from polybus.spark.source.readers import PolybusReader, PolybusStreamReader

VALUES = [f"news:{number}" for number in range(500)]


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBus]:
    with running_bus(tmp_path_factory.mktemp("remote"), ["news", "empty", "a b%ü"]) as running:
        running.publish("news", VALUES, headers={"a": "1"}, scheme="boson+properties")
        running.publish("a b%ü", ["x"])
        yield running


def batch(url: str, **given: Any) -> PolybusReader:
    return PolybusReader(source_options(url, **({"subscribe": "news"} | given)))


def test_a_topic_reads_the_same_over_http_as_from_its_files(bus: RunningBus) -> None:
    far = batch(bus.url)
    near = PolybusReader(source_options(bus.data, subscribe="news"))
    there, here = rows_of(far, far.partitions()), rows_of(near, near.partitions())
    assert there.num_rows == 500
    assert there.equals(here)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"startingOffsets": '{"news": 490}'}, range(490, 500)),
        ({"endingOffsets": '{"news": 3}'}, range(3)),
        ({"columns": "topic,offset", "minPartitions": 4}, range(500)),
        ({"startingTimestamp": 0, "endingTimestamp": "2999-01-01T00:00:00Z"}, range(500)),
    ],
)
def test_options_mean_the_same_over_http(
    bus: RunningBus, given: dict[str, Any], expected: range
) -> None:
    reader = batch(bus.url, **given)
    assert [offset for _, offset in offsets_of(reader, reader.partitions())] == list(expected)


def test_a_range_is_fetched_in_pages_of_bounded_size(
    bus: RunningBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAGE_ROWS", 37)
    reader = batch(bus.url)
    rows = offsets_of(reader, reader.partitions())
    assert rows == [("news", offset) for offset in range(500)]


def test_a_topic_with_a_difficult_name_is_read(bus: RunningBus) -> None:
    reader = batch(bus.url, subscribe="a b%ü")
    assert offsets_of(reader, reader.partitions()) == [("a b%ü", 0)]


def test_an_unknown_topic_is_reported_with_its_option(bus: RunningBus) -> None:
    with pytest.raises(UsageError) as caught:
        batch(bus.url, subscribe="nothing").partitions()
    assert caught.value.code == "topic.unknown"
    assert "option subscribe" in caught.value.text
    assert bus.url in caught.value.text


def test_a_damaged_topic_is_an_error_or_held_and_never_a_new_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = [
        {"name": "fine", "epoch": 5, "start": 0, "stop": 3},
        {"name": "bad", "epoch": 0, "start": 0, "stop": 0, "damaged": "history/1 is broken"},
    ]
    monkeypatch.setattr(BusLocation, "call", lambda *_, **__: {"topics": topics})
    origin = RemoteLog(BusLocation(url="http://127.0.0.1:1"))
    assert origin.all_bounds(["fine"])["fine"].stop == 3
    with pytest.raises(StorageError, match="history/1 is broken"):
        origin.all_bounds(["fine", "bad"])
    given = {"subscribePattern": ".*", "startingOffsets": "latest", "failOnDamage": "false"}
    reader = PolybusStreamReader(source_options("http://127.0.0.1:1", streaming=True, **given))
    place = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert list(place["topics"]) == ["fine"]
    assert "history/1 is broken" in place["damaged"]["bad"]


def test_a_time_after_the_end_is_the_end(bus: RunningBus) -> None:
    origin = RemoteLog(BusLocation(url=bus.url))
    assert origin.offset_at("news", 1 << 51) == 500
    assert origin.offset_at("empty", 0) == 0
    assert origin.offset_at("news", 0) == 0


def test_a_stream_follows_a_bus_over_http_and_over_its_restart(tmp_path: Path) -> None:
    with running_bus(tmp_path, ["news"]) as bus:
        options = {"url": bus.url, "subscribe": "news", "startingOffsets": "earliest"}
        reader = PolybusStreamReader(parse(options, streaming=True))
        place = reader.initialOffset()
        read = []
        for number in range(2):
            bus.publish("news", [f"{number}:{n}" for n in range(10)])
            end = reader.latestOffset(place, ReadAllAvailable())
            read += offsets_of(reader, reader.partitions(place, end))
            place = end
            bus.restart()
        assert read == [("news", offset) for offset in range(20)]


def test_a_recreated_topic_is_never_read_as_the_old_one(tmp_path: Path) -> None:
    with running_bus(tmp_path, ["news"]) as bus:
        bus.publish("news", ["old"] * 5)
        reader = batch(bus.url)
        parts = reader.partitions()
        request = urllib.request.Request(f"{bus.url}/v1/topics/news", method="DELETE")
        urllib.request.urlopen(request).close()
        body = json.dumps({"name": "news"}).encode()
        kind = {"content-type": "application/json"}
        again = urllib.request.Request(f"{bus.url}/v1/topics", body, kind, method="POST")
        urllib.request.urlopen(again).close()
        bus.publish("news", ["new"] * 5)
        with pytest.raises(UsageError) as caught:
            rows_of(reader, parts)
        assert caught.value.code == "spark.data-loss"
        assert "recreated" in caught.value.text
        tolerant = batch(bus.url, failOnDataLoss="false")
        assert offsets_of(tolerant, parts) == []


def test_offsets_that_a_log_leaves_out_are_neither_repeated_nor_an_error() -> None:
    """Kafka gives an offset to the end of each transaction: here 2, 5 and 9, of 10."""
    bus = Breaking([answering(0, 1, 3, 4), answering(6, 7), answering(8), answering()])
    try:
        reader = batch(bus.url, columns="topic,value_bytes,offset")
        rows = offsets_of(reader, reader.partitions())
        assert rows == [("news", offset) for offset in (0, 1, 3, 4, 6, 7, 8)]
        asked = [path.split("offset=")[1].split("&")[0] for path in bus.asked]
        assert asked == ["0", "5", "8", "9"]
    finally:
        bus.close()


def test_an_answer_without_messages_of_a_topic_that_was_recreated_is_data_loss() -> None:
    def recreated(call: BaseHTTPRequestHandler) -> None:
        played.epoch = 2
        whole(call, stream())

    played = Breaking([answering(0, 1), recreated])
    try:
        reader = batch(played.url, columns="offset")
        parts = reader.partitions()
        with pytest.raises(UsageError) as caught:
            rows_of(reader, parts)
    finally:
        played.close()
    assert caught.value.code == "spark.data-loss"


def test_a_held_topic_is_verified_up_to_the_last_message_and_not_by_counting() -> None:
    class Damaged:
        """Offsets 2 and 3 are not messages; 6 is damaged."""

        def plan(self, topic: str, start: int, stop: int) -> ReadPlan:
            return ReadPlan(topic, 1, start, stop, ())

        def read_plan(self, plan: ReadPlan, **_: Any) -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"offset": [0, 1, 4, 5]})
            raise StorageError("log.damaged", "offset 6")

    held = HeldTopics(cast(OffsetReader, Damaged()), fail=False)
    assert held.intact_stop("news", 0, 10) == 6


# A bus that goes away: what answers here is made to disconnect.

Answer = Callable[[BaseHTTPRequestHandler], None]


class Breaking:
    """Answers as a bus does with ten messages, but the reads as the test says."""

    def __init__(self, answers: list[Answer]) -> None:
        self.asked: list[str] = []
        self.answers = answers
        self.epoch = 1
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path.startswith("/v1/topics?"):
                    state = {"name": "news", "epoch": outer.epoch, "start": 0, "stop": 10}
                    whole(self, json.dumps({"topics": [state]}).encode())
                    return
                outer.asked.append(self.path)
                (answers.pop(0) if answers else broken)(self)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def whole(call: BaseHTTPRequestHandler, body: bytes) -> None:
    call.send_response(200)
    call.send_header("content-length", str(len(body)))
    call.end_headers()
    call.wfile.write(body)


def broken(call: BaseHTTPRequestHandler) -> None:
    call.close_connection = True
    call.connection.shutdown(socket.SHUT_RDWR)


def stream(*offsets: int) -> bytes:
    """Messages as the bus sends them, one record batch each."""
    sink = pa.BufferOutputStream()
    schema = pa.schema([SCHEMA.field("value"), SCHEMA.field("offset")])
    with pa.ipc.new_stream(sink, schema) as writer:
        for offset in offsets:
            row = [pa.array([b"x"]), pa.array([offset])]
            writer.write_batch(pa.record_batch(row, schema=schema))
    return bytes(sink.getvalue().to_pybytes())


def answering(*offsets: int) -> Answer:
    return lambda call: whole(call, stream(*offsets))


def cut_after(first: int, stop: int) -> Answer:
    """An answer that promises more than comes: these messages, then the connection is gone."""

    def answer(call: BaseHTTPRequestHandler) -> None:
        body = stream(*range(first, stop))
        call.send_response(200)
        call.send_header("content-length", str(len(body) + 1000))
        call.end_headers()
        call.wfile.write(body[:-8])
        broken(call)

    return answer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "AWAY_S", 0.2)


@pytest.mark.usefixtures("quick")
def test_reading_resumes_where_a_bus_disconnected() -> None:
    bus = Breaking(
        [
            cut_after(0, 3),
            broken,
            cut_after(3, 4),
            broken,
            answering(4, 5, 6, 7, 8, 9),
        ]
    )
    try:
        reader = batch(bus.url, columns="topic,offset")
        rows = offsets_of(reader, reader.partitions())
        assert rows == [("news", offset) for offset in range(10)]
        asked = [path.split("offset=")[1].split("&")[0] for path in bus.asked]
        assert asked == ["0", "3", "3", "4", "4"]
        assert all("stop=10" in path and "epoch=1" in path for path in bus.asked)
    finally:
        bus.close()


@pytest.mark.usefixtures("quick")
def test_a_bus_that_stays_away_is_an_error_with_url_topic_and_offset() -> None:
    bus = Breaking([cut_after(0, 3)])
    try:
        reader = batch(bus.url, columns="offset")
        with pytest.raises(PolybusError) as caught:
            rows_of(reader, reader.partitions())
    finally:
        bus.close()
    assert caught.value.code == "client.disconnected"
    assert bus.url in caught.value.text
    assert "topic 'news'" in caught.value.text
    assert "offset 3" in caught.value.text


@pytest.mark.usefixtures("quick")
def test_a_bus_that_is_not_there_is_an_error_with_its_url() -> None:
    bus = Breaking([])
    bus.close()
    with pytest.raises(PolybusError) as caught:
        batch(bus.url).partitions()
    assert caught.value.code == "client.unreachable"
    assert bus.url in caught.value.text
