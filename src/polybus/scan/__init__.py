"""The scanner: the loops that touch every message, compiled.

`batch` is compiled as it is. Each other compiled module (`_binary`, …) has a
pure-Python twin with the same contract (`binary_py`, …), which documents it and gives the types.
One test suite runs on both forms. The pure form runs if an extension is missing or POLYBUS_PURE=1
is set; `polybus doctor` shows which runs.
"""

import importlib

from polybus.scan import plain

# isort: split
# After `plain`, which decides from where this one is loaded.
from polybus.scan import batch
from polybus.scan.batch import (
    Batch,
    Flow,
    TopicEnd,
    add_places,
    count_receipts,
    count_taken,
    drop_oldest,
    find_ends,
    find_topics,
    keep_batches,
    listen_alike,
    merge_runs,
    rows_by_topic,
    take_batches,
    weigh,
)
from polybus.scan.binary_py import (
    encode_frames,
    encode_properties,
    encode_queue,
    encode_receipts,
    join_queue,
    scan_frames,
    scan_values,
    split_queue,
)
from polybus.scan.columns_py import (
    ends_into,
    gather,
    gather_into,
    offsets_into,
    pack_runs,
    spans_of_offsets,
)
from polybus.scan.goms_py import ObjectScanner, encode_lines, is_utf8, scan_lines
from polybus.scan.packs_py import compact_json, encode_pack

TWINS = ("binary", "columns", "goms", "packs")


def _replace_twins() -> bool:
    """Replace every function and class above by its compiled form; False if one is missing."""
    if batch.__file__.endswith(".py"):
        return False
    try:
        compiled = [importlib.import_module(f"polybus.scan._{twin}") for twin in TWINS]
    except ImportError:
        return False
    public = [name for name in globals() if not name.startswith("_")]
    for module in compiled:
        globals().update({name: vars(module)[name] for name in public if name in vars(module)})
    return True


COMPILED = not plain.PURE and _replace_twins()
