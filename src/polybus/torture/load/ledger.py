"""Ledgers of what was sent and promised, against which a bus is checked.

A value consists of its writer and number: `value_of` recomputes it. So a value that was never sent
is recognised, and the numbers of a writer in a topic must ascend.
"""

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from polybus.client.http.sources import Pack
from polybus.torture.report import Findings

DIRECT = "direct"
_PADDING_MAX = 700
INLINE_BYTES_MAX = 4096
"""Larger values are blobs on the buses of a load."""
LARGE_EVERY = 20


def value_of(writer: str, number: int) -> str:
    size = number * 7919 % _PADDING_MAX
    if number % LARGE_EVERY == LARGE_EVERY - 1:
        size += INLINE_BYTES_MAX
    return f"{writer}.{number}." + "abcdefgh"[number % 8] * size


def parse_value(text: str) -> tuple[str, int] | None:
    """Writer and number of a value, or None if no writer makes such a value."""
    writer, _, rest = text.partition(".")
    digits = rest.partition(".")[0]
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 12:
        return None
    return (writer, int(digits)) if value_of(writer, int(digits)) == text else None


class MessageLedger:
    """Messages of topics: numbers tried by each writer, and those with a receipt."""

    def __init__(self) -> None:
        self._tried: dict[tuple[str, str], int] = defaultdict(int)
        self.receipted: dict[str, dict[str, int | None]] = defaultdict(dict)
        self._large: dict[str, str] = {}
        """Values that may be blobs, by their ids."""
        self._begun: dict[tuple[str, str], list[int]] = defaultdict(list)
        """The first number of each connection of a writer but its first."""

    def connected(self, writer: str) -> None:
        """The writer's next values go over another connection."""
        for (topic, name), tried in self._tried.items():
            if name == writer:
                self._begun[topic, name].append(tried)

    def take(self, topic: str, writer: str, count: int) -> list[str]:
        """The next values of a writer, which it sends now."""
        first = self._tried[topic, writer]
        self._tried[topic, writer] += count
        values = [value_of(writer, number) for number in range(first, first + count)]
        for value in values:
            if len(value) > INLINE_BYTES_MAX:
                self._large[hashlib.sha256(value.encode()).hexdigest()] = value
        return values

    def resolved(self, text: str) -> str:
        """The value to which a text refers, if it is a reference to one that was sent."""
        if not text.startswith('{"reference"'):
            return text
        return self._large.get(json.loads(text)["reference"]["id"], text)

    def receipt(self, topic: str, values: Sequence[str], last_offset: int | None) -> None:
        """All values are durable; the last one at this offset, if it is known."""
        self.receipted[topic].update(dict.fromkeys(values))
        self.receipted[topic][values[-1]] = last_offset

    def was_sent(self, topic: str, text: str) -> bool:
        found = parse_value(text)
        return found is not None and found[1] < self._tried[topic, found[0]]

    def check(
        self,
        topic: str,
        messages: Iterable[tuple[int, str]],
        findings: Findings,
        *,
        of_cluster: bool = False,
        start: int = 0,
    ) -> None:
        """Compare all messages of a topic with what was sent and promised.

        `of_cluster`: offsets only ascend. A node may store what it took after its clients went on
        at another node, so a writer's order counts within a connection, and from each receipt on.
        Retention has removed what was before `start`.
        """
        at: dict[str, int] = {}
        last: dict[tuple[str, int], int] = defaultdict(lambda: -1)
        """The highest number of each connection of each writer; -1 is all of them."""
        expected = start
        for offset, text in messages:
            if offset < expected if of_cluster else offset != expected:
                findings.violated("order", f"{topic}: offset {offset} where {expected} should be")
                return
            expected = offset + 1
            found = parse_value(text)
            if found is None or not self.was_sent(topic, text):
                findings.violated("phantoms", f"{topic} {offset}: {text[:40]!r} was never sent")
                continue
            writer, number = found
            connection = bisect_right(self._begun[topic, writer], number)
            is_any = not of_cluster or text in self.receipted[topic]
            before = last[writer, -1 if is_any else connection]
            if number <= before:
                detail = f"{writer} {number} comes after {before}"
                findings.violated("order", f"{topic} {offset}: {detail}")
            for one in (-1, connection):
                last[writer, one] = max(number, last[writer, one])
            at[text] = offset
        for text, position in self.receipted[topic].items():
            if position is not None and position < start:
                continue
            if text not in at:
                findings.violated("lost", f"{topic}: {text[:30]!r}, receipt {position}")
            elif position is not None and at[text] != position:
                detail = f"{text[:30]!r} had a receipt for {position} and is at {at[text]}"
                findings.violated("order", f"{topic}: {detail}")


class SessionLedger:
    """The packs of one session: what each number meant, and what must still come."""

    def __init__(self, key: str, messages: MessageLedger) -> None:
        self.key = key
        self._messages = messages
        self.contents: dict[int, list[tuple[str, str]]] = {}
        self.seen: set[tuple[str, str]] = set()
        self.tried = 0
        self.pushed: set[str] = set()
        self._direct: dict[str, int] = {}

    def see(self, pack: Pack, findings: Findings) -> None:
        number = pack.pack_id
        if number == 0:
            return
        texts = ((event.name, event.value.decode(errors="replace")) for event in pack.events)
        content = [(name, self._messages.resolved(text)) for name, text in texts]
        known = self.contents.get(number)
        if known is None and number > len(self.contents) + 1:
            text = f"pack {number} follows pack {len(self.contents)}"
            findings.violated("packs", text)
        if known is not None and content and content != known:
            text = f"pack {number} was {_short(known)} and is {_short(content)}"
            findings.violated("packs", text)
        self.contents.setdefault(number, content)
        for name, text in content:
            self.seen.add((name, text))
            if name != DIRECT:
                if not self._messages.was_sent(name, text):
                    findings.violated("phantoms", f"pack {number}: {name} {text[:40]!r}")
            elif not text.isdigit() or int(text) >= self.tried:
                findings.violated("phantoms", f"pack {number}: direct {text[:40]!r}")
            elif self._direct.setdefault(text, number) != number:
                findings.violated(
                    "packs", f"direct {text} is pack {self._direct[text]} and {number}"
                )

    def missing(self, topics: Iterable[str]) -> list[tuple[str, str]]:
        """Promised contents that the session has not received yet."""
        wanted = {(topic, text) for topic in topics for text in self._messages.receipted[topic]}
        wanted |= {(DIRECT, text) for text in self.pushed}
        return sorted(wanted - self.seen)


def _short(content: list[tuple[str, str]]) -> str:
    return repr([(name, text[:12]) for name, text in content])[:120]
