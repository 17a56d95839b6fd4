"""Sample data: customers and the orders of a morning, some late. Sends them to a running bus.

python sample.py [URL]
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

from polybus.client import connect

COUNTRIES = ("NO", "SE", "DK")
TOPICS = ("shop.customers", "shop.orders")


def customers(count: int = 6) -> list[dict[str, Any]]:
    """One message per customer, and a second one in which the last customer changes country."""
    rows = [
        {"customer": f"c{n}", "name": f"Customer {n}", "country": COUNTRIES[n % 3]}
        for n in range(count)
    ]
    return [*rows, {**rows[-1], "country": "FI"}]


def orders(count: int = 60, *, first: int = 0, hour: int = 8) -> Iterator[dict[str, Any]]:
    """One order per minute, starting at `hour`, in the order of their times."""
    for n in range(count):
        time = f"2026-03-01T{hour + n // 60:02d}:{n % 60:02d}:00Z"
        yield {"id": first + n, "customer": f"c{n % 7}", "amount": 10 + n % 5, "time": time}


def late_order(id: int, time: str) -> dict[str, Any]:
    return {"id": id, "customer": "c0", "amount": 100, "time": time}


async def main(url: str) -> None:
    async with connect(url) as client:
        await client.publish_many(
            "shop.customers", [json.dumps(row) for row in customers()], receipt=True
        )
        morning = [*orders(), *orders(30, first=60, hour=9)]
        late = [late_order(900, "2026-03-01T09:25:00Z"), late_order(901, "2026-03-01T08:10:00Z")]
        await client.publish_many(
            "shop.orders", [json.dumps(row) for row in [*morning, *late]], receipt=True
        )
    print(f"{len(customers())} customers and {len(morning) + len(late)} orders sent to {url}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "boson://127.0.0.1:55545"))
