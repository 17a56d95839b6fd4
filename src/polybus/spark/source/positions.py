"""Which topics are read, and where each begins and ends, of what the options say."""

from __future__ import annotations

from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.spark.source.damage import HeldTopics
from polybus.spark.source.losses import Losses
from polybus.spark.source.option_values import EARLIEST, LATEST
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.origin import Origin


def matching(
    options: SourceOptions, origin: Origin, *, strict: bool, held: HeldTopics | None = None
) -> dict[str, Bounds]:
    """The bounds of the topics that the options select and that exist.

    Topics of `leaveOut` are not even looked at: they may be damaged. With `held`, damaged topics
    are left to it; without, they are an error.

    Raises:
        UsageError: with `strict`: `topic.unknown`, a topic that is named does not exist.
        StorageError: `log.damaged`.
    """
    bounds_of = origin.bounds if held is None else held.bounds
    if options.pattern is not None:
        found = [one for one in origin.topics(system=options.system) if options.matches(one)]
        return bounds_of([topic for topic in found if topic not in options.left_out])
    named = [topic for topic in options.topics if topic not in options.left_out]
    bounds = bounds_of(named)
    damaged = {} if held is None else held.texts
    missing = [topic for topic in named if topic not in bounds and topic not in damaged]
    if missing and strict:
        text = f"option subscribe: there is no topic {missing[0]!r} in {options.where}"
        raise UsageError("topic.unknown", f"{text}; polybus topics list shows what there is")
    return bounds


def begin_of(
    topic: str, bounds: Bounds, options: SourceOptions, origin: Origin, losses: Losses
) -> int:
    """The first offset to read.

    Raises:
        UsageError: `spark.timestamp-unmatched`, no message is that late; `spark.data-loss`.
    """
    starting = options.starting
    if starting.timestamp_us is not None:
        offset = origin.offset_at(topic, starting.timestamp_us)
        if offset >= bounds.stop and options.unmatched == "error":
            text = f"option startingTimestamp: topic {topic!r} has no message at or after it"
            advice = "startingOffsetsByTimestampStrategy latest begins at the end then"
            raise UsageError("spark.timestamp-unmatched", f"{text}; {advice}")
        return min(offset, bounds.stop)
    offset = starting.of(topic)
    if offset == EARLIEST:
        return bounds.start
    if offset == LATEST:
        return bounds.stop
    return _inside("startingOffsets", topic, offset, bounds, losses)


def end_of(
    topic: str, bounds: Bounds, options: SourceOptions, origin: Origin, losses: Losses
) -> int:
    """The offset to stop before. Raises UsageError `spark.data-loss`."""
    ending = options.ending
    if ending.timestamp_us is not None:
        return min(origin.offset_at(topic, ending.timestamp_us), bounds.stop)
    offset = ending.of(topic)
    if offset == LATEST:
        return bounds.stop
    return _inside("endingOffsets", topic, offset, bounds, losses)


def _inside(option: str, topic: str, offset: int, bounds: Bounds, losses: Losses) -> int:
    if not bounds.start <= offset <= bounds.stop:
        text = f"option {option}: offset {offset} of topic {topic!r} is not there; the log holds"
        losses.note(f"{text} {bounds.start} to {bounds.stop}")
    return max(bounds.start, min(offset, bounds.stop))
