"""What harm a flip does, and what is said of a bus that serves harmed files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from polybus.torture.flips import Holdings, compare, harm, kinds
from polybus.torture.report import Findings


def whole() -> Holdings:
    messages = {"alpha": [(0, "a"), (1, "b")], "beta": [(0, "c")]}
    return Holdings(messages, {1: [("alpha", "a")], 2: [("direct", "1")]}, batch=4)


def broken(stored: Holdings, *, named: bool) -> set[str]:
    findings = Findings()
    compare(stored, whole(), named, findings)
    return set(findings.broken)


def test_what_is_missing_must_be_named() -> None:
    assert broken(whole(), named=False) == set()
    empty = Holdings({"alpha": [], "beta": []})
    assert broken(empty, named=True) == set()
    assert broken(empty, named=False) == {"verify", "packs", "transactions"}


@pytest.mark.parametrize("named", [True, False])
def test_what_is_wrong_is_found_even_if_damage_is_named(named: bool) -> None:
    stored = whole()
    stored.messages["alpha"] = [(0, "a"), (1, "B")]
    assert broken(stored, named=named) == {"phantoms"}
    stored = whole()
    stored.packs = {1: [("direct", "1")], 2: [("direct", "1")], 3: [("alpha", "a")]}
    assert broken(stored, named=named) == {"packs"}
    stored = whole()
    stored.packs[3] = [("alpha", "lello")]
    assert broken(stored, named=named) == {"phantoms"}


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
