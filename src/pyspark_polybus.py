"""PySpark finds this module by its name and registers `format("polybus")` with it."""

from polybus.spark.source import PolybusDataSource as DefaultSource

__all__ = ["DefaultSource"]
