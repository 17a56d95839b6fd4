"""Transcripts of conversations, replayed on the codecs and on a live bus, byte for byte."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polybus.config import Limits
from polybus.testing import ScriptedPeer, run_bus
from polybus.wire.boson_frames import BosonFramesCodec
from polybus.wire.boson_properties import BosonPropertiesCodec
from polybus.wire.codec import Bad
from polybus.wire.goms import GomsCodec

HERE = Path(__file__).parent
TOPICS = ("golang", "some")
CODECS: dict[str, Callable[[], Any]] = {
    "goms": lambda: GomsCodec(Limits()),
    "boson_frames": lambda: BosonFramesCodec(Limits()),
    "boson_properties": lambda: BosonPropertiesCodec(Limits()),
}
TRANSCRIPTS = [path for name in CODECS for path in sorted((HERE / name).glob("*.transcript"))]


class Step(NamedTuple):
    peer: str
    sends: bool
    text: str


def steps_of(path: Path) -> list[Step]:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# source: ")
    found = [re.fullmatch(r"(\w+)([<>]) (.+)", line) for line in lines if line[:1] != "#"]
    return [Step(one[1], one[2] == ">", one[3]) for one in found if one]


def bytes_of(path: Path, text: str, epochs: Mapping[str, int]) -> bytes:
    """A line of goMS as it is; Boson in hexadecimal digits, with positions filled in."""
    if path.parent.name == "goms":
        for topic, epoch in epochs.items():
            text = text.replace(f"{{{topic}}}", str(epoch))
        return text.encode() + b"\n"

    def position(found: re.Match[str]) -> str:
        at = f"{epochs[found[2]]}:{found[3]}"
        if found[1] == "at":
            return (struct.pack(">i", len(at)) + at.encode()).hex()
        content = f"{at} {found[2]}".encode()
        return (struct.pack(">ibH", len(content), 0, 9) + b"$position" + content).hex()

    return bytes.fromhex(re.sub(r"\[(at|position) (\w+) (\d+)\]", position, text))


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=named)
async def test_the_bus_says_what_the_transcript_says(path: Path) -> None:
    steps = steps_of(path)
    async with run_bus(*TOPICS) as node, contextlib.AsyncExitStack() as stack:
        epochs = {topic: node.bus.log.bounds(topic).epoch for topic in TOPICS}
        peers: dict[str, ScriptedPeer] = {}
        for step in steps:
            if step.peer not in peers:
                peer = ScriptedPeer(node.tcp_port, timeout_s=10)
                peers[step.peer] = await stack.enter_async_context(peer)
            peer = peers[step.peer]
            if step.sends:
                await peer.send(bytes_of(path, step.text, epochs))
            elif step.text == "end":
                assert await peer.read_to_end() == b""
            else:
                expected = bytes_of(path, step.text, epochs)
                assert await peer.read(len(expected)) == expected, step


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=named)
def test_the_codec_finds_nothing_bad_in_the_transcript(path: Path) -> None:
    epochs = dict.fromkeys(TOPICS, 1)
    codecs: dict[str, Any] = {}
    for step in steps_of(path):
        codec = codecs.setdefault(step.peer, CODECS[path.parent.name]())
        if step.sends:
            events = codec.receive(bytes_of(path, step.text, epochs))
            assert not [event for event in events if isinstance(event, Bad)], step


def test_every_deviation_names_a_test_that_exists() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (HERE / "DEVIATIONS.md").read_text().splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    assert len(rows) > 10
    for _, said, ours, reason, test in rows[1:]:
        assert said and ours and reason
        assert (HERE.parent / test).exists(), test
