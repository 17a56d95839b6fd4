"""`spark.read.format("polybus")`: plans in a worker of its own, reads in the tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from polybus.spark.source.filters import Narrowed, narrow
from polybus.spark.source.losses import Losses
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.origin import open_origin
from polybus.spark.source.planning import partitions
from polybus.spark.source.positions import begin_of, end_of, matching
from polybus.spark.source.reading import Shape, read_partition

_FILTER_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class PolybusReader(DataSourceReader):
    """Reads what the topics hold when it is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._shape = Shape.of(options)
        self._narrowed = Narrowed()

    def partitions(self) -> list[InputPartition]:
        options = self._options
        origin = open_origin(options.where)
        losses = Losses(fail=options.fail_on_data_loss)
        plans = []
        for topic, bounds in sorted(matching(options, origin, strict=True).items()):
            if not self._narrowed.has_topic(topic):
                continue
            start = begin_of(topic, bounds, options, origin, losses)
            stop = end_of(topic, bounds, options, origin, losses)
            start, stop = max(start, self._narrowed.start), min(stop, self._narrowed.stop)
            if start < stop:
                plans.append(origin.plan(topic, start, stop, times=self._narrowed.times))
        return list(
            partitions(
                options.where,
                plans,
                count_min=options.min_partitions,
                rows_max=options.max_records,
            )
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._shape)


class FilteringReader(PolybusReader):
    """The same, leaving out what filters on offset, timestamp and topic exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._narrowed = narrow(filters)
        return filters


def batch_reader(options: SourceOptions) -> PolybusReader:
    """The reader for this process.

    Filters are taken only if the option says so. Spark 4.3 keeps what a reader has planned with
    the DataFrame: a second query over the same DataFrame, or a second use of it in one query, is
    answered with the filters of the last one that had any, and so gives too little.

    Spark refuses a reader that takes filters while spark.sql.python.filterPushdown.enabled is off,
    which a source is not told. It only asks for filters in a kind of worker that it starts when
    the setting is on, so that is where there is a reader that takes them.
    """
    main: Any = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    asked = _FILTER_WORKER in sys.modules or name == _FILTER_WORKER
    return FilteringReader(options) if asked and options.push_filters else PolybusReader(options)
