"""The administrator's token: made once, readable by its owner alone, and compared as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from polybus.edges.admin.token import load_or_make
from polybus.errors import StorageError
from polybus.log.layout import admin_token_path


def test_a_token_is_made_once_and_for_the_owner_alone(tmp_path: Path) -> None:
    load_or_make(tmp_path)
    path = admin_token_path(tmp_path)
    text = path.read_text()
    load_or_make(tmp_path)
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_header_with_the_token_is_accepted(tmp_path: Path, scheme: str) -> None:
    token = load_or_make(tmp_path)
    text = admin_token_path(tmp_path).read_text().strip()
    assert token.is_in(f"{scheme} {text}")


def test_any_other_header_is_not(tmp_path: Path) -> None:
    token = load_or_make(tmp_path)
    text = admin_token_path(tmp_path).read_text().strip()
    for header in (None, "", "Bearer ", text, f"Basic {text}", f"Bearer {text[:-1]}", "Bearer é"):
        assert not token.is_in(header)


def test_a_file_without_a_token_is_refused_with_what_to_do(tmp_path: Path) -> None:
    admin_token_path(tmp_path).write_text("\n")
    with pytest.raises(StorageError, match="remove the file"):
        load_or_make(tmp_path)
