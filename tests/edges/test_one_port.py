"""Every protocol on one port: detection, TLS, gzip, and connectors that speak only some."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import ssl
import zlib
from pathlib import Path
from typing import Any

import pytest
from edge_kit import (
    WAYS,
    GzipPeer,
    connected,
    epoch_of,
    frame,
    is_alive,
    line,
    properties,
    read_properties,
    until,
)

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus

CERTIFICATE = Path(__file__).parent.parent / "client" / "tls"
TLS = {"cert": str(CERTIFICATE / "cert.pem"), "key": str(CERTIFICATE / "key.pem")}
TCP_WAYS = [way for way in WAYS if way != "goms-udp"]
SUBSCRIBE = {
    "boson-frames": frame("$subscribe", b"news tell=position"),
    "boson-properties": properties(("hbfs", b"news tell=position")),
    "goms": line("register", topics=["news"], ack=True),
}


def answer_to_subscribe(node: Node, protocol: str) -> bytes:
    epoch = epoch_of(node, "news")
    return {
        "boson-frames": frame("$position", b"%d:0 news" % epoch),
        "boson-properties": properties(("hbfp", b"%d:0" % epoch), ("topic", b"news")),
        "goms": line("reg-ack", topics=["news"]),
    }[protocol]


async def test_all_protocols_share_a_port() -> None:
    async with run_bus("news") as node:
        for way in TCP_WAYS:
            async with connected(node, way) as pipe:
                await WAYS[way].subscribe(pipe, "news", epoch_of(node, "news"))


@pytest.mark.parametrize("protocol", SUBSCRIBE)
@pytest.mark.parametrize("zipped", [False, True])
async def test_a_protocol_is_told_by_its_bytes_however_slowly_they_come(
    protocol: str, zipped: bool
) -> None:
    """A byte at a time, each in a packet of its own."""
    request = SUBSCRIBE[protocol]
    if zipped and protocol != "goms":
        request = gzip.compress(request)
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        expected = answer_to_subscribe(node, protocol)
        for byte in request:
            await peer.send(bytes([byte]))
            await asyncio.sleep(0)
        if zipped and protocol != "goms":
            inflater, plain = zlib.decompressobj(wbits=31), b""
            while len(plain) < len(expected):
                plain += inflater.decompress(await peer.read(1))
            assert plain == expected
        else:
            assert await peer.read(len(expected)) == expected


async def test_a_gzip_stream_may_be_many_members() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(b"".join(gzip.compress(frame("news", b"%d" % n)) for n in range(50)))
        await peer.send(gzip.compress(frame("news?receipt=1", b"")))
        await until(lambda: node.bus.log.bounds("news").stop == 51)


async def test_goms_is_not_spoken_inside_gzip() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(gzip.compress(SUBSCRIBE["goms"]))
        assert await peer.read_to_end() == b""
        assert node.bad_peers.counts["detect.unknown"] == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x00\x05hello" * 10,
        b"\x1f\x8b\x00\x00garbage that is no gzip at all",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"\xff" * 20,
        b"\x00\x00\x00\x01\x09\xff\xff" + bytes(20),
        b"[1, 2]\n" * 3,
    ],
)
async def test_first_bytes_of_nothing_known_are_closed_and_counted(garbage: bytes) -> None:
    async with run_bus("news", "alive") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(garbage)
        assert await peer.read_to_end() == b""
        counts = node.bad_peers.counts
        assert counts["detect.unknown"] + counts["gzip.invalid"] + counts["tls.failed"] == 1
        await is_alive(node)


@pytest.mark.parametrize("method", [b"GET / HTTP/1.1", b"POST /v1/topics HTTP/1.0"])
async def test_http_is_answered_in_http(method: bytes) -> None:
    async with run_bus("news", "alive") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(
            method + b"\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        )
        answer = await peer.read_to_end()
        status = int(answer.split(b" ", 2)[1])
        assert answer.startswith(b"HTTP/1.1 ") and 200 <= status < 600
        await is_alive(node)


@pytest.mark.parametrize("speaks", ["goms", "boson-frames", "boson-properties"])
async def test_a_connector_may_speak_one_protocol_only(speaks: str) -> None:
    """What is not its protocol is a mistake in its protocol, or closed."""
    connectors = [{"protocol": "tcp", "port": 0, "speaks": speaks}]
    async with run_bus("news", connectors=connectors) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(SUBSCRIBE[speaks])
            expected = answer_to_subscribe(node, speaks)
            assert await peer.read(len(expected)) == expected
        other = "goms" if speaks != "goms" else "boson-properties"
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(SUBSCRIBE[other])
            peer.send_eof()
            said = await peer.read_to_end()
            assert answer_to_subscribe(node, other) not in said
        (topic,) = node.bus.topics()
        await until(lambda: not topic.subscribers)


@pytest.mark.parametrize(
    ("one", "two"), list(itertools.combinations(["goms", "boson-frames", "boson-properties"], 2))
)
async def test_a_connector_may_be_limited_to_some_protocols(one: str, two: str) -> None:
    connectors = [{"protocol": "tcp", "port": 0, "speaks": [one, two]}]
    async with run_bus("news", connectors=connectors) as node:
        for protocol in (one, two):
            async with ScriptedPeer(node.tcp_port) as peer:
                await peer.send(SUBSCRIBE[protocol])
                expected = answer_to_subscribe(node, protocol)
                assert await peer.read(len(expected)) == expected
        (third,) = set(SUBSCRIBE) - {one, two}
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(SUBSCRIBE[third])
            peer.send_eof()
            assert answer_to_subscribe(node, third) not in await peer.read_to_end()


async def test_connectors_are_independent_ports_of_one_bus() -> None:
    connectors = [
        {"protocol": "tcp", "port": 0, "speaks": "boson-frames"},
        {"protocol": "tcp", "port": 0, "speaks": "goms"},
    ]
    async with run_bus("news", connectors=connectors) as node:
        ports = [int(address.rpartition(":")[2]) for address in node.addresses]
        async with ScriptedPeer(ports[0]) as frames, ScriptedPeer(ports[1]) as goms:
            await goms.send(SUBSCRIBE["goms"])
            assert await goms.read_line() == line("reg-ack", topics=["news"])
            await frames.send(frame("news", b"across"))
            assert await goms.read_line() == line("message", topics=["news"], data="across")


@pytest.mark.parametrize("speaks", ["goms", "boson-frames", "boson-properties", "queue"])
async def test_http_on_a_connector_of_another_protocol_is_not_understood(speaks: str) -> None:
    """A form of a page can have any body: here, lines of goMS."""
    connector: dict[str, Any] = {"protocol": "tcp", "port": 0, "speaks": speaks}
    if speaks == "queue":
        connector["topic"] = "news"
    lines = [
        '{"messagetype":"register","topics":["news"]}',
        '{"messagetype":"send","topics":["news"],"data":"forged"}',
    ]
    body = "".join(f"{line}\n" for line in lines)
    request = f"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    async with run_bus("news", connectors=[connector]) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(request.encode())
            peer.send_eof()
            await peer.read_to_end()
        assert node.bus.log.bounds("news").stop == 0


# TLS


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=TLS["cert"])


@pytest.mark.parametrize("protocol", SUBSCRIBE)
async def test_tls_is_detected_and_what_is_inside_too(protocol: str) -> None:
    connectors = [{"protocol": "tcp", "port": 0, "tls": TLS}]
    async with run_bus("news", connectors=connectors) as node:
        reader, writer = await asyncio.open_connection(
            "localhost", node.tcp_port, ssl=trusting(), family=2
        )
        for byte in SUBSCRIBE[protocol]:
            writer.write(bytes([byte]))
        expected = answer_to_subscribe(node, protocol)
        assert await asyncio.wait_for(reader.readexactly(len(expected)), 10) == expected
        writer.close()
        await writer.wait_closed()


async def test_gzip_works_inside_tls() -> None:
    connectors = [{"protocol": "tcp", "port": 0, "tls": TLS}]
    async with run_bus("news", connectors=connectors) as node:
        reader, writer = await asyncio.open_connection(
            "localhost", node.tcp_port, ssl=trusting(), family=2
        )
        large = bytes(range(256)) * 1000
        writer.write(gzip.compress(frame("news", large) + frame("news?receipt=1", b"")))
        inflater, plain = zlib.decompressobj(wbits=31), b""
        expected = frame("$receipt", b"1 %d:1" % epoch_of(node, "news"))
        async with asyncio.timeout(10):
            while len(plain) < len(expected):
                plain += inflater.decompress(await reader.read(100))
        assert plain == expected
        assert node.bus.log.read("news", 0)[0].value(0) == large
        writer.close()
        await writer.wait_closed()


async def test_tls_to_a_connector_without_a_certificate_is_closed() -> None:
    async with run_bus("news", "alive") as node:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("localhost", node.tcp_port, ssl=trusting(), family=2)
        assert node.bad_peers.counts["detect.unknown"] == 1
        await is_alive(node)


# Limits of a connection's beginning


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", [b"\x00", b"\x00\x00\x00", b"\x1f", b"\x16", b"GE", gzip.compress(b"", mtime=0)[:5]]
)
async def test_first_bytes_that_never_become_a_protocol_are_closed_in_time(head: bytes) -> None:
    async with run_bus("news", limits={"detect-timeout-s": 0.1}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(head)
            assert await peer.read_to_end() == b""
        assert node.bad_peers.counts["peer.too-slow"] == 1


async def test_there_is_a_limit_to_connections() -> None:
    async with run_bus("news", "alive", limits={"connections-max": 3}) as node:
        peers = [ScriptedPeer(node.tcp_port) for _ in range(3)]
        for peer in peers:
            await peer.__aenter__()
            await peer.send(frame("$subscribe", b"news tell=position"))
            assert (await peer.read_frame())[0] == "$position"
        async with ScriptedPeer(node.tcp_port) as fourth:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await fourth.send(frame("$subscribe", b"news tell=position"))
                await fourth.read(1)
        assert node.bad_peers.counts["connections.too-many"] == 1
        for peer in peers:
            await peer.__aexit__(None, None, None)
        await until(lambda: not node.tcp.connections)
        await is_alive(node)


# gzip bombs


def bomb(plain_bytes: int) -> bytes:
    """Gzip that inflates by about a thousand times: frames of zeros for an unknown topic."""
    deflater = zlib.compressobj(9, wbits=31)
    chunk = frame("news", bytes((1 << 20) - 11))
    return b"".join(deflater.compress(chunk) for _ in range(plain_bytes >> 20)) + deflater.flush()


async def test_a_gzip_bomb_is_cut_and_told_in_the_peers_protocol() -> None:
    async with run_bus("news", "alive") as node:
        async with GzipPeer(node.tcp_port) as peer:
            payload = bomb(64 << 20)
            assert len(payload) < 1 << 18
            await ScriptedPeer.send(peer, payload)
            said = await peer.read_to_end()
        assert b"$error" in said and b"gzip.bomb" in said
        assert node.bus.log.bounds("news").stop < 64
        await is_alive(node)


@pytest.mark.slow
async def test_a_megabyte_that_inflates_to_a_gigabyte_neither_fills_memory_nor_stalls() -> None:
    payload = bomb(1 << 30)
    assert len(payload) < 2 << 20
    async with run_bus(
        "news", "alive", durability="memory", journal={"memory-log-bytes-max": 1 << 20}
    ) as node:
        async with GzipPeer(node.tcp_port) as peer:
            await ScriptedPeer.send(peer, payload)
            assert await is_alive(node) < 4
            assert b"gzip.bomb" in await peer.read_to_end()


async def test_what_compresses_well_within_the_limit_arrives() -> None:
    """A hundred times is not a bomb, and however much comes at once the others are served."""
    async with run_bus("news", "alive", durability="memory") as node:
        text = b"".join(b"line %d of a report\n" % n for n in range(50_000))
        frames = frame("news", text) * 8
        async with GzipPeer(node.tcp_port) as peer:
            await peer.send(frames + frame("news?receipt=1", b""))
            receipt = frame("$receipt", b"1 %d:8" % epoch_of(node, "news"))
            assert await peer.read(len(receipt)) == receipt


async def test_an_error_ends_its_own_connection_only() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as good:
        await good.send(SUBSCRIBE["goms"])
        await good.read_line()
        async with ScriptedPeer(node.tcp_port) as bad:
            await bad.send(frame("news", b"x") + frame("news", b"", 9))
            said = await bad.read_to_end()
        assert b"boson.flag-unknown" in said
        assert json.loads(await good.read_line())["data"] == "x"


async def test_headers_of_properties_reach_properties_inside_gzip() -> None:
    async with run_bus("news") as node, GzipPeer(node.tcp_port) as peer:
        await peer.send(properties(("hbfs", b"news")))
        await peer.send(WAYS["boson-properties"].publish("news", b"v", {"k": b"\x00"}))
        assert (await read_properties(peer))["k"] == b"\x00"
