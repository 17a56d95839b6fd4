"""What harm a flip does, and what is said of a bus that serves harmed files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from polybus.log.verify import Damage, VerifyReport
from polybus.torture.flips import Holdings, NamedDamages, compare, harm, kinds
from polybus.torture.report import Findings


def whole() -> Holdings:
    messages = {"alpha": [(0, "a"), (1, "b")], "beta": [(0, "c")]}
    packs = {1: [("alpha", "a")], 2: [("direct", "1")]}
    return Holdings(messages, packs, seen={1, 2}, batch=4)


def found(*damages: Damage, note: str = "") -> NamedDamages:
    return NamedDamages(VerifyReport(damages=list(damages), notes=[note]))


ALPHA = Damage(file="001.arrows", reason="commit 1: bad", topic="alpha", first=1, last=1)
UNKNOWN = Damage(file="001.arrows", reason="bytes 3 to 9, topics unknown: bad")
SESSION = Damage(file="state.db", reason="session 1: its checksum is wrong")
PRODUCER = Damage(file="state.db", reason="producer torture: its checksum is wrong")


def broken(stored: Holdings, named: NamedDamages, harmed: str = "journal/001.arrows") -> list[str]:
    findings = Findings()
    compare(stored, whole(), named, harmed, findings)
    return sorted(findings.broken)


def test_what_is_missing_must_be_named() -> None:
    assert broken(whole(), found()) == []
    stored = whole()
    stored.messages["alpha"] = [(0, "a")]
    assert broken(stored, found()) == ["verify"]
    assert broken(stored, found(ALPHA)) == []
    assert broken(stored, found(UNKNOWN)) == []
    assert broken(stored, found(note="an unfinished write from byte 3 on")) == []
    torn = found(note="an unfinished write from byte 3 on")
    stored.messages["alpha"] = [(1, "b")]
    assert broken(stored, torn) == ["verify"], "the first one is not the end of the topic"
    assert broken(stored, found(ALPHA)) == ["verify"], "another offset is missing"
    assert broken(stored, found(SESSION)) == ["verify"], "something else is named"
    stored.messages = {"alpha": [(0, "a"), (1, "b")], "beta": []}
    assert broken(stored, found(ALPHA)) == ["verify"], "another topic is missing"


def test_an_unfinished_write_excuses_the_end_of_a_topic_and_no_hole() -> None:
    expected, stored = whole(), whole()
    expected.messages["alpha"] = [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    torn = found(note="an unfinished write from byte 3 on")
    for kept, is_excused in (([0, 1], True), ([1], False), ([0, 2], False), ([], True)):
        findings = Findings()
        stored.messages["alpha"] = [expected.messages["alpha"][offset] for offset in kept]
        compare(stored, expected, torn, "journal/001.arrows", findings)
        assert (not findings.broken) == is_excused, kept


def test_a_lost_transaction_must_be_named() -> None:
    stored = whole()
    stored.batch = 3
    assert broken(stored, found(ALPHA)) == ["transactions"]
    assert broken(stored, found(PRODUCER), "state.db") == []
    assert broken(stored, found(Damage(file="x", reason="bad", topic="$commits"))) == []


def test_a_session_must_be_named_and_told() -> None:
    stored = whole()
    del stored.packs[2]
    assert broken(stored, found(ALPHA)) == ["packs"], "it lost a pack of its own"
    assert broken(stored, found(SESSION), "state.db") == ["packs"], "it was not told"
    stored.notices = {("session.overflow", None)}
    assert broken(stored, found(SESSION), "state.db") == []
    stored.notices = {("session.unset", None)}
    assert broken(stored, found(SESSION), "state.db") == []
    stored = whole()
    stored.packs[1] = []
    stored.notices = {("session.overflow", "alpha")}
    assert broken(stored, found(ALPHA)) == []
    assert broken(stored, found()) == ["packs"]


def test_a_number_that_no_client_has_seen_may_be_of_another_pack() -> None:
    """Packs of a damaged topic are held back, and others get their numbers."""
    expected, stored = whole(), whole()
    stored.packs = {1: [("direct", "1")], 2: [("alpha", "a")]}
    for seen, is_broken in (({1, 2}, True), ({1}, True), (set(), False)):
        findings = Findings()
        expected.seen = seen
        compare(stored, expected, found(), "journal/001.arrows", findings)
        assert bool(findings.broken) == is_broken


def test_damage_is_confined() -> None:
    stored = whole()
    stored.refused = {"alpha": "log.frozen"}
    stored.messages["alpha"] = []
    harmed = "accounts/default/topics/alpha/topic.json removed"
    assert broken(stored, found(ALPHA), harmed) == []
    assert broken(stored, found(), harmed) == ["verify"]
    assert broken(stored, found(ALPHA), harmed.replace("alpha", "beta")) == ["verify"]
    assert broken(stored, found(ALPHA), "state.db cut at byte 9") == ["verify"]


@pytest.mark.parametrize("named", [found(ALPHA, UNKNOWN, SESSION, PRODUCER), found()])
def test_what_is_wrong_is_found_even_if_damage_is_named(named: NamedDamages) -> None:
    stored = whole()
    stored.messages["alpha"] = [(0, "a"), (1, "B")]
    assert broken(stored, named) == ["phantoms"]
    stored = whole()
    stored.packs = {1: [("direct", "1")], 2: [("direct", "1")], 3: [("alpha", "a")]}
    assert broken(stored, named) == ["packs"]
    stored = whole()
    stored.packs[3] = [("alpha", "lello")]
    assert broken(stored, named) == ["phantoms"]


def test_harm_changes_one_file_of_any_kind(tmp_path: Path) -> None:
    names = ["journal/001.arrows", "journal/002.arrows", "topics/a/topic.json", "state.db", "lock"]
    before = {}
    harmed = set()
    for seed in range(60):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(range(1, 200)))
            before[path] = path.read_bytes()
        assert set(kinds(tmp_path)) == {"journal/N.arrows", "topics/T/topic.json", "state.db"}
        harm(tmp_path, random.Random(seed))
        changed = [
            path for path in before if not path.exists() or path.read_bytes() != before[path]
        ]
        assert len(changed) == 1
        harmed.add(changed[0].relative_to(tmp_path).as_posix())
    assert harmed == set(names) - {"lock"}
