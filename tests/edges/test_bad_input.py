"""Bad input: an answer in the peer's own protocol, bounded memory, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
from edge_kit import TIMEOUT_S, frame, is_alive, line, properties, read_properties, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polybus.edges.connection import Connection
from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus

MEBI = 1 << 20
START = {
    "boson-frames": frame("news", b"first"),
    "boson-properties": properties(("topic", b"news"), ("content", b"first")),
    "goms": line("register", topics=["news"]),
}


class Growth:
    """How much Python's memory grew at most since it was made."""

    def __enter__(self) -> Growth:
        gc.collect()
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = tracemalloc.get_traced_memory()[1] - self._before
        tracemalloc.stop()


async def whole_answer(node: Node, data: bytes) -> bytes:
    """Send, end our side, and read until the bus has closed."""
    async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        await peer.send(data)
        peer.send_eof()
        return await peer.read_to_end()


# Lengths and counts

LENGTHS = [-1, -(1 << 31), (1 << 31) - 1, (1 << 20) + 1]


def bad_frames() -> Iterator[tuple[str, bytes, str]]:
    for length in LENGTHS:
        code = "boson.length-negative" if length < 0 else "boson.message-too-large"
        yield f"frames length {length}", struct.pack(">ibH", length, 0, 4) + b"news", code
    for flag in (4, 127, -1, -128):
        yield f"frames flag {flag}", frame("news", b"x", flag), "boson.flag-unknown"


def bad_properties() -> Iterator[tuple[str, bytes, str]]:
    version = b"\x00\x04hbfv\x00\x00\x00\x04\x3f\x80\x00\x00"
    for count in (-1, -(1 << 31), (1 << 31) - 1, 1025):
        yield f"properties count {count}", struct.pack(">i", count) + version, "boson.count-invalid"
    for length in LENGTHS:
        code = "boson.length-negative" if length < 0 else "boson.message-too-large"
        value = struct.pack(">i", 2) + version + b"\x00\x05topic" + struct.pack(">i", length)
        yield f"properties length {length}", value, code


BAD_LENGTHS = [
    pytest.param("boson-frames", data, code, id=name) for name, data, code in bad_frames()
] + [pytest.param("boson-properties", data, code, id=name) for name, data, code in bad_properties()]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("protocol", "data", "code"), BAD_LENGTHS)
async def test_an_impossible_length_gets_an_error_and_ends_the_connection(
    protocol: str, data: bytes, code: str, first: bool
) -> None:
    """As the first bytes too, if the protocol can be told from them."""
    async with run_bus("news", "alive", limits={"message-bytes-max": MEBI}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(data if first else START[protocol] + data)
            said = await peer.read_to_end()
        assert code.encode() in said
        assert (b"$error" if protocol == "boson-frames" else b"hbfe") in said
        assert node.server.bus.log.bounds("news").stop == (0 if first else 1)
        await is_alive(node)


@pytest.mark.parametrize("protocol", ["boson-frames", "boson-properties"])
async def test_lengths_that_no_bytes_follow_take_no_memory(protocol: str) -> None:
    """A hundred peers announce the largest message there is, and send nothing of it."""
    head = {
        "boson-frames": struct.pack(">ibH", 64 * MEBI, 0, 4) + b"news",
        "boson-properties": properties(("topic", b"news"), ("content", b""))[:-4]
        + struct.pack(">i", 64 * MEBI),
    }[protocol]
    async with run_bus("news", "alive") as node:
        peers = [ScriptedPeer(node.tcp_port) for _ in range(100)]
        with Growth() as growth:
            for peer in peers:
                await peer.__aenter__()
                await peer.send(head + b"some")
            await until(lambda: sum(one._unfinished > 0 for one in node.server.connections) == 100)
            await is_alive(node)
        assert growth.peak_bytes < 4 * MEBI
        for peer in peers:
            await peer.__aexit__(None, None, None)


async def test_a_length_at_the_limit_is_taken() -> None:
    async with run_bus("news", "alive", limits={"message-bytes-max": MEBI}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(frame("news?receipt=1", b"x" * MEBI))
            assert (await peer.read_frame())[0] == "$receipt"
        said = await whole_answer(
            node,
            line("register", topics=["news"])
            + line("send", topics=["news"], data="x" * MEBI)
            + line("send", topics=["news"], data="x" * (MEBI + 1))
            + line("send", topics=["news"], ack=True, data="after"),
        )
        answers = [json.loads(one) for one in said.splitlines()]
        assert [one.get("error-code", one["messagetype"]) for one in answers] == [
            "000003",
            "send-ack",
        ]
        assert node.server.bus.log.bounds("news").stop == 3


# Floods


@pytest.mark.slow
@pytest.mark.parametrize("flag", [1, 2, 3])
@pytest.mark.parametrize("protocol", ["boson-frames", "boson-properties"])
async def test_a_million_one_byte_parts_meet_the_limit_of_parts(protocol: str, flag: int) -> None:
    if protocol == "boson-frames":
        part = frame("news", b"x", flag)
    else:
        part = properties(("hbff", bytes([flag])), ("topic", b"news"), ("content", b"x"))
    async with run_bus("news", "alive", durability="memory") as node:
        with Growth() as growth:
            async with ScriptedPeer(node.tcp_port, timeout_s=50) as peer:
                sending = asyncio.create_task(flood(peer, part * 10_000, 100))
                await until(lambda: node.server.connections)
                assert await is_alive(node) < 4
                said = await peer.read_to_end()
                await sending
        assert b"boson.parts-too-many" in said
        assert growth.peak_bytes < 64 * MEBI
        assert node.server.bus.log.bounds("news").stop == (100_000 if flag == 3 else 0)


async def flood(peer: ScriptedPeer, chunk: bytes, count: int) -> None:
    try:
        for _ in range(count):
            await peer.send(chunk)
    except ConnectionError:
        pass


@pytest.mark.parametrize("protocol", ["boson-frames", "boson-properties"])
async def test_parts_are_bounded_in_bytes_together(protocol: str) -> None:
    content = b"x" * 1000
    if protocol == "boson-frames":
        part = frame("news", content, 2)
    else:
        part = properties(("hbff", b"\x02"), ("topic", b"news"), ("content", content))
    async with run_bus("news", "alive", limits={"parts-bytes-max": 100_000}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(part * 101)
            said = await peer.read_to_end()
        assert b"boson.parts-too-large" in said
        assert node.server.bus.log.bounds("news").stop == 0


@pytest.mark.parametrize(
    ("protocol", "unit"),
    [
        pytest.param("boson-frames", bytes(7), id="empty frames"),
        pytest.param("boson-properties", bytes(4), id="messages without properties"),
        pytest.param("goms", b"\n", id="empty lines"),
        pytest.param("goms", b"{}", id="empty objects"),
        pytest.param("goms", b"[]\n", id="no objects"),
        pytest.param("boson-frames", frame("$x", b""), id="control frames of no meaning"),
        pytest.param("boson-frames", frame("nix", b""), id="an unknown topic"),
    ],
)
@pytest.mark.slow
async def test_a_flood_of_nothing_costs_no_more_than_its_bytes(protocol: str, unit: bytes) -> None:
    """Many of the smallest wrong thing there is, and others are answered meanwhile."""
    data = unit * (MEBI // 4 // len(unit))
    async with run_bus("news", "alive") as node:
        with Growth() as growth:
            async with ScriptedPeer(node.tcp_port, timeout_s=50) as peer:
                await peer.send(START[protocol])
                sending = asyncio.create_task(flood(peer, data, 1))
                reading = asyncio.create_task(read_and_forget(peer))
                await until(lambda: node.server.connections)
                assert await is_alive(node) < 4
                await sending
                peer.send_eof()
                await reading
        assert growth.peak_bytes < 64 * MEBI


async def read_and_forget(peer: ScriptedPeer) -> None:
    """Read to the end; either side's memory is the bus's concern here, so nothing is kept."""
    async with asyncio.timeout(50):
        while await peer._reader.read(MEBI):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("protocol", START)
async def test_a_hundred_thousand_one_byte_chunks_do_not_stall_the_loop(protocol: str) -> None:
    """Each byte a read of its own: the cost stays linear, and the loop free for others."""
    message = {
        "boson-frames": frame("news", b"x" * 100_000),
        "boson-properties": properties(("topic", b"news"), ("content", b"x" * 100_000)),
        "goms": line("send", topics=["news"], data="x" * 100_000),
    }[protocol]
    async with run_bus("news", "alive", durability="memory") as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(START[protocol])
            (connection,) = await first_connection(node)
            before = node.server.bus.log.bounds("news").stop
            await until(lambda: connection.translator is not None)
            worst = 0.0
            loop = asyncio.get_running_loop()
            # As the transport does it, without a hundred thousand packets.
            for byte in message:
                began = loop.time()
                connection.get_buffer(-1)[:1] = bytes([byte])
                connection.buffer_updated(1)
                worst = max(worst, loop.time() - began)
            await is_alive(node)
        assert node.server.bus.log.bounds("news").stop >= before + 1
        assert worst < 0.2


async def first_connection(node: Node) -> list[Connection]:
    await until(lambda: node.server.connections)
    return list(node.server.connections)


# JSON


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"messagetype":' + b"[" * 100_000, id="lists"),
        pytest.param(b'{"a":' * 100_000, id="objects"),
        pytest.param(b"[" * 100_000, id="no object"),
        pytest.param(b'{"messagetype":"send","data":' + b"[" * 65 + b"]" * 65 + b"}", id="65"),
        pytest.param(b'{"messagetype":"close","x":' + b"9" * 1_000_000 + b"e}", id="number"),
    ],
)
async def test_json_bombs_get_an_error_and_the_connection_survives(text: bytes) -> None:
    async with run_bus("news", "alive") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(START["goms"])
        with Growth() as growth:
            await peer.send(text + b"\n" + line("register", topics=[], ack=True))
            said = json.loads(await peer.read_line())
        assert said["error-code"] == "000001"
        assert growth.peak_bytes < 16 * MEBI
        while json.loads(await peer.read_line()).get("messagetype") != "reg-ack":
            pass
        await is_alive(node)


async def test_a_million_digits_are_data_like_any_other() -> None:
    digits = b"9" * 1_000_000
    async with run_bus("news", "alive") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(START["goms"])
        request = b'{"messagetype":"send","topics":["news"],"ack":true,"data":' + digits + b"}\n"
        await peer.send(request)
        assert json.loads(await peer.read_line())["messagetype"] == "send-ack"
        assert node.server.bus.log.read("news", 0)[0].value(0) == digits


# Garbage


@pytest.fixture(scope="module")
def seed() -> int:
    return 20121015


@pytest.mark.parametrize("protocol", START)
async def test_garbage_affects_only_its_own_connection(
    protocol: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After a proper beginning anything may come; every connection ends or is still served."""
    draw = random.Random(seed)
    async with run_bus("news", "alive") as node:
        async with ScriptedPeer(node.tcp_port) as witness:
            await witness.send(START["goms"] + line("register", topics=["alive"], ack=True))
            await witness.read_line()
            for _ in range(60):
                mutated = bytearray(START[protocol] * 3)
                for _ in range(draw.randint(1, 8)):
                    mutated[draw.randrange(len(mutated))] = draw.randrange(256)
                await whole_answer(node, START[protocol] + bytes(mutated))
                await whole_answer(node, START[protocol] + draw.randbytes(draw.randint(1, 300)))
            async with ScriptedPeer(node.tcp_port) as writer:
                await writer.send(frame("alive", b"you see"))
            while json.loads(await witness.read_line())["data"] != "you see":
                pass
        await until(lambda: not node.server.connections)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@given(data=st.lists(st.binary(max_size=40) | st.sampled_from(list(START.values())), max_size=8))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_first_bytes_are_answered_or_closed(
    data: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def meet() -> None:
        async with run_bus("news", "alive", durability="memory") as node:
            await whole_answer(node, b"".join(data))
            await is_alive(node)
            await until(lambda: not node.server.connections)

    asyncio.run(meet())
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


# The bus's own words about bad peers


@pytest.mark.slow
async def test_a_hundred_thousand_mistakes_are_few_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_bus("news", "alive") as node:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with caplog.at_level(logging.WARNING, "polybus"):
            async with ScriptedPeer(node.tcp_port, timeout_s=50) as peer:
                await peer.send(START["goms"])
                sending = asyncio.create_task(flood(peer, b"[]\n" * 1000, 100))
                said = 0
                while said < 100_000:
                    said += (await peer.read_line()).count(b"000001")
                await sending
            elapsed_s = loop.time() - began
        assert node.server.bad_peers.counts["goms.000001"] == 100_000
        assert 0 < len(caplog.records) <= 10 * (elapsed_s + 2)


# UDP


async def test_an_answer_to_an_unproven_address_is_never_larger_than_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_bus("news") as node:
        edge = node.server._udp[0]
        sent: list[bytes] = []
        monkeypatch.setattr(edge, "send", lambda data, address: sent.append(bytes(data)))
        stranger = ("192.0.2.7", 1234)
        requests = [
            b"x",
            line("register", topics=["nix" * 80]),
            line("dance"),
            line("register", topics=["news"], ack=True),
            line("send", topics=["news"], ack=True, data=""),
            line("register", topics=["news"], **{"from": "earliest"}),
        ]
        requests_bytes = answers_bytes = 0
        for request in requests * 3:
            edge.datagram_received(request, stranger)
            assert sum(map(len, sent)) <= len(request)
            # An ack comes later, from the committer.
            await asyncio.to_thread(node.server.bus.log.sync)
            await asyncio.sleep(0.01)
            requests_bytes += len(request)
            answers_bytes += sum(map(len, sent))
            assert answers_bytes <= requests_bytes
            sent.clear()
        assert node.server.bad_peers.counts["udp.answer-withheld"] > 0


async def test_nothing_is_replayed_to_an_address_that_may_be_forged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as writer:
        await writer.send(frame("news?receipt=1", b"x" * 1000))
        await writer.read_frame()
        edge = node.server._udp[0]
        sent: list[bytes] = []
        monkeypatch.setattr(edge, "send", lambda data, address: sent.append(bytes(data)))
        request = line("register", topics=["news"], **{"from": "earliest"}, padding="p" * 200)
        edge.datagram_received(request, ("192.0.2.7", 1234))
        await asyncio.sleep(0.1)
        (answer,) = sent
        assert json.loads(answer)["error-code"] == "000403"


async def test_forged_addresses_leave_nothing_behind() -> None:
    async with run_bus("news", limits={"udp-peers-max": 10}) as node:
        edge = node.server._udp[0]
        for n in range(1000):
            edge.datagram_received(b"garbage", (f"192.0.2.{n % 250}", 1000 + n))
        assert not edge._peers
        for n in range(20):
            edge.datagram_received(START["goms"], ("192.0.2.1", 1000 + n))
        assert len(edge._peers) == 10
        assert node.server.bad_peers.counts["udp.too-many"] == 10


# Time


@pytest.mark.slow
@pytest.mark.parametrize("protocol", START)
async def test_a_message_that_stands_still_ends_its_connection_with_an_error(protocol: str) -> None:
    half = {
        "boson-frames": frame("news", b"x" * 100)[:50],
        "boson-properties": properties(("topic", b"news"), ("content", b"x" * 100))[:50],
        "goms": line("send", topics=["news"], data="x" * 100)[:50],
    }[protocol]
    async with run_bus("news", "alive", limits={"message-timeout-s": 0.1}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(START[protocol] + half)
            said = await peer.read_to_end()
        assert (b"000001" if protocol == "goms" else b"peer.too-slow") in said
        assert node.server.bad_peers.counts["peer.too-slow"] == 1
        await is_alive(node)


@pytest.mark.slow
async def test_a_slow_drip_does_not_keep_a_message_open_for_ever() -> None:
    async with run_bus("news", "alive", limits={"message-timeout-s": 0.2}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            # Fast first: that must not buy time for later.
            await peer.send(frame("news", b"x" * MEBI)[: MEBI // 2])
            dripping = asyncio.create_task(drip(peer))
            said = await peer.read_to_end()
            dripping.cancel()
        assert b"peer.too-slow" in said


async def drip(peer: ScriptedPeer) -> None:
    try:
        while True:
            await peer.send(b"x")
            await asyncio.sleep(0.02)
    except ConnectionError:
        pass


@pytest.mark.slow
async def test_idle_connections_between_messages_stay() -> None:
    async with run_bus("news", limits={"message-timeout-s": 0.1}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(START["boson-properties"])
            await asyncio.sleep(1.5)
            await peer.send(properties(("hbfs", b"news tell=position")))
            assert "hbfp" in await read_properties(peer)


async def test_many_large_unfinished_messages_share_a_bounded_pool() -> None:
    """Those who want more than there is wait; small clients, and one large at a time, go on."""
    limits = {"assembly-bytes-max": 4 * MEBI}
    size = 2 * MEBI
    message = frame("news?receipt=1", b"x" * size)
    async with run_bus("news", "alive", durability="memory", limits=limits) as node:
        peers = [ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) for _ in range(12)]
        senders = []
        for peer in peers:
            await peer.__aenter__()
            # All but the last byte, so that none can finish by itself.
            senders.append(asyncio.create_task(peer.send(message[:-1])))
        held = node.server.connections
        await until(lambda: any("assembly" in one._held_by for one in held))
        assert await is_alive(node) < 4
        assert sum(one._unfinished for one in held) < 12 * MEBI
        # Now all may finish, one after another.
        finishing = [
            asyncio.create_task(finish(peer, sender))
            for peer, sender in zip(peers, senders, strict=True)
        ]
        await asyncio.gather(*finishing)
        assert node.server.bus.log.bounds("news").stop == 12
        for peer in peers:
            await peer.__aexit__(None, None, None)


async def finish(peer: ScriptedPeer, sender: asyncio.Task[None]) -> None:
    await sender
    await peer.send(b"x")
    assert (await peer.read_frame())[0] == "$receipt"
