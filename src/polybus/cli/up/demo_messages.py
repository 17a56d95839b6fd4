"""What the demo's traffic says: orders, telemetry, chat and readings, with real-life flaws."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

CUSTOMERS = ("acme", "globex", "initech", "umbrella", "hooli", "stark", "wayne", "tyrell")
ITEMS = {
    "bolt": 0.2,
    "bearing": 4.5,
    "gearbox": 310.0,
    "sensor": 35.0,
    "cable": 2.4,
    "motor": 120.0,
}
LINES = (
    "line 3 is back up",
    "who moved the torque wrench?",
    "shift change in ten minutes",
    "pallet 14 is ready for the truck",
    "coffee machine needs descaling again",
    "inspection passed, thanks all",
)
DUPLICATE_SHARE = 0.05
BROKEN_SHARE = 0.04
LATE_SHARE = 0.02
LATE_BY = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Piece:
    """One message to send."""

    value: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Messages:
    """Endless messages of each kind; the same seed gives the same ones, but for their times."""

    def __init__(self, seed: int = 7) -> None:
        self._random = random.Random(seed)
        self._run = f"{self._random.getrandbits(32):08x}"
        self._number = 0

    def orders(self) -> Iterator[Piece]:
        """JSON orders; some twice, some late, some broken off in the middle."""
        while True:
            order = self._order()
            yield order
            if self._random.random() < DUPLICATE_SHARE:
                yield order
            if self._random.random() < BROKEN_SHARE:
                broken = self._order()
                yield Piece(broken.value[: len(broken.value) // 2])

    def burst(self, count: int) -> list[bytes]:
        """Whole orders only: what is odd about a burst is its rate."""
        return [self._order().value for _ in range(count)]

    def _order(self) -> Piece:
        draw = self._random
        item = draw.choice(list(ITEMS))
        quantity = draw.randint(1, 40)
        at = datetime.now(UTC) - (LATE_BY if draw.random() < LATE_SHARE else timedelta())
        order = {
            "id": self._id("o"),
            "customer": draw.choice(CUSTOMERS),
            "item": item,
            "quantity": quantity,
            "amount": round(quantity * ITEMS[item], 2),
            "at": at.isoformat(timespec="milliseconds"),
        }
        return Piece(json.dumps(order).encode())

    def telemetry(self) -> Iterator[Piece]:
        """A device's properties: no value, all is in the headers; some arrive twice."""
        while True:
            reading = Piece(
                b"",
                {
                    "message-id": self._id("t"),
                    "device": f"press-{self._random.randint(1, 6)}",
                    "temperature": f"{self._random.gauss(62, 4):.1f}",
                    "rpm": str(self._random.randint(880, 940)),
                },
            )
            yield reading
            if self._random.random() < DUPLICATE_SHARE:
                yield reading

    def beacons(self) -> Iterator[Piece]:
        """Small JSON states, as a device sends in one datagram."""
        while True:
            state = {
                "device": f"gate-{self._random.randint(1, 3)}",
                "open": self._random.random() < 0.3,
            }
            yield Piece(json.dumps(state).encode())

    def chat(self) -> Iterator[Piece]:
        """Plain text; a nervous sender repeats itself."""
        while True:
            line = Piece(self._random.choice(LINES).encode(), {"message-id": self._id("c")})
            yield line
            if self._random.random() < DUPLICATE_SHARE:
                yield line

    def readings(self) -> Iterator[Piece]:
        """One number as text, all that a queue carries."""
        while True:
            yield Piece(f"{self._random.gauss(21, 0.8):.2f}".encode())

    def _id(self, kind: str) -> str:
        self._number += 1
        return f"{kind}-{self._run}-{self._number}"
