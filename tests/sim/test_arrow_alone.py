"""The bus, pandas and numpy: installed beside it for pipelines, and none of its business."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from sim_kit import Process, served

from polybus.testing import ScriptedPeer

NDJSON = {"content-type": "application/x-ndjson"}
ARROW = {"accept": "application/vnd.apache.arrow.stream"}
LINES = b"".join(
    json.dumps({"value": number, "key": f"k{number}", "headers": {"h": "v"}}).encode() + b"\n"
    for number in range(10)
)
SETTINGS = """
[[connectors]]
protocol = "tcp"
[[connectors]]
protocol = "udp"
[journal]
segment-age-s = 0.1
handover-interval-s = 0.1
"""


async def publish_and_read(bus: Process) -> None:
    """Keys and headers in; out by offset and time, as JSON, as Arrow, and to subscribers."""
    base = f"http://127.0.0.1:{bus.port}"
    async with httpx.AsyncClient(base_url=base, timeout=20) as client:
        url = "/v1/topics/red/messages"
        sent = await client.post(url, content=LINES, headers=NDJSON)
        assert sent.status_code == 200, sent.text
        for query in ("offset=3", "time=2020-01-01T00:00:00Z", "from=earliest"):
            found = await client.get(f"{url}?{query}")
            assert (found.json()["messages"][-1]["headers"]) == {"h": "v"}
            assert (await client.get(f"{url}?{query}", headers=ARROW)).status_code == 200
    register = b'{"messagetype":"register","topics":["red"],"from":"earliest"}\n'
    async with ScriptedPeer(bus.port, timeout_s=20) as peer:
        await peer.send(b'{"messagetype":"send","topics":["red"],"data":"x","ack":true}\n')
        assert b"002001" in await peer.read_line()
        await peer.send(register)
        assert b'"headers":{"h":"v"}' in await peer.read_line()


def mapped_files(process: int) -> str:
    return Path(f"/proc/{process}/maps").read_text()


@pytest.mark.slow
async def test_the_bus_imports_no_numpy_and_with_its_hand_over_no_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow would, for the first key it meets: 60 MB for nothing."""
    imported = tmp_path / "imported"
    package = tmp_path / "packages" / "pandas" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(f"open({str(imported)!r}, 'w').close()\nraise ImportError('a trap')\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent.parent))
    config = tmp_path / "bus.toml"
    config.write_text(SETTINGS)
    data = tmp_path / "data"
    async with served(data, "--config", str(config), "--topic", "red") as bus:
        await publish_and_read(bus)
        async with asyncio.timeout(20):
            while not list(data.glob("accounts/*/topics/red/history/*/*")):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        # From history this time.
        await publish_and_read(bus)
        assert "/numpy/" not in mapped_files(bus.process.pid)
        assert await bus.terminate() == 0

    assert not imported.exists()


@pytest.mark.slow
def test_what_pandas_itself_is_asked_for_still_works() -> None:
    code = (
        "import sys, pyarrow as pa; from polybus.log.without_pandas import block_pandas;"
        "block_pandas(); column = pa.array([1, 2]); assert 'pandas' not in sys.modules;"
        "assert column.to_pandas().sum() == 3; block_pandas(); assert 'pandas' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()
