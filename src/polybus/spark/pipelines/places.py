"""Where the bus of a pipeline is, and what its files are told of it while they are loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """Where the bus is: its data folder, and its URL where the files are not here."""

    data: Path
    url: str | None = None
    token: str | None = None

    def options(self) -> dict[str, str]:
        """Options of our source and sink."""
        if self.url is None:
            return {"data": str(self.data)}
        return {"url": self.url} | ({"token": self.token} if self.token else {})

    def topics(self) -> list[str]:
        """All topics, the system's own too."""
        if self.url is None:
            from polybus.log.reading.reader import LogReader

            return LogReader(self.data).topics(system=True)
        from polybus.client.http.blocking import request_json

        answer = request_json(self.url, "GET", "/v1/topics?system=true", token=self.token)
        listed = answer["topics"] if isinstance(answer, dict) else answer
        return [one["name"] if isinstance(one, dict) else str(one) for one in listed]


class WhileLoading:
    """Names outside of a pipeline's functions: only topics by `format("polybus")` are known yet."""

    def __init__(self, where: Where) -> None:
        self._where = where

    def stream(self, name: str, options: dict[str, Any]) -> Any:
        return None

    def batch(self, name: str, options: dict[str, Any]) -> Any:
        return None

    def source(self, given: dict[str, Any], load: Any, *, streaming: bool) -> Any:
        return load(missing_options(self._where, given))


def missing_options(where: Where, given: dict[str, Any]) -> dict[str, Any]:
    """Options that say where the bus is, unless those given do."""
    names = {key.lower() for key in given}
    return {} if names & {"data", "url"} else dict(where.options())
