"""Masks: which fields of a topic's messages are hidden, by the settings `http.masks`.

The API hides them from all except administrators, before any filter, search or query sees the
message. Subscribers of a topic get its messages unmasked: a mask hides fields from people who
browse, not from programs.

A field is a path in a JSON value (`$.card.number`; a list on the way means each of its items), `$`
for whole values, `key`, or `header:NAME`. A value that is not JSON has no fields: it is hidden
completely if its topic has any path. So is a reference, because the id of a blob is enough to read
it. `GET /v1/blobs/ID` answers as if no blob of such a topic existed, except for administrators;
subscribers get large payloads through their protocols.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from polybus import references
from polybus.batch import Batch
from polybus.config import Mask
from polybus.log.columns import SCHEMA
from polybus.services.accounts.records import matches

HIDDEN = "•••"
_HIDDEN_BYTES = HIDDEN.encode()
_HIDDEN_JSON = f'"{HIDDEN}"'.encode()
_HEADER = "header:"
_MASKED = ("value", "key", "headers")


class TopicMask:
    """The hidden fields of one topic's messages."""

    def __init__(self, fields: Iterable[str]) -> None:
        self.fields = sorted(set(fields))
        self._paths = [one[1:].strip(".").split(".") for one in self.fields if one.startswith("$")]
        self._hides_all = [""] in self._paths
        self._hides_key = "key" in self.fields
        self._headers = {one[len(_HEADER) :] for one in self.fields if one.startswith(_HEADER)}

    @property
    def hides_values(self) -> bool:
        """Whether any part of values is hidden, and so every large value."""
        return bool(self._paths)

    def value(self, value: bytes | None, headers: Mapping[str, bytes] | None) -> bytes | None:
        """The value of a message with these headers, without hidden fields."""
        if not self._paths or value is None:
            return value
        if self._hides_all:
            return _HIDDEN_JSON
        if references.marked(headers):
            return _HIDDEN_BYTES
        try:
            found = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _HIDDEN_BYTES
        for path in self._paths:
            _hide(found, path)
        return msgspec.json.encode(found)

    def key(self, key: bytes | None) -> bytes | None:
        return _HIDDEN_BYTES if self._hides_key and key is not None else key

    def headers(self, headers: Mapping[str, bytes] | None) -> Mapping[str, bytes] | None:
        if headers and self._paths:
            headers = references.without_mark(headers)
        if not headers or not self._headers:
            return headers
        return {
            name: _HIDDEN_BYTES if name in self._headers else one for name, one in headers.items()
        }

    def batch(self, batch: Batch) -> Batch:
        """The batch without hidden fields."""
        nothing = [None] * len(batch)
        headers = batch.headers or nothing
        values = zip(batch.values(), headers, strict=True)
        masked = Batch.of(
            batch.topic,
            [self.value(one, its_headers) or b"" for one, its_headers in values],
            keys=[self.key(one) for one in batch.keys or nothing],
            headers=[self.headers(one) for one in headers],
        )
        for name in ("protocol", "sender", "timestamp_us", "epoch", "first_offset", "stored"):
            setattr(masked, name, getattr(batch, name))
        return masked

    def rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the log, with at least these columns, without hidden fields."""
        values, keys, pairs = (rows.column(name).to_pylist() for name in _MASKED)
        headers = [None if one is None else dict(one) for one in pairs]
        shown: tuple[list[Any], ...] = (
            [self.value(*one) for one in zip(values, headers, strict=True)],
            [self.key(one) for one in keys],
            [self.headers(one) for one in headers],
        )
        for name, column in zip(_MASKED, shown, strict=True):
            items = [list(one.items()) if isinstance(one, dict) else one for one in column]
            index = rows.schema.get_field_index(name)
            array = pa.array(items, SCHEMA.field(name).type)
            rows = rows.set_column(index, rows.schema.field(index), array)
        return rows


def _hide(found: Any, path: Sequence[str]) -> None:
    if isinstance(found, list):
        for one in found:
            _hide(one, path)
    elif isinstance(found, dict) and path[0] in found:
        if len(path) == 1:
            found[path[0]] = HIDDEN
        else:
            _hide(found[path[0]], path[1:])


class Masks:
    """All masks of a bus."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self._masks = masks

    def __bool__(self) -> bool:
        return bool(self._masks)

    def of(self, topic: str) -> TopicMask | None:
        """The mask of a topic of this full name; None if nothing is hidden."""
        fields = [
            field for mask in self._masks if matches((mask.topics,), topic) for field in mask.fields
        ]
        return TopicMask(fields) if fields else None
