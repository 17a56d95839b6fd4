"""Why JSON in lake tables is text: the engines do not agree on VARIANT (decisions/0018).

If this fails, they may agree now, and the decision should be looked at again.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

PARTS = pa.struct([pa.field(name, pa.binary(), nullable=False) for name in ("metadata", "value")])


def test_delta_rs_and_polars_give_a_variant_as_its_bytes(tmp_path: Path) -> None:
    """The table has the number 7 as Delta's specification says."""
    rows = pa.table({"payload": pa.array([{"metadata": b"\x01\0\0", "value": b"\x0c\x07"}], PARTS)})
    pq.write_table(rows, tmp_path / "rows.parquet")
    column = {"name": "payload", "type": "variant", "nullable": True, "metadata": {}}
    features = {"readerFeatures": ["variantType"], "writerFeatures": ["variantType"]}
    about = {"id": "x", "format": {"provider": "parquet", "options": {}}, "createdTime": 0}
    about |= {"schemaString": json.dumps({"type": "struct", "fields": [column]})}
    added = {"path": "rows.parquet", "partitionValues": {}, "modificationTime": 0}
    added |= {"size": (tmp_path / "rows.parquet").stat().st_size, "dataChange": True}
    actions = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"metaData": {**about, "partitionColumns": [], "configuration": {}}},
        {"add": added},
    ]
    (tmp_path / "_delta_log").mkdir()
    log = tmp_path / "_delta_log" / f"{0:020d}.json"
    log.write_text("\n".join(map(json.dumps, actions)))
    assert DeltaTable(tmp_path).to_pyarrow_table().schema.field("payload").type == PARTS
    by_polars = pl.read_delta(str(tmp_path)).schema["payload"]
    assert by_polars == pl.Struct({"metadata": pl.Binary, "value": pl.Binary})
