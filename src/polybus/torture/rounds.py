"""Rounds of faults, the units of a campaign."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """Some faults of one kind, on a folder of their own."""

    fault: str
    number: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.number}"
