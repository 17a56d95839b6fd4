"""The settings of a micro-batch, the same ones when it is done again.

If a topic's schema changes between two tries of a batch, a message that the first try put into
silver must not go to quarantine in the second. So new settings are written down before the first
batch uses them, and a batch that was begun before the query started has those written down.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from polybus.lake import settings as pipeline_settings
from polybus.lake.settings import PipelineSettings
from polybus.log.disk import replace_file

NAME = "standard-settings.json"


class BatchSettings:
    """Looks at the bus's settings file before every batch, and reads it when it is another.

    Args:
        begun: the batch that was begun by an earlier run and not finished, if there is one.
    """

    def __init__(self, data: Path, *, begun: int | None = None) -> None:
        self._data = data
        self._path = data / "pipeline" / NAME
        self._begun = begun
        self._mark: tuple[int, int] | None = None
        self._newest = PipelineSettings()
        self._used = self._read()

    def of(self, batch_id: int) -> PipelineSettings:
        """The settings of a batch.

        Raises:
            StorageError: `log.damaged`, the bus's settings file cannot be read.
        """
        if self._used is not None and batch_id == self._begun:
            return self._used
        newest = self._look()
        if newest != self._used:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(newest))
            self._used = newest
        return newest

    def _look(self) -> PipelineSettings:
        try:
            status = pipeline_settings.path_of(self._data).stat()
            mark = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            mark = (0, 0)
        if mark != self._mark:
            self._newest = pipeline_settings.read(self._data)
            self._mark = mark
        return self._newest

    def _read(self) -> PipelineSettings | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=PipelineSettings)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
