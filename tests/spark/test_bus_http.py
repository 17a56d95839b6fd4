"""Blocking calls to the bus: errors of the bus, errors of the connection, and retries."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from spark_kit import RunningBus, running_bus

from polybus.client.http.blocking import bus_url, read_token, request, request_json
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.spark.location import retried


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBus]:
    with running_bus(tmp_path_factory.mktemp("bus"), ["news"]) as running:
        yield running


def test_the_bus_of_a_folder_is_found_with_its_token(bus: RunningBus) -> None:
    assert bus_url(bus.data) == bus.url
    token = read_token(bus.data)
    assert token is not None
    assert request_json(bus.url, "GET", "/v1/topics", token=token)["topics"][0]["name"] == "news"


def test_a_folder_without_a_bus_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="polybus serve") as caught:
        bus_url(tmp_path)
    assert caught.value.code == "client.unreachable"
    assert str(tmp_path) in caught.value.text
    assert read_token(tmp_path) is None
    (tmp_path / "run.json").write_text(json.dumps({"addresses": [], "http": []}))
    with pytest.raises(UsageError, match="speaks http"):
        bus_url(tmp_path)


def test_a_refusal_has_the_code_of_the_bus(bus: RunningBus) -> None:
    with pytest.raises(UsageError) as caught:
        request_json(bus.url, "GET", "/v1/topics/nobody")
    assert caught.value.code == "topic.unknown"
    # It answers, and closes, before it has read all of this.
    with pytest.raises(UsageError) as caught:
        request(bus.url, "POST", "/v1/staging/p/0-aaaaaaaa.arrows", b"x" * (40 << 20))
    assert caught.value.code == "http.body-too-large"


def test_an_invalid_and_an_unreachable_address_are_reported() -> None:
    for url in ("boson://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:x"):
        with pytest.raises(UsageError) as caught:
            request(url, "GET", "/")
        assert caught.value.code == "client.url"
    with pytest.raises(PolybusError) as nobody:
        request("http://127.0.0.1:9", "GET", "/")
    assert nobody.value.code == "client.unreachable"


class Answers:
    """Accepts connections, answers each with the next of some bytes, and closes it."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answers = answers
        self._thread = threading.Thread(target=self._serve)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        for answer in self._answers:
            connection, _ = self._listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    def __enter__(self) -> Answers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listener.close()


def test_another_server_and_a_lost_connection_are_distinguished() -> None:
    page = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope"
    torn = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    problem = json.dumps({"code": "log.full", "detail": "no room"}).encode()
    full = b"HTTP/1.1 503 X\r\ncontent-length: %d\r\n\r\n%s" % (len(problem), problem)
    with Answers(page, b"", torn, full) as server:
        codes = []
        for _ in range(4):
            with pytest.raises(PolybusError) as caught:
                request(server.url, "GET", "/")
            codes.append(caught.value.code)
        assert isinstance(caught.value, StorageError)
    assert codes == [
        "client.answer-invalid", "client.disconnected", "client.disconnected", "log.full",
    ]  # fmt: skip


def test_only_a_bus_that_is_away_is_waited_for() -> None:
    tries: list[int] = []

    def away_at_first() -> str:
        tries.append(len(tries))
        if len(tries) < 3:
            raise PolybusError("client.disconnected", "away")
        return "done"

    assert retried(away_at_first, patience_s=5) == "done"
    assert len(tries) == 3

    def refused() -> str:
        tries.append(0)
        raise UsageError("topic.unknown", "no")

    with pytest.raises(UsageError):
        retried(refused, patience_s=5)
    assert len(tries) == 4

    def gone() -> str:
        raise PolybusError("client.unreachable", "away")

    with pytest.raises(PolybusError):
        retried(gone, patience_s=0.1)
