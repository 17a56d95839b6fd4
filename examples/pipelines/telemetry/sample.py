"""Sample data: devices that report every ten seconds; the last device overheats.

python sample.py [URL]
"""

import asyncio
import json
import sys
from typing import Any

from polybus.client import connect

TOPICS = ("telemetry", "device.alerts")


def readings(device: str, celsius: list[float], *, minute: int = 0) -> list[dict[str, Any]]:
    """One reading every ten seconds, starting at the given minute."""
    return [
        {
            "device": device,
            "celsius": value,
            "time": f"2026-03-01T12:{minute + n // 6:02d}:{n % 6 * 10:02d}Z",
        }
        for n, value in enumerate(celsius)
    ]


async def main(url: str) -> None:
    rows = [
        *readings("pump-1", [40.0 + n for n in range(6)]),
        *readings("pump-2", [70.0, 79.0, 85.0, 90.0, 91.0, 92.0]),
        *readings("pump-1", [41.0, 42.0], minute=5),
    ]
    async with connect(url) as client:
        await client.publish_many("telemetry", [json.dumps(row) for row in rows], receipt=True)
    print(f"{len(rows)} readings sent to {url}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "boson://127.0.0.1:55545"))
