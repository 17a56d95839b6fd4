"""pyarrow without pandas, for the processes that are only the bus's own.

The first time pyarrow makes an array or a scalar of Python objects it imports pandas, if that is
installed, to see whether they are some of pandas'. In the bus they never are, and pandas takes
60 MB and half a second. pyarrow asks once per process and keeps the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pyarrow as pa


class _NoPandas(MetaPathFinder):
    """Answers an import of pandas as if it were not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the bus does without pandas", name=name)


def leave_pandas_out() -> None:
    """Have pyarrow take every value for what it is, and import no pandas to look.

    For the whole process: a series or a data frame is no longer known for one, so this is not for
    processes that run a user's code. `to_pandas` goes on working.
    """
    answer = _NoPandas()
    sys.meta_path.insert(0, answer)
    try:
        # Whatever needs the question answered; where pandas is imported already, it has been.
        pa.scalar(0)
    finally:
        sys.meta_path.remove(answer)
