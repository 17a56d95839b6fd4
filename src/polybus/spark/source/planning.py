"""Partitions: how many tasks a batch has, and which task reads what.

The ranges of all topics are laid end to end and cut into parts of about the same size, so that a
thousand small topics do not become a thousand tasks, and all cores read one large topic. A history
file is cut between row groups if one ends nearby: a task that begins inside of a row group decodes
all rows before its own.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition

from polybus.log.reading.pieces import Piece, ReadPlan

ROWS_MIN = 20_000
"""Fewer rows are not worth a task of their own."""
ROWS_MAX = 2_000_000
BYTES_MAX = 128 << 20
"""Both bound what a task reads, so that a failed task costs little."""


@dataclass(frozen=True)
class LogPartition(InputPartition):
    """What one task reads."""

    plans: tuple[ReadPlan, ...]


def partitions(
    plans: Sequence[ReadPlan],
    *,
    count_min: int | None = None,
    rows_max: int | None = None,
    cores: int | None = None,
) -> list[LogPartition]:
    """Split the plans: at least `count_min` tasks of at least one row, each up to `rows_max`."""
    rows = sum(piece.rows for plan in plans for piece in plan.pieces)
    size = sum(piece.bytes for plan in plans for piece in plan.pieces)
    if not rows:
        return []
    count = max(
        min(cores or available_cores(), rows // ROWS_MIN),
        -(-rows // ROWS_MAX),
        -(-size // BYTES_MAX),
        count_min or 1,
    )
    per_task = max(1, -(-rows // count)) if count_min is None else max(1, rows // count)
    exact = count_min is not None or rows_max is not None
    if rows_max is not None:
        per_task = min(per_task, rows_max)
    cutter = _Cutter(per_task, snap=0 if exact else per_task // 3)
    for plan in plans:
        cutter.add(plan)
    return [LogPartition(part) for part in cutter.finished()]


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Cutter:
    """Cuts plans into parts of `rows` rows; a cut may move by `snap` rows to a row group's end."""

    def __init__(self, rows: int, *, snap: int) -> None:
        self._rows = rows
        self._snap = snap
        self._parts: list[tuple[ReadPlan, ...]] = []
        self._plans: list[ReadPlan] = []
        self._room = rows

    def add(self, plan: ReadPlan) -> None:
        pieces: list[Piece] = []
        for piece in plan.pieces:
            rest = piece
            while rest.rows:
                at = self._cut_at(rest)
                taken = rest.cut(rest.first, at)
                pieces.append(taken)
                self._room -= taken.rows
                rest = rest.cut(at, rest.stop)
                if rest.rows or self._room <= 0:
                    self._keep(plan, pieces)
                    self._close()
                    pieces = []
        self._keep(plan, pieces)

    def finished(self) -> list[tuple[ReadPlan, ...]]:
        self._close()
        return self._parts

    def _cut_at(self, piece: Piece) -> int:
        at = piece.first + self._room
        if piece.stop <= at + self._snap:
            return piece.stop
        if self._snap and piece.file is not None:
            starts = piece.row_group_starts()
            near = min(starts, key=lambda start: abs(start - at), default=at)
            if near > piece.first and abs(near - at) <= self._snap:
                return near
        return at

    def _keep(self, plan: ReadPlan, pieces: list[Piece]) -> None:
        if pieces:
            start, stop = pieces[0].first, pieces[-1].stop
            self._plans.append(replace(plan, start=start, stop=stop, pieces=tuple(pieces)))

    def _close(self) -> None:
        if self._plans:
            self._parts.append(tuple(self._plans))
        self._plans = []
        self._room = self._rows
