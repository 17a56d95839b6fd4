"""The scanner: the loops that touch every message, compiled.

`batch` is compiled from its Python source. Each other compiled module (`_binary`, …) has a
pure-Python twin with the same contract (`binary_py`, …), which documents it and gives the types.
One test suite covers both. The pure form runs if an extension is missing or POLYBUS_PURE=1 is set;
`polybus doctor` shows which runs.
"""

import importlib

from polybus.scan import plain

# isort: split
# After `plain`, which decides whether this is loaded from source.
from polybus.scan import batch
from polybus.scan.batch import *
from polybus.scan.binary_py import *
from polybus.scan.columns_py import *
from polybus.scan.goms_py import *
from polybus.scan.packs_py import *
from polybus.scan.records_py import *
from polybus.scan.rows_py import *

TWINS = ("binary", "columns", "goms", "packs", "records", "rows")


def _replace_twins() -> bool:
    """Replace every function and class above by its compiled form; False if one is missing."""
    if batch.__file__.endswith(".py"):
        return False
    try:
        compiled = [importlib.import_module(f"polybus.scan._{twin}") for twin in TWINS]
    except ImportError:
        return False
    for module in compiled:
        for name, value in vars(module).items():
            if name in globals() and getattr(value, "__module__", None) == module.__name__:
                globals()[name] = value
    return True


COMPILED = not plain.PURE and _replace_twins()
