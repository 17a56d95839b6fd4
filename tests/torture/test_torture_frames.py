"""Frames that are fuzzed begin as valid frames, the same as those of our own encoders."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from polybus.config import Limits
from polybus.torture.faults.clients import fuzz
from polybus.torture.faults.clients.frames import (
    API,
    BLOB,
    KEY,
    PARSERS,
    QUERIES,
    Number,
    boson_frame,
    encoded,
    goms,
    http,
    live,
    mutated,
    queue,
)
from polybus.wire import boson_frames
from polybus.wire.goms import Download, GomsCodec
from polybus.wire.queue import QueueReader


def test_a_boson_frame_is_that_of_the_encoder() -> None:
    for seed in range(50):
        length, flag, name_length, topic, content = boson_frame(random.Random(seed))
        assert isinstance(topic, bytes) and isinstance(content, bytes)
        assert isinstance(flag, Number)
        frame = encoded([length, flag, name_length, topic, content])
        assert frame == boson_frames.encode_frame(topic, content, flag.value)


def test_every_queue_frame_is_read_as_a_message() -> None:
    for seed in range(50):
        codec = QueueReader(message_bytes_max=1 << 20)
        assert len(codec.receive(encoded(queue(random.Random(seed))))) == 1


def test_every_goms_line_without_a_fault_is_one_request() -> None:
    whole = [encoded(goms(random.Random(seed))) for seed in range(50)]
    for line in whole:
        if b"[[" not in line:
            assert len(GomsCodec(Limits()).receive(line)) == 1


def test_downloads_get_past_the_check_of_their_fields() -> None:
    lines = [encoded(goms(random.Random(seed))) for seed in range(300)]
    requests = [one for line in lines for one in GomsCodec(Limits()).receive(line)]
    downloads = [one for one in requests if isinstance(one, Download)]
    assert any(one.id == BLOB.decode() and one.start and one.bytes_max for one in downloads)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_seed_decides_the_faults(parser: str) -> None:
    def frames() -> list[bytes]:
        chance = random.Random(3)
        return [encoded(mutated(PARSERS[parser](chance), chance)) for _ in range(100)]

    made = frames()
    assert made == frames()
    assert len(set(made)) > 50


def test_a_number_takes_any_value_that_its_layout_can_hold() -> None:
    assert Number(">i", -1).encode() == b"\xff\xff\xff\xff"
    assert Number(">i", 1 << 31).encode() == b"\x80\x00\x00\x00"
    assert Number(">B", 257).encode() == b"\x01"


def test_http_bodies_come_with_a_length_or_in_whole_chunks() -> None:
    bodies = {}
    for seed in range(200):
        head, _, body = encoded(http(random.Random(seed))).partition(b"\r\n\r\n")
        if b"chunked" not in head:
            assert b"content-length: %d" % len(body) in head
            continue
        content, rest = b"", body
        while not rest.startswith(b"0\r\n"):
            size, _, rest = rest.partition(b"\r\n")
            content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        assert rest == b"0\r\n\r\n"
        bodies[seed] = content
    assert len(set(bodies.values())) > 5
    keyed = [seed for seed in range(200) if KEY in encoded(http(random.Random(seed)))]
    assert len(keyed) > 30


def test_every_route_of_the_api_gets_requests() -> None:
    made = [encoded(http(random.Random(seed))) for seed in range(3000)]
    wanted = [*API, *((method, path, (), ()) for method, path, _, _ in QUERIES)]
    for method, path, _, _ in wanted:
        assert any(one.startswith(b"%s %s" % (method, path)) for one in made), path
    assert any(b"\r\nrange: bytes=" in one for one in made)
    assert sum(b'"query":"SELECT 1"}' in one for one in made) < 20, "few are done"


def test_requests_on_the_live_socket_are_masked_text_of_one_frame() -> None:
    for seed in range(50):
        first, length, mask, masked = live(random.Random(seed))
        assert isinstance(first, Number) and isinstance(length, Number)
        assert isinstance(mask, bytes) and isinstance(masked, bytes)
        assert length.value - 0x80 == len(masked) < 126
        assert bytes(byte ^ mask[at % 4] for at, byte in enumerate(masked)).startswith(b'{"op"')


def test_datagrams_count_when_they_were_read() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bus:
        bus.bind(("127.0.0.1", 0))
        port = bus.getsockname()[1]
        assert fuzz._unread("udp", port) == (0, 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.sendto(b"hello", ("127.0.0.1", port))
        waiting_bytes, dropped = fuzz._unread("udp", port)
        assert waiting_bytes > 0 and dropped == 0
        bus.recv(10)
        assert fuzz._unread("udp", port) == (0, 0)


def test_connections_are_read_until_the_bus_has_all_that_they_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bus:
        port = bus.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as peer, bus.accept()[0] as connected:
            peer.sendall(b"hello")
            assert fuzz._unread("tcp", port) == (5, 0)
            late = threading.Timer(2 * fuzz.CLOSE_S_MAX, connected.recv, (10,))
            late.start()
            fuzz._read_to_end([peer], port)
            assert fuzz._unread("tcp", port) == (0, 0)
            late.join()
