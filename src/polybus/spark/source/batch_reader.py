"""`spark.read.format("polybus")`: plans in a worker process of its own, reads in the tasks."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from polybus.spark.origin import open_origin
from polybus.spark.source.filters import Narrowed, narrow
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.planning import partitions
from polybus.spark.source.positions import ChosenOffsets, DataLoss, matching
from polybus.spark.source.reading import read_partition

_FILTER_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class PolybusReader(DataSourceReader):
    """Reads what the topics hold when it is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._narrowed = Narrowed()

    def partitions(self) -> list[InputPartition]:
        options, narrowed = self._options, self._narrowed
        origin = open_origin(options.location)
        chosen = ChosenOffsets(options, origin, DataLoss(fail=options.fail_on_data_loss))
        plans = []
        for topic, bounds in sorted(matching(options, origin, strict=True).items()):
            if not narrowed.has_topic(topic):
                continue
            start = max(chosen.begin(topic, bounds), narrowed.start)
            stop = min(chosen.end(topic, bounds), narrowed.stop)
            if start < stop:
                plans.append(origin.plan(topic, start, stop, times=narrowed.times))
        return list(
            partitions(plans, count_min=options.min_partitions, rows_max=options.max_records)
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options)


class FilteringReader(PolybusReader):
    """Also leaves out what filters on offset, timestamp and topic exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._narrowed = narrow(filters)
        return filters


def batch_reader(options: SourceOptions) -> PolybusReader:
    """The reader for this process.

    Filters are pushed down only if the option says so. Spark 4.3 keeps the plan of a reader with
    the DataFrame: a second query over the same DataFrame, or a second use of it in one query, gets
    the filters of the last one that had any, and so returns too few rows.

    Spark refuses a reader that takes filters while spark.sql.python.filterPushdown.enabled is off,
    and does not tell a source whether it is. But it starts the worker process that asks for
    filters only when the setting is on, so only that process makes a FilteringReader.
    """
    main: Any = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    asks = _FILTER_WORKER in sys.modules or name == _FILTER_WORKER
    return FilteringReader(options) if asks and options.push_filters else PolybusReader(options)
