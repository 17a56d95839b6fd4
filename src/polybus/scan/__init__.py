"""The scanner: the loops that touch every message, compiled.

Each compiled module (`_batch`, `_frames`, …) has a pure-Python twin with the same contract
(`batch_py`, `frames_py`, …), and one test suite runs on both. The twins document the contract and
give the types. They run if the extensions are missing or POLYBUS_PURE=1 is set; `polybus doctor`
shows which run.
"""

import importlib
import os

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
from polybus.scan.frames_py import encode_frames, encode_receipts, scan_frames
from polybus.scan.lines_py import encode_lines, is_utf8, scan_lines
from polybus.scan.objects_py import ObjectScanner
from polybus.scan.packs_py import compact_json, encode_pack
from polybus.scan.properties_py import encode_properties, scan_properties
from polybus.scan.queue_py import encode_queue, join_queue, scan_queue, split_queue

__all__ = ["COMPILED", "Batch", "Flow", "ObjectScanner", "TopicEnd", "add_places", "compact_json"]
__all__ += ["count_receipts", "count_taken", "drop_oldest", "encode_frames"]
__all__ += ["encode_lines", "encode_pack", "encode_properties", "encode_queue", "encode_receipts"]
__all__ += ["ends_into", "find_ends", "find_topics", "gather", "gather_into"]
__all__ += ["is_utf8", "join_queue", "keep_batches", "listen_alike", "merge_runs", "offsets_into"]
__all__ += ["pack_runs", "rows_by_topic", "scan_frames", "scan_lines"]
__all__ += ["scan_properties", "scan_queue", "spans_bytes", "spans_of_offsets", "split_queue"]
__all__ += ["take_batches", "weigh"]
TWINS = ("batch", "columns", "ends", "frames", "lines", "objects", "packs", "properties", "queue")


def _replace_twins() -> bool:
    """Replace every function and class above by its compiled form; False if one is missing."""
    try:
        compiled = [importlib.import_module(f"polybus.scan._{twin}") for twin in TWINS]
    except ImportError:
        return False
    found = {name: getattr(module, name) for module in compiled for name in dir(module)}
    globals().update((name, found[name]) for name in __all__ if name in found)
    return True


COMPILED = os.environ.get("POLYBUS_PURE", "") in ("", "0") and _replace_twins()
