"""What damage a flip does, and what is said of a bus that serves corrupted files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from polybus.log.verify.verify import Damage, VerifyReport
from polybus.torture.faults.files.corruptions import (
    TOGETHER_MAX,
    Corruption,
    kinds,
    owners_of,
    together,
)
from polybus.torture.faults.files.flips import Holdings, NamedDamages, compare
from polybus.torture.report import Findings


def whole() -> Holdings:
    messages = {"alpha": [(0, "a"), (1, "b")], "beta": [(0, "c")]}
    packs = {1: [("alpha", "a")], 2: [("direct", "1")]}
    tables: dict[str, list[tuple[int, str]] | str] = {"alpha": [(0, "a")], "lake": [(0, "r")]}
    return Holdings(messages, packs, seen={1, 2}, batch=4, position=7, tables=tables)


def found(*damages: Damage, note: str = "") -> NamedDamages:
    return NamedDamages(VerifyReport(damages=list(damages), notes=[note]))


ALPHA = Damage(file="001.arrows", reason="commit 1: bad", topic="alpha", first=1, last=1)
UNKNOWN = Damage(file="001.arrows", reason="bytes 3 to 9, topics unknown: bad")
SESSION = Damage(file="state.db", reason="session 1: its checksum is wrong")
PRODUCER = Damage(file="state.db", reason="producer torture: its checksum is wrong")


def broken(
    stored: Holdings, named: NamedDamages, corrupted: str = "journal/001.arrows"
) -> list[str]:
    findings = Findings()
    compare(stored, whole(), named, [corrupted], findings)
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
        compare(stored, expected, torn, ["journal/001.arrows"], findings)
        assert (not findings.broken) == is_excused, kept


def test_a_large_payload_that_is_not_served_must_be_named_and_a_wrong_one_is_never_right() -> None:
    blob = "ab" * 32
    corrupted = f"accounts/default/blobs/{blob}/content"
    stored = whole()
    stored.blobs = {blob: "right"}
    assert broken(stored, found(), corrupted) == []
    stored.blobs = {blob: "blob.damaged"}
    assert broken(stored, found(), corrupted) == ["verify"]
    named = Damage(file=f"/data/accounts/default/blobs/{blob}", reason="damaged")
    assert broken(stored, found(named), corrupted) == []
    assert broken(stored, found(ALPHA), corrupted) == ["verify"], "something else is named"
    stored.blobs = {blob: "wrong"}
    assert broken(stored, found(named), corrupted) == ["phantoms"]


def test_a_large_payload_stays_when_one_of_its_topics_goes() -> None:
    blob = "ab" * 32
    stored = whole()
    stored.blobs, stored.shared = {blob: "right"}, {blob: "blob.unknown"}
    corrupted = f"accounts/default/blobs/{blob}/7-0 removed"
    assert broken(stored, found(), corrupted) == ["verify"]
    named = Damage(file=f"/data/accounts/default/blobs/{blob}/7-0", reason="is missing")
    assert broken(stored, found(named), corrupted) == []


def test_a_message_whose_large_payload_is_not_served_must_be_named() -> None:
    blob = "ab" * 32
    stored = whole()
    stored.messages["alpha"] = [(0, "a"), (1, f"?blob.damaged {blob}")]
    assert broken(stored, found()) == ["phantoms"]
    named = Damage(file=f"/data/accounts/default/blobs/{blob}", reason="damaged")
    assert broken(stored, found(named)) == []


def test_a_table_must_have_its_rows_or_be_named() -> None:
    tables = {
        "alpha": Damage(file="/data/accounts/default/topics/alpha/table/x", reason="bad"),
        "lake": Damage(file="/data/tables/lake/x", reason="bad"),
    }
    nothing: list[list[tuple[int, str]] | str] = [[], "unreadable"]
    for table, damage in tables.items():
        for rows in nothing:
            stored = whole()
            stored.tables[table] = rows
            assert broken(stored, found()) == ["verify"], table
            assert broken(stored, found(damage)) == []
        stored.tables[table] = [(0, "x")]
        assert broken(stored, found(damage)) == ["phantoms"], "it is wrong"
        for path in ("x.parquet", "_delta_log/x.parquet"):
            named = Damage(file=damage.file.removesuffix("x") + path, reason="bad")
            is_excused = not path.startswith("_")
            assert broken(stored, found(named)) == ([] if is_excused else ["phantoms"])
    stored = whole()
    stored.tables["alpha"] = [(0, "a"), (1, "b")]
    assert broken(stored, found()) == [], "a hand-over went on"
    stored.tables["alpha"] = [(0, "a"), (1, "c")]
    assert broken(stored, found()) == ["phantoms"]


def test_the_position_of_a_consumer_must_be_named() -> None:
    stored = whole()
    stored.position = None
    consumer = Damage(file="state.db", reason="consumer torture: its checksum is wrong")
    assert broken(stored, found()) == ["lost"]
    assert broken(stored, found(consumer), "state.db") == []


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
        compare(stored, expected, found(), ["journal/001.arrows"], findings)
        assert bool(findings.broken) == is_broken


def test_damage_is_confined() -> None:
    stored = whole()
    stored.refused = {"alpha": "log.frozen"}
    stored.messages["alpha"] = []
    corrupted = "accounts/default/topics/alpha/topic.json removed"
    assert broken(stored, found(ALPHA), corrupted) == []
    assert broken(stored, found(), corrupted) == ["verify"]
    assert broken(stored, found(ALPHA), corrupted.replace("alpha", "beta")) == ["verify"]
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


def test_a_corruption_changes_one_file_of_any_kind(tmp_path: Path) -> None:
    names = ["journal/001.arrows", "journal/002.arrows", "topics/a/topic.json", "state.db", "lock"]
    before = {}
    corrupted = set()
    for seed in range(60):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(range(1, 200)))
            before[path] = path.read_bytes()
        assert set(kinds(tmp_path)) == {"journal/N.arrows", "topics/T/topic.json", "state.db"}
        planned = Corruption.draw(random.Random(seed))
        planned.apply(tmp_path, planned.path(kinds(tmp_path)))
        changed = [
            path for path in before if not path.exists() or path.read_bytes() != before[path]
        ]
        assert len(changed) == 1
        corrupted.add(changed[0].relative_to(tmp_path).as_posix())
    assert corrupted == set(names) - {"lock"}


TOPICS = "accounts/default/topics"


def test_files_that_have_nothing_to_do_with_each_other_are_corrupted_in_one_copy() -> None:
    files = [
        *(f"{TOPICS}/alpha/topic.json", f"{TOPICS}/beta/manifest.json", "admin.token"),
        # A topic again; packs of alpha; blobs of any topic; anything.
        *(f"{TOPICS}/alpha/manifest.json", "state.db-wal", f"{TOPICS}/payloads/topic.json"),
        *("accounts/default/blobs/ab/content", "accounts/shop1/account.json"),
        "accounts/default/blobs/cd/sums",
        *("journal/001.arrows", "journal/001.index", "polybus.json", "trash/1/topic.json"),
    ]
    assert together(files) == [[0, 1, 2, 5], [3], [4], [6, 7, 8], [9], [10], [11], [12]]
    assert together(["journal/001.arrows", *files[:2]]) == [[0], [1, 2]]
    many = [f"{TOPICS}/t{number}/topic.json" for number in range(TOGETHER_MAX + 2)]
    assert [len(group) for group in together(many)] == [TOGETHER_MAX, 2]


def test_damage_is_confined_to_the_files_of_one_copy() -> None:
    confined = owners_of([f"{TOPICS}/a/topic.json", "state.db", f"{TOPICS}/b%2Fc/x"])
    assert confined == frozenset({"a", "b/c"})
    assert owners_of([f"{TOPICS}/a/topic.json", "journal/001.arrows"]) is None
    assert owners_of(["accounts/shop1/topics/own/topic.json"]) is None


def test_a_table_that_follows_its_topic_has_payloads_that_the_bus_does_not_serve() -> None:
    """Its rows refer to them, and their texts are those that were sent."""
    expected, stored = whole(), whole()
    expected.tables = {"alpha": expected.messages["alpha"][:1]}
    stored.tables = {"alpha": list(expected.messages["alpha"])}
    blob = "ab" * 32
    stored.messages["alpha"] = [expected.messages["alpha"][0], (1, f"?blob.damaged {blob}")]
    named = found(Damage(file=f"accounts/default/blobs/{blob}", reason="its checksum is wrong"))
    findings = Findings()
    compare(stored, expected, named, [f"accounts/default/blobs/{blob}/sums"], findings)
    assert not findings.broken
    stored.tables["alpha"][1] = (1, "nobody sent it")  # type: ignore[index]
    compare(stored, expected, named, [f"accounts/default/blobs/{blob}/sums"], findings)
    assert set(findings.broken) == {"phantoms"}
