"""Bad input: an answer in the peer's own protocol, bounded memory, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import struct
from collections.abc import Iterator

import pytest
from bad_input_kit import MEBI, START, Growth, whole_answer
from edge_kit import frame, is_alive, line, open_connections, properties, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polybus.testing import ScriptedPeer, run_bus

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
    """As the first bytes too, if the protocol can be recognised by them."""
    async with run_bus("news", "alive", limits={"message-bytes-max": MEBI}) as node:
        async with ScriptedPeer(node.tcp_port) as peer:
            await peer.send(data if first else START[protocol] + data)
            said = await peer.read_to_end()
        assert code.encode() in said
        assert (b"$error" if protocol == "boson-frames" else b"hbfe") in said
        assert node.bus.log.bounds("news").stop == (0 if first else 1)
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
            await until(
                lambda: sum(one.unfinished_bytes > 0 for one in open_connections(node)) == 100
            )
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
        assert node.bus.log.bounds("news").stop == 3


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
        assert node.bus.log.read("news", 0)[0].value(0) == digits


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
        await until(lambda: not node.tcp.connections)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@given(data=st.lists(st.binary(max_size=40) | st.sampled_from(list(START.values())), max_size=8))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.slow
def test_any_first_bytes_are_answered_or_closed(
    data: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def meet() -> None:
        async with run_bus("news", "alive", durability="memory") as node:
            await whole_answer(node, b"".join(data))
            await is_alive(node)
            await until(lambda: not node.tcp.connections)

    asyncio.run(meet())
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
