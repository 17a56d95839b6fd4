"""Corruptions of files of a stopped bus: a flipped bit, a truncation, zeros, a removal.

To serve a corrupted copy costs much more than to corrupt it. So independent files are corrupted in
one copy: the loss in each must still be reported, and the report for one must not explain the loss
of another.
"""

import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polybus import names
from polybus.services.state_rows import NAME as STATE
from polybus.services.transactions.commits import TOPIC as COMMITS
from polybus.torture.chances import ranked
from polybus.torture.load.load import FOLLOWED

ZERO_BYTES_MAX = 4096
CORRUPTIONS = ("flip", "flip", "cut", "zero", "remove")
TOGETHER_MAX = 6
# Locks have no content, and the next start writes run.json again.
_LEFT_ALONE = ("lock", "history.lock", "history.queue", "run.json")


def kinds(data: Path) -> dict[str, list[Path]]:
    """All files by their kind: journal/N.arrows, accounts/default/topics/T/topic.json …"""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(data.rglob("*")):
        name = str(path.relative_to(data))
        if path.is_file() and name not in _LEFT_ALONE:
            kind = re.sub(r"topics/[^/]+", "topics/T", name)
            found[re.sub(r"[0-9a-f-]*\d[0-9a-f-]*", "N", kind)].append(path)
    return found


@dataclass(frozen=True, slots=True)
class Corruption:
    """A corruption of a file; positions are fractions, because sizes depend on the machine."""

    salt: int
    """Decides the kind of file."""
    file: float
    what: str
    position: float
    zero_bytes: int
    bit: int

    @classmethod
    def draw(cls, chance: random.Random) -> "Corruption":
        return cls(
            salt=chance.getrandbits(64),
            file=chance.random(),
            what=chance.choice(CORRUPTIONS),
            position=chance.random(),
            zero_bytes=chance.randint(1, ZERO_BYTES_MAX),
            bit=chance.randrange(8),
        )

    def path(self, found: dict[str, list[Path]]) -> Path:
        """The file, of any kind with the same chance."""
        paths = found[ranked(found, self.salt)[0]]
        return paths[int(self.file * len(paths))]

    def apply(self, data: Path, path: Path) -> str:
        """Corrupt a file; return a description."""
        name, size = path.relative_to(data), path.stat().st_size
        if self.what == "remove" or size == 0:
            path.unlink()
            return f"{name} removed"
        position = int(self.position * size)
        if self.what == "cut":
            os.truncate(path, position)
            return f"{name} cut at byte {position} of {size}"
        with path.open("r+b") as file:
            file.seek(position)
            if self.what == "zero":
                length = min(size - position, self.zero_bytes)
                file.write(bytes(length))
                return f"{name} bytes {position} to {position + length} of {size} set to 0"
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ (1 << self.bit)]))
        return f"{name} bit {self.bit} of byte {position} of {size} flipped"


@dataclass(frozen=True, slots=True)
class Reach:
    """What a corrupted file may affect.

    `things` are what `verify` may name because of it; files that share one are corrupted apart.
    `topics` may be refused or named damaged; None: any.
    """

    things: frozenset[str]
    topics: frozenset[str] | None


def reach_of(name: str) -> Reach | None:
    """What a file below the data folder affects; None: perhaps everything, so it is corrupted
    alone.
    """
    first, *rest = name.split("/")
    if first.startswith(STATE):
        # Sessions have packs of these topics, and producers a record there.
        return Reach(frozenset({STATE, COMMITS, *FOLLOWED}), frozenset())
    if first == "accounts" and rest[0] != names.ACCOUNT:
        # Their topics and blobs are their own. Which topics it has is not known here.
        return Reach(frozenset({rest[0]}), None)
    if first == "accounts" and rest[1] == "topics":
        topic = names.topic_in(rest[2])
        return Reach(frozenset({topic}), frozenset({topic}))
    if first == "accounts" and rest[1] == "blobs":
        # Messages of any topic may refer to it.
        return Reach(frozenset({rest[2]}), None)
    if first in ("admin.token", "pipeline", "tables", "staging", "accounts"):
        thing = COMMITS if first == "staging" else first
        return Reach(frozenset({thing}), frozenset())
    return None


def owners_of(files: Iterable[str]) -> frozenset[str] | None:
    """The topics that corruptions may damage; None: any."""
    found: frozenset[str] = frozenset()
    for name in files:
        reach = reach_of(name)
        if reach is None or reach.topics is None:
            return None
        found |= reach.topics
    return found


def together(files: Iterable[str]) -> list[list[int]]:
    """The indexes of files that can be corrupted in one copy, at most TOGETHER_MAX."""
    groups: list[tuple[list[int], set[str], bool]] = []
    for number, name in enumerate(files):
        reach = reach_of(name)
        # A file that may affect every topic would mask damage of another that is not confined.
        is_open = reach is None or reach.topics is None
        for members, things, is_open_group in groups:
            if reach is None or len(members) == TOGETHER_MAX or is_open != is_open_group:
                continue
            if things and not things & reach.things:
                members.append(number)
                things |= reach.things
                break
        else:
            groups.append(([number], set() if reach is None else set(reach.things), is_open))
    return [members for members, _, _ in groups]
