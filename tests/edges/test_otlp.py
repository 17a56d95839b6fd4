"""Metrics for an OpenTelemetry collector, and the header of a trace through the protocols."""

from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from edge_kit import line, properties
from http_kit import http_bus

from polybus.testing import ScriptedPeer

Received = queue.Queue[dict[str, Any]]


@pytest.fixture
def collector() -> Iterator[tuple[str, Received]]:
    """A receiver of OTLP/HTTP: its URL, and what it got."""
    received: Received = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            assert self.headers["content-type"] == "application/json"
            received.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", received
        server.shutdown()
        thread.join()


async def test_a_collector_gets_counters_gauges_and_histograms(
    collector: tuple[str, Received],
) -> None:
    url, received = collector
    async with http_bus("news", otlp={"endpoint": url, "interval-s": 0.1}) as http:
        await http.publish("news", b"1", b"2")
        before = received.qsize()
        # The first of these may have been gathered earlier.
        await http.until(lambda: received.qsize() >= before + 2)
    found = list(received.queue)[-1]
    [resource] = found["resourceMetrics"]
    [scope] = resource["scopeMetrics"]
    service = {"key": "service.name", "value": {"stringValue": "polybus"}}
    assert resource["resource"]["attributes"] == [service]
    metrics = {one["name"]: one for one in scope["metrics"]}
    published = metrics["polybus_messages_in_total"]["sum"]
    assert published["isMonotonic"] and published["aggregationTemporality"] == 2
    news = [
        one
        for one in published["dataPoints"]
        if {"key": "topic", "value": {"stringValue": "news"}} in one["attributes"]
    ]
    assert [one["asDouble"] for one in news] == [2.0]
    assert int(news[0]["timeUnixNano"]) > int(news[0]["startTimeUnixNano"])
    assert metrics["polybus_storage_healthy"]["gauge"]["dataPoints"][0]["asDouble"] == 1.0
    [waits] = metrics["polybus_fsync_duration_seconds"]["histogram"]["dataPoints"]
    assert len(waits["bucketCounts"]) == len(waits["explicitBounds"]) + 1
    assert sum(map(int, waits["bucketCounts"])) == int(waits["count"]) > 0


async def test_a_collector_that_is_away_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    where = {"endpoint": "http://127.0.0.1:1/v1/metrics", "interval-s": 0.02}
    async with http_bus("news", otlp=where) as http:
        await http.until(lambda: "cannot be sent" in caplog.text)
        assert (await http.client.get("/healthz")).status_code == 200
    said = [one for one in caplog.records if one.name == "polybus.otlp"]
    assert len(said) == 1


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_the_trace_of_a_message_is_carried_by_every_protocol_with_headers() -> None:
    async with (
        http_bus("news") as http,
        ScriptedPeer(http.node.tcp_port) as goms,
        ScriptedPeer(http.node.tcp_port) as boson,
    ):
        await goms.send(line("register", topics=["news"], ack=True))
        await goms.read_line()
        await boson.send(properties(("hbfs", b"news")))
        await http.until(lambda: len(http.node.bus.topic("news").subscribers) == 2)
        given = {"traceparent": TRACE}
        await http.client.post("/v1/topics/news/messages", content=b"1", headers=given)
        assert (await goms.read_json())["headers"] == given
        said = b""
        while not said.endswith(TRACE.encode()):
            said += await boson.read(1)

        await goms.send(line("send", topics=["news"], data="2", headers=given))
        sent = properties(("topic", b"news"), ("content", b"3"), ("traceparent", TRACE.encode()))
        await boson.send(sent)
        await http.until(lambda: http.node.bus.log.bounds("news").stop == 3)
        read = (await http.client.get("/v1/topics/news/messages")).json()["messages"]
        assert [one["headers"] for one in read] == [given] * 3
