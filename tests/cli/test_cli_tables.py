"""`polybus tables migrate`: the command that the error about old tables names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from cli_kit import polybus, serve
from old_tables_kit import lay_out_old_tables

from polybus.cli import sql, tables  # noqa: F401


def test_a_verb_that_needs_the_library_of_tables_says_so(tmp_path: Path) -> None:
    missing = tmp_path / "deltalake.py"
    missing.write_text("raise ModuleNotFoundError('No module named deltalake', name='deltalake')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with serve(tmp_path / "data"):
        pass
    data = str(tmp_path / "data")
    for verb in (("tables", "migrate"), ("sql", "SELECT 1"), ("replay", "--dead-letters")):
        done = polybus(*verb, "--data", data, PYTHONPATH=path)
        assert done.returncode == 1 and b"polybus[sql]" in done.stderr, done.stderr


def test_the_command_in_the_error_converts_the_tables(tmp_path: Path) -> None:
    with serve(tmp_path, "orders"):
        pass
    lay_out_old_tables(tmp_path)
    query = ("sql", "SELECT count(*) AS n FROM silver", "--json", "--data", str(tmp_path))
    refused = polybus(*query)
    text = refused.stderr.decode()
    command = re.search(r"run: polybus (.*)", text)
    assert refused.returncode == 1 and "lake.old-format" in text and command is not None, text
    assert b"2 tables were converted" in polybus(*command[1].split()).stdout
    assert json.loads(polybus(*query).stdout) == [{"n": 6}]
    again = polybus("tables", "migrate", "--json", "--data", str(tmp_path))
    assert json.loads(again.stdout) == {"tables": []}
