"""What a client may say to a goMS server, and the error for everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from goms_kit import codes, only_error, received

from polybus.config import Limits
from polybus.wire.goms import Close, Logout, Register, Send

LIMITS = Limits(
    topics_per_request_max=3, topic_bytes_max=10, properties_max=2, message_bytes_max=1000
)


def sent(**fields: Any) -> bytes:
    """An object that is never a plain line."""
    return json.dumps(fields, separators=(" ,", ":")).encode()


def send(**fields: Any) -> bytes:
    return sent(messagetype="send", topics=["a"], **fields)


def only(data: bytes) -> object:
    (event,) = received(data, limits=LIMITS)
    return event


def test_register_carries_all_its_fields() -> None:
    assert only(sent(messagetype="register", topics=["a", "B c", "A"])) == Register(
        ("a", "b c", "a")
    )
    full = {"messagetype": "register", "topics": [], "from": "1:7", "ack": True, "offsets": True}
    assert only(sent(**full)) == Register((), "1:7", True, True)
    plain = {"messagetype": "register", "topics": ["a"], "from": None, "ack": False}
    assert only(sent(**plain, offsets=None)) == Register(("a",))


def test_send_names_each_topic_once_in_sent_order() -> None:
    data = sent(messagetype="send", topics=["b", "A", "B"], data="x")
    assert only(data) == Send(("b", "a"), b"x")


def test_logout_is_of_the_topics_or_of_all() -> None:
    assert only(sent(messagetype="logout")) == Logout(None)
    assert only(sent(messagetype="logout", topics=None)) == Logout(None)
    assert only(sent(messagetype="logout", topics=["A", "a", "b"])) == Logout(("a", "b"))
    assert only(sent(messagetype="logout", topics=[])) == Logout(())


def test_close_needs_no_fields_and_minds_none() -> None:
    assert only(sent(messagetype="close", topics=5)) == Close()


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'"text"', b"text"),
        (b'""', b""),
        (b'"\\u00e9\\ud83d\\ude00\\n"', "é😀\n".encode()),
        (b"null", b"null"),
        (b"-1.50e+3", b"-1.50e+3"),
        (b'{ "a": [1,\n2] }', b'{ "a": [1,\n2] }'),
        ('["é"]'.encode(), '["é"]'.encode()),
    ],
)
def test_data_is_its_text_or_its_json(data: bytes, value: bytes) -> None:
    wire = b'{"messagetype":"send", "topics":["a"],"data":%b}' % data
    assert only(wire) == Send(("a",), value)


def test_base64_data_is_bytes() -> None:
    assert only(send(data="/wA=", encoding="base64")) == Send(("a",), b"\xff\x00")
    assert only(send(data="x", encoding=None)) == Send(("a",), b"x")


def test_headers_are_strings_or_base64() -> None:
    headers = {"k": "é", "bin": {"base64": "/w=="}}
    expected = {"k": "é".encode(), "bin": b"\xff"}
    assert only(send(data="x", headers=headers)) == Send(("a",), b"x", expected)
    assert only(send(data="x", headers={})) == Send(("a",), b"x", None)
    assert only(send(data="x", headers=None, ack=True)) == Send(("a",), b"x", None, True)


WRONG_TYPES = {
    "messagetype": sent(messagetype=1),
    "topics": sent(messagetype="register", topics="a"),
    "topics entries": sent(messagetype="register", topics=["a", 1]),
    "topics null": sent(messagetype="register", topics=None),
    "topics missing": sent(messagetype="register"),
    "topics of a send": sent(messagetype="send", topics={"a": 1}, data="x"),
    "topics of a logout": sent(messagetype="logout", topics="a"),
    "from": sent(**{"messagetype": "register", "topics": ["a"], "from": 5}),
    "from no position": sent(**{"messagetype": "register", "topics": ["a"], "from": "now"}),
    "ack": sent(messagetype="register", topics=["a"], ack="yes"),
    "ack of a send": send(data="x", ack=1),
    "offsets": sent(messagetype="register", topics=["a"], offsets=["1:0"]),
    "encoding": send(data="x", encoding=1),
    "encoding unknown": send(data="x", encoding="hex"),
    "data": send(data=[1], encoding="base64"),
    "data not base64": send(data="=", encoding="base64"),
    "data not base64 at all": send(data="é", encoding="base64"),
    "headers": send(data="x", headers=["a"]),
    "headers of numbers": send(data="x", headers={"a": 1}),
    "headers of others": send(data="x", headers={"a": {}}),
    "headers not base64": send(data="x", headers={"a": {"base64": "="}}),
}


@pytest.mark.parametrize("wire", WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_a_field_of_the_wrong_type_is_000001_and_named(
    wire: bytes, request: pytest.FixtureRequest
) -> None:
    code, text = only_error(wire, limits=LIMITS)
    assert code == "000001"
    assert request.node.callspec.id.split()[0] in text


@pytest.mark.parametrize(
    "wire",
    [
        b"{}",
        sent(messagetype="Register", topics=["a"]),
        sent(messagetype="message", topics=["a"], data="x"),
        sent(messagetype=""),
        sent(MessageType="register", topics=["a"]),
        sent(MESSAGETYPE="close"),
    ],
)
def test_an_unknown_or_missing_messagetype_is_000002(wire: bytes) -> None:
    assert only_error(wire)[0] == "000002"


def test_keys_in_another_case_are_unknown_keys() -> None:
    assert only_error(sent(messagetype="register", Topics=["a"]))[0] == "000001"
    assert only_error(send(Data="x"))[0] == "002002"
    assert only(send(data="x", DATA="y", Ack=True)) == Send(("a",), b"x")


def test_a_send_without_data_is_002002() -> None:
    assert only_error(send()) == ("002002", "data is missing")


def test_the_last_of_two_equal_keys_counts() -> None:
    wire = b'{"messagetype":"send","topics":["a"],"data":"x","data":"y"}'
    assert only(wire) == Send(("a",), b"y")


@pytest.mark.parametrize(
    "wire",
    [
        b'{"messagetype":"send","topics":["a"],"data":01}',
        b'{"messagetype":"send","topics":["a"],"data":truth}',
        b'{"messagetype":"send","topics":["a"],"data":1e}',
        b'{"messagetype":"send","topics":["a"],"data":"\\x"}',
        b'{"messagetype":"send","topics":["a"],"data":"\\ud800"}',
        b'{"messagetype":"send","topics":["a"],"data":"\\ud800\\u0041"}',
        b'{"messagetype":"send","topics":["a"],"data":"\\udc00"}',
        b'{"messagetype":"send","topics":["\\udc00"],"data":"x"}',
        b'{"messagetype":"send","topics":["a"],"data":"\xff"}',
        b'{"messagetype":"send","topics":["a"],"data":"\xed\xa0\x80"}',
        b'{"messagetype":"send","topics":["a"],"data":1,"unknown":"\xff"}',
        b'{"messagetype":"send","topics":["a"],"data":"x","headers":{"a":"\\ud800"}}',
    ],
)
def test_what_is_not_json_in_utf8_is_000001_and_costs_only_itself(wire: bytes) -> None:
    assert codes(received(wire + b'{"messagetype":"logout"}')) == ["000001", "ok"]


@pytest.mark.parametrize(
    ("wire", "limit"),
    [
        (sent(messagetype="register", topics=["a"] * 4), "topics-per-request-max"),
        (sent(messagetype="register", topics=["a" * 11]), "topic-bytes-max"),
        (sent(messagetype="logout", topics=["é" * 6]), "topic-bytes-max"),
        (send(data="x", headers={"a": "", "b": "", "c": ""}), "properties-max"),
        (send(data="x", headers={str(key): "" for key in range(100)}), "properties-max"),
        (send(data="x" * 1001), "message-bytes-max"),
        (send(data=["x" * 1001]), "message-bytes-max"),
    ],
)
def test_what_is_over_a_limit_is_000003_and_names_it(wire: bytes, limit: str) -> None:
    code, text = only_error(wire, limits=LIMITS)
    assert code == "000003"
    assert limit in text


def test_limits_include_their_own_value() -> None:
    assert codes(received(sent(messagetype="register", topics=["é" * 5] * 3), limits=LIMITS)) == [
        "ok"
    ]
    headers = {"a": {"base64": ""}, "b": {"base64": ""}}
    assert codes(received(send(data="x" * 1000, headers=headers), limits=LIMITS)) == ["ok"]


def test_a_million_digits_are_data_like_any_other() -> None:
    digits = b"9" * 1_000_000
    wire = b'{"messagetype":"send","topics":["a"],"data":%b}' % digits
    (event,) = received(wire)
    assert event == Send(("a",), digits)
    for key in (b"topics", b"messagetype", b"ack", b"headers", b"from", b"unknown"):
        wire = b'{"messagetype":"register","topics":["a"],"%b":%b}' % (key, digits)
        assert len(received(wire)) == 1


def test_a_list_of_a_million_topics_is_refused_before_it_is_built() -> None:
    wire = b'{"messagetype":"register","topics":[' + b'"",' * 1_000_000 + b'""]}'
    assert only_error(wire)[0] == "000003"


def test_errors_do_not_echo_what_the_peer_sent() -> None:
    for wire in (sent(messagetype="secret"), sent(messagetype="register", topics="secret")):
        assert "secret" not in only_error(wire)[1]
