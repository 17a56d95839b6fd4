"""The sender of an interrupted upload continues it with the missing bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from accounts_http_kit import accounts_bus
from http_kit import Http, http_bus

from polybus.log.blobs import blobs_folder
from polybus.services.blobs.unfinished import UploadId
from polybus.services.blobs.uploads import Uploader
from polybus.testing import ScriptedPeer

LARGE = os.urandom(3 << 20)
SHA256 = hashlib.sha256(LARGE).hexdigest()
PART = 2 << 20


async def put(http: Http, content: bytes, start: int = 0, topic: str = "news") -> httpx.Response:
    params: dict[str, Any] = {"sha256": SHA256, "from": start}
    return await http.client.put(f"/v1/topics/{topic}/blob", content=content, params=params)


async def arrived(http: Http, topic: str = "news") -> int:
    answer = await http.client.get(f"/v1/topics/{topic}/blob", params={"sha256": SHA256})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["bytes"]
    return found


async def break_off(http: Http, account: str = "default", *, sha256: str = SHA256) -> int:
    """Send a part to a topic of the account, and close when the bus has most of it; how much."""
    topic = "news" if account == "default" else f"{account}/shared"
    lines = [f"PUT /v1/topics/{quote(topic, safe='')}/blob?sha256={sha256} HTTP/1.1"]
    if isinstance(http.client.auth, httpx.BasicAuth):
        lines.append(f"authorization: {http.client.auth._auth_header}")
    head = "\r\n".join([*lines, "host: localhost", f"content-length: {len(LARGE)}", "", ""])
    name = UploadId(Uploader(account), topic, sha256).folder
    content = blobs_folder(http.node.data, account) / name / "content"
    room = http.node.services.blobs.room
    async with ScriptedPeer(http.node.tcp_port) as peer:
        await peer.send(head.encode() + LARGE[:PART])
        await http.until(lambda: content.exists() and content.stat().st_size > PART // 2)
    await http.until(lambda: room.arriving == 0)
    return http.node.services.blobs.unfinished.size_of(account, content.parent)


async def test_an_upload_continues_where_it_broke_off_also_after_a_restart(tmp_path: Path) -> None:
    async with http_bus("news", data=str(tmp_path)) as http:
        assert await arrived(http) == 0
        kept = await break_off(http)
        assert PART // 2 < kept == await arrived(http) <= PART
        assert http.node.services.blobs.bytes_of("default") == kept
        assert http.node.bus.topic("news").messages_in == 0
    async with http_bus("news", data=str(tmp_path)) as http:
        assert await arrived(http) == kept
        elsewhere = await put(http, LARGE[5:], 5)
        assert (elsewhere.status_code, elsewhere.json()["code"]) == (409, "blob.position")
        stored = await put(http, LARGE[kept:], kept)
        assert stored.status_code == 200, stored.text
        assert stored.json()["reference"]["size"] == len(LARGE)
        assert (await http.client.get(f"/v1/blobs/{SHA256}")).content == LARGE
        assert await arrived(http) == 0
        # It may begin again, too.
        await break_off(http)
        assert (await put(http, LARGE)).status_code == 200
        assert os.listdir(blobs_folder(tmp_path, "default")) == [SHA256]


async def test_what_is_not_the_announced_payload_is_removed() -> None:
    async with http_bus("news") as http:
        kept = await break_off(http)
        wrong = await put(http, b"x" * (len(LARGE) - kept), kept)
        assert (wrong.status_code, wrong.json()["code"]) == (400, "blob.mismatch")
        assert http.node.bus.topic("news").messages_in == 0
        await http.until(lambda: not os.listdir(blobs_folder(http.node.data, "default")))
        assert http.node.services.blobs.bytes_of("default") == 0
        assert await arrived(http) == 0
        assert (await put(http, LARGE)).status_code == 200
        nameless = await http.client.put("/v1/topics/news/blob", params={"from": 7}, content=b"x")
        assert nameless.json()["code"] == "http.query"


async def test_two_uploads_of_one_payload_do_not_meet() -> None:
    async with http_bus("news") as http:
        head = f"PUT /v1/topics/news/blob?sha256={SHA256} HTTP/1.1\r\nhost: localhost\r\n"
        async with ScriptedPeer(http.node.tcp_port) as peer:
            await peer.send(f"{head}content-length: {len(LARGE)}\r\n\r\n".encode() + LARGE[:PART])
            await http.until(lambda: http.node.services.blobs.room.arriving == 1)
            second = await put(http, LARGE)
            assert (second.status_code, second.json()["code"]) == (409, "blob.arriving")
            await peer.send(LARGE[PART:])
            assert (await peer.read(15)).endswith(b"200 OK")
        assert (await put(http, LARGE)).status_code == 200


async def test_nobody_learns_of_or_continues_the_upload_of_another_account() -> None:
    async with accounts_bus() as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        bus.node.accounts.grant("shop", "other", "shared", ["publish", "subscribe"])
        kept = await break_off(shop, "shop")
        assert await arrived(shop, "shared") == kept
        assert await arrived(other, "shop%2Fshared") == 0
        stolen = await put(other, LARGE[kept:], kept, "shop%2Fshared")
        assert stolen.json()["code"] == "blob.position"
        assert (await put(shop, LARGE[kept:], kept, "shared")).status_code == 200


async def test_uploads_that_nobody_continues_are_removed(tmp_path: Path) -> None:
    limits = {"unfinished-uploads-max": 2}
    folder = blobs_folder(tmp_path, "default")
    async with http_bus("news", data=str(tmp_path), limits=limits) as http:
        for number in range(4):
            await break_off(http, sha256=f"{number}" * 64)
        await http.until(lambda: len(os.listdir(folder)) == 2)
    async with http_bus("news", data=str(tmp_path), limits={"unfinished-upload-s": 0.001}) as http:
        await http.until(lambda: not os.listdir(folder))
