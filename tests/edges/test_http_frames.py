"""Frames past the library: the same bytes as the library's, and never in the middle of one."""

from __future__ import annotations

import asyncio

from http_kit import http_bus
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from polybus.edges.http.sending import PackEncodings, confirmed_ids, packs_frame, text_frame
from polybus.edges.http.websocket import ends_between_frames
from polybus.testing import ScriptedPeer
from polybus.wire.msgstream import parse_confirm_ids

UPGRADE = (
    b"GET /msgstream?sessionKey=%b HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n"
)


def said(text: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    """A client's frame, by the library."""
    return Frame(opcode, text, fin).serialize(mask=True, extensions=[])


@given(st.binary(max_size=70_000))
def test_a_text_frame_is_the_librarys(text: bytes) -> None:
    assert text_frame(text) == Frame(Opcode.TEXT, text).serialize(mask=False, extensions=[])


@given(st.lists(st.text("0123456789,", min_size=1, max_size=125), min_size=1), st.binary())
def test_short_confirmations_are_read_as_by_the_library(texts: list[str], before: bytes) -> None:
    data = before + b"".join(said(text.encode()) for text in texts)
    ids = [number for text in texts for number in parse_confirm_ids(text)]
    has_long = any(len(word) > 15 for text in texts for word in text.split(","))
    expected = None if has_long else ids
    assert confirmed_ids(data + b"beyond", len(before), len(data)) == expected


@given(st.binary(min_size=1, max_size=125))
def test_anything_that_is_no_plain_id_is_left_to_the_library(text: bytes) -> None:
    if set(text) - set(b"0123456789,"):
        assert confirmed_ids(said(text), 0, len(said(text))) is None


def test_anything_else_is_left_to_the_library() -> None:
    others = [
        b"\x81",
        said(b""),
        said(b"1" * 126),
        said(b"1" * 70_000),
        said(b"1", Opcode.BINARY),
        said(b"1", Opcode.PONG),
        said(b"1", fin=False),
        said(b"1", Opcode.CONT),
        said(b"1") + said(b"2", Opcode.PING),
        said(b"1 "),
        said(b"12")[:-1],
        said(b"12") + b"\x81",
        text_frame(b"unmasked"),
        b"\xc1" + said(b"1")[1:],
    ]
    assert [confirmed_ids(data, 0, len(data)) for data in others] == [None] * len(others)


FRAMES = {
    "short": said(b"1"),
    "empty": said(b""),
    "longest short": said(b"1" * 125),
    "medium": said(b"1" * 126),
    "large": said(b"1" * 65_536),
    "binary": said(b"\x00", Opcode.BINARY),
    "pong": said(b"", Opcode.PONG),
}


@given(st.lists(st.sampled_from(sorted(FRAMES)), max_size=3), st.data())
def test_it_is_known_where_frames_end(kinds: list[str], data: st.DataObject) -> None:
    whole = b"".join(FRAMES[kind] for kind in kinds)
    ends = {len(b"".join(FRAMES[kind] for kind in kinds[:count])) for count in range(4)}
    cut = data.draw(st.integers(0, len(whole)))

    assert ends_between_frames(whole)
    assert ends_between_frames(whole[:cut]) == (cut in ends)


def test_a_message_that_goes_on_is_not_between_frames() -> None:
    assert not ends_between_frames(said(b"1", fin=False))
    assert not ends_between_frames(said(b"1", fin=False) + said(b"2", Opcode.CONT))


async def test_the_same_packs_share_a_frame_within_a_loop_turn() -> None:
    frames = PackEncodings(asyncio.get_running_loop(), packs_frame)
    one, two = b'[["a"]]', b'[["b"]]'

    assert frames.get([(1, one)]) is frames.get([(1, one)])
    assert frames.get([(1, one), (2, two)]) is frames.get([(1, one), (2, two)])
    assert frames.get([(2, one)]) == text_frame(b'{"2":[["a"]]}')
    assert frames.get([(1, one), (3, two)]) == text_frame(b'{"1":[["a"]],"3":[["b"]]}')
    assert frames.get([(1, one), (2, two)]) == text_frame(b'{"1":[["a"]],"2":[["b"]]}')
    before = frames.get([(1, one)])
    await asyncio.sleep(0)
    assert frames.get([(1, one)]) is not before


async def test_confirmations_count_however_they_are_cut_and_joined() -> None:
    seven, eight = said(b"7"), said(b"8")
    pieces = [
        said(b"1"),
        said(b"2") + said(b"3"),
        said(b"", Opcode.PONG) + said(b"4"),
        said(b"5"),
        said(b"6", fin=False) + said(b"", Opcode.CONT),
        seven[:3],
        seven[3:],
        eight[:1],
        eight[1:] + said(b"9"),
        said(b"10"),
    ]
    left = [9, 7, 6, 5, 4, 4, 3, 3, 1, 0]
    async with http_bus("news") as http:
        key = await http.open_session("news")
        await http.publish("news", *(b"%d" % number for number in range(1, 11)))
        session = http.node.services.inboxes.find(key)
        assert session is not None
        async with ScriptedPeer(http.node.tcp_port) as peer:
            await peer.send(UPGRADE % key.encode())
            await http.until(lambda: session.shown_to == 10)
            for piece, count in zip(pieces, left, strict=True):
                await peer.send(piece)
                # Each piece must be a read of its own, and one that ends nothing changes nothing.
                await asyncio.sleep(0.01)
                await http.until(lambda count=count: session.pack_count == count)


async def test_a_short_frame_inside_a_fragmented_message_is_a_protocol_error() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        async with ScriptedPeer(http.node.tcp_port, timeout_s=5.0) as peer:
            await peer.send(UPGRADE % key.encode())
            await http.until(lambda: http.node.http.websockets)
            await peer.send(said(b"1", fin=False))
            await asyncio.sleep(0.01)
            await peer.send(said(b"2"))
            answer = await peer.read_to_end()

    _, _, frames = answer.partition(b"\r\n\r\n")
    assert frames[:1] == b"\x88"
    assert int.from_bytes(frames[2:4], "big") == 1002
