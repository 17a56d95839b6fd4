"""Expectations in SQL files, in the syntax of Databricks, which Spark's own parser does not know.

    CREATE STREAMING TABLE orders (
      CONSTRAINT has_a_price EXPECT (price > 0) ON VIOLATION DROP ROW
    ) AS SELECT …

Without `ON VIOLATION` a row is kept; `FAIL UPDATE` fails the flow. The text that Spark parses has
blanks in place of the constraints, so that its lines keep their numbers.
"""

import re
from collections.abc import Iterator

from polybus.spark.expectations import Consequence, Expectation

_HEAD = re.compile(
    r"\s*CREATE\s+(?:OR\s+(?:REFRESH|REPLACE)\s+)?"
    r"(?:STREAMING\s+TABLE|MATERIALIZED\s+VIEW|TEMPORARY\s+VIEW)\s+(?:IF\s+NOT\s+EXISTS\s+)?"
    r"(?:`[^`]+`|\w+)(?:\s*\.\s*(?:`[^`]+`|\w+))*\s*\(",
    re.IGNORECASE,
)
_CONSTRAINT = re.compile(
    r"\s*CONSTRAINT\s+(?P<name>`[^`]+`|\w+)\s+EXPECT\s*\((?P<condition>.*)\)"
    r"(?:\s*ON\s+VIOLATION\s+(?P<consequence>DROP\s+ROW|FAIL\s+UPDATE))?\s*",
    re.IGNORECASE | re.DOTALL,
)
_PIECE = re.compile(
    r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|--[^\n]*|/\*.*?\*/|.", re.DOTALL
)
_CONSEQUENCES: dict[str, Consequence] = {"DROP": "expect_or_drop", "FAIL": "expect_or_fail"}


def split(text: str) -> tuple[str, list[Expectation]]:
    """A statement without its constraints, and these as expectations."""
    head = _HEAD.match(text)
    if head is None:
        return text, []
    bounds = list(_items(text, head.end()))
    found = [(_CONSTRAINT.fullmatch(text[first:end]), first, end) for first, end in bounds]
    expected = []
    for match, first, end in found:
        if match is not None:
            word = (match["consequence"] or "").upper()[:4]
            consequence = _CONSEQUENCES.get(word, "expect")
            expected.append(Expectation(match["name"].strip("`"), match["condition"], consequence))
            # With the comma after it, or the one before it if it is the last.
            text = _blanked(text, first, end + (text[end] == ","))
    if expected and len(expected) == len(bounds):
        text = _blanked(text, bounds[0][0] - 1, bounds[-1][1] + 1)
    elif expected and found[-1][0] is not None:
        last = max(end for match, _, end in found if match is None)
        text = _blanked(text, last, last + 1)
    return text, expected


def _items(text: str, begin: int) -> Iterator[tuple[int, int]]:
    """Where each item of a list in parentheses is; each ends before a comma or the parenthesis."""
    depth, first = 0, begin
    for piece in _PIECE.finditer(text, begin):
        match piece.group():
            case "(":
                depth += 1
            case ")" if depth:
                depth -= 1
            case ")" | "," if not depth:
                yield first, piece.start()
                first = piece.end()
                if piece.group() == ")":
                    return


def _blanked(text: str, first: int, end: int) -> str:
    return text[:first] + re.sub(r"[^\n]", " ", text[first:end]) + text[end:]
