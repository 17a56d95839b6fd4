"""The scanner: the loops that touch every message, compiled.

Each compiled module (`_batch`, `_frames`, `_columns`, `_lines`, …) has a pure-Python twin with the
same contract (`batch_py`, `frames_py`, …); one test suite runs on both. The twin is used when the
extension is not there, or when POLYBUS_PURE=1 asks for it; `polybus doctor` says which runs.
"""

from __future__ import annotations

import os

__all__ = [
    "COMPILED",
    "Batch",
    "Flow",
    "ObjectScanner",
    "TopicEnd",
    "add_places",
    "compact_json",
    "count_receipts",
    "count_taken",
    "drop_oldest",
    "encode_frames",
    "encode_frames_of",
    "encode_lines",
    "encode_pack",
    "encode_properties",
    "encode_queue",
    "encode_receipts",
    "encode_receipts_of",
    "find_ends",
    "find_topics",
    "gather",
    "gather_into",
    "ends_into",
    "is_utf8",
    "join_queue",
    "keep_batches",
    "listen_alike",
    "merge_runs",
    "offsets_into",
    "rows_by_topic",
    "scan_batches",
    "scan_frames",
    "scan_lines",
    "scan_properties",
    "scan_queue",
    "spans_bytes",
    "spans_count",
    "spans_of_offsets",
    "split_queue",
    "take_batches",
    "pack_runs",
    "weigh",
]

COMPILED = os.environ.get("POLYBUS_PURE", "") in ("", "0")
if COMPILED:
    try:
        from polybus.scan._batch import (
            Batch,
            Flow,
            count_receipts,
            count_taken,
            find_topics,
            listen_alike,
            weigh,
        )
        from polybus.scan._columns import (
            ends_into,
            gather,
            gather_into,
            offsets_into,
            pack_runs,
            spans_bytes,
            spans_count,
            spans_of_offsets,
        )
        from polybus.scan._ends import (
            TopicEnd,
            add_places,
            drop_oldest,
            find_ends,
            keep_batches,
            merge_runs,
            rows_by_topic,
            take_batches,
        )
        from polybus.scan._frames import (
            encode_frames,
            encode_frames_of,
            encode_receipts,
            encode_receipts_of,
            scan_batches,
            scan_frames,
        )
        from polybus.scan._lines import encode_lines, is_utf8, scan_lines
        from polybus.scan._objects import ObjectScanner
        from polybus.scan._packs import compact_json, encode_pack
        from polybus.scan._properties import encode_properties, scan_properties
        from polybus.scan._queue import encode_queue, join_queue, scan_queue, split_queue
    except ImportError:
        COMPILED = False
if not COMPILED:
    from polybus.scan.batch_py import (
        Batch,
        Flow,
        count_receipts,
        count_taken,
        find_topics,
        listen_alike,
        weigh,
    )
    from polybus.scan.columns_py import (
        ends_into,
        gather,
        gather_into,
        offsets_into,
        pack_runs,
        spans_bytes,
        spans_count,
        spans_of_offsets,
    )
    from polybus.scan.ends_py import (
        TopicEnd,
        add_places,
        drop_oldest,
        find_ends,
        keep_batches,
        merge_runs,
        rows_by_topic,
        take_batches,
    )
    from polybus.scan.frames_py import (
        encode_frames,
        encode_frames_of,
        encode_receipts,
        encode_receipts_of,
        scan_batches,
        scan_frames,
    )
    from polybus.scan.lines_py import encode_lines, is_utf8, scan_lines
    from polybus.scan.objects_py import ObjectScanner  # type: ignore[assignment]
    from polybus.scan.packs_py import compact_json, encode_pack
    from polybus.scan.properties_py import encode_properties, scan_properties
    from polybus.scan.queue_py import encode_queue, join_queue, scan_queue, split_queue
