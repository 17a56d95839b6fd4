"""Duplicates: messages whose id was seen on the same topic within the watermark before them.

Recent ids are in a small lake table, `recent_ids`, with a copy in memory: two 64-bit hashes of
topic, epoch and id (together they do not collide in practice), the time the bus received the
message, and its micro-batch. A batch that runs again after a failure ignores the ids that it stored
itself.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pandas.util import hash_array

from polybus.lake.compact import vacuum
from polybus.lake.table import LakeTable, open_table
from polybus.spark.pipelines.standard.accumulated import TIME

TABLE = "recent_ids"
FILES_MAX = 64
HASH_KEYS = ("polybus-ids-one!", "polybus-ids-two!")
ID_COLUMNS = ["hash_a", "hash_b", "at"]
SCHEMA = pa.schema({"hash_a": pa.int64(), "hash_b": pa.int64(), "at": TIME, "batch": pa.int64()})


class RecentIds:
    """The recent ids. For one thread, that of the flow that writes them."""

    def __init__(self, data: Path, writer: str) -> None:
        self._table: LakeTable = open_table(data, TABLE)
        self._writer = writer
        self._rows = SCHEMA.empty_table()
        if self._table.exists:
            self._rows = self._table.read().select(SCHEMA.names).cast(SCHEMA)

    @staticmethod
    def of(messages: pa.Table) -> pa.Table:
        """The ids of messages that have one, in the same order."""
        parts = [messages["topic"], messages["epoch"].cast(pa.string()), messages["message_id"]]
        # Neither topic nor epoch contains a line break, so different ids stay different.
        joined = pc.binary_join_element_wise(*parts, "\n").to_numpy(zero_copy_only=False)
        hashes = [hash_array(joined, hash_key=key, categorize=False) for key in HASH_KEYS]
        return pa.table(
            {
                "hash_a": pa.array(hashes[0].view(np.int64)),
                "hash_b": pa.array(hashes[1].view(np.int64)),
                "at": messages["timestamp"],
                "offset": messages["offset"],
            }
        )

    def duplicates(
        self, fresh: pa.Table, batch_id: int, *, watermark_s: float
    ) -> npt.NDArray[np.bool_]:
        """A flag for each id of a batch."""
        near = self._rows.filter(
            pc.and_(
                pc.is_in(self._rows["hash_a"], value_set=pc.unique(fresh["hash_a"])),
                pc.not_equal(self._rows["batch"], batch_id),
            )
        )
        known = near.num_rows
        joined = pa.concat_tables([near.select(ID_COLUMNS), fresh.select(ID_COLUMNS)])
        offsets = np.concatenate([np.full(known, -1), fresh["offset"].to_numpy()])
        hash_a, hash_b = joined["hash_a"].to_numpy(), joined["hash_b"].to_numpy()
        at_us = joined["at"].cast(pa.int64()).to_numpy()
        # Of equal ids at equal times the first in the log is the original.
        order = np.lexsort((offsets, at_us, hash_b, hash_a))
        same = (np.diff(hash_a[order]) == 0) & (np.diff(hash_b[order]) == 0)
        soon = np.diff(at_us[order]) <= watermark_s * 1e6
        flags = np.zeros(len(order), dtype=bool)
        flags[order[1:]] = same & soon
        return flags[known:]

    def remember(self, fresh: pa.Table, batch_id: int, *, watermark_s: float, ids_max: int) -> None:
        """Store a batch's ids and forget those older than the watermark."""
        last = self._table.last_batch(self._writer)
        if last is not None and batch_id <= last:
            return
        batch = pa.array(np.full(fresh.num_rows, batch_id, dtype=np.int64))
        rows = fresh.select(ID_COLUMNS).append_column("batch", batch).cast(SCHEMA)
        everything = pa.concat_tables([self._rows, rows])
        newest_us = pc.max(everything["at"]).cast(pa.int64()).as_py()
        oldest = pa.scalar(int(newest_us - watermark_s * 1e6), TIME)
        everything = everything.filter(pc.greater_equal(everything["at"], oldest))
        self._rows = everything.slice(max(0, everything.num_rows - ids_max)).combine_chunks()
        state = self._table.state
        is_rewritten = len(state.files) >= FILES_MAX
        note = self._table.write(self._rows if is_rewritten else rows)
        replaced = list(state.files) if is_rewritten else []
        self._table.commit([note], remove=replaced, writer=self._writer, batch_id=batch_id)
        if is_rewritten:
            vacuum(self._table)
