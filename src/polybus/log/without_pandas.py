"""pyarrow without pandas, for processes that run only our own code.

The first time pyarrow converts Python objects it imports pandas, if it is installed, to recognise
objects of pandas. The bus uses none, and pandas takes 60 MB and half a second. pyarrow tries once
per process and remembers the result.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pyarrow as pa


class _NoPandas(MetaPathFinder):
    """Makes an import of pandas fail as if it were not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the bus does without pandas", name=name)


def block_pandas() -> None:
    """Keep pyarrow from importing pandas for conversions in this process.

    pyarrow no longer recognises a series or data frame, so do not call this in processes that run
    a user's code. `to_pandas` still works.
    """
    answer = _NoPandas()
    sys.meta_path.insert(0, answer)
    try:
        # Any conversion makes pyarrow try the import, unless it tried before.
        pa.scalar(0)
    finally:
        sys.meta_path.remove(answer)
