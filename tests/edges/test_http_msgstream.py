"""The msgstream endpoint, row by row of what clients of the original server rely on."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_kit import http_bus, raw, recv
from websockets.exceptions import ConnectionClosed, InvalidStatus

UNSET = b'{"0":[["session.unset","noSession"]]}'


async def test_packs_come_as_compact_json_in_ascending_order_and_raw_utf_8() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        await http.publish("news", *[b'{"n": %d}' % n for n in range(11)], "grün".encode())

        answer = await http.poll(key)

        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["pragma"] == "no-cache"
        assert answer.content.startswith(b'{"1":[["news",{"n":0}]],"2":[["news",{"n":1}]],')
        assert answer.content.endswith('"12":[["news","grün"]]}'.encode())
        assert list(answer.json()) == [str(number) for number in range(1, 13)]


async def test_nothing_to_say_is_204_without_a_body() -> None:
    async with http_bus("news") as http:
        answer = await http.poll(await http.open_session("news"))

        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["pragma"] == "no-cache"


@pytest.mark.parametrize("transport", ["shortpolling", "longpolling"])
async def test_head_with_a_transport_is_200_without_a_session(transport: str) -> None:
    async with http_bus() as http:
        answer = await http.client.head(f"/msgstream?transport={transport}")

        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_other_methods_are_405(method: str) -> None:
    async with http_bus() as http:
        answer = await http.client.request(method, "/msgstream?transport=shortpolling")

        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


async def test_options_is_204_without_cors_settings() -> None:
    async with http_bus() as http:
        answer = await http.client.options("/msgstream")

        assert answer.status_code == 204
        assert "access-control-allow-origin" not in answer.headers


async def test_options_is_the_cors_answer_as_configured() -> None:
    async with http_bus(http={"cors-origins": ["https://game.example"]}) as http:
        ask = {"origin": "https://game.example", "access-control-request-method": "GET"}
        allowed = await http.client.options("/msgstream", headers=ask)
        refused = await http.client.options("/msgstream", headers=ask | {"origin": "https://e.vil"})

        assert allowed.headers["access-control-allow-origin"] == "https://game.example"
        assert "access-control-allow-origin" not in refused.headers


async def test_a_trailing_slash_is_accepted() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        answer = await http.client.get(f"/msgstream/?sessionKey={key}&transport=shortpolling")

        assert answer.status_code == 204


@pytest.mark.parametrize("transport", ["foo", "websocket"])
async def test_an_unknown_transport_is_told_in_plain_text(transport: str) -> None:
    async with http_bus() as http:
        key = await http.open_session()
        answer = await http.client.get(f"/msgstream?sessionKey={key}&transport={transport}")

        assert answer.status_code == 400
        assert answer.headers["content-type"] == "text/plain; charset=UTF-8"
        assert answer.text == f"Unknown HTTP transport: {transport}"


@pytest.mark.parametrize("query", ["", "&sessionKey="])
async def test_a_missing_key_is_400_and_says_so(query: str) -> None:
    async with http_bus() as http:
        answer = await http.client.get(f"/msgstream?transport=shortpolling{query}")

        assert answer.status_code == 400
        assert answer.headers["content-type"].startswith("text/plain")
        assert "sessionKey" in answer.text


async def test_an_unknown_session_is_told_in_pack_0() -> None:
    async with http_bus() as http:
        answer = await http.poll("nobody")

        assert (answer.status_code, answer.content) == (200, UNSET)


async def test_an_unknown_session_on_a_websocket_is_told_and_closed_with_1000() -> None:
    async with http_bus() as http, http.websocket("nobody") as websocket:
        assert await websocket.recv() == UNSET.decode()
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000


@pytest.mark.slow
async def test_an_expired_session_is_unknown_and_cleaned_up() -> None:
    async with http_bus() as http:
        key = await http.open_session(**{"ttl-s": 0.05})
        await http.until(lambda: len(http.node.services.inboxes) == 0)

        assert (await http.poll(key)).content == UNSET


async def test_a_deleted_session_lets_its_poll_go() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        poll = await http.hanging_poll(key)

        deleted = await http.client.delete(f"/v1/sessions/{key}")

        assert deleted.status_code == 204
        assert (await poll).content == UNSET


async def test_confirmations_count_before_delivery_and_garbage_does_not() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        for number in range(4):
            await http.post(key, ["n", number])
        assert list(await http.packs(key)) == ["1", "2", "3", "4"]

        left = await http.packs(key, "2,2,x,,0,-1,77,4")

        assert list(left) == ["1", "3"]


async def test_a_repeated_parameter_and_escaped_commas_are_joined() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        for number in range(4):
            await http.post(key, ["n", number])
        await http.packs(key)

        query = f"sessionKey={key}&transport=shortpolling&confirmIds=1%2C2&confirmIds=3&rand=0.5"
        answer = await http.client.get(f"/msgstream?{query}")

        assert list(answer.json()) == ["4"]


async def test_a_confirmation_of_what_was_never_sent_does_nothing() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        await http.packs(key, "1,2,3")
        await http.post(key, ["first"])

        assert await http.packs(key) == {"1": [["first"]]}


async def test_numbers_go_on_after_confirmation_and_the_notice_is_not_confirmed() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        await http.post(key, ["a"])
        await http.packs(key)
        assert await http.packs(key, "0,1") == {}
        await http.post(key, ["b"])

        assert await http.packs(key) == {"2": [["b"]]}


async def test_messages_before_the_first_poll_are_kept() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        await http.publish("news", b"early")

        assert await http.packs(key) == {"1": [["news", "early"]]}


async def test_packs_stay_until_they_are_confirmed() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        await http.post(key, ["a", {"x": 1}], ["b"])

        assert await http.packs(key) == await http.packs(key) == {"1": [["a", {"x": 1}], ["b"]]}
        assert await http.packs(key, "1") == {}


async def test_a_long_poll_is_answered_the_moment_something_comes() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        poll = await http.hanging_poll(key)
        assert not poll.done()

        await http.publish("news", b"now")

        assert (await poll).json() == {"1": [["news", "now"]]}


async def test_a_long_poll_ends_with_204_at_the_heartbeat() -> None:
    async with http_bus(msgstream={"heartbeat-s": 0.1}) as http:
        answer = await http.poll(await http.open_session(), hang=True)

        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["pragma"] == "no-cache"


async def test_a_newer_poll_lets_an_older_one_go_with_204() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        older = await http.hanging_poll(key)

        newer = asyncio.create_task(http.poll(key, hang=True))

        assert (await older).status_code == 204
        await http.post(key, ["x"])
        assert (await newer).json() == {"1": [["x"]]}


async def test_a_websocket_lets_an_older_poll_go() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        older = await http.hanging_poll(key)
        async with http.websocket(key):
            assert (await older).status_code == 204


async def test_a_poll_closes_an_older_websocket_with_1000() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        async with http.websocket(key) as older:
            await http.poll(key)
            with pytest.raises(ConnectionClosed) as closed:
                await older.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000


async def test_a_websocket_gets_each_pack_once_and_again_only_after_a_reconnect() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        got: dict[str, object] = {}
        async with http.websocket(key) as websocket:
            for number in range(20):
                await http.publish("news", b"%d" % number)
            while len(got) < 20:
                for name, pack in (await recv(websocket)).items():
                    assert name not in got
                    got[name] = pack
            await websocket.send("1,2,3")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(websocket.recv(), 0.2)
        async with http.websocket(key) as websocket:
            assert list(await recv(websocket)) == [str(number) for number in range(4, 21)]


async def test_a_websocket_without_a_key_is_refused_before_the_upgrade() -> None:
    async with http_bus() as http:
        with pytest.raises(InvalidStatus) as refused:
            async with http.websocket(""):
                pass
        assert refused.value.response.status_code == 400
        assert b"sessionKey" in (refused.value.response.body or b"")


async def test_a_binary_frame_closes_with_1003_and_nothing_is_lost() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        await http.post(key, ["a"])
        async with http.websocket(key) as websocket:
            await recv(websocket)
            await websocket.send(b"1")
            with pytest.raises(ConnectionClosed) as closed:
                await websocket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1003
        assert await http.packs(key) == {"1": [["a"]]}


async def test_empty_and_garbage_text_is_ignored_and_pings_are_answered() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        async with http.websocket(key) as websocket:
            await websocket.send("")
            await websocket.send("not,an,id")
            await (await websocket.ping())
            await http.post(key, ["still here"])
            assert await recv(websocket) == {"1": [["still here"]]}


async def test_a_confirmation_in_fragments_counts_as_one() -> None:
    async with http_bus() as http:
        key = await http.open_session()
        for number in range(12):
            await http.post(key, ["n", number])
        async with http.websocket(key) as websocket:
            await recv(websocket)
            await websocket.send(["1,2,3,4,5,6,7,8,9,1", "0"])
            await (await websocket.ping())
        assert list(await http.packs(key)) == ["11", "12"]


async def test_an_oversized_message_closes_with_1009() -> None:
    async with http_bus(msgstream={"websocket-message-bytes-max": 1000}) as http:
        key = await http.open_session()
        async with http.websocket(key) as websocket:
            await websocket.send("1," * 501)
            with pytest.raises(ConnectionClosed) as closed:
                await websocket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


async def test_a_websocket_that_does_not_answer_pings_is_let_go() -> None:
    upgrade = (
        b"GET /msgstream?sessionKey=%b HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with http_bus(msgstream={"ping-interval-s": 0.1}) as http:
        key = await http.open_session()
        answer = await raw(http.node, upgrade % key.encode())

        assert answer.startswith(b"HTTP/1.1 101")
        assert answer.endswith(b"\r\n\r\n\x89\x00")


async def test_invalid_utf_8_closes_with_1007() -> None:
    upgrade = (
        b"GET /msgstream?sessionKey=%b HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with http_bus() as http:
        key = await http.open_session()
        # A masked text frame with one byte, 0xff; the mask is zero.
        from polybus.testing import ScriptedPeer

        async with ScriptedPeer(http.node.tcp_port) as peer:
            await peer.send(upgrade % key.encode())
            while await peer.read_line() != b"\r\n":
                pass
            await peer.send(b"\x81\x81\0\0\0\0\xff")
            answer = await peer.read(4)
        assert answer[:1] == b"\x88" and answer[2:4] == (1007).to_bytes(2, "big")


async def test_at_shutdown_a_long_poll_gets_204_and_close_and_a_websocket_1001() -> None:
    async with http_bus() as http:
        one, two = await http.open_session(), await http.open_session()
        async with http.websocket(two) as websocket:
            poll = await http.hanging_poll(one)
            stopping = asyncio.create_task(http.node.stop())

            answer = await poll
            with pytest.raises(ConnectionClosed) as closed:
                await websocket.recv()

            assert answer.status_code == 204
            assert answer.headers["connection"] == "close"
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
            await stopping


async def test_a_poll_while_another_hangs_takes_nothing_from_other_sessions() -> None:
    async with http_bus("news") as http:
        one, two = await http.open_session("news"), await http.open_session("news")
        first = await http.hanging_poll(one)
        second = asyncio.create_task(http.poll(two, hang=True))
        await http.poll(one)
        assert (await first).status_code == 204

        await http.publish("news", b"x")

        assert json.loads((await second).content) == {"1": [["news", "x"]]}
        assert await http.packs(one) == {"1": [["news", "x"]]}
