"""The state diagrams of docs/protocols/queues.md, drawn from the transition tables of the code.

    python tests/queues/diagrams.py docs/protocols/queues.md

redraws them in place; test_queue_docs.py checks that the page is current.
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


def state_diagram(table: Table) -> str:
    """A table of (state, event) → state as a Mermaid diagram that starts in the first state."""
    (first, _), *_ = table
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for (state, event), following in table.items():
        lines.append(f"    {state.value} --> {following.value}: {event}")
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with every `<!-- table: NAME -->` block redrawn."""

    def draw(block: re.Match[str]) -> str:
        diagram = state_diagram(TABLES[block[2]])
        return f"{block[1]}```mermaid\n{diagram}\n```\n{block[3]}"

    return _BLOCK.sub(draw, page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
