"""The options of the source and the sink: known names, and text turned into checked values.

A class of options is a dataclass whose fields are made by `option`. Every mistake is a UsageError
that names the option: an unknown name (`spark.option-unknown`, with the nearest known one), an
invalid value (`spark.option-invalid`), or two options that contradict each other
(`spark.option-conflict`).
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec

from polybus import names
from polybus.errors import UsageError
from polybus.spark.location import CLUSTER_OPTIONS
from polybus.structs import decode

EARLIEST = -2
LATEST = -1
LOCATION = ("data", "url", "token", "log", *CLUSTER_OPTIONS)
"""The options that every class of options has: see `find_location`."""
_ONE_PLACE = (("data", "url"), ("data", "log"), ("url", "log"), ("token", "log"))
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_NUMBER_MAX = (1 << 63) - 1
_DURATION = re.compile(r"([0-9]{1,12})\s*(ms|s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)?")
_UNITS_MS = {"m": 60_000, "s": 1000, "h": 3_600_000, "d": 86_400_000}
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30}
_OFFSETS = 'it must be earliest, latest or JSON like {"topic": 23}'
_TOPICS = 'it must be a JSON list of topics like ["orders"]'


def option(name: str, parse: Callable[[str], Any], default: Any, **notes: Any) -> Any:
    """A field with the value of an option. `parse` raises ValueError or UsageError.

    Options with the metadata `internal` are accepted, but not suggested to users.
    """
    return dataclasses.field(default=default, metadata={"name": name, "parse": parse, **notes})


def options_of(kind: type) -> list["dataclasses.Field[Any]"]:
    """The fields that `option` made."""
    return [field for field in dataclasses.fields(kind) if "parse" in field.metadata]


def given_options(
    kind: type,
    options: Mapping[str, str],
    *,
    apart: Collection[tuple[str, str]] = (),
    ignored: Collection[str] = (),
) -> dict[str, str]:
    """The options that the user gave, by their proper names: Spark ignores case.

    Raises:
        UsageError: `spark.option-unknown`; `spark.option-conflict` for two options that exclude
        each other (`apart`).
    """
    every = {one.metadata["name"]: one.metadata for one in options_of(kind)}
    known = [*(name for name, notes in every.items() if "internal" not in notes), *LOCATION]
    proper = {name.lower(): name for name in (*known, *every, *ignored)}
    given = {}
    for name, value in options.items():
        if name.lower() not in proper:
            raise _unknown(name, known)
        given[proper[name.lower()]] = str(value)
    for one, other in (*_ONE_PLACE, *apart):
        if one in given and other in given:
            raise conflict(one, other, "give only one of them")
    lonely = next((name for name in given if name in CLUSTER_OPTIONS), None)
    if lonely is not None and "log" not in given:
        raise conflict(lonely, "log", "the first needs the second")
    return given


def checked_values(kind: type, given: Mapping[str, str]) -> dict[str, Any]:
    """The values of the given options, by field. Raises UsageError `spark.option-invalid`."""
    values = {}
    for field in options_of(kind):
        name, parse = field.metadata["name"], field.metadata["parse"]
        if name in given:
            try:
                values[field.name] = parse(given[name])
            except UsageError as error:
                raise invalid(name, error.text) from error
            except ValueError as error:
                raise invalid(name, str(error)) from error
    return values


def invalid(option: str, text: str) -> UsageError:
    return UsageError("spark.option-invalid", f"option {option}: {text}")


def conflict(one: str, other: str, text: str) -> UsageError:
    return UsageError("spark.option-conflict", f"options {one} and {other}: {text}")


def _unknown(name: str, known: Collection[str]) -> UsageError:
    proper = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), proper, 1, cutoff=0.5)
    hint = f"; did you mean {proper[near[0]]}?" if near else ""
    if name.lower() == "path":
        hint = "; use option data for a data folder"
    text = f"option {name} is unknown{hint} (known options: {', '.join(known)})"
    return UsageError("spark.option-unknown", text)


# Parsers of values


def topic_name(text: str) -> str:
    """A topic's name in the form that the bus uses."""
    return names.canonical(text.strip())


def listed(text: str) -> list[str]:
    """A list with commas and at least one item."""
    found = [item.strip() for item in text.split(",") if item.strip()]
    if not found:
        raise ValueError("the list is empty; name at least one")
    return found


def number(text: str) -> int:
    """A number of one or more."""
    if not re.fullmatch("[0-9]{1,19}", text.strip()) or not 0 < int(text) <= _NUMBER_MAX:
        raise ValueError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def size(text: str) -> int:
    """A number of bytes: 1048576, or like 512k, 64m or 1g, as in Spark."""
    found = re.fullmatch("([0-9]{1,12})([kmg]?)b?", text.strip().lower())
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is not a size like 1048576, 512k, 64m or 1g")
    return int(found[1]) << _SHIFTS[found[2]]


def boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError(f"{word!r} is neither true nor false")
    return word == "true"


def duration_ms(text: str) -> int:
    """A duration like 500ms, 30s, 15m or 1h; a number without unit is milliseconds."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a duration like 500ms, 30s, 15m or 1h")
    unit = found[2] or "ms"
    return int(found[1]) * (1 if unit == "ms" else _UNITS_MS[unit[0]])


def timestamp_us(text: str) -> int:
    """A time: milliseconds since 1970, as in Kafka, or ISO 8601 with a time zone."""
    if re.fullmatch("[0-9]{1,15}", text.strip()):
        return int(text) * 1000
    from polybus.log.history.parquet import timestamp_us_of  # It needs pyarrow.

    try:
        # Without a time zone it is a TypeError.
        return timestamp_us_of(datetime.fromisoformat(text.strip()))
    except (ValueError, TypeError) as error:
        wanted = "milliseconds since 1970, or like 2026-01-31T12:00:00Z with a time zone"
        raise ValueError(f"{text!r} is not a time: {wanted}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class OffsetChoice:
    """An offset, EARLIEST or LATEST by topic; `others` is for topics without one, or LATEST."""

    others: int | None = None
    topics: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def of(self, topic: str) -> int:
        return self.topics.get(topic, self.others or LATEST)

    def __contains__(self, offset: int) -> bool:
        return offset in (self.others, *self.topics.values())


def offsets(text: str) -> OffsetChoice:
    """`earliest`, `latest` or JSON by topic.

    JSON is as in Kafka, {"topic": {"0": 23}} with -2 for earliest and -1 for latest, or simpler,
    {"topic": 23} or {"topic": "earliest"}.
    """
    word = text.strip().lower()
    if word in _WORDS:
        return OffsetChoice(_WORDS[word])
    found = _json(text, Annotated[dict[str, Any], msgspec.Meta(min_length=1)], _OFFSETS)
    topics = {topic_name(topic): _offset(topic, value) for topic, value in found.items()}
    return OffsetChoice(None, topics)


def topic_set(text: str) -> frozenset[str]:
    """A JSON list of topics, because a name may contain a comma."""
    return frozenset(map(topic_name, _json(text, list[str], _TOPICS)))


def _json(text: str, kind: Any, wanted: str) -> Any:
    try:
        return decode(text, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{wanted}: {error}") from error


def _offset(topic: str, value: Any) -> int:
    if isinstance(value, dict):
        if set(value) != {"0"}:
            raise ValueError(f'topic {topic!r}: a topic has only the partition "0"')
        value = value["0"]
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if isinstance(value, bool) or not isinstance(value, int) or not -2 <= value <= _NUMBER_MAX:
        raise ValueError(f"topic {topic!r}: {value!r} is not an offset")
    return value
