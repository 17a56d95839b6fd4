"""Jobs of query processes and their answers: the protocol between the bus and a process.

The bus writes a job as one line of JSON to the process's standard input. The process answers on
standard output in frames: one byte for the kind, four for the length, and the content. A job ends
with END or ERROR; the next may follow.
"""

import re
import struct
from typing import Literal

import msgspec

from polybus.errors import UsageError

DATA = b"d"
"""Bytes of the answer."""
ROWS = b"r"
"""Rows of a topic: an Arrow stream."""
NOTE = b"n"
"""JSON about the answer."""
ERROR = b"e"
"""A JobError: the last frame."""
END = b"z"
HEAD = struct.Struct(">cI")
FRAME_BYTES_MAX = 64 << 20

Form = Literal["json", "csv", "jsonl", "parquet", "arrow"]


class JobError(msgspec.Struct):
    """Why there is no answer; `kind` is the class of the error."""

    kind: str
    code: str
    text: str


class Visibility(msgspec.Struct):
    """What a caller may see: topics by the caller's names for them, and their masks.

    `topics` are those that a statement may name, `known` some of all: an error suggests them.
    """

    topics: dict[str, str]
    masks: dict[str, list[str]] = {}
    tables: bool = False
    known: list[str] = []


class SqlJob(msgspec.Struct, tag="sql"):
    """Run a statement."""

    query: str
    visibility: Visibility
    rows_max: int
    form: Form = "json"


class SearchJob(msgspec.Struct, tag="search"):
    """Find messages of a topic, by its full name; they must meet all given conditions.

    It searches upwards from `start`, or with `is_newest` downwards from `stop`, and ends after
    `limit` messages or `time_s`. With a format, the answer is a file of the messages found; else it
    has rows.
    """

    topic: str
    start: int
    stop: int
    limit: int
    time_s: float
    text: str = ""
    header: str = ""
    path: str = ""
    equals: str | None = None
    sql: str = ""
    fields: list[str] = []
    is_newest: bool = False
    form: Form | None = None


class HistogramJob(msgspec.Struct, tag="histogram"):
    """Count the messages of a topic in bins of time."""

    topic: str
    start_us: int
    stop_us: int
    bins: int


class TablesJob(msgspec.Struct, tag="tables"):
    """Describe all tables, or one."""

    table: str = ""


class LettersJob(msgspec.Struct, tag="letters"):
    """List dead letters; `ids` names some. They are counted for `pairs_max` topics and reasons.

    Values are cut unless `is_whole`.
    """

    topic: str = ""
    reason: str = ""
    text: str = ""
    first: int = 0
    limit: int = 100
    ids: list[str] = []
    pairs_max: int | None = 100
    is_whole: bool = False


class UndeliveredJob(msgspec.Struct, tag="undelivered"):
    """List undelivered messages, from these topics of events.

    Filters: one topic; a text in the reason; a text in the topic or in the name of the subscriber.
    """

    events: list[str]
    topic: str
    limit: int
    reason: str = ""
    text: str = ""
    first: int = 0


class RangesJob(msgspec.Struct, tag="ranges"):
    """The ranges of undelivered messages, without overlaps, after the last one of a page.

    The filters are those of an UndeliveredJob.
    """

    events: list[str]
    topic: str = ""
    reason: str = ""
    text: str = ""
    after: tuple[str, int, int, int] | None = None
    limit: int = 10_000


class UndeliveredRow(msgspec.Struct):
    """Messages of a topic, from `first` up to `stop`, that a subscriber did not get."""

    time: str
    topic: str
    epoch: int
    first: int
    stop: int
    reason: str
    to: str
    protocol: str


class HistoryJob(msgspec.Struct, tag="history"):
    """The bus's figures of the last days, from `$metrics`."""

    since_s: float
    step_s: float


Lookup = HistogramJob | TablesJob | LettersJob | UndeliveredJob | RangesJob | HistoryJob
Job = SqlJob | SearchJob | Lookup
encode_job = msgspec.json.Encoder().encode
decode_job = msgspec.json.Decoder(Job).decode


_STEP = re.compile(r"""\.?\*|\[\*\]|\.?([^.\[\]'"*]+)|\[(\d+)\]|\['([^']*)'\]|\["([^"]*)"\]""")


def path_steps(path: str) -> list[str | None]:
    """The steps of a JSON path; None is each item or field. Raises UsageError `sql.path`.

    A path is `$.items[0].id`, `$.items[*].id`, `$['a name']`, or the same without `$`.
    """
    left = path.strip().removeprefix("$")
    steps: list[str | None] = []
    while left:
        found = _STEP.match(left)
        if found is None:
            text = f"the JSON path is invalid from {left[:40]!r} on; write one like $.items[0].id"
            raise UsageError("sql.path", text)
        steps.append(next((one for one in found.groups() if one is not None), None))
        left = left[found.end() :]
    return steps


def check_condition(sql: str) -> None:
    """Refuse anything but one condition. Raises UsageError `sql.invalid`."""
    if ";" in sql:
        raise UsageError("sql.invalid", "the condition contains a semicolon; write one condition")
