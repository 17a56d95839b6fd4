"""What `polybus torture` checks and counts: the faults done, and the promises that one broke."""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

INVARIANTS = {
    "starts": "the bus starts after every fault, and stops cleanly",
    "lost": "every message and large payload with a receipt exists, and what an answer promised",
    "order": "every message is stored once, at its position, in the order of its writer",
    "phantoms": "every stored message was sent by a client",
    "packs": "packs of sessions: no number is skipped or changes its meaning, nothing is missing",
    "transactions": "a transaction is done once, as a whole, and its request can be repeated",
    "deleted": "deleted topics, sessions, accounts, tokens and grants stay deleted",
    "verify": "`polybus verify` finds no damage where there is none, and names what is lost",
    "errors": "no unhandled exception in the bus's log, and a normal client is answered in 1 s",
    "memory": "the bus's memory is within 64 MiB of its start, and its descriptors are closed",
}
TEXTS_MAX = 20
TEXT_CHARACTERS_MAX = 500


@dataclass
class Findings:
    """The result of some rounds: how often the fault was done, and each broken invariant."""

    count: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Figures that were measured, for a reader."""

    def violated(self, invariant: str, text: str) -> None:
        assert invariant in INVARIANTS, invariant
        self.broken[invariant] += 1
        if len(self.texts) < TEXTS_MAX:
            self.texts.append(f"{invariant}: {text[:TEXT_CHARACTERS_MAX]}")

    def add(self, other: "Findings") -> None:
        self.count += other.count
        self.broken += other.broken

    def row(self, fault: str, unchecked: Container[str] = ()) -> list[object]:
        """Name, count and broken promises; None for one that the fault does not check."""
        broken = (
            None if name in unchecked and not self.broken[name] else self.broken[name]
            for name in INVARIANTS
        )
        return [fault, self.count, *broken]
