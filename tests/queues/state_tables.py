"""The state tables of docs/protocols/queues.md, written from the transition tables of the code.

    python tests/queues/state_tables.py docs/protocols/queues.md

writes them in place; test_queue_docs.py checks that the page is current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from polybus.queues.channel import CHANNEL_STATES
from polybus.queues.message_queue import SENDING
from polybus.wire.queue import RECEIVING

Table = Mapping[Any, Enum]
TABLES: dict[str, Table] = {"sending": SENDING, "receiving": RECEIVING, "channel": CHANNEL_STATES}
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def state_table(table: Table) -> str:
    """A table of (state, event) → state in Markdown, which every viewer shows."""
    lines = ["| in state | when | goes to |", "|---|---|---|"]
    for (state, event), following in table.items():
        lines.append(f"| {state.value} | {event} | {following.value} |")
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with every `<!-- table: NAME -->` block written again."""

    def draw(block: re.Match[str]) -> str:
        # The empty lines end the comments, or Markdown takes the table for a part of them.
        return f"{block[1]}\n{state_table(TABLES[block[2]])}\n\n{block[3]}"

    return _BLOCK.sub(draw, page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
