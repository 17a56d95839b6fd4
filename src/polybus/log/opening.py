"""Opens a log to read it by offset, wherever its messages are.

spark/origin.py opens the log of a bus at a URL: that needs a client, a layer above the log.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from polybus.errors import ConfigError
from polybus.log.cluster_location import ClusterLocation, read_location
from polybus.log.reading.offset_reader import OffsetReader
from polybus.log.reading.reader import LogReader


def open_reader(place: Path | ClusterLocation) -> OffsetReader:
    """A reader of a data folder's files, or of the cluster that its node uses, or of a cluster.

    Raises as LogReader does; for a cluster ConfigError `cluster.library-missing`, or `config.log`
    and `config.cluster` if the place is not valid; StorageError `log.unreachable`.
    """
    if isinstance(place, Path):
        cluster = read_location(place)
        if cluster is None:
            return LogReader(place)
        place = cluster
    with library_needed(place):
        from polybus.log.kafka.reader import ClusterReader
    return ClusterReader(place)


@contextlib.contextmanager
def library_needed(place: ClusterLocation) -> Iterator[None]:
    """Around imports that need the Kafka library. Raises ConfigError `cluster.library-missing`."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{place} is read with {error.name}, which is not installed here"
        advice = "every machine that reads the cluster needs it, each executor of Spark too"
        raise ConfigError("cluster.library-missing", f"{text}; {advice}") from error
