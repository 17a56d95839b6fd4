"""Sessions after kill -9: what was not confirmed comes again, and no number changes its meaning."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

pytestmark = pytest.mark.slow


class Bus:
    """`polybus serve` as a process of its own."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._process: asyncio.subprocess.Process
        self.client: httpx.AsyncClient
        self.port = 0

    async def __aenter__(self) -> Bus:
        command = ("-m", "polybus.cli", "serve", "--port", "0", "--topic", "news")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(*command, "--data", str(self._data)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        ready = (await asyncio.wait_for(self._process.stdout.readline(), 20)).decode()
        address = next(word for word in ready.split() if word.startswith("tcp://"))
        self.port = int(address.rpartition(":")[2])
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=10)
        return self

    async def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        await asyncio.wait_for(self._process.wait(), 20)

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        if self._process.returncode is None:
            await self.end(signal.SIGKILL)
        # The transport of a process that was killed closes in the next turn of the loop.
        await asyncio.sleep(0)

    async def publish(self, *values: bytes) -> None:
        for value in values:
            answer = await self.client.post("/v1/topics/news/messages", content=value)
            assert answer.status_code == 200

    async def packs(self, key: str, confirm: str = "") -> dict[str, Any]:
        query = {"sessionKey": key, "transport": "shortpolling", "confirmIds": confirm}
        answer = await self.client.get("/msgstream", params=query)
        return dict(answer.json()) if answer.status_code == 200 else {}


def values(packs: dict[str, Any]) -> list[Any]:
    return [message[1] for pack in packs.values() for message in pack]


async def open_session(bus: Bus) -> str:
    answer = await bus.client.post("/v1/sessions", json={"topics": ["news"]})
    return str(answer.json()["sessionKey"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_unconfirmed_packs_come_again_under_their_numbers(
    tmp_path: Path, how: signal.Signals
) -> None:
    async with Bus(tmp_path) as bus:
        key = await open_session(bus)
        await bus.publish(b"1", b"2")
        posted = await bus.client.post(f"/v1/sessions/{key}/packs", json=[["direct", 3]])
        assert posted.status_code == 202
        before = await bus.packs(key)
        await bus.end(how)
    async with Bus(tmp_path) as bus:
        after = await bus.packs(key)
        assert after == before == {"1": [["news", 1]], "2": [["news", 2]], "3": [["direct", 3]]}
        await bus.publish(b"4")
        assert await bus.packs(key, "1,2,3") == {"4": [["news", 4]]}


async def test_a_confirmation_survives_sigterm(tmp_path: Path) -> None:
    async with Bus(tmp_path) as bus:
        key = await open_session(bus)
        await bus.publish(b"1", b"2")
        await bus.packs(key)
        assert list(await bus.packs(key, "1")) == ["2"]
        await bus.end(signal.SIGTERM)
    async with Bus(tmp_path) as bus:
        assert list(await bus.packs(key)) == ["2"]


async def test_a_direct_pack_that_was_accepted_survives_at_once(tmp_path: Path) -> None:
    async with Bus(tmp_path) as bus:
        key = await open_session(bus)
        await bus.client.post(f"/v1/sessions/{key}/packs", json=[["safe"]])
        await bus.end(signal.SIGKILL)
    async with Bus(tmp_path) as bus:
        assert await bus.packs(key) == {"1": [["safe"]]}


@pytest.mark.parametrize("seen", [1, 37, 150])
async def test_killed_in_full_flow_nothing_is_lost_and_no_number_is_missing(
    tmp_path: Path, seen: int
) -> None:
    got: dict[int, Any] = {}
    sent = 0

    async with Bus(tmp_path) as bus:
        key = await open_session(bus)

        async def flow() -> None:
            nonlocal sent
            while True:
                await bus.publish(b"%d" % sent)
                sent += 1

        flowing = asyncio.create_task(flow())
        async with connect(f"ws://127.0.0.1:{bus.port}/msgstream?sessionKey={key}") as websocket:
            while len(got) < seen:
                packs = json.loads(await websocket.recv())
                got |= {int(name): pack for name, pack in packs.items()}
                await websocket.send(",".join(packs))
            await bus.end(signal.SIGKILL)
        flowing.cancel()
        await asyncio.gather(flowing, return_exceptions=True)
    async with Bus(tmp_path) as bus:
        await bus.publish(b"-1")
        expected = max(got) + 1
        again: dict[str, Any] = {}
        while -1 not in values(again):
            packs = await bus.packs(key, ",".join(again))
            again |= packs
        numbers = sorted(map(int, again))
        # A client that stops at gaps continues: the numbers follow on what it has.
        assert min(numbers) <= expected
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        delivered = {value for pack in got.values() for _, value in pack} | set(values(again))
        assert set(range(sent)) <= delivered
        # A number that both saw never means other messages.
        for name, pack in again.items():
            assert not pack or int(name) not in got or got[int(name)] == pack
