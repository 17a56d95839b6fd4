"""The user's pipelines in the driver: loaded at the start, again while they wait for the bus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybus.spark.pipelines.running.driving import Options

if TYPE_CHECKING:
    from polybus.spark.pipelines.flows import Flow

PAUSE_FIRST_S = 0.2
PAUSE_LAST_S = 5.0
Say = Callable[[dict[str, Any]], None]


class UserPipelines:
    """The user's pipelines: those that are broken are told of, those that wait are tried again."""

    def __init__(self, spark: Any, options: Options, say: Say) -> None:
        self._spark = spark
        self._options = options
        self._say = say
        self._waiting: tuple[str, ...] = ()
        self._problems: dict[str, str] = {}
        self._due = 0.0
        self._pause_s = PAUSE_FIRST_S

    @property
    def problems(self) -> list[str]:
        """Why pipelines have not started, as of now."""
        return list(self._problems.values())

    def load(self) -> Iterator[Flow]:
        """All flows that can start now."""
        folder = self._options.pipelines
        if folder is not None and folder.is_dir():
            self._say({"event": "starting", "text": f"reading the pipelines in {folder}"})
            yield from self._prepare(folder, ())

    def retry(self) -> Iterator[Flow]:
        """Flows of pipelines that could not start while the bus was away, and now can."""
        folder = self._options.pipelines
        if folder is not None and self._waiting and time.monotonic() >= self._due:
            yield from self._prepare(folder, self._waiting)

    def _prepare(self, folder: Path, only: tuple[str, ...]) -> Iterator[Flow]:
        from polybus.spark.pipelines.declared.prepare import prepare
        from polybus.spark.pipelines.places import Where
        from polybus.spark.pipelines.running.causes import is_transient

        where = Where(self._options.data, self._options.url, self._options.token)
        prepared = prepare(self._spark, folder, where, only=only)
        for name in only:
            self._problems.pop(name, None)
        self._problems |= {one.pipeline: str(one.error) for one in prepared.problems}
        waiting = [one for one in prepared.problems if is_transient(str(one.error))]
        for one in prepared.problems:
            is_news = one not in waiting or one.pipeline not in self._waiting
            if is_news:
                about = {"pipeline": one.pipeline, "code": one.error.code, "text": one.error.text}
                self._say({"event": "waiting" if one in waiting else "problem", **about})
        self._waiting = tuple(one.pipeline for one in waiting)
        self._pause_s = min(2 * self._pause_s, PAUSE_LAST_S)
        self._due = time.monotonic() + self._pause_s
        yield from prepared.flows
