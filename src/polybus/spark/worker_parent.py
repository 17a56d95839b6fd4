"""The parent of Spark's Python processes on this machine, with their imports preloaded.

Spark starts Python processes for each kind of work: to plan a read, to read, to write, to commit.
PySpark imports pandas, pyarrow and our modules in each of them, which takes half a second of
processor time. Processes that are forked from this one have already imported them, and skip them
when they collect garbage, as PySpark has them do after each task.

Executors on other machines may not have Polybus: there Spark uses its own parent.
"""

import importlib

from polybus.spark import internals

MODULES = ("numpy", "pandas", "pyarrow", "polybus.spark.source.readers", "polybus.spark.sink")

if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    internals.run_worker_parent()
