"""goMS on a running bus: one test per promise about its words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from edge_kit import Pipe, connected, epoch_of, error_line, line, until

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus


@pytest.fixture
async def bus() -> AsyncIterator[Node]:
    async with run_bus("news", "sport", "Weather", "two words") as node:
        yield node


@pytest.fixture
async def anna(bus: Node) -> AsyncIterator[ScriptedPeer]:
    async with ScriptedPeer(bus.tcp_port) as peer:
        yield peer


@pytest.fixture
async def bert(bus: Node) -> AsyncIterator[ScriptedPeer]:
    async with ScriptedPeer(bus.tcp_port) as peer:
        yield peer


async def register(peer: ScriptedPeer, *topics: str) -> None:
    await peer.send(line("register", topics=list(topics), ack=True))
    assert await peer.read_line() == line("reg-ack", topics=list(topics))


async def answers(peer: ScriptedPeer) -> bytes:
    """What the bus says until it has come to the end of what was sent so far."""
    await peer.send(line("register", topics=[], ack=True))
    said = b""
    while (one := await peer.read_line()) != line("reg-ack", topics=[]):
        assert one
        said += one
    return said


# register


async def test_a_register_is_answered_with_silence_unless_an_ack_is_asked_for(
    anna: ScriptedPeer,
) -> None:
    await anna.send(line("register", topics=["news"]))
    assert await answers(anna) == b""
    await anna.send(line("register", topics=["sport"], ack=True))
    assert await anna.read_line() == line("reg-ack", topics=["sport"])


async def test_a_connector_may_ack_every_register() -> None:
    connectors = [{"protocol": "tcp", "port": 0, "reg-ack": True}]
    async with run_bus("news", connectors=connectors) as bus, ScriptedPeer(bus.tcp_port) as peer:
        await peer.send(line("register", topics=["news"]))
        assert await peer.read_line() == b'{"messagetype":"reg-ack","topics":["news"]}\n'


async def test_a_mixed_register_takes_the_valid_topics_and_lists_the_others(
    anna: ScriptedPeer,
) -> None:
    await register(anna, "news")
    topics = ["no", "news", "sport", "nix", "news", "sport"]
    await anna.send(line("register", topics=topics, ack=True))
    assert await anna.read_line() == error_line("001001", "no,nix")
    assert await anna.read_line() == error_line("001002", "news,news,sport")
    assert await anna.read_line() == line("reg-ack", topics=["sport"])


async def test_capitals_are_folded_in_register_send_logout_and_the_topics_file(
    anna: ScriptedPeer, bert: ScriptedPeer
) -> None:
    await anna.send(line("register", topics=["WEATHER", "Two Words"], ack=True))
    assert await anna.read_line() == line("reg-ack", topics=["weather", "two words"])
    await register(bert, "weather", "two words")
    await bert.send(line("send", topics=["WeatheR"], data="rain"))
    assert await anna.read_line() == line("message", topics=["weather"], data="rain")
    await anna.send(line("logout", topics=["Weather"]))
    assert await answers(anna) == b""
    await bert.send(line("send", topics=["weather"], data="sun"))
    await bert.send(line("send", topics=["TWO words"], data="!"))
    assert await anna.read_line() == line("message", topics=["two words"], data="!")


async def test_system_topics_and_everything_are_no_topics_to_register_to(
    anna: ScriptedPeer,
) -> None:
    await anna.send(line("register", topics=["$error", "*", ""]))
    assert await answers(anna) == error_line("001001", "$error,*,")


# send


async def test_a_message_is_one_compact_line_in_the_protocols_key_order(
    anna: ScriptedPeer, bert: ScriptedPeer
) -> None:
    await register(anna, "news")
    await register(bert, "news")
    request = {"data": "hi", "headers": {"k": "v"}, "topics": ["news"], "messagetype": "send"}
    await bert.send_json(request)
    expected = b'{"messagetype":"message","topics":["news"],"headers":{"k":"v"},"data":"hi"}\n'
    assert await anna.read_line() == expected


async def test_the_sender_does_not_get_its_own_message(
    anna: ScriptedPeer, bert: ScriptedPeer
) -> None:
    await register(anna, "news")
    await register(bert, "news")
    await anna.send(line("send", topics=["news"], data="mine"))
    await anna.send(line("send", topics=["news"], headers={"a": "b"}, data="mine too"))
    assert (await bert.read_json())["data"] == "mine"
    assert (await bert.read_json())["data"] == "mine too"
    assert await answers(anna) == b""


@pytest.mark.parametrize("topic", ["news", "unheard-of", "$error"])
async def test_a_send_to_a_topic_one_is_not_registered_to_is_ignored_and_counted(
    bus: Node, anna: ScriptedPeer, bert: ScriptedPeer, topic: str
) -> None:
    await register(anna, "news", "sport")
    await register(bert, "sport")
    await bert.send(line("send", topics=[topic], data="plain"))
    await bert.send(line("send", topics=[topic], headers={"a": "b"}, data="not plain"))
    assert await answers(bert) == b""
    await bert.send(line("send", topics=["sport"], data="marker"))
    assert await anna.read_line() == line("message", topics=["sport"], data="marker")
    assert bus.bad_peers.counts["goms.send-ignored"] == 2
    assert bus.bus.log.bounds("news").stop == 0


async def test_a_send_to_several_topics_is_one_message_for_each_receiver(
    bus: Node, anna: ScriptedPeer, bert: ScriptedPeer
) -> None:
    """It lists the sent topics that the receiver is registered to, in the order they were sent."""
    await register(anna, "weather", "news")
    await register(bert, "news", "sport", "weather")
    async with ScriptedPeer(bus.tcp_port) as carl:
        await register(carl, "sport")
        topics = ["sport", "news", "NEWS", "weather", "two words", "sport"]
        await bert.send(line("send", topics=topics, data="x"))
        assert await anna.read_line() == line("message", topics=["news", "weather"], data="x")
        assert await carl.read_line() == line("message", topics=["sport"], data="x")
    for topic, stop in {"sport": 1, "news": 1, "weather": 1, "two words": 0}.items():
        assert bus.bus.log.bounds(topic).stop == stop


async def test_several_topics_are_several_messages_on_protocols_that_know_only_one(
    bus: Node, anna: ScriptedPeer, bert: ScriptedPeer
) -> None:
    await register(bert, "news", "sport")
    await anna.send_frame("$subscribe", b"news tell=position\nsport tell=position")
    await anna.read_frame(), await anna.read_frame()
    await bert.send(line("send", topics=["sport", "news"], data="x"))
    assert [await anna.read_frame(), await anna.read_frame()] == [("sport", b"x"), ("news", b"x")]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ('"text"', b"text"),
        ('"\\u00e9\\n\\ud83d\\ude00"', "\xe9\n\U0001f600".encode()),
        ('{"a": [1,  2.50]}', b'{"a": [1,  2.50]}'),
        ("12.50", b"12.50"),
        ("null", b"null"),
        ("false", b"false"),
        ('""', b""),
    ],
)
async def test_a_string_is_its_text_and_any_other_value_its_json(
    bus: Node, anna: ScriptedPeer, data: str, value: bytes
) -> None:
    await register(anna, "news")
    request = '{"messagetype":"send","topics":["news"],"ack":true,"data":' + data + "}\n"
    await anna.send(request.encode())
    assert (await anna.read_json())["messagetype"] == "send-ack"
    (batch,) = bus.bus.log.read("news", 0)
    assert list(batch.values()) == [value]


async def test_a_send_may_carry_base64_of_any_value(bus: Node, anna: ScriptedPeer) -> None:
    await register(anna, "news")
    await anna.send(line("send", topics=["news"], ack=True, encoding="base64", data="/wD+"))
    assert (await anna.read_json())["messagetype"] == "send-ack"
    (batch,) = bus.bus.log.read("news", 0)
    assert list(batch.values()) == [b"\xff\x00\xfe"]


async def test_a_send_ack_names_topics_and_offsets_once_the_message_is_durable(
    bus: Node, anna: ScriptedPeer
) -> None:
    await register(anna, "news", "sport")
    await anna.send(line("send", topics=["news"], data="first"))
    await anna.send(line("send", topics=["sport", "news"], ack=True, data="x"))
    epochs = epoch_of(bus, "sport"), epoch_of(bus, "news")
    assert await anna.read_line() == line(
        "send-ack", topics=["sport", "news"], offsets=[f"{epochs[0]}:0", f"{epochs[1]}:1"]
    )
    assert bus.bus.log.durable >= 2


async def test_who_asks_for_an_ack_is_told_what_was_not_sent(anna: ScriptedPeer) -> None:
    await register(anna, "news")
    await anna.send(line("send", topics=["sport", "nix"], ack=True, data="x"))
    said = error_line("002001", "not registered to sport,nix: register first")
    assert await anna.read_line() == said
    await anna.send(line("send", topics=["sport", "news"], ack=True, data="x"))
    assert await anna.read_line() == error_line("002001", "not registered to sport: register first")
    assert (await anna.read_json())["topics"] == ["news"]


# logout, close


async def test_logout_ends_some_registrations_and_lists_those_that_were_none(
    anna: ScriptedPeer, bert: ScriptedPeer
) -> None:
    await register(anna, "news", "sport")
    await register(bert, "news", "sport")
    await anna.send(line("logout", topics=["news", "weather", "nix"]))
    assert await answers(anna) == error_line("003001", "weather,nix")
    await bert.send(line("send", topics=["news"], data="missed"))
    await bert.send(line("send", topics=["sport"], data="got"))
    assert await anna.read_line() == line("message", topics=["sport"], data="got")


@pytest.mark.parametrize(
    "request_text", [b'{"messagetype":"logout"}\n', b'{"messagetype":"logout","topics":null}\n']
)
async def test_logout_without_topics_ends_all_registrations(
    bus: Node, anna: ScriptedPeer, request_text: bytes
) -> None:
    await register(anna, "news", "sport")
    await anna.send(request_text)
    assert await answers(anna) == b""
    assert [one.subscribers for one in bus.bus.topics()] == [()] * 4
    await register(anna, "news")


async def test_after_close_nothing_is_read_and_the_connection_ends(
    bus: Node, anna: ScriptedPeer
) -> None:
    await register(anna, "news")
    await anna.send(line("close") + line("send", topics=["news"], data="late") + b"garbage")
    assert await anna.read_to_end() == b""
    assert bus.bus.log.bounds("news").stop == 0
    anna.send_eof()
    await until(lambda: not bus.tcp.connections)
    assert all(not topic.subscribers for topic in bus.bus.topics())


async def test_the_end_of_the_stream_ends_all_registrations(bus: Node, anna: ScriptedPeer) -> None:
    await register(anna, "news")
    anna.send_eof()
    assert await anna.read_to_end() == b""
    await until(lambda: not any(topic.subscribers for topic in bus.bus.topics()))


async def test_an_object_without_a_newline_counts_and_an_unfinished_one_does_not(
    bus: Node, anna: ScriptedPeer
) -> None:
    await register(anna, "news")
    whole = line("send", topics=["news"], ack=True, data="whole").rstrip()
    await anna.send(whole + b'{"messagetype":"send","topics":["news"],"data":"half')
    anna.send_eof()
    said = await anna.read_to_end()
    assert json.loads(said)["messagetype"] == "send-ack"
    (batch,) = bus.bus.log.read("news", 0)
    assert list(batch.values()) == [b"whole"]


# Layout and errors


async def test_any_layout_of_objects_is_understood(anna: ScriptedPeer, bert: ScriptedPeer) -> None:
    await anna.send(b' \r\n{\n  "messagetype": "register",\r\n  "topics": ["news"]\n}\r\n')
    await register(bert, "news")
    assert await answers(anna) == b""
    await bert.send(
        b'{"messagetype":"send","topics":["news"],"data":"1"}\r\n'
        b'{"messagetype":"send","topics":["news"],"data":"2"}'
        b'{ "messagetype" : "send", "topics" : [ "news" ], "data" : "3" }\n'
    )
    said = [await anna.read_line() for _ in range(3)]
    assert said == [line("message", topics=["news"], data=str(n)) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("request_text", "code"),
    [
        (b"[]", "000001"),
        (b'"x"', "000001"),
        (b"garbage", "000001"),
        (b'{"messagetype":"send","topics":["news"],"data":"\xff"}', "000001"),
        (b'{"messagetype":"send","topics":["news"],"data":1e}', "000001"),
        (b'{"messagetype":"register","topics":"news"}', "000001"),
        (b'{"messagetype":"register"}', "000001"),
        (b'{"messagetype":"register","topics":["sport"],"from":"yesterday"}', "000001"),
        (b'{"messagetype":"register","topics":["sport"],"ack":"yes"}', "000001"),
        (b'{"messagetype":1}', "000001"),
        (b'{"messagetype":"Register","topics":["sport"]}', "000002"),
        (b'{"MessageType":"register","topics":["sport"]}', "000002"),
        (b'{"messagetype":"dance"}', "000002"),
        (b"{}", "000002"),
        (b'{"messagetype":"send","topics":["news"]}', "002002"),
        (b'{"messagetype":"send","topics":["news"],"Data":"x"}', "002002"),
        (b'{"messagetype":"register","Topics":["sport"]}', "000001"),
        (b'{"messagetype":"register","topics":["%b"]}' % (b"x" * 256), "000003"),
        (b'{"messagetype":"register","topics":[%b]}' % b",".join([b'"x"'] * 1025), "000003"),
    ],
)
async def test_a_mistake_gets_its_code_and_the_connection_stays(
    anna: ScriptedPeer, bert: ScriptedPeer, request_text: bytes, code: str
) -> None:
    await register(anna, "news")
    await register(bert, "news")
    await anna.send(request_text + b"\n")
    told = json.loads(await answers(anna))
    assert (told["messagetype"], told["error-code"], told["errorcode"]) == ("error", code, code)
    assert list(told) == ["messagetype", "error-code", "errorcode", "error"]
    await anna.send(line("send", topics=["news"], data="still here"))
    assert await bert.read_line() == line("message", topics=["news"], data="still here")


# UDP


async def test_udp_speaks_the_same_words(bus: Node, bert: ScriptedPeer) -> None:
    await register(bert, "news")
    async with connected(bus, "goms-udp") as udp:
        await udp.send(line("register", topics=["news"], ack=True) + line("dance"))
        assert await udp.read(len(ack := line("reg-ack", topics=["news"]))) == ack
        assert b'"000002"' in await read_line(udp)
        await udp.send(line("send", topics=["news"], ack=True, data="by datagram"))
        assert await bert.read_line() == line("message", topics=["news"], data="by datagram")
        assert b"send-ack" in await read_line(udp)
        await bert.send(line("send", topics=["news"], data="back"))
        assert await read_line(udp) == line("message", topics=["news"], data="back")
        await udp.send(line("close"))
        await until(lambda: len(bus.bus.topics()[0].subscribers) == 1)


async def test_a_datagram_that_ends_inside_an_object_is_told_so(bus: Node) -> None:
    async with connected(bus, "goms-udp") as udp:
        await udp.send(b'{"messagetype":"register","topics":["ne')
        assert b'"000001"' in await read_line(udp)
        await udp.send(b'ws"]}')
        assert b'"000001"' in await read_line(udp)


async def test_a_udp_peer_that_is_silent_for_too_long_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polybus.edges.udp.SWEEP_S", 0.05)
    async with run_bus("news", limits={"udp-idle-s": 0.01}) as bus:
        async with connected(bus, "goms-udp") as udp:
            await udp.send(line("register", topics=["news"], ack=True))
            await read_line(udp)
            (topic,) = bus.bus.topics()
            assert len(topic.subscribers) == 1
            await until(lambda: not topic.subscribers)


async def read_line(pipe: Pipe) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        found += await pipe.read(1)
    return found
