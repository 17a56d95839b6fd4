"""The change data feed of sums: which rows a batch changes, for readers of Delta tables.

A batch rewrites files with many rows and changes few of them. Without an explicit feed, a reader
would get all rows of these files as deleted and inserted.
"""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc


def changes(before: pa.Table, after: pa.Table, rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The change data feed of a batch: its keys before and after it, and keys that are gone."""
    batch, old, new = (_joined(one, keys) for one in (rows, before, after))
    is_old, is_new = pc.is_in(new, value_set=old), pc.is_in(new, value_set=batch)
    stays, is_changed = pc.is_in(old, value_set=new), pc.is_in(old, value_set=batch)
    found = {
        "insert": after.filter(pc.and_(is_new, pc.invert(is_old))),
        "update_preimage": before.filter(pc.and_(is_changed, stays)),
        "update_postimage": after.filter(pc.and_(is_new, is_old)),
        "delete": before.filter(pc.invert(stays)),
    }
    return pa.concat_tables(
        part.select(after.column_names).append_column(
            "_change_type", pa.array([kind] * part.num_rows, pa.string())
        )
        for kind, part in found.items()
    )


def _joined(rows: pa.Table, keys: Sequence[str]) -> pa.ChunkedArray:
    """The keys of each row as one text."""
    texts = [
        rows[key].cast(pa.int64()).cast(pa.string())
        if pa.types.is_timestamp(rows.schema.field(key).type)
        else rows[key]
        for key in keys
    ]
    # No key contains this character: it cannot be part of a topic, a protocol or a sender.
    return pc.binary_join_element_wise(*texts, "\x00", null_handling="replace")
