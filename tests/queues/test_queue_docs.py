"""docs/protocols/queues.md says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from docs_kit import run_by
from state_tables import TABLES, state_table, updated

from polybus.queues import QueueLimits
from polybus.queues.pump import RUNNABLES_MAX
from polybus.wire.queue import RECEIVING

PAGE = Path(__file__).parents[2] / "docs" / "protocols" / "queues.md"


def test_the_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(TABLES)
    assert updated(page) == page


def test_a_table_has_every_row_of_the_code() -> None:
    lines = state_table(RECEIVING).splitlines()
    assert lines[2].startswith("| Length |")
    assert "| Message | the message's last byte | Length |" in lines
    assert len(lines) == 2 + len(RECEIVING)


def test_the_page_has_every_limit_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE))
    limits = QueueLimits()
    known = {field.name: str(getattr(limits, field.name)) for field in fields(QueueLimits)}
    assert rows == known | {"runnables_max": str(RUNNABLES_MAX)}


def test_the_program_on_the_page_prints_what_it_says() -> None:
    [program] = run_by("queues/test_queue_docs.py", "docs/protocols/queues.md")
    ran = subprocess.run(
        [sys.executable, "-c", program.text],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("hello\n", "")
