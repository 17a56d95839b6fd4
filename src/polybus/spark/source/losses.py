"""Messages that were to be read and are gone: an error, or a warning, by `failOnDataLoss`."""

from __future__ import annotations

import logging

from polybus.errors import UsageError

logger = logging.getLogger("polybus.spark")
_SAID_MAX = 1000


class Losses:
    """Says what is lost; each loss once."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._said: set[str] = set()

    def note(self, text: str) -> None:
        """Raises UsageError `spark.data-loss` if that is what the option says."""
        if self._fail:
            advice = "set failOnDataLoss to false to go on with what is there"
            raise UsageError("spark.data-loss", f"{text}; {advice}, or start with a new checkpoint")
        if text not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(text)
            logger.warning("data loss: %s", text)

    def note_error(self, error: UsageError) -> None:
        self.note(error.text)
