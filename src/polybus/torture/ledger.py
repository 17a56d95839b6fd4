"""What was sent and what was promised: the truth that the bus is held against.

A value says who wrote it and its number, and nothing else: `value_of` makes it again. So a value
that nobody sent is known at once, and the numbers of a writer in a topic must ascend.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from polybus.client.http.sources import Pack
from polybus.torture.report import Findings

DIRECT = "direct"
_PADDING_MAX = 700


def value_of(writer: str, number: int) -> str:
    return f"{writer}.{number}." + "abcdefgh"[number % 8] * (number * 7919 % _PADDING_MAX)


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

    def take(self, topic: str, writer: str, count: int) -> list[str]:
        """The next values of a writer, which it sends now."""
        first = self._tried[topic, writer]
        self._tried[topic, writer] += count
        return [value_of(writer, number) for number in range(first, first + count)]

    def receipt(self, topic: str, values: Sequence[str], last_offset: int | None) -> None:
        """All values are durable; the last one at this offset, if it is known."""
        self.receipted[topic].update(dict.fromkeys(values))
        self.receipted[topic][values[-1]] = last_offset

    def was_sent(self, topic: str, text: str) -> bool:
        found = parse_value(text)
        return found is not None and found[1] < self._tried[topic, found[0]]

    def check(self, topic: str, messages: Iterable[tuple[int, str]], findings: Findings) -> None:
        """Compare all messages of a topic with what was sent and promised."""
        at: dict[str, int] = {}
        last: dict[str, int] = defaultdict(lambda: -1)
        for expected, (offset, text) in enumerate(messages):
            if offset != expected:
                findings.violated("order", f"{topic}: offset {offset} where {expected} should be")
                return
            found = parse_value(text)
            if found is None or not self.was_sent(topic, text):
                findings.violated("phantoms", f"{topic} {offset}: {text[:40]!r} was never sent")
                continue
            writer, number = found
            if number <= last[writer]:
                detail = f"{writer} {number} comes after {last[writer]}"
                findings.violated("order", f"{topic} {offset}: {detail}")
            last[writer] = number
            at[text] = offset
        for text, position in self.receipted[topic].items():
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
        content = [(event.name, event.value.decode(errors="replace")) for event in pack.events]
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
        """What was promised to the session and has not come yet."""
        wanted = {(topic, text) for topic in topics for text in self._messages.receipted[topic]}
        wanted |= {(DIRECT, text) for text in self.pushed}
        return sorted(wanted - self.seen)


def _short(content: list[tuple[str, str]]) -> str:
    return repr([(name, text[:12]) for name, text in content])[:120]
