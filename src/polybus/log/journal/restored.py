"""Estimates how large a topic is after a restart: its messages in the journal at that time.

The index has their number and the size of whole commits, which topics share. So their mean size is
estimated from a sample: the topic's last commit in each segment, newest segment first, until
SAMPLE_BYTES_MAX or SAMPLE_COMMITS_MAX are read for all topics together. A topic without a sample
gets the mean of all samples. Values are counted, without keys and headers.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus.log.journal.commit import Damaged
from polybus.log.journal.message import read_rows
from polybus.log.journal.segment import read_message
from polybus.log.journal.topic_commits import CommitRows
from polybus.log.journal.topics import JournalTopic

SAMPLE_BYTES_MAX = 64 << 20
SAMPLE_COMMITS_MAX = 2000


def estimate_sizes(topics: Iterable[JournalTopic]) -> None:
    """Set `restored_mean_bytes` of the topics that have messages in the journal."""
    found = {log: [0, 0] for log in topics if log.places.start is not None}
    left_bytes, left_commits = SAMPLE_BYTES_MAX, SAMPLE_COMMITS_MAX
    for (segment, position, size), parts in _samples(found):
        left_bytes, left_commits = left_bytes - size, left_commits - 1
        if left_bytes < 0 or left_commits < 0:
            break
        try:
            values = read_rows(read_message(segment, position, size)).column("value")
        except (Damaged, OSError):
            continue  # A reader of these messages will get the error.
        for log, rows in parts:
            found[log][0] += rows.row_count
            found[log][1] += _size(values.slice(rows.first_row, rows.row_count))
    of_all = [sum(one[0] for one in found.values()), sum(one[1] for one in found.values())]
    for log, own in found.items():
        messages, value_bytes = own if own[0] else of_all
        log.restored_mean_bytes = value_bytes / messages if messages else None


def _samples(
    topics: Iterable[JournalTopic],
) -> Iterator[tuple[tuple[Path, int, int], list[tuple[JournalTopic, CommitRows]]]]:
    """The commits to read, each with the topics for which it is read; newest segments first."""
    commits: dict[tuple[Path, int, int], list[tuple[JournalTopic, CommitRows]]] = defaultdict(list)
    for log in topics:
        for rows in log.places.last_commits():
            commits[(rows.segment, rows.position, rows.size)].append((log, rows))
    # The name of a segment is the number of its first commit, with leading zeros.
    yield from sorted(commits.items(), key=lambda one: one[0], reverse=True)


def _size(values: pa.Array) -> int:
    return int(pc.sum(pc.binary_length(values)).as_py() or 0)
