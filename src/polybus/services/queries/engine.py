"""DuckDB with the permissions of one caller: only topics that it may read, masked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from polybus.errors import UsageError
from polybus.lake.duck import DATE, STORED, Engine, Fresh, columns_of, quoted, select
from polybus.lake.sql.names import Named
from polybus.lake.table import LakeTable
from polybus.log.columns import SCHEMA
from polybus.services.masks import TopicMask
from polybus.services.queries.jobs import Visibility


class RestrictedEngine(Engine):
    """An engine that shows only what one caller may see."""

    def __init__(self, data: Path, visibility: Visibility) -> None:
        super().__init__(data)
        self._visibility = visibility
        self._topics = frozenset(visibility.topics)
        self._shown = {full: shown for shown, full in visibility.topics.items()}
        self._masks = {topic: TopicMask(fields) for topic, fields in visibility.masks.items()}

    def _known(self) -> set[str]:
        own = set(self._visibility.known)
        return own | super()._known() if self._visibility.tables else own

    def _table(self, parts: Any) -> LakeTable | None:
        found = super()._table(parts)
        if found is not None and not self._visibility.tables:
            name = ".".join(parts)
            if name.lower() in self._topics:
                return None
            text = f"{name} is a table, and only administrators may read tables"
            raise UsageError("auth.denied", text)
        return found

    def _typed_query(self, name: str) -> tuple[str, list[str]] | None:
        return super()._typed_query(name) if self._visibility.tables else None

    def _made(self, topic: str, epoch: int) -> dict[str, str]:
        return super()._made(self._shown[topic], epoch)

    def _topic_query(self, topic: str, named: Named) -> tuple[str, list[str]]:
        full = self._visibility.topics[topic]
        mask = self._masks.get(full)
        if mask is None:
            return super()._topic_query(full, named)
        bounds = self._reader.bounds(full)

        def batches() -> Iterator[Any]:
            # All columns, even if the statement names few: the mask of one depends on others.
            rows = self._batches(full, (bounds.start, bounds.stop), list(STORED))
            return map(mask.rows, rows)

        view = f"__masked_{full}"
        schema = pa.schema([SCHEMA.field(name) for name in STORED])
        self._connection.register(view, Fresh(schema, batches))
        made = self._made(full, bounds.epoch) | {"date": DATE}
        return select(columns_of(named), made, quoted(view)), []
