"""Every line either side of goMS sends, byte for byte, and what the client reads from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from goms_kit import received, seen
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.config import Limits
from polybus.wire import goms
from polybus.wire.codec import Bad, Deliver
from polybus.wire.goms import (
    Close,
    Error,
    GomsClientCodec,
    Logout,
    Message,
    RegAck,
    Register,
    Reply,
    Send,
    SendAck,
)
from polybus.wire.goms_objects import Code
from polybus.wire.positions import Position

VECTORS = Path(__file__).parents[1] / "vectors" / "goms"
PAGE = json.loads((VECTORS / "protocol-page.json").read_text())
LINES: dict[str, bytes] = {
    name: text.encode()
    for name, text in json.loads((VECTORS / "polybus.json").read_text())["lines"].items()
}
HEADERS = {"k": b"v", "bin": b"\xff"}


def replies(*chunks: bytes) -> list[Reply]:
    codec = GomsClientCodec(Limits())
    return [event for chunk in chunks for event in codec.receive(chunk)]


def logged(batch: Batch) -> Batch:
    batch.epoch, batch.first_offset = 3, 9
    return batch


@pytest.mark.parametrize("vector", PAGE["requests"], ids=lambda vector: vector["event"])
def test_the_requests_of_the_protocol_page_are_understood(vector: dict[str, Any]) -> None:
    topics = tuple(vector.get("topics", ()))
    expected = {
        "Register": Register(topics),
        "Send": Send(topics, vector.get("data", "").encode()),
        "Logout": Logout(topics),
        "Close": Close(),
    }
    assert received(vector["wire"].encode()) == [expected[vector["event"]]]


@pytest.mark.parametrize("vector", PAGE["answers"], ids=lambda vector: vector["event"])
def test_the_answers_of_the_protocol_page_are_understood(vector: dict[str, Any]) -> None:
    topics = tuple(vector["topics"])
    expected = {
        "RegAck": RegAck(topics),
        "Message": Message(topics, vector.get("data", "").encode()),
    }
    assert replies(vector["wire"].encode()) == [expected[vector["event"]]]


ENCODED: dict[str, bytes] = {
    "message": goms.encode(Batch.of("golang", [b'h"i'])),
    "binary": goms.encode(Batch.of("golang", [b"\xff\x00"])),
    "full": goms.encode_message(["a", "b"], b"x", HEADERS, [Position(1, 7), Position(2, 9)]),
    "error": goms.encode_error("goms.001001", "a,b"),
    "reg-ack": goms.encode_reg_ack(["a"]),
    "reg-ack-offsets": goms.encode_reg_ack(["a"], [Position(1, 7)]),
    "send-ack": goms.encode_send_ack(["a", "b"], [Position(1, 7), Position(1, 0)]),
    "register": goms.encode_register(["a"]),
    "register-full": goms.encode_register(["a"], start="earliest", ack=True, offsets=True),
    "send": goms.encode_send(["a"], b"x"),
    "send-full": goms.encode_send(["a", "b"], b"\xff", {"k": b"v"}, ack=True),
    "close": goms.encode_close(),
}


@pytest.mark.parametrize("name", ENCODED)
def test_our_lines_are_the_golden_ones(name: str) -> None:
    assert ENCODED[name] == LINES[name]


def test_the_client_understands_every_answer() -> None:
    names = ["binary", "full", "error", "reg-ack", "reg-ack-offsets", "send-ack"]
    assert replies(b"".join(LINES[name] for name in names)) == [
        Message(("golang",), b"\xff\x00"),
        Message(("a", "b"), b"x", HEADERS, (Position(1, 7), Position(2, 9))),
        Error("001001", "a,b"),
        RegAck(("a",)),
        RegAck(("a",), (Position(1, 7),)),
        SendAck(("a", "b"), (Position(1, 7), Position(1, 0))),
    ]


def test_the_server_understands_every_request() -> None:
    names = ["register", "register-full", "send-full", "logout", "logout-topics", "close"]
    assert received(b"".join(LINES[name] for name in names)) == [
        Register(("a",)),
        Register(("a",), "earliest", True, True),
        Send(("a", "b"), b"\xff", {"k": b"v"}, True),
        Logout(),
        Logout(("a",)),
        Close(),
    ]


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (b'{"messagetype":"error","errorcode":"001002","error":"a"}\n\n', Error("001002", "a")),
        (b'{"messagetype":"error","error-code":1001,"error":"a"}', Error("001001", "a")),
        (b'{"messagetype":"error","error-code":"002001"}', Error("002001", "")),
    ],
)
def test_the_client_understands_errors_of_other_servers(wire: bytes, expected: Error) -> None:
    assert replies(wire) == [expected]


@pytest.mark.parametrize(
    "wire",
    [
        b'{"messagetype":"register","topics":["a"]}',
        b'{"messagetype":"error"}',
        b'{"messagetype":"error","error-code":[]}',
        b'{"messagetype":"send-ack","topics":["a"],"offsets":["latest"]}',
        b'{"messagetype":"send-ack","topics":["a"],"offsets":["1:x"]}',
        b'{"messagetype":"send-ack","topics":["a"],"offsets":5}',
    ],
)
def test_the_client_names_what_no_server_says(wire: bytes) -> None:
    (event, after) = replies(wire + b"\n" + LINES["reg-ack"])
    assert isinstance(event, Bad)
    assert after == RegAck(("a",))


def test_plain_messages_reach_the_client_as_batches() -> None:
    (event,) = replies(goms.encode(Batch.of("a", [b"1", b"2"])))
    assert isinstance(event, Deliver)
    assert [(batch.topic, list(batch.values())) for batch in event.batches] == [("a", [b"1", b"2"])]


def test_messages_with_headers_keep_their_place() -> None:
    batch = Batch.of("a", [b"1", b"2", b"3"], headers=[None, {"k": b"v"}, {}])
    lines = [json.loads(line) for line in goms.encode(batch).splitlines()]
    assert [line["data"] for line in lines] == ["1", "2", "3"]
    assert [line.get("headers") for line in lines] == [None, {"k": "v"}, None]
    assert list(lines[1]) == ["messagetype", "topics", "headers", "data"]


@pytest.mark.parametrize("headers", [None, [{"k": b"v"}, None]])
def test_messages_tell_their_offsets_when_asked(headers: list[Any] | None) -> None:
    batch = logged(Batch.of("a", [b"1", b"\xff"], headers=headers))
    told = replies(goms.encode_with_offsets(batch))
    assert told == [
        Message(("a",), b"1", headers[0] if headers else None, (Position(3, 9),)),
        Message(("a",), b"\xff", None, (Position(3, 10),)),
    ]


@pytest.mark.parametrize("headers", [None, [{"k": b"v"}]])
def test_a_batch_outside_the_log_has_no_offsets_to_tell(headers: list[Any] | None) -> None:
    with pytest.raises(ValueError, match="offset"):
        goms.encode_with_offsets(Batch.of("a", [b"1"], headers=headers))


def test_a_batch_from_a_plain_send_goes_out_as_it_came_in() -> None:
    wire = '{"messagetype":"send","topics":["a"],"data":"é \\"q\\" \\n"}\n'.encode()
    (event,) = received(wire)
    (batch,) = cast(Any, event).batches
    assert goms.encode(batch) == wire.replace(b'"send"', b'"message"')


@given(
    st.sampled_from(["a", "with space", 'quo"te', "é"]),
    st.lists(st.binary(max_size=30) | st.text(max_size=30).map(str.encode), max_size=6),
)
def test_any_value_survives_both_ways(topic: str, values: list[bytes]) -> None:
    batch = Batch.of(topic, values)
    expected = {topic: values} if values else {}
    assert seen(received(goms.encode_sends(batch)))[0] == expected
    arrived: list[bytes] = []
    for event in replies(goms.encode(batch)):
        if isinstance(event, Deliver):
            arrived += [value for part in event.batches for value in part.values()]
        else:
            assert isinstance(event, Message)
            arrived.append(event.value)
    assert arrived == values


@given(st.dictionaries(st.text(max_size=10), st.binary(max_size=10), max_size=5))
def test_any_headers_survive_both_ways(headers: dict[str, bytes]) -> None:
    (request,) = received(goms.encode_send(["a", "b"], b"x", headers))
    assert request == Send(("a", "b"), b"x", headers or None)
    (reply,) = replies(goms.encode_message(["a", "b"], b"x", headers))
    assert reply == Message(("a", "b"), b"x", headers or None)


def test_the_protocol_page_lists_every_error_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocols" / "goms.md").read_text()
    listed = re.findall(r"^\| (\d{6}) \|", page, re.MULTILINE)
    assert listed == [code.value for code in Code]
