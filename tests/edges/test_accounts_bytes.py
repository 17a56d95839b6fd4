"""The bytes that an account may store bind everybody who publishes to its topics, at any time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from accounts_http_kit import PASSWORDS, Bus, accounts_bus
from accounts_kit import SPEAKERS, peer_of
from commit_kit import rows, staged
from edge_kit import frame, line, properties, until

from polybus.errors import UsageError
from polybus.log.blobs import blobs_folder
from polybus.services.accounts import accounts as service
from polybus.services.accounts import storage
from polybus.testing import ScriptedPeer

MEBI = 1 << 20
CODES = {"boson-frames": "account.bytes", "boson-properties": "account.bytes", "goms": "002001"}


def configure(bus: Bus, account: str, **limits: int) -> None:
    path = Path(bus.node.config.data) / "accounts" / account / "config.json"
    path.write_text(json.dumps({"limits": {key.replace("_", "-"): n for key, n in limits.items()}}))


@pytest.fixture(autouse=True)
def sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SWEEP_S", 0.05)
    monkeypatch.setattr(service, "MEASURE_SWEEPS", 1)


@contextlib.asynccontextmanager
async def full_shop(data: Path | None = None) -> AsyncIterator[Bus]:
    """`shop` stores as much as it may; `other` and `default` may publish to its `shared`."""
    async with accounts_bus(None if data is None else str(data)) as bus:
        for guest in ("other", "default"):
            bus.node.accounts.grant("shop", guest, "shared", ["publish", "subscribe"])
        bus.node.accounts.grant("default", "shop", "news", ["publish"])
        await (await bus.of("shop")).publish("news", b"x" * 3000)
        configure(bus, "shop", bytes_max=2000)
        await until(lambda: "shop" in bus.node.bus.full_accounts)
        yield bus


@pytest.mark.parametrize("guest", ["other", "default"])
@pytest.mark.parametrize("protocol", SPEAKERS)
async def test_a_guest_does_not_fill_an_account_that_is_full(protocol: str, guest: str) -> None:
    speaker = SPEAKERS[protocol]
    async with full_shop() as bus, peer_of(bus.node, speaker, guest, PASSWORDS[guest]) as peer:
        await peer.send(speaker.subscribe("shop/shared"))
        assert (await speaker.hear(peer))[0] == "subscribed"
        await peer.send(speaker.publish("shop/shared", "x"))
        assert (await speaker.hear(peer))[:2] == ("error", CODES[protocol])
        assert bus.node.bus.log.bounds("shop/shared").stop == 0


async def test_a_guest_does_not_fill_a_full_account_over_http_nor_by_a_transaction() -> None:
    async with full_shop() as bus:
        other = (await bus.of("other")).client
        content = staged([rows("shop/shared", [b"x"])])
        stage = "/v1/staging/p/0-aaaaaaaa.arrows?end=true"
        assert (await other.post(stage, content=content)).status_code == 200
        commit = {"producer": "p", "query": "q", "batch": 0, "files": ["0-aaaaaaaa.arrows"]}
        answers = [
            await other.post("/v1/topics/shop%2Fshared/messages", content=b"x"),
            await other.put("/v1/topics/shop%2Fshared/blob", content=b"x" * 3000),
            await other.post("/v1/commits", json=commit),
        ]
        assert [(one.status_code, one.json()["code"]) for one in answers] == [
            (507, "account.bytes")
        ] * 3
        # They do not learn how much the owner stores.
        assert "3000" not in "".join(one.text for one in answers)
        assert bus.node.bus.log.bounds("shop/shared").stop == 0


async def test_a_full_account_publishes_to_topics_of_others() -> None:
    async with full_shop() as bus:
        shop = await bus.of("shop")
        await shop.publish("default%2Fnews", b"x")
        refused = await shop.client.post("/v1/topics/news/messages", content=b"x")
        assert (refused.status_code, refused.json()["code"]) == (507, "account.bytes")


async def test_other_rates_do_not_reopen_a_full_account_nor_pay_its_debt() -> None:
    async with full_shop() as bus:
        quota = bus.node.accounts.configs.quotas["shop"]
        quota.charge(1_000_000_000, 0)
        configure(bus, "shop", bytes_max=2000, messages_per_s_max=7)
        await until(lambda: quota.messages_per_s == 7)
        assert bus.node.accounts.configs.quotas["shop"] is quota
        assert "shop" in bus.node.bus.full_accounts
        configure(bus, "shop", messages_per_s_max=7)
        await until(lambda: "shop" not in bus.node.bus.full_accounts)
        refused = await (await bus.of("shop")).client.post("/v1/topics/news/messages", content=b"x")
        assert (refused.status_code, refused.json()["code"]) == (429, "account.rate")


async def test_messages_count_before_they_are_history(tmp_path: Path) -> None:
    async with full_shop(tmp_path) as bus:
        assert bus.node.bus.log.describe("shop/news")["history-bytes"] == 0
        assert bus.node.accounts.configs.storage.bytes_of("shop") == 3000
        assert bus.node.accounts.configs.storage.bytes_of("other") == 0
    # A restart makes no room.
    async with accounts_bus(str(tmp_path)) as bus:
        await until(lambda: "shop" in bus.node.bus.full_accounts)
        assert bus.node.bus.log.describe("shop/news")["history-bytes"] == 0
        assert bus.node.accounts.configs.storage.bytes_of("shop") == 3000


async def test_others_run_while_many_topics_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "STEP", 10)
    async with accounts_bus() as bus:
        loop = asyncio.get_running_loop()
        for number in range(100):
            bus.node.bus.create_topic(f"shop/topic-{number}")
        turns, measuring = 0, asyncio.create_task(bus.node.accounts.measure())

        def take_turn() -> None:
            nonlocal turns
            turns += 1
            if not measuring.done():
                loop.call_soon(take_turn)

        take_turn()
        await measuring
        assert turns >= 10


# Payloads that arrive


def arrived_bytes(bus: Bus, account: str) -> int:
    folder = blobs_folder(bus.node.data, account)
    return sum(one.stat().st_size for one in folder.glob("*/content")) if folder.exists() else 0


@pytest.mark.parametrize("how", ["http", "boson-frames", "boson-properties", "goms"])
async def test_a_payload_is_refused_while_it_arrives(how: str) -> None:
    """It is as large as the bus takes, and the account has room for a part of it."""
    payload = b"y" * (16 * MEBI)
    async with accounts_bus(limits={"account-bytes-max": 2 * MEBI}) as bus:
        shop = await bus.of("shop")
        if how == "http":
            answer = await shop.client.put("/v1/topics/news/blob", content=payload)
            assert (answer.status_code, answer.json()["code"]) == (507, "account.bytes")
        else:
            speaker = SPEAKERS[how]
            async with peer_of(bus.node, speaker, "shop", PASSWORDS["shop"]) as peer:
                await peer.send(speaker.subscribe("news"))
                assert (await speaker.hear(peer))[0] == "subscribed"
                if how == "boson-frames":
                    await peer.send(frame("news?receipt=1", payload))
                elif how == "boson-properties":
                    pairs = (("hbfr", b"1"), ("topic", b"news"), ("content", payload))
                    await peer.send(properties(*pairs))
                else:
                    await peer.send(line("send", topics=["news"], ack=True, data=payload.decode()))
                assert (await speaker.hear(peer))[:2] == ("error", CODES[how])
        await until(lambda: arrived_bytes(bus, "shop") == 0)
        assert bus.node.services.blobs.bytes_of("shop") == 0
        assert bus.node.bus.log.bounds("shop/news").stop == 0
        stored = await shop.client.put("/v1/topics/news/blob", content=payload[:MEBI])
        assert stored.status_code == 200, stored.text


async def test_a_sequence_for_which_there_is_room_does_not_count_twice() -> None:
    """The parts are copied out of what has arrived."""
    parts = [bytes([number]) * (2 * MEBI) for number in range(3)]
    async with accounts_bus(limits={"account-bytes-max": 8 * MEBI}) as bus:
        speaker = SPEAKERS["boson-frames"]
        async with peer_of(bus.node, speaker, "shop", PASSWORDS["shop"]) as peer:
            for part in parts:
                await peer.send(frame("news?receipt=1", part, 2))
            await peer.send(frame("news"))
            assert (await peer.read_frame())[0] == "$receipt"
        assert bus.node.bus.log.bounds("shop/news").stop == 3


async def test_payloads_that_arrive_at_the_same_time_count_together() -> None:
    async with accounts_bus(limits={"account-bytes-max": 4 * MEBI}) as bus:
        shop, room = await bus.of("shop"), bus.node.services.blobs.room
        head = b"PUT /v1/topics/news/blob HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-length: 9000000\r\n"
        auth = shop.client.auth
        head += f"authorization: {auth._auth_header}\r\n\r\n".encode()  # type: ignore[union-attr]
        async with contextlib.AsyncExitStack() as stack:
            answers = []
            for _ in range(8):
                peer = await stack.enter_async_context(ScriptedPeer(bus.node.tcp_port))
                await peer.send(head + bytes(MEBI))
                answers.append(asyncio.create_task(peer.read(12)))
            await until(
                lambda: (
                    0 < sum(one.done() for one in answers) == 8 - room.arriving
                    and room.bytes["shop"] > 2 * MEBI
                )
            )
            assert {await one for one in answers if one.done()} == {b"HTTP/1.1 507"}
            assert arrived_bytes(bus, "shop") <= 4 * MEBI
            refused = await shop.client.post("/v1/topics/news/messages", content=bytes(2 * MEBI))
            assert (refused.status_code, refused.json()["code"]) == (507, "account.bytes")
            for one in answers:
                one.cancel()
        await until(lambda: bus.node.services.blobs.bytes_of("shop") == 0)


# Uploads that were interrupted


async def break_off(bus: Bus, account: str, topic: str, content: bytes) -> None:
    """Begin an upload that can be continued, and leave."""
    access = bus.node.accounts.of(account)
    assert access is not None
    sha256 = hashlib.sha256(content).hexdigest()
    upload = bus.node.services.blobs.upload(access, topic, sha256)
    try:
        await upload.write(content)
    except UsageError:
        upload.discard()
        raise
    upload.pause()  # type: ignore[attr-defined]


async def test_uploads_that_a_guest_breaks_off_are_its_own(tmp_path: Path) -> None:
    limits = {"unfinished-uploads-max": 3, "account-bytes-max": MEBI}
    begun = hashlib.sha256(b"begun").hexdigest()
    params = {"sha256": begun}
    folder = blobs_folder(tmp_path, "shop")
    async with accounts_bus(str(tmp_path), limits=limits) as bus:
        bus.node.accounts.grant("shop", "other", "shared", ["publish"])
        await break_off(bus, "shop", "shop/shared", b"begun")
        for number in range(10):
            await break_off(bus, "other", "shop/shared", b"%d" % number * 1000)
        shop = await bus.of("shop")
        await until(lambda: len(os.listdir(folder)) == 4)
        sizes = [bus.node.services.blobs.bytes_of(account) for account in ("shop", "other")]
        assert sizes == [5, 3000]
        answer = await shop.client.get("/v1/topics/shared/blob", params=params)
        assert answer.json() == {"bytes": 5}
    async with accounts_bus(str(tmp_path), limits=limits) as bus:
        shop = await bus.of("shop")
        for number in range(10, 20):
            await break_off(bus, "other", "shop/shared", b"%d" % number * 1000)
        await until(lambda: len(os.listdir(folder)) == 4)
        answer = await shop.client.get("/v1/topics/shared/blob", params=params)
        assert answer.json() == {"bytes": 5}
        with pytest.raises(UsageError, match=r"account\.bytes"):
            await break_off(bus, "other", "shop/shared", bytes(MEBI))
        stored = await shop.client.put(
            "/v1/topics/shared/blob", params={**params, "from": 5}, content=b""
        )
        assert stored.status_code == 200, stored.text
        sizes = [bus.node.services.blobs.unfinished.bytes_of(one) for one in ("shop", "other")]
        assert sizes == [0, 6000]
