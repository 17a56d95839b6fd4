"""kill -9 under load, again and again: what had a receipt is there, in order, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sim_kit import (
    FramesPublisher,
    GomsPublisher,
    PropertiesPublisher,
    Publisher,
    UdpPublisher,
    check,
    served,
    stored,
)

KILLS = 25
LOAD_S_MAX = 0.4
TOPIC_OPTIONS = ("--topic", "red", "--topic", "blue")


@pytest.mark.slow
async def test_no_kill_loses_a_message_that_had_a_receipt(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 32)))
    sys.stdout.write(f"play this again with KILL_SEED={seed} pytest {Path(__file__).name}\n")
    draw = random.Random(seed)
    publishers: list[Publisher] = [
        FramesPublisher("frames-a"),
        FramesPublisher("frames-b"),
        PropertiesPublisher("properties"),
        GomsPublisher("goms"),
    ]
    over_udp = UdpPublisher("udp")
    for _ in range(KILLS):
        async with served(tmp_path, *TOPIC_OPTIONS) as bus:
            load = [asyncio.create_task(one.run(bus.port)) for one in publishers]
            datagrams = asyncio.create_task(over_udp.run(bus.udp_port))
            await asyncio.sleep(draw.uniform(0, LOAD_S_MAX))
            await bus.kill()
            await asyncio.gather(*load)
            datagrams.cancel()
            await asyncio.wait([datagrams])
    publishers.append(over_udp)
    check(publishers, stored(tmp_path))
    assert all(len(one.receipts) > KILLS for one in publishers)
    verify = [sys.executable, "-m", "polybus.cli", "verify", "--data", str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, verify, check=False, capture_output=True)
    assert done.returncode == 0, done.stdout
