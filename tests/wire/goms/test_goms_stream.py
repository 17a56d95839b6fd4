"""goMS framing: any chunking, any layout, and back in step after anything that is wrong."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import pytest
from goms_kit import codes, only_error, received, received_by_edge, seen
from hypothesis import given
from hypothesis import strategies as st

from polybus import scan
from polybus.config import Limits
from polybus.scan import goms_py
from polybus.wire.codec import Bad, LargeBegin, LargeDropped, LargeEnd, Publish
from polybus.wire.goms import Close, GomsCodec, Register, decode_datagram, encode_send
from polybus.wire.goms_objects import CARRY_BYTES_MAX, object_bytes_max

REGISTER = b'{"messagetype":"register","topics":["golang"]}'
GO = b'{"messagetype":"send","topics":["golang"],"data":"go"}'
SMALL = Limits(message_bytes_max=100, json_depth_max=4)
TOO_LARGE = b'{"messagetype":"send","topics":["golang"],"data":"%b"}' % (b"x" * 200)

TRANSCRIPT = b"\r\n".join(
    [
        REGISTER + GO + b" " + GO,
        b'{\n  "messagetype": "send",\n  "topics": ["golang"],\n  "data": "pretty"\n}',
        b'{"messagetype":"send","topics":["golang"],"data":"h\\u00e9llo\\n"}',
        '{"messagetype":"send","topics":["goms"],"data":"é😀"}'.encode(),
        b'{"messagetype":"send","topics":["GOLANG","goms"],"data":{"a":[1, 2]},"ack":true}',
        b"garbage " + GO,
        b'{"messagetype":"send","topics":["golang"],"data":"cut',
        GO,
        b'{"messagetype":"register"',
        REGISTER,
        b'{"a":[[[[[[1]]]]]]}' + GO,
        b'{"a":[[[[[[',
        TOO_LARGE + GO,
        b'{"messagetype":"send","topics":["golang"],"data":"\xff"}',
        b'{"messagetype":"nonsense"}',
        b'{"messagetype":"logout"}',
        b'{"messagetype":"send","topics":["golang"],"data":"last"}',
    ]
)
WHOLE = seen(received(TRANSCRIPT, limits=SMALL))


@pytest.fixture(params=["compiled", "pure"])
def either_scanner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    twin: ModuleType = goms_py
    if request.param == "compiled":
        twin = importlib.import_module("polybus.scan._goms")
    for name in ("scan_lines", "is_utf8", "ObjectScanner"):
        monkeypatch.setattr(scan, name, getattr(twin, name))


@pytest.mark.usefixtures("either_scanner")
def test_a_transcript_gives_what_it_says() -> None:
    values, others = seen(received(TRANSCRIPT, limits=SMALL))
    go = b"go"
    assert values == {
        "golang": [
            *(go, go, b"pretty", "héllo\n".encode(), b'{"a":[1, 2]}', go, go, go),
            b"last",
        ],
        "goms": ["é😀".encode(), b'{"a":[1, 2]}'],
    }
    assert [other[-1] for other in others if other[0] == "bad"] == [
        *("goms.000001", "goms.000001", "goms.000001", "goms.000001", "goms.000001"),
        *("goms.000003", "goms.000001", "goms.000002"),
    ]


@pytest.mark.usefixtures("either_scanner")
def test_a_cut_at_any_byte_changes_nothing() -> None:
    for cut in range(len(TRANSCRIPT) + 1):
        parts = [TRANSCRIPT[:cut], TRANSCRIPT[cut:]]
        assert seen(received(*parts, limits=SMALL)) == WHOLE
        assert seen(received_by_edge(parts, SMALL)) == WHOLE


@given(st.lists(st.integers(0, len(TRANSCRIPT))))
def test_events_do_not_depend_on_where_the_network_cuts_the_stream(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(TRANSCRIPT)]
    parts = [TRANSCRIPT[start:end] for start, end in pairwise(bounds)]
    assert seen(received(*parts, limits=SMALL)) == WHOLE
    assert seen(received_by_edge(parts, SMALL)) == WHOLE


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(kind: type[bytes]) -> None:
    assert seen(received(kind(TRANSCRIPT), limits=SMALL)) == WHOLE


def test_an_object_counts_as_soon_as_it_is_complete() -> None:
    assert codes(received(REGISTER)) == ["ok"]
    assert codes(received(GO)) == ["ok"]


def test_an_unfinished_last_object_is_dropped() -> None:
    codec = GomsCodec(Limits())
    assert len(codec.receive(GO + GO[:-1])) == 1
    assert codec.unfinished_bytes == len(GO) - 1
    assert codec.close() == []
    assert codec.unfinished_bytes == 0


@pytest.mark.parametrize("unfinished", [GO[:-1], b"garbage", b'{"a":[[[[[', TOO_LARGE * 1000])
def test_a_new_stream_may_begin_after_the_end_of_one(unfinished: bytes) -> None:
    codec = GomsCodec(SMALL)
    codec.receive(unfinished[:-1])
    codec.take_carry()
    codec.close()
    assert codes(codec.receive(REGISTER)) == ["ok"]


def test_nothing_is_heard_after_close() -> None:
    codec = GomsCodec(Limits())
    assert codec.receive(b'{"messagetype":"close"}' + GO + b"garbage") == [Close()]
    assert codec.receive(GO) == []
    assert codec.close() == []
    assert codec.receive(GO) == []


def test_plain_lines_of_one_read_are_one_event() -> None:
    other = GO.replace(b"golang", b"goms")
    (event,) = received((GO + b"\n" + other + b"\n") * 1000)
    assert isinstance(event, Publish)
    assert [(batch.topic, len(batch)) for batch in event.batches] == [
        ("golang", 1000),
        ("goms", 1000),
    ]


def test_a_carry_lets_the_line_it_begins_join_the_next_read() -> None:
    codec = GomsCodec(Limits())
    codec.receive(GO[:20])
    carry = codec.take_carry()
    assert carry == GO[:20]
    assert codec.unfinished_bytes == 0
    assert codec.take_carry() == b""
    (event,) = codec.receive(carry + GO[20:] + GO + GO)
    assert isinstance(event, Publish)
    assert len(event.batches[0]) == 3


def test_a_long_unfinished_object_is_kept_and_not_carried() -> None:
    codec = GomsCodec(Limits())
    part = GO[:-4] + b"x" * CARRY_BYTES_MAX
    codec.receive(part)
    assert codec.take_carry() == b""
    assert codec.unfinished_bytes == len(part)
    assert codes(codec.receive(b'"}')) == ["ok"]


@pytest.mark.usefixtures("either_scanner")
@pytest.mark.parametrize("garbage", [b"[]", b'"x"', b"garbage", b"}", b"1", b"\xff\x00", b'{"a":}'])
def test_reading_resumes_behind_the_line_that_is_no_object(garbage: bytes) -> None:
    events = received(garbage + b" " + GO + b"\n" + REGISTER)
    assert codes(events) == ["000001", "ok"]
    assert events[1] == Register(("golang",))


@pytest.mark.usefixtures("either_scanner")
@pytest.mark.parametrize(
    "cut_off",
    [
        b'{"messagetype":"send","topics":["golang"],"data":"x',
        b'{"messagetype":"send","topics":["golang"],"data":"x\\',
        b'{"messagetype":"send","topics":["golang"]',
        b'{"messagetype":"send","topics"',
        b"{",
    ],
)
def test_a_cut_off_line_costs_only_itself(cut_off: bytes) -> None:
    assert codes(received(cut_off + b"\n" + REGISTER + b"\n" + GO)) == ["000001", "ok", "ok"]


@pytest.mark.usefixtures("either_scanner")
@pytest.mark.parametrize(
    "bomb",
    [
        b'{"messagetype":"send","topics":["golang"],"data":'
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":' * 100_000 + b"\n",
        b'{"a":[' + b"[" * 100_000 + b'"\n',
    ],
    ids=["data", "objects", "unclosed", "unclosed string"],
)
def test_a_depth_bomb_is_one_error_and_the_connection_goes_on(bomb: bytes) -> None:
    assert codes(received(bomb + REGISTER)) == ["000001", "ok"]
    codec = GomsCodec(Limits())
    half = len(bomb) // 2
    codec.receive(bomb[:half])
    assert codec.unfinished_bytes == 0
    assert codes(codec.receive(bomb[half:] + REGISTER)) == ["ok"]


def test_the_depth_limit_includes_its_own_value() -> None:
    deepest = b'{"messagetype":"send","topics":["golang"],"data":[[[1]]]}'
    assert codes(received(deepest, limits=SMALL)) == ["ok"]
    code, text = only_error(deepest.replace(b"1", b"[1]"), limits=SMALL)
    assert code == "000001"
    assert "json-depth-max" in text


@pytest.mark.usefixtures("either_scanner")
def test_what_is_too_large_is_dropped_as_it_comes_and_reading_resumes_at_its_end() -> None:
    codec = GomsCodec(SMALL)
    begin = b'{\n"messagetype":"send",\n"topics":["golang"],\n"data":"'
    chunk = b"x" * 10_000
    events = codec.receive(begin)
    for _ in range(50):
        events += codec.receive(chunk)
        assert codec.unfinished_bytes <= object_bytes_max(SMALL)
    events += codec.receive(b'"\n}' + REGISTER)
    assert codes(events) == ["000003", "ok"]


def test_an_object_too_large_that_never_ends_properly_ends_with_its_line() -> None:
    flood = GO[:-2] + b"x" * 200_000
    assert codes(received(flood + b"\n" + REGISTER, limits=SMALL)) == ["000003", "ok"]
    chunks = [flood[at : at + 1000] for at in range(0, len(flood), 1000)]
    assert codes(received(*chunks, b"\n" + REGISTER, limits=SMALL)) == ["000003", "ok"]


def test_the_size_limit_is_of_the_data() -> None:
    limit = SMALL.message_bytes_max
    for spaces in (b"", b" " * 10):
        begin = b'{"messagetype":"send",%b"topics":["golang"],"data":"' % spaces
        assert codes(received(begin + b"x" * limit + b'"}', limits=SMALL)) == ["ok"]
        assert codes(received(begin + b"x" * (limit + 1) + b'"}', limits=SMALL)) == ["000003"]


@pytest.mark.usefixtures("either_scanner")
def test_a_value_of_exactly_the_limit_fits_in_base64_too() -> None:
    limits = Limits(message_bytes_max=1 << 20)
    for size, code in ((limits.message_bytes_max, "ok"), (limits.message_bytes_max + 1, "000003")):
        line = encode_send(["golang"], b"\xff" * size, {"a": b"b"}, ack=True)
        chunks = [line[at : at + 65536] for at in range(0, len(line), 65536)]
        assert codes(received(*chunks, limits=limits)) == [code]


class CountedScans:
    """The scans of a codec, and how many bytes they were given to look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        scan_lines = scan.scan_lines
        scanner_type = scan.ObjectScanner
        counted = self

        def counted_lines(buffer: bytes, start: int, stop: int, *rest: object) -> object:
            counted.bytes += stop - start
            return scan_lines(buffer, start, stop, *rest)  # type: ignore[arg-type]

        class CountedScanner:
            def __init__(self, depth_max: int) -> None:
                self._scanner = scanner_type(depth_max)
                self.reset = self._scanner.reset

            def scan(self, buffer: bytes, start: int, stop: int) -> tuple[int, int]:
                counted.bytes += stop - start
                return self._scanner.scan(buffer, start, stop)

        monkeypatch.setattr(scan, "scan_lines", counted_lines)
        monkeypatch.setattr(scan, "ObjectScanner", CountedScanner)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedScans]:
    yield CountedScans(monkeypatch)


@pytest.mark.parametrize(
    "stream",
    [
        GO[:-4] + b"x" * 100_000 + b'"}',
        b"\n" * 100_000,
        b'{"a":' + b"[" * 100_000,
        b"garbage" * 15_000,
        (b"x" * 9 + b"\n") * 10_000,
    ],
    ids=["one object", "newlines", "depth", "garbage", "garbage lines"],
)
def test_a_byte_at_a_time_is_looked_at_a_few_times_at_most(
    stream: bytes, counted: CountedScans
) -> None:
    received(*(stream[at : at + 1] for at in range(len(stream))))
    assert counted.bytes <= 4 * len(stream)


def test_a_carried_byte_is_not_looked_at_again(counted: CountedScans) -> None:
    stream = b'{"messagetype":"send",  "topics":["golang"],"data":"%b"}' % (b"x" * 3000)
    received_by_edge([stream[at : at + 1] for at in range(len(stream))], Limits())
    assert counted.bytes <= 4 * len(stream)


def test_an_error_keeps_nothing_of_how_it_was_found() -> None:
    (event,) = received(b'{"messagetype":"register","topics":5}')
    assert isinstance(event, Bad)
    assert event.error.__traceback__ is None
    assert event.error.__context__ is None
    assert event.error.__cause__ is None


def test_a_datagram_holds_whole_objects() -> None:
    limits = Limits()
    assert codes(decode_datagram(REGISTER + GO, limits)) == ["ok", "ok"]
    assert codes(decode_datagram(REGISTER + GO[:-1], limits)) == ["ok", "000001"]
    assert decode_datagram(b"\n", limits) == []


def test_a_large_payload_ends_with_its_datagram() -> None:
    """Nothing that comes later could end it, and its sender would wait forever."""
    large = b'{"messagetype":"send","topics":["a"],"data":"' + b"x" * 500
    limits = Limits(inline_bytes_max=100)
    for end in (b"", b'"', b"\\", b'"} {'):
        events = decode_datagram(large + end, limits)
        begun = sum(isinstance(one, LargeBegin) for one in events)
        assert begun == sum(isinstance(one, LargeEnd | LargeDropped) for one in events), end
        assert any(isinstance(one, Bad) for one in events), end


@given(st.binary(max_size=200).filter(lambda data: b"close" not in data))
def test_garbage_gives_errors_and_nothing_worse(data: bytes) -> None:
    events = received(data, b"\n" + REGISTER + b"\n" + REGISTER, limits=SMALL)
    assert events[-1] == Register(("golang",))


@given(st.text(alphabet='{}[]",:\\ \n1a', max_size=60))
def test_almost_json_depends_on_no_cut_either(text: str) -> None:
    data = text.encode()
    events = seen(received(data, limits=SMALL))
    assert seen(received(*(bytes([byte]) for byte in data), limits=SMALL)) == events
