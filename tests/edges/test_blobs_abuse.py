"""Floods of large payloads of one account, beside another one that has its turn nevertheless."""

from __future__ import annotations

import asyncio
import contextlib
import os
from base64 import b64encode
from collections.abc import AsyncIterator

from accounts_http_kit import PASSWORDS, Bus, accounts_bus
from http_kit import http_bus

from polybus.log.layout import admin_token_path
from polybus.services.blobs.turns import AccountTurns
from polybus.testing import ScriptedPeer

LARGE = os.urandom(2 << 20)
AUTH = b64encode(f"other:{PASSWORDS['other']}".encode()).decode()


async def test_accounts_take_turns_however_much_each_has_waiting() -> None:
    turns = AccountTurns(asyncio.get_running_loop(), bytes_max=10)
    served: list[str] = []

    async def pass_through(account: str) -> None:
        await turns.enter(account, 10)
        served.append(account)
        await asyncio.sleep(0)
        turns.leave(10)

    flood = [asyncio.create_task(pass_through("flood")) for _ in range(100)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(pass_through(f"other{number % 2}")) for number in range(4)]
    await asyncio.sleep(0)
    flood[50].cancel()
    await asyncio.gather(*flood, *others, return_exceptions=True)
    assert len(served) == 103
    # Each gets every third turn while all three have something to do.
    assert max(at for at, one in enumerate(served) if one != "flood") < 12
    await asyncio.wait_for(turns.enter("late", 10), 5)


@contextlib.asynccontextmanager
async def uploads_of_other(bus: Bus, count: int) -> AsyncIterator[None]:
    """This many uploads of `other` that have begun and do not continue."""
    head = f"PUT /v1/topics/own/blob HTTP/1.1\r\nhost: localhost\r\nauthorization: Basic {AUTH}\r\n"
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            peer = await stack.enter_async_context(ScriptedPeer(bus.node.tcp_port))
            await peer.send(f"{head}content-length: 9000000\r\n\r\n".encode() + LARGE[: 300 << 10])
        yield


async def test_uploads_that_never_end_leave_room_for_those_of_others() -> None:
    limits = {"uploads-max": 20, "account-uploads-max": 5}
    async with accounts_bus(limits=limits) as bus:
        bus.node.bus.create_topic("other/own")
        shop, other = await bus.of("shop"), await bus.of("other")
        room = bus.node.services.blobs.room
        async with uploads_of_other(bus, 12):
            await shop.until(lambda: room.arriving == 5)
            refused = await other.client.put("/v1/topics/own/blob", content=LARGE)
            assert (refused.status_code, refused.json()["code"]) == (503, "blob.busy")
            for _ in range(3):
                stored = await shop.client.put("/v1/topics/news/blob", content=LARGE)
                assert stored.status_code == 200, stored.text
        await shop.until(lambda: room.arriving == 0)
        assert (await other.client.put("/v1/topics/own/blob", content=LARGE)).status_code == 200


async def test_a_flood_of_ranges_leaves_others_their_turn() -> None:
    async with accounts_bus() as bus:
        bus.node.bus.create_topic("other/own")
        shop, other = await bus.of("shop"), await bus.of("other")
        await shop.client.put("/v1/topics/news/blob", content=LARGE)
        stored = await other.client.put("/v1/topics/own/blob", content=LARGE[1:])
        url = stored.json()["reference"]["url"]
        served: list[str] = []
        asked_at: dict[str, int] = {}
        blobs = bus.node.services.blobs
        read = blobs.read

        async def noted(reader: object, start: int, size: int, account: str) -> bytes:
            asked_at.setdefault(account, len(served))
            data = await read(reader, start, size, account)  # type: ignore[arg-type]
            served.append(account)
            return data

        blobs.read = noted  # type: ignore[method-assign, assignment]
        head = f"GET {url} HTTP/1.1\r\nhost: localhost\r\nauthorization: Basic {AUTH}\r\n\r\n"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(50):
                peer = await stack.enter_async_context(ScriptedPeer(bus.node.tcp_port))
                await peer.send(head.encode() * 3)
            await shop.until(lambda: len(served) >= 20)
            message = (await shop.client.get("/v1/topics/news/messages")).json()["messages"][0]
            path = f"/v1/blobs/{message['reference']['id']}"
            assert (await shop.client.get(path)).content == LARGE
            # In front of the other's hundred and more that wait.
            assert served.count("shop") == 2
            assert served.index("shop") - asked_at["shop"] < 10


async def test_a_blob_of_a_masked_topic_is_unknown_by_its_id_except_to_administrators() -> None:
    masks = [{"topics": "hidden", "fields": ["$.card"]}, {"topics": "keys", "fields": ["key"]}]
    async with http_bus("hidden", "keys", http={"masks": masks}) as http:
        stored = await http.client.put("/v1/topics/hidden/blob", content=LARGE)
        path = stored.json()["reference"]["url"]
        hidden = await http.client.get(path)
        unknown = await http.client.get(f"/v1/blobs/{'0' * 64}")
        assert (hidden.status_code, hidden.content) == (404, unknown.content)
        token = admin_token_path(http.node.data).read_text().strip()
        head = {"authorization": f"Bearer {token}"}
        assert (await http.client.get(path, headers=head)).content == LARGE
        await http.client.put("/v1/topics/keys/blob", content=LARGE)
        assert (await http.client.get(path)).content == LARGE
