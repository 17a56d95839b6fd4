"""Poison messages, which make decoding raise: they are found and moved to quarantine.

decode.py has a reason for every message that it cannot decode, so this does not run for a usual
batch. It is the last resort: an error of Spark or Arrow that a message causes must not stop the
flow. The batch is staged in halves, and a half that fails in halves again, until single messages
fail.

Two checks show that the messages are the cause. First, staging an empty batch must succeed. Last,
staging the messages that were set aside for quarantine, as raw bytes, must succeed. A full disk, a
JVM that has ended or a damaged log fails one of the checks, and then the batch.

The ranges that a batch sets aside are stored before its first commit. A batch that runs again sets
aside the same messages, so that none is in both tables or in neither. If that file is damaged, a
batch that silver has does not run again, because it is unknown which messages it left out; any
other begins again.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame

from polybus.errors import PolybusError, StorageError
from polybus.lake.files import NewFile
from polybus.log import checked_json
from polybus.log.disk import replace_file
from polybus.spark.causes import clean_cause, is_transient
from polybus.spark.declared_fields import literal

FILE = "standard-aside.json"
FOUND_MAX = 100
"""After this many failures in a batch, a failing half is set aside as a whole."""
REASON_CHARS_MAX = 500
PLACE = ("topic", "epoch", "offset")
Stage = Callable[[DataFrame], list[NewFile]]


class PoisonRange(msgspec.Struct, frozen=True):
    """Messages from `first` to `last`, both included, in the order of topic, epoch and offset."""

    first: tuple[str, int, int]
    last: tuple[str, int, int]
    reason: str

    @property
    def condition(self) -> str:
        first, last = (f"STRUCT({literal(t)}, {e}L, {o}L)" for t, e, o in (self.first, self.last))
        return f"STRUCT({', '.join(PLACE)}) BETWEEN {first} AND {last}"


class PoisonMessages(msgspec.Struct, frozen=True):
    """The messages that a writer's batch sets aside; usually none."""

    writer: str
    batch: int
    ranges: tuple[PoisonRange, ...] = ()

    @property
    def condition(self) -> str:
        return " OR ".join(f"({one.condition})" for one in self.ranges) or "false"

    @property
    def reason(self) -> str:
        cases = [f"WHEN {one.condition} THEN {literal(one.reason)}" for one in self.ranges]
        return f"CASE {' '.join(cases)} END"

    def save(self, data: Path) -> None:
        replace_file(data / "pipeline" / FILE, checked_json.encode(self))


def stored(data: Path, writer: str, batch_id: int) -> PoisonMessages:
    """The messages that the batch set aside in its first run.

    Raises StorageError `pipeline.settings` if the file is damaged.
    """
    nothing, path = PoisonMessages(writer, batch_id), data / "pipeline" / FILE
    try:
        found = checked_json.decode(path.read_bytes(), PoisonMessages, path, accept_unchecked=True)
    except FileNotFoundError:
        return nothing
    except StorageError as error:
        advice = "restore it, or remove it and give up messages that the last batch set aside"
        raise StorageError("pipeline.settings", f"{error.text}; {advice}") from error
    return found if (found.writer, found.batch) == (writer, batch_id) else nothing


def is_of_surroundings(error: Exception) -> bool:
    """Whether the error shows that the disk, the log or a process is the cause."""
    return isinstance(error, PolybusError) or is_transient(error)


def stage_apart(frame: DataFrame, stage: Stage) -> tuple[list[NewFile], tuple[PoisonRange, ...]]:
    """Stage the messages that can be staged; the others are set aside, with their errors.

    Raises the errors of staging an empty batch, and of reading the positions of the messages.
    """
    notes = stage(frame.where("false"))
    order = [(name, "ascending") for name in PLACE]
    places = frame.select(*PLACE).toArrow().sort_by(order)

    def place(row: int) -> tuple[str, int, int]:
        topic, epoch, offset = (places[name][row].as_py() for name in PLACE)
        return topic, epoch, offset

    found: list[PoisonRange] = []
    waiting = [(0, places.num_rows)]
    while waiting:
        first, stop = waiting.pop()
        part = PoisonRange(place(first), place(stop - 1), "")
        try:
            notes += stage(frame.where(part.condition))
        except Exception as error:
            if is_of_surroundings(error):
                raise
            if stop - first > 1 and len(found) < FOUND_MAX:
                middle = (first + stop) // 2
                waiting += [(middle, stop), (first, middle)]
                continue
            others = f" together with {stop - first - 1} others" if stop - first > 1 else ""
            reason = f"cannot be processed{others}: {clean_cause(error)}"[:REASON_CHARS_MAX]
            found.append(msgspec.structs.replace(part, reason=reason))
    return notes, tuple(found)
