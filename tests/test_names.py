"""Topic names: one spelling, and a folder for each that stays where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus import names
from polybus.errors import UsageError

printable = st.text(min_size=1, max_size=80).map(str.lower).filter(str.isprintable)


def test_a_name_has_one_spelling() -> None:
    assert names.canonical("aCoolTopicName") == "acooltopicname"


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "x" * 256, "é" * 128])
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        names.canonical(name)
    assert caught.value.code == "topic.invalid"


@pytest.mark.parametrize(
    "name", ["..", ".", "../../etc", "/etc/passwd", "a/../b", "a%2e", "ä" * 100]
)
def test_a_folder_stays_in_its_parent(name: str, tmp_path: Path) -> None:
    folder = tmp_path / names.folder_of(name)
    assert folder.resolve().parent == tmp_path.resolve()
    folder.mkdir()


@given(printable, printable)
def test_different_topics_have_different_folders(one: str, other: str) -> None:
    folder = names.folder_of(one)
    assert (folder == names.folder_of(other)) == (one == other)
    assert "/" not in folder and folder not in (".", "..") and len(folder.encode()) <= 255
