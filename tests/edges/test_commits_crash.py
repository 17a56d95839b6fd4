"""kill -9 in the middle of transactions: each is there as a whole, once, when the bus is back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from commit_kit import rows, stage_bytes, staged, values_of

from polybus.config import Config
from polybus.edges.node import open_log

pytestmark = pytest.mark.slow

TOPICS = ("red", "blue")
KILLS = 8
VALUES, VALUE_BYTES = 600, 20_000


@contextlib.asynccontextmanager
async def serve(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A bus of a process's own, with small parts; killed at the end."""
    config = folder / "bus.json"
    limits = {"transaction-part-bytes": 500_000}
    log = (folder / "log").open("ab")
    config.write_text(json.dumps({"topics": TOPICS, "limits": limits}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polybus.cli", "serve", "--port", "0"),
        *("--config", str(config), "--data", str(folder / "data")),
        stdout=asyncio.subprocess.PIPE,
        stderr=log.fileno(),
    )
    log.close()
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        found = re.search(r"tcp://127.0.0.1:(\d+)", line)
        assert found, line
        yield process, f"http://127.0.0.1:{found[1]}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def transaction(batch: int) -> bytes:
    """Both topics, many parts: the values tell batch and place."""
    filler = b"x" * VALUE_BYTES
    batches = []
    for first in range(0, VALUES, 10):
        values = [b"%d %d " % (batch, n) + filler for n in range(first, first + 10)]
        batches.append(rows(TOPICS[first // 10 % 2], values))
    return staged(batches)


async def part_done(client: httpx.AsyncClient, offset: int) -> None:
    """Wait until a transaction has its intent and one of its parts."""
    while True:
        query = {"offset": offset, "wait-s": 5}
        answer = await client.get("/v1/topics/$commits/messages", params=query)
        found = answer.json()["messages"]
        offset += len(found)
        if any(one["value"]["kind"] != "intent" for one in found):
            return


async def test_no_kill_leaves_half_a_transaction_or_makes_two_of_one(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 32)))
    sys.stdout.write(f"play this again with KILL_SEED={seed} pytest {Path(__file__).name}\n")
    draw = random.Random(seed)
    data = tmp_path / "data"
    batch = 0
    for kill in range(KILLS):
        async with serve(tmp_path) as (process, url), httpx.AsyncClient(base_url=url) as client:
            # The first is often one that the start has finished; the second is killed.
            for is_last in (False, True):
                files = [stage_bytes(data, "spark", batch, transaction(batch))]
                body: dict[str, Any] = {"producer": "spark", "query": "q", "batch": batch}
                stop = (await client.get("/v1/topics/$commits")).json()["stop"]
                asked = asyncio.create_task(
                    client.post("/v1/commits", json=body | {"files": files}, timeout=60)
                )
                if is_last and kill < KILLS - 1:
                    if kill % 2 == 0:
                        # In the middle; else at any moment.
                        await part_done(client, stop)
                    else:
                        await asyncio.wait([asked], timeout=draw.uniform(0.01, 0.3))
                    process.kill()
                with contextlib.suppress(httpx.HTTPError):
                    answer = await asked
                    assert answer.status_code == 200, answer.text
                    batch += 1
    log = open_log(Config(data=str(data)))
    try:
        for index, topic in enumerate(TOPICS):
            found = [value.split()[:2] for value in values_of(log, topic)]
            expected = [
                [b"%d" % number, b"%d" % n]
                for number in range(batch)
                for n in range(VALUES)
                if n // 10 % 2 == index
            ]
            assert found == expected
        records = [json.loads(value) for value in values_of(log, "$commits")]
        assert [one["batch"] for one in records if one["kind"] == "commit"] == list(range(batch))
        assert any(one["kind"] == "part" for one in records)
    finally:
        log.close()
    assert not list((data / "staging").glob("*/*"))
    assert (tmp_path / "log").read_text().count("finished batch") > 1
