"""Ranges of offsets that several subscribers missed: joined, and divided into pages.

A page is found in one pass over any number of ranges in any order, in memory for a few pages. The
next page begins where the last range of this one ends, so no message is in two pages.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from polybus.services.events import UndeliveredRange

PAGES_HELD = 4


class RangePage(msgspec.Struct):
    """Ranges without overlaps, by topic, epoch and offset; and whether they are the last ones."""

    ranges: list[UndeliveredRange]
    is_last: bool


def joined(ranges: Iterable[UndeliveredRange]) -> list[UndeliveredRange]:
    """Merge overlapping ranges, in order: several subscribers may have missed the same messages."""
    found: list[UndeliveredRange] = []
    for one in sorted(ranges):
        last = found[-1] if found else None
        if last is None or last[:2] != one[:2] or one.first > last.stop:
            found.append(one)
        elif one.stop > last.stop:
            found[-1] = last._replace(stop=one.stop)
    return found


def count_messages(ranges: Iterable[UndeliveredRange]) -> Counter[str]:
    """The number of messages by topic in ranges without overlaps."""
    counts: Counter[str] = Counter()
    for one in ranges:
        counts[one.topic] += one.stop - one.first
    return counts


def page_of(
    ranges: Iterable[UndeliveredRange], after: UndeliveredRange | None, limit: int
) -> RangePage:
    """The first `limit` ranges after `after`, the last one of the previous page."""
    held: list[UndeliveredRange] = []
    # Ranges that begin here or later are for the next page.
    bound: UndeliveredRange | None = None

    def tidy() -> None:
        nonlocal held, bound
        held = joined(held)
        if len(held) > limit:
            bound, held = held[limit], held[:limit]

    for one in ranges:
        if after is not None and one[:2] <= after[:2]:
            if one[:2] < after[:2]:
                continue
            one = one._replace(first=max(one.first, after.stop))
        if one.stop <= one.first or (bound is not None and one[:3] >= bound[:3]):
            continue
        held.append(one)
        if len(held) >= PAGES_HELD * limit:
            tidy()
    tidy()
    return RangePage(held, bound is None)
