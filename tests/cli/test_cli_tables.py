"""`polybus tables migrate`: the command that the error about old tables names."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli_kit import polybus, serve
from old_tables_kit import lay_out_old_tables

from polybus.cli import sql, tables  # noqa: F401


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
