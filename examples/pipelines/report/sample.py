"""Sample data: sales of four days. Sends them to a running bus.

python sample.py [URL]
"""

import asyncio
import json
import sys
from typing import Any

from polybus.client import connect

TOPICS = ("sales",)
PRICES = {"lamp": 20, "desk": 150, "chair": 45}


def sales(days: int = 4) -> list[dict[str, Any]]:
    """Sales for every hour of the working day, increasing each day."""
    return [
        {
            "product": product,
            "pieces": 1 + (day + hour + n) % 3,
            "price": price,
            "time": f"2026-03-{day + 1:02d}T{hour:02d}:30:00Z",
        }
        for day in range(days)
        for hour in range(9, 17)
        for n, (product, price) in enumerate(PRICES.items())
    ]


async def main(url: str) -> None:
    async with connect(url) as client:
        await client.publish_many("sales", [json.dumps(row) for row in sales()], receipt=True)
    print(f"{len(sales())} sales sent to {url}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "boson://127.0.0.1:55545"))
